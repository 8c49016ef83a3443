// ptx.cuh, tensor_map.cuh and wgmma.cuh for the CPU, behind copies.h: threads run until they have to wait. What is
// asynchronous on a GPU happens as late as it may or, in every other run, at once.
#if defined(__F16C__)
#include <immintrin.h>
#endif

#include <array>

#define MODELNEW_SM90A 1

namespace simt {

struct Barrier {
  int count, pending;
  int64_t bytes;  // still to come
  uint32_t phase;
};
inline std::map<uint32_t, Barrier> barriers;

inline Barrier& barrier_at(uint32_t address) {
  const auto found = barriers.find(address);
  if (found == barriers.end()) complain("an uninitialised barrier");
  return found->second;
}

inline void end_phase_if_due(Barrier& barrier) {
  ++progress;
  if (barrier.pending > 0 || barrier.bytes != 0) return;
  barrier.phase ^= 1;
  barrier.pending = barrier.count;
}

inline void arrive(uint32_t address, int64_t bytes = 0) {
  Barrier& barrier = barrier_at(address);
  if (barrier.pending <= 0) complain("one arrival too many");
  --barrier.pending;
  barrier.bytes += bytes;
  end_phase_if_due(barrier);
}

using Action = std::function<void()>;
inline std::deque<Action> bulk_copies;
inline Ordered multiplications[1024];
// By threads, of which few have any: stores of boxes, and copies with arrivals behind them.
inline std::map<unsigned, Ordered> bulk_stores;
inline std::map<unsigned, std::deque<Action>> arriving;

// `left_out`: bytes that are not written, if any.
inline void bulk_copy(uint32_t to, std::vector<uint8_t> bytes, uint32_t address, std::vector<bool> left_out = {}) {
  check_shared(to, bytes.size());
  Barrier& barrier = barrier_at(address);
  left_out.resize(bytes.size());
  bulk_copies.push_back([to, bytes = std::move(bytes), left_out = std::move(left_out), &barrier] {
    for (size_t i = 0; i < bytes.size(); ++i) {
      if (left_out[i]) continue;
      smem[to + i] = bytes[i];
      --barrier.bytes;
    }
    end_phase_if_due(barrier);
  });
}

inline unsigned copy_delay = 1;  // rounds, on average

// Does all that is in a queue or, in late runs, some of it, and tells whether more is left.
template <typename Queue>
bool do_some_of(Queue& queue, bool in_order = true) {
  while (!queue.empty() && (!late || shuffler() % copy_delay == 0)) {
    if (late && !in_order) std::swap(queue.front(), queue[shuffler() % queue.size()]);
    const auto first = std::move(queue.front());
    queue.pop_front();
    first();
  }
  return !queue.empty();
}

// Threads of a warp or of a block that wait for one another.
struct Meeting {
  unsigned waiting = 0, round = 0;
  void end() {
    waiting = 0;
    ++round;
    ++progress;
  }
  void attend(unsigned threads) {
    const unsigned mine = round;
    if (++waiting == threads)
      end();
    else
      wait_while(round, mine);
  }
};
// A cluster's threads meet. Only one of its blocks runs at a time: all threads of this block that have not ended.
inline Meeting cluster_meeting;
inline void attend_cluster() { cluster_meeting.attend(~0u); }
inline void meet_in_cluster() {
  const auto lives = [](const Fibre& fibre) { return fibre.line != kExited; };
  const auto threads = std::count_if(fibres.begin(), fibres.begin() + blockDim.x, lives);
  if (cluster_meeting.waiting > 0 && cluster_meeting.waiting >= threads) cluster_meeting.end();
}

inline bool do_some() {
  meet_in_cluster();
  bool left = do_some_of(bulk_copies, false);
  for (auto& [thread, of_thread] : bulk_stores) left |= do_some_of(of_thread.all);
  for (auto& [thread, of_thread] : arriving) left |= do_some_of(of_thread);
  return left;
}

inline Meeting block_meeting, warp_meetings[32], named_meetings[16];

// The lanes of a warp meet and show one another a value: those of all lanes. A slot is written again after the next
// meeting at the earliest, by when all have read it.
template <typename Value>
const Value* shown_by_warp(const Value& value) {
  static Value shown[32][2][32];
  const unsigned warp = threadIdx.x / 32;
  Value(&lanes)[32] = shown[warp][warp_meetings[warp].round % 2];
  std::memcpy(&lanes[threadIdx.x % 32], &value, sizeof value);
  warp_meetings[warp].attend(32);
  return lanes;
}

// Blocks run one after another, so a cluster of them runs twice: what a block shows of its shared memory at first, the
// others read the second time. Without `again` there are none.
inline bool again = false;
inline unsigned of_cluster = 1;                               // blocks of one, if that was said at the launch
inline std::map<unsigned, std::vector<unsigned char>> shown;  // by blocks

inline float shown_by(unsigned block, uint32_t address) {
  const auto found = shown.find(block);
  float value = NAN;
  if (found != shown.end()) std::memcpy(&value, &found->second[address], sizeof value);
  return value;
}

// A kernel launched early: which of its threads have waited for all that was launched before, and whether that is what
// was launched before the call.
inline bool early = false;
inline std::vector<bool> waited;
inline bool first_of_call = false;
inline bool allows_next = false;  // the latest kernel: that the next one is launched before its end

inline void begin_block() {
  forget_copies();
  first_of_call &= early;
  waited.assign(blockDim.x, false);
  barriers.clear();
  bulk_copies.clear();
  copy_delay = 1u << shuffler() % 9;
  block_meeting = cluster_meeting = {};
  std::fill(std::begin(warp_meetings), std::end(warp_meetings), Meeting{});
  std::fill(std::begin(named_meetings), std::end(named_meetings), Meeting{});
  bulk_stores.clear();
  arriving.clear();
  for (unsigned thread = 0; thread < blockDim.x; ++thread) multiplications[thread].clear();
}
inline const bool runs_independently = [] {
  before_block = begin_block;
  between_rounds = do_some;
  block_barrier = [](int) { block_meeting.attend(blockDim.x); };
  return independent = true;
}();

}  // namespace simt

