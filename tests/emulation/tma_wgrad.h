#include "problem_fields.h"

namespace modelnew {
static const char* refuse_all(const Problem&, Operator) { return "everything"; }
const Engine kWgradEngine{"wgrad", refuse_all, nullptr, nullptr, nullptr};
const Engine kDirectEngine{"direct", refuse_all, nullptr, nullptr, nullptr};
}  // namespace modelnew
using namespace modelnew;
using namespace modelnew::tma_wgrad;

// Plans this tile in so many parts (0: any) on a GPU of three SMs and runs it: -1 if there is no such plan.
extern "C" int run_wished(int, const int64_t* fields, void* const* pointers, const int* wishes, int seed) {
  const int channels = wishes[0], blocks = wishes[1], parts = wishes[2];
  const Problem problem = make_problem(fields);
  const auto address = [](const void* pointer) { return reinterpret_cast<uint64_t>(pointer); };
  Plan plan;
  if (!make_plan(problem, 3, {address(pointers[0]), address(pointers[3])}, plan, channels, blocks, parts)) return -1;
  const int64_t bytes = sum_bytes(plan) + copied_bytes(problem, plan);
  std::vector<float> room(bytes / 4 + 4, std::numeric_limits<float>::quiet_NaN());
  Pointers all{};
  all.x = pointers[0];
  all.dy = pointers[3];
  all.out = pointers[4];
  all.workspace = room.data() + (16 - address(room.data()) % 16) % 16 / 4;
  return simt_run(seed, false, [&] {
    return problem.dtype == DType::kFloat16 ? run<Half>(problem, plan, all, nullptr)
                                            : run<BFloat16>(problem, plan, all, nullptr);
  });
}
