#include "tma_wgrad.cu"

using namespace modelnew;
using namespace modelnew::tma_wgrad;
static double estimate(const Problem& problem, Operator) { return plan_of(problem, Alignment{}).plan.cycles; }
#include "planner.h"
#include "tma_columns.h"

static void check_numbers(const Problem& problem, const Plan& plan, int sms) {
  const int64_t blocks_c = ceil_div(problem.C, 64);
  CHECK((plan.channels == 64 || plan.channels == 128) && plan.blocks >= 1 && plan.blocks <= 4);
  CHECK(plan.fp16_parts < 2 || plan.blocks <= 2);
  CHECK(plan.stage_bytes == (plan.fp16_parts == 2 ? 2 : 1) * (plan.channels / 64 + plan.blocks) * 64 * 128);
  CHECK(plan.stages >= 2 && plan.stages <= kMostStages);
  CHECK(plan.channels == 128 || plan.stages % 2 == 0);  // by turns
  const int order = plan.fp16_parts != 0 ? static_cast<int>(sizeof(uint16_t) * kMostListed) : 0;
  const int beside = 2 * kMostStages * 8 + order;
  CHECK(plan.smem_bytes >= plan.stages * plan.stage_bytes + beside && plan.smem_bytes <= kSharedMemory);
  CHECK(covers(plan.tiles_k, plan.channels, problem.K) && plan.blocks_c == blocks_c);
  CHECK(covers(plan.tiles_e, plan.blocks, int64_t{problem.R} * problem.S * blocks_c));
  const int64_t images = plan.planes ? problem.N : 1;
  CHECK(plan.steps % images == 0 && covers(plan.steps / images, 64, problem.N / images * problem.P * problem.Q));
  CHECK(plan.parts >= 1 && plan.jobs == int64_t{plan.tiles_k} * plan.tiles_e * plan.parts);
  CHECK(plan.grid == std::min(plan.jobs, sms) && plan.cycles > 0);
}

// Each tile of each part is one job's, the parts have each pixel once, no chain of sums is too long, and all sums find
// room.
static void check_jobs(const Problem& problem, const Plan& plan) {
  Params params{};
  params.plan = plan;
  params.by_tiles = make_divisor(int64_t{plan.tiles_k} * plan.tiles_e);
  params.by_tiles_k = make_divisor(plan.tiles_k);
  const int64_t rows = int64_t{plan.tiles_k} * plan.channels, columns = row_columns(plan);
  const int of_part = plan.channels == 64 ? 2 : 1;  // sums of each warpgroup
  Owned owned(plan.jobs);
  std::vector<std::set<std::pair<int, int>>> steps(plan.parts);
  for (int number = 0; number < plan.jobs; ++number) {
    const Job job = locate_job(params, number);
    CHECK(within(job.tile_k, plan.tiles_k) && within(job.tile_e, plan.tiles_e) && within(job.part, plan.parts));
    CHECK(owned.take((job.part * plan.tiles_e + job.tile_e) * plan.tiles_k + job.tile_k));
    steps[job.part].insert({job.first_step, job.last_step});
    const int64_t last_part = int64_t{of_part} * (job.part + 1) - 1;
    const int64_t last_row = last_part * rows + (job.tile_k + 1) * plan.channels - 1;
    CHECK(last_row * columns + (int64_t{job.tile_e} + 1) * plan.blocks * 64 <= sums_of(plan));
    CHECK(ceil_div(job.last_step - job.first_step, of_part) * 64 <= hopper::most_chained(plan.fp16_parts == 0));
  }
  int next = 0;
  for (const auto& of_tiles : steps) {
    CHECK(of_tiles.size() == 1 && of_tiles.begin()->first == next && of_tiles.begin()->second > next);
    next = of_tiles.begin()->second;
  }
  CHECK(next == plan.steps);
  const int64_t taps = int64_t{problem.R} * problem.S;
  CHECK(problem.K <= rows && (taps - 1) * plan.blocks_c * 64 + problem.C <= columns);  // what is added up
}

