#include "tma_wgrad.cu"

using namespace modelnew;
using namespace modelnew::tma_wgrad;
#include "planner.h"
#include "tma_columns.h"

// What is wrong with the numbers of a plan, or nothing.
static std::string fault_of_numbers(const Problem& problem, const Plan& plan, int sms) {
  const int64_t pixels = problem.N * problem.P * problem.Q, blocks_c = (problem.C + 63) / 64;
  const int64_t of_taps = int64_t{problem.R} * problem.S * blocks_c;
  if ((plan.channels != 64 && plan.channels != 128) || plan.blocks < 1 || plan.blocks > 4) return "no kernel's tile";
  if (plan.stage_bytes != (plan.channels / 64 + plan.blocks) * 64 * 128) return "bytes of a stage";
  if (plan.stages < 2 || plan.stages > kMostStages) return "stages";
  if (plan.channels == 64 && plan.stages % 2) return "an odd number of stages by turns";
  if (plan.smem_bytes < plan.stages * plan.stage_bytes + 2 * kMostStages * 8) return "room for stages and barriers";
  if (plan.smem_bytes > 232448) return "shared memory";
  if (!covers(plan.tiles_k, plan.channels, problem.K)) return "tiles of channels";
  if (plan.blocks_c != blocks_c || !covers(plan.tiles_e, plan.blocks, of_taps)) return "tiles of weights";
  if (!covers(plan.steps, 64, pixels)) return "steps";
  if (plan.jobs != int64_t{plan.tiles_k} * plan.tiles_e * plan.parts || plan.parts < 1) return "jobs";
  if (plan.grid != std::min(plan.jobs, sms)) return "blocks of the launch";
  return plan.cycles > 0 ? "" : "no estimate";
}

// What is wrong with the jobs, or nothing: each tile of each part is one's, the parts have each pixel once, no chain of
// sums is too long and all sums find room.
static std::string fault_of_jobs(const Problem& problem, const Plan& plan) {
  Params params{};
  params.plan = plan;
  params.by_tiles = make_divisor(int64_t{plan.tiles_k} * plan.tiles_e);
  params.by_tiles_k = make_divisor(plan.tiles_k);
  const int64_t rows = int64_t{plan.tiles_k} * plan.channels, columns = row_columns(plan), sums = sums_of(plan);
  const int of_part = plan.channels == 64 ? 2 : 1;  // each warpgroup's own
  std::vector<uint8_t> owned(plan.jobs);
  std::vector<int> first(plan.parts, -1), last(plan.parts, -1);
  for (int number = 0; number < plan.jobs; ++number) {
    const Job job = locate_job(params, number);
    if (job.tile_k < 0 || job.tile_k >= plan.tiles_k || job.tile_e < 0 || job.tile_e >= plan.tiles_e || job.part < 0 ||
        job.part >= plan.parts)
      return "a job outside";
    if (owned[(job.part * plan.tiles_e + job.tile_e) * plan.tiles_k + job.tile_k]++) return "a tile twice";
    if (first[job.part] >= 0 && (first[job.part] != job.first_step || last[job.part] != job.last_step))
      return "tiles of a part that have other pixels";
    first[job.part] = job.first_step;
    last[job.part] = job.last_step;
    const int64_t part = int64_t{of_part} * job.part + of_part - 1;
    const int64_t row = part * rows + (job.tile_k + 1) * plan.channels - 1;
    if (row * columns + (int64_t{job.tile_e} + 1) * plan.blocks * 64 > sums) return "sums without room";
    const int64_t chain = (int64_t{job.last_step} - job.first_step + of_part - 1) / of_part * 64;
    if (chain > kMostChained) return "a chain that is too long";
  }
  for (int part = 0, next = 0; part < plan.parts; ++part) {
    if (first[part] != next || last[part] <= next) return "pixels of a part";
    next = last[part];
    if (part + 1 == plan.parts && next != plan.steps) return "pixels of no part";
  }
  // What is added up.
  const int64_t taps = int64_t{problem.R} * problem.S;
  if (problem.K > rows || (taps - 1) * plan.blocks_c * 64 + problem.C > columns) return "weights without sums";
  return "";
}