// One launch, or two that stand for one of clusters. Odd seeds delay what is asynchronous.
template <typename Launch>
int simt_run(int seed, bool clusters, const Launch& launch) {
  simt::late = seed % 2;
  simt::again = clusters;
  simt::shown.clear();
  int code = 0;
  for (int i = 0; i <= clusters && code == 0; ++i) {
    simt::shuffler.seed(seed);
    simt::first_of_call = true;
    simt::allows_next = false;
    recomputed = 0;
    code = launch();
  }
  if (code != 0 || !simt::allows_next) return code;
  simt::message = "the next call is allowed before this one has ended";
  return cudaErrorLaunchFailure;
}

inline int __syncthreads_or(int vote) {
  static int votes = 0;
  votes |= vote != 0;
  simt::block_meeting.attend(blockDim.x);
  const int any = votes;
  simt::block_meeting.attend(blockDim.x);
  votes = 0;
  return any;
}
inline void __syncwarp() { simt::warp_meetings[threadIdx.x / 32].attend(32); }
template <typename Value>
Value __shfl_sync(unsigned, Value value, int lane) {
  return simt::shown_by_warp(value)[lane & 31];
}
template <typename Value>
Value __shfl_down_sync(unsigned mask, Value value, int by) {
  const int lane = threadIdx.x % 32;
  return __shfl_sync(mask, value, lane + by < 32 ? lane + by : lane);
}
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned select) {
  const uint64_t bytes = uint64_t{b} << 32 | a;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) result |= static_cast<unsigned>(bytes >> 8 * (select >> 4 * i & 7) & 255) << 8 * i;
  return result;
}
inline bool __any_sync(unsigned, bool value) {
  const bool* const lanes = simt::shown_by_warp(value);
  return std::any_of(lanes, lanes + 32, [](bool one) { return one; });
}
inline unsigned __ballot_sync(unsigned, bool value) {
  const bool* const lanes = simt::shown_by_warp(value);
  unsigned result = 0;
  for (int lane = 0; lane < 32; ++lane) result |= unsigned{lanes[lane]} << lane;
  return result;
}
inline int __ffs(unsigned value) { return __builtin_ffs(static_cast<int>(value)); }
// Threads change at waits only, hence these are atomic.
template <typename Value, typename Other>
Value atomicAdd(Value* place, Other value) {
  return std::exchange(*place, *place + static_cast<Value>(value));
}
template <typename Value, typename Other>
Value atomicMax(Value* place, Other value) {
  return std::exchange(*place, std::max(*place, static_cast<Value>(value)));
}
inline unsigned atomicOr(unsigned* place, unsigned value) { return std::exchange(*place, *place | value); }
inline unsigned atomicExch(unsigned* place, unsigned value) { return std::exchange(*place, value); }
inline void __threadfence() {}
template <typename Value>
Value __ldg(const Value* from) {
  simt::check_readable(from, sizeof(Value));
  return *from;
}
inline void __stcs(uint4* to, const uint4& value) { *to = value; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
using std::max;
using std::min;

namespace modelnew {
namespace hopper {

template <typename Number>
Number in_register(Number number) {
  return number;
}
inline int uniform(int value) {
  const int first = __shfl_sync(~0u, value, 0);
  if (first != value) simt::complain("lanes that differ");
  return first;
}

inline void load_8(const void* address, bool exist, uint32_t& low, uint32_t& high) {
  const uint2 words = exist ? *reinterpret_cast<const uint2*>(address) : uint2{0, 0};
  low = words.x, high = words.y;
}
inline void load_4(const void* address, bool exist, uint32_t& word) {
  word = exist ? *reinterpret_cast<const uint32_t*>(address) : 0;
}

template <int BYTES>
void copy_later(uint32_t to, const void* from, bool exist) {
  copy_async<BYTES>(to, from, exist ? BYTES : 0);
}

inline void barrier_init(uint32_t barrier, int count) { simt::barriers[barrier] = {count, count, 0, 0}; }
inline void barrier_arrive(uint32_t barrier) { simt::arrive(barrier); }
inline void copies_arrive(uint32_t barrier) {
  auto& mine = simt::own_copies[threadIdx.x].all;
  auto& queue = simt::arriving[threadIdx.x];
  queue.insert(queue.end(), mine.begin(), mine.end());
  mine.clear();
  queue.push_back([=] { simt::arrive(barrier); });
  ++simt::progress;
}
inline void barrier_arrive_expecting(uint32_t barrier, int bytes) { simt::arrive(barrier, bytes); }
inline void barrier_wait(uint32_t barrier, uint32_t parity) {
  simt::wait_while(simt::barrier_at(barrier).phase, parity & 1);
}
inline bool barrier_ended(uint32_t barrier, uint32_t parity) { return simt::barrier_at(barrier).phase != (parity & 1); }
inline void barrier_wait_idly(uint32_t barrier, uint32_t parity) { barrier_wait(barrier, parity); }
inline void fence_async() {}
inline void fence_async_memory() {}
inline void wait_for_count(const uint32_t* count, uint32_t least) {  // blocks run one after another
  if (*count < least) simt::complain("a block that waits for those behind it");
}

inline void cluster_sync() {
  if (!simt::again) simt::complain("a cluster");
  simt::attend_cluster();
  if (simt::shown.count(blockIdx.x) == 0)
    simt::shown[blockIdx.x] = std::vector<unsigned char>(simt::smem, simt::smem + simt::granted_bytes);
  simt::attend_cluster();
}
inline void cluster_leave() { simt::attend_cluster(); }
inline float4 load_cluster_4(uint32_t address, int rank) {
  simt::check_shared(address, 16);
  const unsigned block = blockIdx.x / simt::of_cluster * simt::of_cluster + rank;
  if (static_cast<unsigned>(rank) >= simt::of_cluster) simt::complain("a block of another cluster");
  return {simt::shown_by(block, address), simt::shown_by(block, address + 4), simt::shown_by(block, address + 8),
          simt::shown_by(block, address + 12)};
}
inline float add_cluster(uint32_t address, int blocks) {
  simt::check_shared(address, 4, 4);
  float sum = 0;
  for (int rank = 0; rank < blocks; ++rank) sum += simt::shown_by(blockIdx.x / blocks * blocks + rank, address);
  return sum;
}
inline float4 add_cluster_4(uint32_t address, int blocks) {
  simt::check_shared(address, 16);
  return {add_cluster(address, blocks), add_cluster(address + 4, blocks), add_cluster(address + 8, blocks),
          add_cluster(address + 12, blocks)};
}

inline void launch_dependents() {
  if (simt::first_of_call && !simt::waited[threadIdx.x])
    simt::complain("the next kernel is allowed before what was launched before this call has ended");
  simt::allows_next = true;
}
inline void wait_for_prerequisites() { simt::waited[threadIdx.x] = true; }
template <typename... Params>
cudaError_t launch_early_in_clusters(void (*kernel)(Params...), unsigned blocks, unsigned of_cluster, int threads,
                                     size_t smem_bytes, cudaStream_t stream,
                                     const std::remove_const_t<Params>&... params) {
  if (blocks % of_cluster != 0) return cudaErrorInvalidConfiguration;
  simt::allows_next = false;
  simt::of_cluster = of_cluster;
  simt::early = true;
  simt::launch(kernel, blocks, threads, smem_bytes, stream)(params...);
  simt::early = simt::first_of_call = false;
  return cudaGetLastError();
}
template <typename... Params>
cudaError_t launch_early(void (*kernel)(Params...), unsigned blocks, int threads, size_t smem_bytes,
                         cudaStream_t stream, const std::remove_const_t<Params>&... params) {
  return launch_early_in_clusters(kernel, blocks, 1, threads, smem_bytes, stream, params...);
}

inline void bulk_load(uint32_t to, const void* from, int bytes, uint32_t barrier) {
  if (bytes % 16 != 0 || reinterpret_cast<uint64_t>(from) % 16 != 0) simt::complain("a bulk copy that is not aligned");
  const uint8_t* const first = static_cast<const uint8_t*>(from);
  simt::bulk_copy(to, {first, first + bytes}, barrier);
}

constexpr int kBoxRowBytes = 128;
struct BoxMap {
  uint8_t* tensor;
  int element_bytes;
  uint64_t sizes[4], strides[4];
  uint32_t box[4], steps[4];  // of so many elements; from one to the next
  uint32_t pieces;            // of 16 bytes in a row whose order is that of store_box, or 0
  int first[2], last[2];      // of columns: their ends, of columns and rows of an image
  uint32_t pixels;
};
// The driver's answer to a map.
inline cudaError_t accepted(bool right) {
  if (!right) simt::complain("a map that the driver would refuse");
  return right ? cudaSuccess : cudaErrorInvalidValue;
}
enum class BoxUse { kStore, kStoreHalves, kStoreQuarters, kLoad, kLoadRows, kLoadHalves, kLoadQuarters };
inline cudaError_t make_box_map(BoxUse use, const void* tensor, int element_bytes, const uint64_t (&sizes)[4],
                                const uint64_t (&strides)[3], const uint32_t (&box)[4], BoxMap& map,
                                uint32_t step = 1, uint32_t step_2 = 1) {
  map = {static_cast<uint8_t*>(const_cast<void*>(tensor)), element_bytes};
  const uint32_t row_bytes = box[0] * element_bytes;
  bool right = reinterpret_cast<uint64_t>(tensor) % 16 == 0;
  const bool quarters = use == BoxUse::kStoreQuarters;
  const bool halves = use == BoxUse::kStoreHalves || use == BoxUse::kLoadHalves;
  map.pieces = use == BoxUse::kLoad || quarters ? 0 : use == BoxUse::kLoadQuarters ? 2 : halves ? 4 : 8;
  right &= row_bytes % 16 == 0 && (map.pieces > 0 ? row_bytes <= map.pieces * 16 : !quarters || row_bytes == 32);
  // A box spans so many elements of memory and takes one in every `step`.
  right &= step >= 1 && step <= 8 && box[1] % step == 0 && step_2 >= 1 && step_2 <= 8 && box[2] % step_2 == 0;
  const uint32_t steps[4] = {1, step, step_2, 1};
  for (int i = 0; i < 4; ++i) {
    map.strides[i] = i == 0 ? element_bytes : strides[i - 1];
    map.sizes[i] = sizes[i], map.steps[i] = steps[i], map.box[i] = box[i] / steps[i];
    right &= sizes[i] >= 1 && sizes[i] <= uint64_t{1} << 32 && box[i] >= 1 && box[i] <= 256;
    right &= i == 0 || (map.strides[i] % 16 == 0 && map.strides[i] < uint64_t{1} << 40);
  }
  return accepted(right);
}
inline cudaError_t make_columns_map(const void* tensor, int element_bytes, const uint64_t (&sizes)[4],
                                    const uint64_t (&strides)[3], const int (&first)[2], const int (&last)[2],
                                    const int (&steps)[2], uint32_t channels, uint32_t pixels, BoxMap& map) {
  const cudaError_t error =
      make_box_map(BoxUse::kLoadRows, tensor, element_bytes, sizes, strides, {channels, 1, 1, 1}, map);
  map.pixels = pixels;
  bool right = error == cudaSuccess && pixels >= 1 && pixels <= 1024;
  for (int i = 0; i < 2; ++i) {
    map.first[i] = first[i], map.last[i] = last[i], map.steps[1 + i] = steps[i];
    right &= steps[i] >= 1 && steps[i] <= 8;
    right &= first[i] >= -128 && first[i] <= 127 && last[i] >= -128 && last[i] <= 127;
    right &= first[i] <= static_cast<int64_t>(sizes[1 + i]) - 1 + last[i];
  }
  return accepted(right);
}
inline void prefetch_map(const BoxMap&) {}
// The address of an element of a tensor, or null outside it.
inline uint8_t* element_at(const BoxMap& map, const int64_t (&numbers)[4]) {
  uint8_t* place = map.tensor;
  bool exists = true;
  for (int i = 0; i < 4; ++i) {
    const int64_t at = numbers[i];
    exists &= at >= 0 && static_cast<uint64_t>(at) < map.sizes[i];
    place += at * map.strides[i];
  }
  return exists ? place : nullptr;
}
// Rows may be shorter than those of their swizzle: what is left lies unused between them.
inline uint32_t row_pitch(const BoxMap& map) {
  return map.pieces > 0 ? map.pieces * 16 : map.box[0] * map.element_bytes;
}
// Visits all elements of a box that lies at `address` in shared memory: the address of each in the tensor, or null, and
// its place in the box, where the order of pieces depends on `address`.
template <typename Visit>
void for_each_in_box(const BoxMap& map, uint32_t address, const int64_t (&first)[4], const Visit& visit) {
  if (first[0] * map.element_bytes % 16 != 0) simt::complain("a box that is not aligned in memory");
  // Rows that end within 16 bytes are overwritten beyond that, and may be read.
  const int64_t end = static_cast<int64_t>(map.sizes[0]);
  if (first[0] < end && first[0] + map.box[0] > end && end * map.element_bytes % 16 != 0)
    simt::complain("rows of a box that end within 16 bytes");
  const uint32_t rows = map.box[1] * map.box[2] * map.box[3];
  for (uint32_t row = 0; row < rows; ++row)
    for (uint32_t element = 0; element < map.box[0]; ++element) {
      const uint32_t inside[4] = {element, row % map.box[1], row / map.box[1] % map.box[2],
                                  row / map.box[1] / map.box[2]};
      int64_t numbers[4];
      for (int i = 0; i < 4; ++i) numbers[i] = first[i] + int64_t{inside[i]} * map.steps[i];
      uint32_t place = row * row_pitch(map) + element * map.element_bytes;
      if (map.pieces > 0) place ^= (place + address) / kBoxRowBytes % map.pieces * 16;
      visit(element_at(map, numbers), place);
    }
}
inline uint32_t box_bytes(const BoxMap& map) { return map.box[1] * map.box[2] * map.box[3] * row_pitch(map); }
inline void store_box_now(const BoxMap& map, uint32_t from, const int64_t (&first)[4]) {
  simt::check_shared(from, box_bytes(map));
  // The order of pieces repeats itself from there on.
  if (from % (kBoxRowBytes * max(map.pieces, 1u)) != 0) simt::complain("a box that is not aligned in shared memory");
  for_each_in_box(map, from, first, [&](uint8_t* to, uint32_t place) {
    if (to != nullptr) std::memcpy(to, simt::smem + from + place, map.element_bytes);
  });
}
inline void load_box(const BoxMap& map, uint32_t to, int i, int j, int k, int l, uint32_t barrier) {
  if (to % 128 != 0) simt::complain("a box that is not aligned in shared memory");
  std::vector<uint8_t> loaded(box_bytes(map));
  std::vector<bool> left_out(loaded.size(), true);
  for_each_in_box(map, to, {i, j, k, l}, [&](const uint8_t* from, uint32_t place) {
    if (from != nullptr) std::memcpy(&loaded[place], from, map.element_bytes);
    std::fill_n(left_out.begin() + place, map.element_bytes, false);
  });
  simt::bulk_copy(to, std::move(loaded), barrier, std::move(left_out));
}
inline void load_columns(const BoxMap& map, uint32_t to, int i, int j, int k, int l, int move_j, int move_k,
                         uint32_t barrier) {
  if (to % 128 != 0) simt::complain("columns that are not aligned in shared memory");
  const int in_16_bytes = 16 / map.element_bytes, channels = map.box[0];
  if (i % in_16_bytes != 0 || map.sizes[0] % in_16_bytes != 0) simt::complain("columns that are not aligned in memory");
  if (move_j < 0 || move_j > 255 || move_k < 0 || move_k > 255) simt::complain("columns that move too far");
  std::vector<uint8_t> loaded(map.pixels * kBoxRowBytes);
  std::vector<bool> left_out(loaded.size(), true);
  int at[2] = {j, k};
  const int64_t end[2] = {static_cast<int64_t>(map.sizes[1]) + map.last[0],
                          static_cast<int64_t>(map.sizes[2]) + map.last[1]};
  for (int axis = 0; axis < 2; ++axis)
    if (at[axis] < map.first[axis] || at[axis] >= end[axis]) simt::complain("columns that begin outside");
  for (uint32_t pixel = 0; pixel < map.pixels; ++pixel) {
    for (int channel = 0; channel < channels; ++channel) {
      const uint8_t* const from =
          element_at(map, {int64_t{i} + channel, int64_t{at[0]} + move_j, int64_t{at[1]} + move_k, l});
      uint32_t place = pixel * kBoxRowBytes + channel * map.element_bytes;
      place ^= (place + to) / kBoxRowBytes % 8 * 16;
      if (from != nullptr) std::memcpy(&loaded[place], from, map.element_bytes);
      std::fill_n(left_out.begin() + place, map.element_bytes, false);
    }
    if ((at[0] += map.steps[1]) < end[0]) continue;
    at[0] = map.first[0];
    if ((at[1] += map.steps[2]) < end[1]) continue;
    at[1] = map.first[1];
    ++l;
  }
  simt::bulk_copy(to, std::move(loaded), barrier, std::move(left_out));
}
template <bool LEAVES_FIRST = true>
void store_box(const BoxMap& map, const void* from, int i, int j, int k, int l) {
  const uint32_t address = smem_address(from);
  simt::bulk_stores[threadIdx.x].queue([&map, address, i, j, k, l] { store_box_now(map, address, {i, j, k, l}); });
}
inline void bulk_stores_commit() { ++simt::bulk_stores[threadIdx.x].groups; }
template <int PENDING>
void bulk_stores_wait_read() {
  simt::bulk_stores[threadIdx.x].wait(PENDING);
}

template <int COUNT>
void registers_give_back() {}
template <int COUNT>
void registers_take() {}

inline uint32_t of_own_block(uint32_t address) { return address; }
inline uint32_t descriptor(uint32_t address, uint32_t leading_byte_offset) {
  return address / 16 | leading_byte_offset / 16 << 16;
}
inline void wgmma_fence() {}
inline void wgmma_commit() { ++simt::multiplications[threadIdx.x].groups; }
template <int PENDING>
void wgmma_wait() {
  simt::multiplications[threadIdx.x].wait(PENDING);
  __syncwarp();  // the instruction is the whole warp's
}
template <bool ADDS = false, typename Sums>
void wgmma_start(Sums& sums) {
  std::fill_n(reinterpret_cast<float*>(&sums), sizeof sums / sizeof(float), ADDS ? 0 : NAN);
}
template <int COUNT>
void wgmma_settle(float (&)[COUNT]) {}

// Operands are widened to fp32, by the processor's instruction where it has one: most of the tests' time goes there.
template <typename Operand>
float value_of(Operand operand) {
  return widen(operand);
}
// The bits that TF32 does not have may be anything.
inline float value_of(float operand) { return bits_float(float_bits(operand) & ~0x1fffu); }
template <typename Operand>
void widen_16_bytes(const unsigned char* from, float* to) {
  Operand values[16 / sizeof(Operand)];
  std::memcpy(values, from, sizeof values);
  for (const Operand& value : values) *to++ = value_of(value);
}
#if defined(__F16C__)
template <>
inline void widen_16_bytes<Half>(const unsigned char* from, float* to) {
  _mm256_storeu_ps(to, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i_u*>(from))));
}
#endif

template <int N>
struct Count {
  static constexpr int kValue = N;
};
constexpr uint32_t kDescriptorHigh = 128 / 16, kRowsDescriptorHigh = 1024 / 16 | 1u << 30;

// A row of an operand, 32 bytes along the reduction: 16 bytes in each of two places; or of rows of 128 bytes in the
// order of boxes, which goes by the address; or down such rows.
enum class Lies { kPieces, kRows, kTransposed };
template <typename Operand>
void read_operand_row(Lies lies, uint32_t operand, int row, float (&values)[32 / sizeof(Operand)]) {
  if (operand & 0xc000) simt::complain("a descriptor beyond shared memory");
  constexpr int kHalf = 16 / sizeof(Operand);
  const uint32_t begin = (operand & 0x3fff) * 16, distance = (operand >> 16) * 16;
  const auto in_order = [](uint32_t address) { return address ^ address / 128 % 8 * 16; };
  if (lies == Lies::kTransposed) {
    for (int k = 0; k < 2 * kHalf; ++k) {
      const uint32_t address = in_order(begin + row / 64 * distance + k * 128 + row % 64 * sizeof(Operand));
      simt::check_shared(address / 16 * 16, 16);
      Operand value;
      std::memcpy(&value, simt::smem + address, sizeof value);
      values[k] = value_of(value);
    }
    return;
  }
  for (int half = 0; half < 2; ++half) {
    const uint32_t address =
        lies == Lies::kRows ? in_order(begin + row * 128 + half * 16) : begin + half * distance + row * 16;
    simt::check_shared(address, 16);
    widen_16_bytes<Operand>(simt::smem + address, values + half * kHalf);
  }
}

// acc (+)= a b. read_a(i, values) gives row i of the thread's two, and read_b(row, values) one of b.
template <typename Operand, int N, typename ReadA, typename ReadB>
void multiply_rows(float (&acc)[N / 2], int keep, const ReadA& read_a, const ReadB& read_b) {
  float* const sums = acc;
  simt::multiplications[threadIdx.x].order([=] {
    constexpr int kSteps = 32 / sizeof(Operand);
    float a[2][kSteps], b[kSteps];
    for (int i = 0; i < 2; ++i) read_a(i, a[i]);
    for (int j = 0; j < N / 8; ++j)
      for (int e = 0; e < 2; ++e) {
        read_b(8 * j + 2 * static_cast<int>(threadIdx.x % 4) + e, b);
        for (int i = 0; i < 2; ++i) {
          float sum = keep ? sums[4 * j + 2 * i + e] : 0;
          for (int k = 0; k < kSteps; ++k) sum += a[i][k] * b[k];
          sums[4 * j + 2 * i + e] = sum;
        }
      }
  });
}

// Whether an operand lies in rows of 128 bytes, by the upper half of its descriptor.
inline bool lies_in_rows(uint32_t high) {
  if (high != kDescriptorHigh && high != kRowsDescriptorHigh) simt::complain("an unknown descriptor");
  return high == kRowsDescriptorHigh;
}

template <typename Operand, int N, Lies A_LIES, Lies B_LIES>
struct WgmmaLying {
  static void multiply(float (&acc)[N / 2], uint32_t a, uint32_t b, int keep, uint32_t high = kDescriptorHigh) {
    const bool rows = lies_in_rows(high);
    if (!rows && (A_LIES != Lies::kRows || B_LIES != Lies::kRows)) simt::complain("an unknown descriptor");
    const Lies a_lies = rows ? A_LIES : Lies::kPieces, b_lies = rows ? B_LIES : Lies::kPieces;
    const int first = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
    multiply_rows<Operand, N>(
        acc, keep, [=](int i, auto& values) { read_operand_row<Operand>(a_lies, a, first + 8 * i, values); },
        [=](int row, auto& values) { read_operand_row<Operand>(b_lies, b, row, values); });
  }
};
template <typename Operand, int N>
using Wgmma = WgmmaLying<Operand, N, Lies::kRows, Lies::kRows>;
template <typename Operand, int N>
using WgmmaTransposed = WgmmaLying<Operand, N, Lies::kRows, Lies::kTransposed>;
template <typename Operand, int N>
using WgmmaFirstTransposed = WgmmaLying<Operand, N, Lies::kTransposed, Lies::kRows>;
template <typename Operand, int N>
using WgmmaBothTransposed = WgmmaLying<Operand, N, Lies::kTransposed, Lies::kTransposed>;

// Rows of `a` in the registers of four threads each.
template <typename Operand>
std::array<std::array<float, 32 / sizeof(Operand)>, 2> rows_in_registers(const uint32_t (&a)[4]) {
  constexpr int kSteps = 32 / sizeof(Operand), kWord = 4 / sizeof(Operand);
  const auto* const of_four = simt::shown_by_warp(a) + threadIdx.x % 32 / 4 * 4;
  std::array<std::array<float, kSteps>, 2> rows;
  for (int i = 0; i < 2; ++i)
    for (int k = 0; k < kSteps; ++k) {
      const uint32_t& word = of_four[k / kWord % 4][i + 2 * (k / kWord / 4)];
      Operand value;
      std::memcpy(&value, reinterpret_cast<const uint8_t*>(&word) + k % kWord * sizeof value, sizeof value);
      rows[i][k] = value_of(value);
    }
  return rows;
}

template <typename Operand, int N>
struct WgmmaRegisters {
  static void multiply(float (&acc)[N / 2], const uint32_t (&a)[4], uint32_t b, int keep,
                       uint32_t b_high = kDescriptorHigh) {
    const Lies b_lies = lies_in_rows(b_high) ? Lies::kRows : Lies::kPieces;
    if (b_lies == Lies::kRows && (b & 0x3fff) * 16 % 1024 > 96)
      simt::complain("an operand that does not begin with a group of eight rows");
    const auto rows = rows_in_registers<Operand>(a);
    multiply_rows<Operand, N>(
        acc, keep, [=](int i, auto& values) { std::copy(rows[i].begin(), rows[i].end(), values); },
        [=](int row, auto& values) { read_operand_row<Operand>(b_lies, b, row, values); });
  }
};

// And chunks of eight columns of `b`, [step of the reduction] x 16 bytes each, or rows in a swizzle, 128, 64 or 32 bytes
// of columns each.
template <typename Operand, int N>
struct WgmmaRegistersTransposed {
  static void multiply(float (&acc)[N / 2], const uint32_t (&a)[4], uint32_t b, int keep, uint32_t b_high) {
    if (b & 0xc000 || (b_high & 0x3fffffff) >> 14 != 0) simt::complain("a descriptor beyond shared memory");
    const uint32_t row_bytes = b_high >> 30 == 0 ? 16 : 256 >> (b_high >> 30), to_next = (b_high & 0x3fff) * 16;
    if (row_bytes > 16 && to_next != 8 * row_bytes) simt::complain("rows of a swizzle that do not follow each other");
    const auto rows = rows_in_registers<Operand>(a);
    multiply_rows<Operand, N>(
        acc, keep, [=](int i, auto& values) { std::copy(rows[i].begin(), rows[i].end(), values); },
        [=](int column, auto& values) {
          for (int k = 0; k < 16; ++k) {
            const uint32_t first = (b & 0x3fff) * 16, leading = (b >> 16) * 16, bytes = column * 2;
            uint32_t place = first + bytes / row_bytes * leading + k / 8 * to_next + k % 8 * row_bytes;
            if (row_bytes == 16) place = first + column / 8 * to_next + k / 8 * leading + k % 8 * 16;
            place += bytes % row_bytes / 16 * 16;
            place ^= place / kBoxRowBytes % (row_bytes / 16) * 16;
            simt::check_shared(place, 16);
            Operand value;
            std::memcpy(&value, simt::smem + place + column % 8 * sizeof value, sizeof value);
            values[k] = value_of(value);
          }
        });
  }
};

inline void named_barrier(int number, int threads) { simt::named_meetings[number].attend(threads); }
inline bool named_barrier_any(int number, int threads, bool own) {
  // Calls take two meetings each, and turns: a slow thread may still clear the votes of the call before.
  static bool any[2][16];
  const int round = simt::named_meetings[number].round / 2 % 2;
  any[round][number] |= own;
  simt::named_meetings[number].attend(threads);
  const bool answer = any[round][number];
  simt::named_meetings[number].attend(threads);
  any[round][number] = false;
  return answer;
}

// Blocks of 8 x 8 values of 16 bits that the lanes of a warp hold, two of a row each, to pieces of 16 bytes.
inline void store_blocks(uint32_t address, const uint32_t (&words)[4], bool transposed) {
  simt::check_shared(address, 16);
  const auto* const lanes = simt::shown_by_warp(words);
  const int lane = threadIdx.x % 32;
  uint16_t piece[8];
  for (int i = 0; i < 8; ++i) {
    const int row = transposed ? i : lane % 8, column = transposed ? lane % 8 : i;
    piece[i] = static_cast<uint16_t>(lanes[4 * row + column / 2][lane / 8] >> column % 2 * 16);
  }
  std::memcpy(simt::smem + address, piece, sizeof piece);
}
inline void store_matrix(uint32_t address, const uint32_t (&words)[4]) { store_blocks(address, words, false); }
inline void store_matrix_transposed(uint32_t address, const uint32_t (&words)[4]) {
  store_blocks(address, words, true);
}

inline uint32_t warp_max(uint32_t value) {
  const uint32_t* const lanes = simt::shown_by_warp(value);
  return *std::max_element(lanes, lanes + 32);
}

template <typename Value>
void load_words(Value& words, uint32_t address) {
  simt::check_shared(address, sizeof words, sizeof words);
  std::memcpy(&words, simt::smem + address, sizeof words);
}
inline void load_shared(uint32_t& word, uint32_t address) { load_words(word, address); }
inline void load_shared_2(uint32_t (&words)[2], uint32_t address) { load_words(words, address); }
inline void load_shared_4(uint32_t (&words)[4], uint32_t address) { load_words(words, address); }
inline void load_shared_half(uint32_t& word, uint32_t address) {
  uint16_t half;
  load_words(half, address);
  word = half;
}
template <typename Value>
void store_words(uint32_t address, const Value& words) {
  simt::check_shared(address, sizeof words, sizeof words);
  std::memcpy(simt::smem + address, &words, sizeof words);
}
inline void store_shared(uint32_t address, uint32_t word) { store_words(address, word); }
inline void store_shared_4(uint32_t address, const uint32_t (&words)[4]) { store_words(address, words); }

// Matrices of 8 x 8 values of 16 bits, a row of which lies where a lane says: a lane gets two values of a row or, of a
// transposed matrix, of a column.
inline void load_matrix(uint32_t (&a)[4], uint32_t address) {
  simt::check_shared(address, 16);
  const uint32_t* const rows = simt::shown_by_warp(address);
  const int lane = threadIdx.x % 32;
  for (int e = 0; e < 4; ++e) load_shared(a[e], rows[8 * e + lane / 4] + lane % 4 * 4);
}
inline void load_matrix_transposed(uint32_t (&a)[4], uint32_t address) {
  simt::check_shared(address, 16);
  const uint32_t* const rows = simt::shown_by_warp(address);
  const int lane = threadIdx.x % 32;
  for (int e = 0; e < 4; ++e) {
    uint32_t values[2];
    for (int i = 0; i < 2; ++i) load_shared_half(values[i], rows[8 * e + lane % 4 * 2 + i] + lane / 4 * 2);
    a[e] = values[0] | values[1] << 16;
  }
}

}  // namespace hopper
}  // namespace modelnew
