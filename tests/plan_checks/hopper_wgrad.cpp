#include "hopper_wgrad.cu"

using namespace modelnew;
using namespace modelnew::hopper_wgrad;
static double estimate(const Problem& problem, Operator) { return plan_of(problem, Alignment{}).cycles; }
#include "planner.h"

// Each tile of each part is one job's, no chain of sums is too long, and all sums find room.
static void check_jobs(const Problem& problem, const Params& params) {
  const Plan& plan = params.plan;
  const int64_t row = int64_t{problem.R} * problem.S * row_channels(plan);
  Owned owned(plan.jobs);
  std::vector<int> firsts(plan.parts + 1, plan.tiles);
  for (int number = 0; number < plan.jobs; ++number) {
    const Job job = locate_job(params, number);
    CHECK(within(job.group, problem.groups) && within(job.tile_k, plan.tiles_k) && within(job.part, plan.parts));
    CHECK(within(job.block_c, plan.blocks_c) && within(job.block_t, plan.blocks_t));
    const int64_t tile = ((int64_t{job.part} * problem.groups + job.group) * plan.tiles_k + job.tile_k) * plan.blocks_c;
    CHECK(owned.take((tile + job.block_c) * plan.blocks_t + job.block_t));
    CHECK(job.first_tile < job.last_tile);
    CHECK(firsts[job.part] == plan.tiles || firsts[job.part] == job.first_tile);
    firsts[job.part] = job.first_tile;
    CHECK(firsts[job.part + 1] == plan.tiles || firsts[job.part + 1] == job.last_tile);
    const int64_t pixels = int64_t{job.last_tile - job.first_tile} * plan.images * plan.steps * step_pixels(plan);
    CHECK(pixels / sums_of_part(plan) <= hopper::most_chained(plan.bytes == 2) + plan.images * plan.steps * step_pixels(plan));
  }
  CHECK(firsts[0] == 0);
  CHECK(params.rows >= int64_t{problem.groups} * plan.tiles_k * plan.channels);
  CHECK(plan.slices * plan.parts * sums_of_part(plan) * params.rows * row == sums_of(problem, plan));
}

// Every pixel is in one stage. Each of its taps is the pixel of x that the convolution says.
static void check_pixels(const Problem& p, const Params& params) {
  const Plan& plan = params.plan;
  const int dy_pixels = plan.images * plan.steps * step_slots(plan);
  Owned owned(p.N * p.P * p.Q);
  for (int tile = 0; tile < plan.tiles; ++tile) {
    const Place at = locate_tile(params, tile);
    for (int i = 0; i < dy_pixels; ++i) {
      const int packed = dy_pixel(params, i, step_slots(plan), step_pixels(plan));
      const int64_t n = at.n + (packed >> 20);
      const int y = at.p + (packed >> 10 & 1023), x = at.q + (packed & 1023);
      if (packed >= 0 && n < p.N && y < p.P && x < p.Q) CHECK(owned.take((n * p.P + y) * p.Q + x));
    }
  }
  CHECK(owned.all());
  for (int block = 0; block < plan.blocks_t; ++block) {
    const Tap first = first_tap(params, block);
    for (int t = 0; t < plan.shape.taps; ++t) {
      const int tap = block * plan.shape.taps + t, r = tap / p.S - first.r, s = tap % p.S - first.s;
      if (tap >= p.R * p.S) break;
      const int from = slot_of_tap(params, first, tap);
      for (int i = 0; i < dy_pixels; ++i) {
        const int image = i / (plan.steps * step_slots(plan)), slot = i % (plan.steps * step_slots(plan));
        const int place = image * phases_of(plan) * plan.slots + from + slot;
        const int packed = dy_pixel(params, i, step_slots(plan), step_pixels(plan));
        CHECK(within(place, plan.images * phases_of(plan) * plan.slots));
        if (packed < 0) continue;
        const int y = (packed >> 10 & 1023) * params.stride_h + r * p.dilation_h;
        const int x = (packed & 1023) * params.stride_w + s * p.dilation_w;
        CHECK(plan.shifted || x_pixel(params, place) == pack_pixel(packed >> 20, y, x));
      }
    }
  }
}