static void note(const Plan& plan) {
  seen.insert("tile of " + std::to_string(plan.channels) + " x " + std::to_string(plan.blocks));
  if (plan.copies_x && plan.copies_dy) seen.insert("copies of both");
  if (plan.copies_x != plan.copies_dy) seen.insert("a copy of one");
  if (plan.parts > 1) seen.insert("parts");
  if (plan.jobs > plan.grid) seen.insert("several jobs");
  const int64_t most = kMostChained * plan.parts * sums_of_part(plan);
  if (int64_t{plan.steps} * 64 > most - most / 8) seen.insert("the longest chains");
}

extern "C" {
double plan_cycles(int, const int64_t* fields, uint64_t x, uint64_t dy, uint64_t) {
  const Planned& planned = plan_of(make_problem(fields), Alignment{x, dy});
  return planned.found ? planned.plan.cycles : 0;
}
// The plan for tensors at these addresses, on a GPU of few SMs or of many, and some that are asked for: null if there
// is none, else what is wrong, or "".
const char* plan_fault(int, const int64_t* fields, uint64_t x, uint64_t dy, uint64_t, int seed) {
  std::string fault;
  const Problem p = make_problem(fields);
  std::mt19937 random(seed);
  const int sms = seed % 3 == 0 ? 3 : seed % 3 == 1 ? 64 : 132;
  const hopper::Axis of_x[2] = {{p.W, p.Q, p.S, p.Q == 1 ? 1 : p.stride_w, p.pad_w, p.dilation_w},
                                {p.H, p.P, p.R, p.P == 1 ? 1 : p.stride_h, p.pad_h, p.dilation_h}};
  const hopper::Axis of_dy[2] = {{p.Q, p.Q, 1, 1, 0, 1}, {p.P, p.P, 1, 1, 0, 1}};
  const bool in_place_x = has_pixels_for_boxes(p.x_stride, x, {p.N, p.C, p.H, p.W});
  const bool in_place_dy = has_pixels_for_boxes(p.y_stride, dy, {p.N, p.K, p.P, p.Q});
  const auto are_planes = [](const int64_t (&stride)[4], int rows, int columns) {
    return (columns == 1 || stride[3] == 1) && (rows == 1 || stride[2] == columns);
  };
  const bool may = (in_place_x || are_planes(p.x_stride, p.H, p.W)) &&
                   (in_place_dy || are_planes(p.y_stride, p.P, p.Q)) &&
                   fault_of_columns(columns_of_dy(p), of_dy).empty();
  const std::string fault_of_x = fault_of_columns(hopper::columns_of(of_x[0], of_x[1]), of_x);
  Plan best{};
  const bool found = make_plan(p, sms, Alignment{x, dy}, best);
  if (found && (best.copies_x == in_place_x || best.copies_dy == in_place_dy)) return "a copy too many or too few";
  if (found != (may && fault_of_x.empty())) {
    return told(!found ? "nothing that stands in its way" : !may ? "tensors that boxes do not take" : fault_of_x, "x");
  }
  if (found && !fault_of_columns(columns_of_x(p), of_x).empty()) return "columns of x";
  for (int i = 0; i < 6 && found; ++i) {
    Plan plan = best;
    const int channels = 64 * static_cast<int>(random() % 3), blocks = random() % (kMostBlocks + 1);
    const int parts = random() % 2 ? 0 : best.parts + static_cast<int>(random() % 3) - 1;
    if (i > 0 && !make_plan(p, sms, Alignment{x, dy}, plan, channels, blocks, parts)) continue;
    if (i > 0 && ((channels > 0 && plan.channels != channels) || (blocks > 0 && plan.blocks != blocks) ||
                  (parts > 0 && plan.parts != parts)))
      return "another plan than was asked for";
    note(plan);
    fault = fault_of_numbers(p, plan, sms);
    if (fault.empty()) fault = fault_of_jobs(p, plan);
    if (fault.empty() && plan.cycles < best.cycles) fault = "not the best plan";
    if (!fault.empty()) return told(fault, "plan " + std::to_string(i) + " for " + std::to_string(sms) + " SMs");
  }
  return found ? "" : nullptr;
}
}
