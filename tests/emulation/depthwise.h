// Entry points of depthwise's kernels in shapes of the caller's choice: -1 if there is no such plan.

IDLE(kHopperWgradEngine)

static int run_if(depthwise::Kernel kernel, int op, const int64_t* fields, void* const* pointers,
                  const depthwise::Wish& wish) {
  const Problem problem = make_problem(fields);
  const depthwise::Plan plan = depthwise::make_plan(problem, as_operator(op), true, wish);
  if (!plan.exists || plan.kernel != kernel) return -1;
  const Pointers all = {pointers[0], pointers[1], pointers[2], pointers[3], pointers[4], nullptr};
  return depthwise::launch_planned(as_operator(op), problem, all, plan, nullptr);
}
extern "C" {
int depthwise_ring(int op, const int64_t* fields, void* const* pointers, const int* wish) {
  return run_if(depthwise::Kernel::kRing, op, fields, pointers,
                {false, wish[0], wish[1], false, wish[2], wish[3], wish[4], wish[5], {}});
}
int depthwise_queue(int op, const int64_t* fields, void* const* pointers, int shape, int band_rows) {
  depthwise::Wish wish{false, band_rows};
  wish.queue_shape = shape + 1;
  return run_if(depthwise::Kernel::kQueue, op, fields, pointers, wish);
}
}
