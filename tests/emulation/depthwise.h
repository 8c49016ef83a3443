// Runs ring_kernel in a shape of the caller's choice, or says -1.

extern "C" int depthwise_ring(int op, const int64_t* fields, void* const* pointers, const int* wish) {
  using namespace modelnew;
  const Problem problem = make_problem(fields);
  const depthwise::Plan plan = depthwise::make_plan(
      problem, as_operator(op), true, {false, wish[0], wish[1], false, wish[2], wish[3], wish[4], wish[5], {}});
  if (!plan.exists || plan.kernel != depthwise::Kernel::kRing) return -1;
  const Pointers all = {pointers[0], pointers[1], pointers[2], pointers[3], pointers[4], nullptr};
  return depthwise::launch_planned(as_operator(op), problem, all, plan, nullptr);
}

// The same for queue_kernel, a shape of it and the height of its bands.
extern "C" int depthwise_queue(int op, const int64_t* fields, void* const* pointers, int shape, int band_rows) {
  using namespace modelnew;
  const Problem problem = make_problem(fields);
  depthwise::Wish wish{false, band_rows};
  wish.queue_shape = shape + 1;
  const depthwise::Plan plan = depthwise::make_plan(problem, as_operator(op), true, wish);
  if (!plan.exists || plan.kernel != depthwise::Kernel::kQueue) return -1;
  const Pointers all = {pointers[0], pointers[1], pointers[2], pointers[3], pointers[4], nullptr};
  return depthwise::launch_planned(as_operator(op), problem, all, plan, nullptr);
}