// The same of fp32: copies have all that the filter reads, in place for boxes.
static void check_contained(Problem p, int sms) {
  p.dtype = DType::kFloat32;
  Plan plan{};
  if (!make_contained_plan(p, sms, plan)) return;
  const Problem of_copies = problem_of_copies(p);
  CHECK(plan.fp16_parts == (uses_tf32(p, Operator::kWgrad) ? 1 : 2));
  CHECK(!plan.copies_x && !plan.copies_dy && !plan.planes);
  CHECK(has_pixels_for_boxes(of_copies.x_stride, 0, {p.N, 8 * ceil_div(p.C, 8), of_copies.H, of_copies.W}));
  CHECK(has_pixels_for_boxes(of_copies.y_stride, 0, {p.N, 8 * ceil_div(p.K, 8), p.P, p.Q}));
  CHECK(of_copies.P == p.P && of_copies.Q == p.Q && copy_bytes_of_x(of_copies) % 16 == 0);
  CHECK(copy_bytes_of_dy(of_copies) % 16 == 0);
  CHECK(kGuardBytes % 128 == 0 && kGuardBytes >= static_cast<int64_t>(sizeof(GuardLayout)));
  NOTE(of_copies.H != p.H);
  NOTE(plan.fp16_parts == 2);
  check_numbers(of_copies, plan, sms);
  check_jobs(of_copies, plan);
}

// Plans for a GPU of few SMs or of many: there is one where boxes take x and dy, or copies of them.
static bool check_plans(const Problem& p, Operator, const Addresses& at, std::mt19937& random) {
  const int sms = std::array{3, 64, kSms}[random() % 3];
  const hopper::Axis of_x[2] = {{p.W, p.Q, p.S, p.Q == 1 ? 1 : p.stride_w, p.pad_w, p.dilation_w},
                                {p.H, p.P, p.R, p.P == 1 ? 1 : p.stride_h, p.pad_h, p.dilation_h}};
  const bool in_place_x = has_pixels_for_boxes(p.x_stride, at.in, {p.N, p.C, p.H, p.W});
  const bool in_place_dy = has_pixels_for_boxes(p.y_stride, at.w, {p.N, p.K, p.P, p.Q});
  const auto has_planes = [&](const int64_t (&stride)[4], uint64_t address, int channels) {
    const bool dense = (p.Q == 1 || stride[3] == 1) && (p.P == 1 || stride[2] == p.Q * (p.Q == 1 ? stride[2] : 1));
    return dense && address % 16 == 0 && (channels == 1 || (stride[1] > 0 && stride[1] % 8 == 0)) &&
           (p.N == 1 || (stride[0] > 0 && stride[0] % 8 == 0));
  };
  const bool alike = p.R == 1 && p.S == 1 && p.H == p.P && p.W == p.Q && p.pad_h == 0 && p.pad_w == 0;
  const bool planes = !(in_place_x && in_place_dy) && alike && p.P * p.Q % 8 == 0 &&
                      has_planes(p.x_stride, at.in, p.C) && has_planes(p.y_stride, at.w, p.K);
  check_contained(p, sms);
  Problem other = p;
  other.tf32_allowed = !p.tf32_allowed;
  check_contained(other, sms);
  const bool may = int64_t{p.R} * p.S <= 7168 && (in_place_x || has_lines(p.x_stride, p.H, p.W)) &&
                   (in_place_dy || has_lines(p.y_stride, p.P, p.Q)) &&
                   are_columns(columns_of_dy(p), {{p.Q, p.Q, 1, 1, 0, 1}, {p.P, p.P, 1, 1, 0, 1}}) &&
                   are_columns(hopper::columns_of(of_x[0], of_x[1]), of_x);
  Plan best{};
  CHECK(make_plan(p, sms, {at.in, at.w}, best) == may);
  if (!may) return false;
  CHECK(best.planes == planes && best.copies_x == !(in_place_x || planes));
  CHECK(best.copies_dy == !(in_place_dy || planes) && are_columns(columns_of_x(p), of_x));
  for (int i = 0; i < 6; ++i) {
    plan_in_hand = "plan " + std::to_string(i) + " for " + std::to_string(sms) + " SMs";
    Plan plan = best;
    const int channels = 64 * static_cast<int>(random() % 3), blocks = random() % (kMostBlocks + 1);
    const int parts = random() % 2 ? 0 : best.parts + static_cast<int>(random() % 3) - 1;
    if (i > 0) {  // 0: the planner's choice
      if (!make_plan(p, sms, {at.in, at.w}, plan, channels, blocks, parts)) continue;
      CHECK((channels == 0 || plan.channels == channels) && (blocks == 0 || plan.blocks == blocks));
      CHECK(parts == 0 || plan.parts == parts);
    }
    const int64_t most = hopper::most_chained(plan.fp16_parts == 0) * plan.parts * sums_of_part(plan);
    NOTE_VALUES(plan.blocks, 1, 2, 3, 4);
    NOTE(plan.channels == 64);
    NOTE(plan.copies_x != plan.copies_dy);
    NOTE(plan.planes);
    NOTE(stores_weights(p, plan));
    NOTE(plan.jobs > plan.grid);
    NOTE(int64_t{plan.steps} * 64 > most / 4);  // long chains
    check_numbers(p, plan, sms);
    check_jobs(p, plan);
  }
  return true;
}