// Plans for x and dy at these addresses.
static bool check_plans(const Problem& p, Operator, const Addresses& at, std::mt19937& random) {
  const int sms = std::array{3, 64, kSms}[random() % 3];
  Plan plan{};
  if (!make_plan(p, sms, {at.in, at.w}, plan)) {  // only some groups of 16 bits may be handed on
    CHECK(element_bytes(p.dtype) == 2 && (p.C / p.groups % 8 != 0 || p.K / p.groups % 8 != 0));
    CHECK(p.groups > 1 && (at.in % 16 != 0 || at.w % 16 != 0));
    return false;
  }
  plan_in_hand = "the plan for " + std::to_string(sms) + " SMs";
  NOTE_VALUES(plan.shape.taps, 1, 9);
  NOTE(plan.channels == 64);
  NOTE(plan.copies_x != plan.copies_dy);
  NOTE(plan.dy_planes);
  NOTE(plan.x_planes);
  NOTE(plan.images > 1);
  NOTE(plan.tiles_q > 1);
  NOTE(plan.jobs > plan.grid);
  NOTE_VALUES(plan.parts_of_x, 1, 2, 3);
  CHECK(is_compiled(plan.shape, plan.parts_of_x, plan.splits, plan.contains, plan.rounds) && (plan.channels == 64 || plan.channels == 128));
  CHECK(plan.smem_bytes == shared_layout(plan).end && plan.smem_bytes <= kSharedMemory && plan.stages <= kMostStages);
  CHECK(plan.stages >= 3);
  CHECK(multiples(kRegionBytes, {plan.dy_bytes, plan.raw_bytes, plan.stage_bytes}) && plan.slots % 8 == 0);
  CHECK(shared_layout(plan).barriers % 8 == 0);
  const int slots = all_slots(plan), columns = 8 * plan.shape.chunks;
  const bool lines = plan.rounds && plan.x_planes;
  if (lines)
    CHECK(plan.dy_planes && plan.dy_bytes >= plan.images * plan.channels * plan.slots * 4 && plan.slots % kLine == 0);
  else if (plan.dy_planes)
    CHECK(plan.dy_bytes >= plan.images * plan.channels * plan.dy_run * plan.bytes && plan.dy_run % 16 == 8);
  else
    CHECK(plan.dy_bytes >= plan.images * plan.dy_slots * plan.channels * plan.bytes && plan.dy_slots % 8 == 0);
  CHECK(plan.dy_slots >= plan.steps * step_slots(plan));
  CHECK(plan.part_bytes >= slots * columns * (plan.rounds ? 4 : 2 * plan.parts_of_x));
  CHECK(plan.stage_bytes == plan.dy_bytes + (plan.splits ? 0 : plan.part_bytes));
  CHECK(plan.splits == ((plan.bytes == 4 && !plan.rounds) || (plan.bytes == 2 && plan.x_planes)) && (plan.bytes == 4 || plan.x_planes == plan.dy_planes));
  CHECK(!plan.splits || plan.raw_stages == plan.stages - 1);
  NOTE(plan.bytes == 2 && plan.x_planes);
  CHECK(!plan.rounds || (plan.shape.taps == 1 && plan.slots % kLine == 0));
  CHECK(!plan.splits || plan.part_stages == 2 || plan.part_stages == 3);
  CHECK(!plan.splits ||
        plan.raw_bytes >= columns * plan.bytes * (plan.x_planes ? plan.images * plan.x_boxes * plan.run : slots));
  NOTE(lines);
  NOTE(plan.shifted);
  NOTE(plan.rounds && !lines);
  NOTE(plan.fold_h * plan.fold_w == 1);
  CHECK(plan.jobs == int64_t{p.groups} * plan.tiles_k * plan.blocks_c * plan.blocks_t * plan.parts);
  NOTE(plan.contains);
  CHECK(!plan.shifted || !plan.copies_x || !plan.copies_dy);
  CHECK(plan.grid == std::min(plan.jobs, sms) && plan.cycles > 0);
  CHECK(plan.slices * plan.slice_images >= p.N && (plan.slices - 1) * plan.slice_images < p.N);
  Problem slice = p;
  slice.N = plan.slice_images;
  const Problem planned = as_planned(slice, plan);
  CHECK(copied_bytes(planned, plan) <= kMostCopiedBytes && planned.N * planned.P * planned.Q < 1 << 30);
  NOTE(planned.Q > p.Q);
  NOTE(plan.fold_h + plan.fold_w > 2);
  NOTE(planned.R > 1 && planned.R < p.R && planned.dilation_w > 1);
  NOTE(plan.x_planes && !lines && plan.box_rows > 1);
  NOTE(plan.shifted && !lines);
  for (const Tensor& of : {x_of(planned), dy_of(planned)})
    CHECK(!plan.shifted || of.stride[1] > shift_of(plan, 1, of.stride[1], plan.bytes));
  NOTE(plan.x_planes && plan.phases_h < p.stride_h);
  const Params params = make_params(planned, plan);
  check_jobs(planned, params);
  // Every pixel of a window that a slot has lies in a box, whose first pixel may lie up to 16 bytes behind its
  // address, and as far behind that as planes are shifted.
  for (int slot = 0; plan.x_planes && !lines && slot < slots; ++slot) {
    const int packed = x_pixel(params, slot), row = packed >> 10 & 1023, column = packed & 1023;
    if (packed < 0) continue;
    const InBox place = place_in_box(params, row, column);
    CHECK(within(place.number, plan.x_boxes) && within(place.offset + piece_of(plan.bytes) - 1 + most_shift(plan, planned.x_stride[1], plan.bytes), plan.run));
    CHECK((row - first_row(params, place.number)) * planned.W + column == place.offset);
  }
  if (p.N * p.P * p.Q < 1 << 18) check_pixels(planned, params);
  return true;
}
