#include "run.h"

IDLE(kMmaWgradEngine) IDLE(kDirectEngine)
using namespace modelnew::hopper_wgrad;

// These stages and tiles, in so many parts (0: any; of the shape: -1), on a GPU of three SMs.
extern "C" int run_wished(int, const int64_t* fields, void* const* pointers, const int* wishes, int seed) {
  const Wish wish{wishes[0], wishes[1], wishes[2], wishes[3], wishes[4],
                  wishes[5], wishes[6], wishes[7], wishes[8]};
  const Problem problem = make_problem(fields);
  Plan plan;
  if (!make_plan(problem, 3, {address(pointers[0]), address(pointers[3])}, plan, wish)) return -1;
  Workspace workspace(bytes_of(problem, plan));
  const Pointers all = {pointers[0], nullptr, nullptr, pointers[3], pointers[4], workspace.data()};
  const int code = simt_run(seed, false, [&] { return run(problem, plan, all, nullptr); });
  return unless_overrun(code, workspace);
}
