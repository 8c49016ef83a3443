// ptx.cuh, tensor_map.cuh and wgmma.cuh for the CPU, and what else a kernel of warps with roles of their own takes:
// every thread runs until it has to wait. What is asynchronous on a GPU happens here as late as it may or, in every
// other run, at once.
#if defined(__F16C__)
#include <immintrin.h>
#endif

#include <array>
#include <deque>

#include "numerics.cuh"

#define MODELNEW_SM90A 1

namespace simt {

inline bool late = false;  // whether what is asynchronous happens late

struct Barrier {
  int count, pending;
  int64_t bytes;  // still to come
  uint32_t phase;
};
inline std::map<uint32_t, Barrier> barriers;

inline Barrier& barrier_at(uint32_t address) {
  const auto found = barriers.find(address);
  if (found == barriers.end()) complain("a barrier that nobody initialised");
  return found->second;
}

inline void end_phase_if_due(Barrier& barrier) {
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
  ++progress;
}

inline void check_shared(uint32_t address, size_t bytes) {
  if (address % 16 != 0 || address + bytes > granted_bytes) complain("a wild address in shared memory");
}

// From where to where loads by __ldg may go; if nothing is said, anywhere.
inline std::vector<std::pair<const char*, const char*>> readable;

inline void check_readable(const void* from, size_t bytes) {
  const auto first = static_cast<const char*>(from);
  bool inside = readable.empty();
  for (const auto& [start, end] : readable) inside |= first >= start && first + bytes <= end;
  if (!inside) complain("a load outside of what it may read");
}

// Bulk copies on their way.
struct Copy {
  uint32_t to, barrier;
  std::vector<uint8_t> bytes;
};
inline std::deque<Copy> copies;

inline unsigned copy_delay = 1;  // rounds, on average

inline bool copy_some() {
  while (!copies.empty() && (!late || shuffler() % copy_delay == 0)) {
    if (late) std::swap(copies.front(), copies[shuffler() % copies.size()]);  // they come in any order
    const Copy copy = copies.front();
    copies.pop_front();
    std::copy(copy.bytes.begin(), copy.bytes.end(), smem + copy.to);
    Barrier& barrier = barriers.at(copy.barrier);
    barrier.bytes -= static_cast<int>(copy.bytes.size());
    end_phase_if_due(barrier);
    ++progress;
  }
  return !copies.empty();
}

// What a thread has ordered, in groups: done at the latest when it waits for them.
struct Ordered {
  struct One {
    std::function<void()> run;
    int group;
  };
  std::deque<One> all;
  int groups = 0;  // committed

  void order(std::function<void()> run) { all.push_back({std::move(run), groups}); }
  void do_first() {
    all.front().run();
    all.pop_front();
  }
  void clear() {
    all.clear();
    groups = 0;
  }
  void wait(int pending) {
    while (!all.empty() && all.front().group < groups - pending) do_first();
  }
};
inline Ordered multiplications[1024], own_copies[1024];
// Of few threads: those are gone through in every round.
inline std::map<unsigned, Ordered> bulk_stores;
inline std::map<unsigned, std::deque<std::function<void()>>> arriving;  // copies of threads, with arrivals behind them

// Threads that meet: those of a warp or of the block.
struct Meeting {
  unsigned waiting = 0, round = 0;
  void attend(unsigned threads) {
    const unsigned mine = round;
    if (++waiting == threads) {
      waiting = 0;
      ++round;
      ++progress;
    } else {
      wait_while(round, mine);
    }
  }
};
// All threads of a cluster that have not ended meet: of its blocks, of which only one runs at a time, this one's.
inline Meeting cluster_meeting;
inline void attend_cluster() {
  const unsigned mine = cluster_meeting.round;
  ++cluster_meeting.waiting;
  ++progress;
  wait_while(cluster_meeting.round, mine);
}
inline void meet_in_cluster() {
  const auto lives = [](const Fibre& fibre) { return fibre.line != kExited; };
  const auto threads = std::count_if(fibres.begin(), fibres.begin() + blockDim.x, lives);
  if (cluster_meeting.waiting == 0 || cluster_meeting.waiting < threads) return;
  cluster_meeting.waiting = 0;
  ++cluster_meeting.round;
  ++progress;
}

inline bool do_some() {
  meet_in_cluster();
  bool left = copy_some();
  for (auto& [thread, of_thread] : bulk_stores) {
    while (!of_thread.all.empty() && (!late || shuffler() % copy_delay == 0)) of_thread.do_first();
    left |= !of_thread.all.empty();
  }
  for (auto& [thread, of_thread] : arriving) {
    while (!of_thread.empty() && (!late || shuffler() % copy_delay == 0)) {
      of_thread.front()();
      of_thread.pop_front();
    }
    left |= !of_thread.empty();
  }
  return left;
}

inline Meeting block_meeting, warp_meetings[32], named_meetings[16];
inline uint64_t shuffled[32][32];

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

// Who has waited for all that was launched before, and whether that is what was launched before a call.
inline std::vector<bool> waited;
inline bool first_of_call = false;
inline bool allows_next = false;  // the latest kernel: that the next one is launched before its end

inline void begin_block() {
  waited.assign(blockDim.x, false);
  barriers.clear();
  copies.clear();
  copy_delay = 1u << shuffler() % 9;
  block_meeting = cluster_meeting = {};
  for (Meeting& meeting : warp_meetings) meeting = {};
  for (Meeting& meeting : named_meetings) meeting = {};
  bulk_stores.clear();
  arriving.clear();
  for (unsigned thread = 0; thread < blockDim.x; ++thread) multiplications[thread].clear(), own_copies[thread].clear();
}

}  // namespace simt

#undef __syncthreads
#define __syncthreads() simt::block_meeting.attend(blockDim.x)
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
  const unsigned warp = threadIdx.x / 32;
  std::memcpy(&simt::shuffled[warp][threadIdx.x % 32], &value, sizeof value);
  __syncwarp();
  std::memcpy(&value, &simt::shuffled[warp][lane & 31], sizeof value);
  __syncwarp();
  return value;
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
  uint64_t(&values)[32] = simt::shuffled[threadIdx.x / 32];
  values[threadIdx.x % 32] = value;
  __syncwarp();
  const bool any = std::any_of(values, values + 32, [](uint64_t one) { return one != 0; });
  __syncwarp();
  return any;
}
// Threads change at waits only, so these are whole.
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
template <typename Value>
Value __ldcg(const Value* from) {
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

inline uint32_t smem_address(const void* pointer) {
  return static_cast<uint32_t>(static_cast<const unsigned char*>(pointer) - simt::smem);
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
inline void load_2(const void* address, bool exist, uint32_t& word) {
  word = exist ? *reinterpret_cast<const uint16_t*>(address) : 0;
}

// The first `size` of BYTES, and zeros for the rest.
template <int BYTES>
void copy_async(uint32_t to, const void* from, int size) {
  if (to % BYTES != 0 || to + BYTES > simt::granted_bytes) simt::complain("a wild address in shared memory");
  if (size < 0 || size > BYTES) simt::complain("more than a copy");
  if (size > 0 && reinterpret_cast<uint64_t>(from) % BYTES != 0) simt::complain("a copy that is not aligned");
  if (size > 0) simt::check_readable(from, size);
  const auto run = [=] {
    std::memset(simt::smem + to, 0, BYTES);
    if (size > 0) std::memcpy(simt::smem + to, from, size);  // an address that nobody reads may be any
  };
  if (simt::late)
    simt::own_copies[threadIdx.x].order(run);
  else
    run();
}
template <int BYTES>
void copy_later(uint32_t to, const void* from, bool exist) {
  copy_async<BYTES>(to, from, exist ? BYTES : 0);
}
inline void copies_commit() { ++simt::own_copies[threadIdx.x].groups; }
template <int PENDING>
void copies_wait() {
  simt::own_copies[threadIdx.x].wait(PENDING);
}

inline void barrier_init(uint32_t barrier, int count) { simt::barriers[barrier] = {count, count, 0, 0}; }
inline void barrier_arrive(uint32_t barrier) { simt::arrive(barrier); }
inline void copies_arrive(uint32_t barrier) {
  auto& mine = simt::own_copies[threadIdx.x].all;
  auto& queue = simt::arriving[threadIdx.x];
  for (auto& one : mine) queue.push_back(std::move(one.run));
  mine.clear();
  queue.push_back([=] { simt::arrive(barrier); });
  ++simt::progress;
}
inline void barrier_arrive_expecting(uint32_t barrier, int bytes) { simt::arrive(barrier, bytes); }
inline bool barrier_ended(uint32_t barrier, uint32_t parity) {
  return simt::barrier_at(barrier).phase != (parity & 1);
}
inline void barrier_wait(uint32_t barrier, uint32_t parity) {
  simt::wait_while(simt::barrier_at(barrier).phase, parity & 1);
}
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
  float values[4];
  for (int i = 0; i < 4; ++i) values[i] = simt::shown_by(block, address + 4 * i);
  return {values[0], values[1], values[2], values[3]};
}
inline float4 add_cluster_4(uint32_t address, int blocks) {
  simt::check_shared(address, 16);
  float sums[4] = {};
  for (int rank = 0; rank < blocks; ++rank) {
    for (int i = 0; i < 4; ++i) sums[i] += simt::shown_by(blockIdx.x / blocks * blocks + rank, address + 4 * i);
  }
  return {sums[0], sums[1], sums[2], sums[3]};
}
inline float add_cluster(uint32_t address, int blocks) {
  const float4 sums = add_cluster_4(address / 16 * 16, blocks);
  return address % 16 == 0 ? sums.x : address % 16 == 4 ? sums.y : address % 16 == 8 ? sums.z : sums.w;
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
  simt::launch(kernel, blocks, threads, smem_bytes, stream)(params...);
  simt::first_of_call = false;
  return cudaGetLastError();
}
template <typename... Params>
cudaError_t launch_early(void (*kernel)(Params...), unsigned blocks, int threads, size_t smem_bytes,
                         cudaStream_t stream, const std::remove_const_t<Params>&... params) {
  return launch_early_in_clusters(kernel, blocks, 1, threads, smem_bytes, stream, params...);
}

inline void bulk_load(uint32_t to, const void* from, int bytes, uint32_t barrier) {
  simt::check_shared(to, bytes);
  if (bytes % 16 != 0 || reinterpret_cast<uint64_t>(from) % 16 != 0) simt::complain("a bulk copy that is not aligned");
  const uint8_t* const first = static_cast<const uint8_t*>(from);
  simt::copies.push_back({to, barrier, {first, first + bytes}});
}

constexpr int kBoxRowBytes = 128;
struct BoxMap {
  uint8_t* tensor;
  int element_bytes;
  uint64_t sizes[4], strides[4];
  uint32_t box[4], steps[4];  // of so many elements; from one to the next
  uint32_t pieces;        // of 16 bytes in a row whose order is that of store_box, or 0
  int first[2], last[2];  // of columns: their ends, of columns and rows of an image
  uint32_t pixels;
};
enum class BoxUse { kStore, kStoreHalves, kStoreQuarters, kLoad, kLoadRows, kLoadHalves };
inline cudaError_t make_box_map(BoxUse use, const void* tensor, int element_bytes, const uint64_t (&sizes)[4],
                                const uint64_t (&strides)[3], const uint32_t (&box)[4], BoxMap& map,
                                uint32_t step = 1, uint32_t step_2 = 1) {
  map = {static_cast<uint8_t*>(const_cast<void*>(tensor)), element_bytes};
  const uint32_t row_bytes = box[0] * element_bytes;
  bool right = reinterpret_cast<uint64_t>(tensor) % 16 == 0;
  const bool quarters = use == BoxUse::kStoreQuarters;
  map.pieces = use == BoxUse::kLoad || quarters                          ? 0
               : use == BoxUse::kStoreHalves || use == BoxUse::kLoadHalves ? 4
                                                                           : 8;
  right &= map.pieces > 0 ? row_bytes == map.pieces * 16 : quarters ? row_bytes == 32 : row_bytes % 16 == 0;
  map.strides[0] = element_bytes;
  for (int i = 0; i < 4; ++i) {
    if (i > 0) map.strides[i] = strides[i - 1];
    map.sizes[i] = sizes[i], map.box[i] = box[i];
    right &= sizes[i] >= 1 && sizes[i] <= uint64_t{1} << 32 && box[i] >= 1 && box[i] <= 256;
    right &= i == 0 || (map.strides[i] % 16 == 0 && map.strides[i] < uint64_t{1} << 40);
  }
  // A box is so many elements of memory, of which it has every so manieth.
  right &= step >= 1 && step <= 8 && box[1] % step == 0 && step_2 >= 1 && step_2 <= 8 && box[2] % step_2 == 0;
  map.steps[0] = map.steps[3] = 1;
  map.steps[1] = step;
  map.steps[2] = step_2;
  for (int i = 0; i < 4; ++i) map.box[i] = box[i] / map.steps[i];
  if (!right) simt::complain("a map of boxes that the driver would refuse");
  return right ? cudaSuccess : static_cast<cudaError_t>(1);
}
inline cudaError_t make_columns_map(const void* tensor, int element_bytes, const uint64_t (&sizes)[4],
                                    const uint64_t (&strides)[3], const int (&first)[2], const int (&last)[2],
                                    const int (&steps)[2], uint32_t pixels, BoxMap& map) {
  const uint32_t channels = kBoxRowBytes / element_bytes;
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
  if (!right) simt::complain("a map of columns that the driver would refuse");
  return right ? cudaSuccess : static_cast<cudaError_t>(1);
}
inline void prefetch_map(const BoxMap&) {}
// Visits all elements of a box: its place in memory, or null outside the tensor, its row and its number in there.
template <typename Visit>
void for_each_in_box(const BoxMap& map, const int64_t (&first)[4], const Visit& visit) {
  if (first[0] * map.element_bytes % 16 != 0) simt::complain("a box that is not aligned in memory");
  // Rows that end within 16 bytes are overwritten beyond that (H200, 2026-11-23), and may be read.
  const int64_t end = static_cast<int64_t>(map.sizes[0]);
  if (first[0] < end && first[0] + map.box[0] > end && end * map.element_bytes % 16 != 0)
    simt::complain("rows of a box that end within 16 bytes");
  const uint32_t rows = map.box[1] * map.box[2] * map.box[3];
  for (uint32_t row = 0; row < rows; ++row)
    for (uint32_t element = 0; element < map.box[0]; ++element) {
      const uint32_t inside[4] = {element, row % map.box[1], row / map.box[1] % map.box[2],
                                  row / map.box[1] / map.box[2]};
      uint8_t* place = map.tensor;
      bool exists = true;
      for (int i = 0; i < 4; ++i) {
        const int64_t at = first[i] + int64_t{inside[i]} * map.steps[i];
        exists &= at >= 0 && static_cast<uint64_t>(at) < map.sizes[i];
        place += at * map.strides[i];
      }
      visit(exists ? place : nullptr, row, element);
    }
}
inline uint32_t box_bytes(const BoxMap& map) {
  return map.box[0] * map.box[1] * map.box[2] * map.box[3] * map.element_bytes;
}
inline void store_box_now(const BoxMap& map, uint32_t from, const int64_t (&first)[4]) {
  simt::check_shared(from, box_bytes(map));
  // Where the order of pieces, if there is one, starts anew.
  const uint32_t pieces = max(map.pieces, 1u);
  if (from % (kBoxRowBytes * pieces) != 0) simt::complain("a box that is not aligned in shared memory");
  for_each_in_box(map, first, [&](uint8_t* to, uint32_t row, uint32_t element) {
    uint32_t place = (row * map.box[0] + element) * map.element_bytes;
    place ^= place / kBoxRowBytes % pieces * 16;
    if (to != nullptr) std::memcpy(to, simt::smem + from + place, map.element_bytes);
  });
}
inline void load_box(const BoxMap& map, uint32_t to, int i, int j, int k, int l, uint32_t barrier) {
  simt::check_shared(to, box_bytes(map));
  if (to % 128 != 0) simt::complain("a box that is not aligned in shared memory");
  std::vector<uint8_t> loaded(box_bytes(map));
  for_each_in_box(map, {i, j, k, l}, [&](const uint8_t* from, uint32_t row, uint32_t element) {
    uint32_t place = (row * map.box[0] + element) * map.element_bytes;
    // The order of pieces goes by the address.
    if (map.pieces > 0) place ^= (place + to) / kBoxRowBytes % map.pieces * 16;
    for (int byte = 0; byte < map.element_bytes; ++byte) loaded[place + byte] = from != nullptr ? from[byte] : 0;
  });
  simt::copies.push_back({to, barrier, loaded});
}
inline void load_columns(const BoxMap& map, uint32_t to, int i, int j, int k, int l, int move_j, int move_k,
                         uint32_t barrier) {
  simt::check_shared(to, map.pixels * kBoxRowBytes);
  if (to % 128 != 0) simt::complain("columns that are not aligned in shared memory");
  const int in_16_bytes = 16 / map.element_bytes, channels = kBoxRowBytes / map.element_bytes;
  if (i % in_16_bytes != 0 || map.sizes[0] % in_16_bytes != 0) simt::complain("columns that are not aligned in memory");
  if (move_j < 0 || move_j > 255 || move_k < 0 || move_k > 255) simt::complain("columns that move too far");
  std::vector<uint8_t> loaded(map.pixels * kBoxRowBytes);
  int at[2] = {j, k};
  const int64_t end[2] = {static_cast<int64_t>(map.sizes[1]) + map.last[0],
                          static_cast<int64_t>(map.sizes[2]) + map.last[1]};
  for (int axis = 0; axis < 2; ++axis)
    if (at[axis] < map.first[axis] || at[axis] >= end[axis]) simt::complain("columns that begin outside");
  for (uint32_t pixel = 0; pixel < map.pixels; ++pixel) {
    const int64_t place[4] = {i, int64_t{at[0]} + move_j, int64_t{at[1]} + move_k, l};
    for (int channel = 0; channel < channels; ++channel) {
      const uint8_t* from = map.tensor;
      bool exists = true;
      for (int axis = 0; axis < 4; ++axis) {
        const int64_t number = place[axis] + (axis == 0 ? channel : 0);
        exists &= number >= 0 && static_cast<uint64_t>(number) < map.sizes[axis];
        from += number * map.strides[axis];
      }
      const uint32_t byte =
          (pixel * kBoxRowBytes + channel * map.element_bytes) ^ (pixel + to / kBoxRowBytes) % 8 * 16;
      if (exists) std::memcpy(&loaded[byte], from, map.element_bytes);
    }
    if ((at[0] += map.steps[1]) < end[0]) continue;
    at[0] = map.first[0];
    if ((at[1] += map.steps[2]) < end[1]) continue;
    at[1] = map.first[1];
    ++l;
  }
  simt::copies.push_back({to, barrier, loaded});
}
template <bool LEAVES_FIRST = true>
void store_box(const BoxMap& map, const void* from, int i, int j, int k, int l) {
  const auto run = [&map, from, i, j, k, l] { store_box_now(map, smem_address(from), {i, j, k, l}); };
  simt::bulk_stores[threadIdx.x].order(run);
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
template <typename Sums>
void wgmma_start(Sums& sums) {
  std::fill_n(reinterpret_cast<float*>(&sums), sizeof sums / sizeof(float), NAN);
}
template <int COUNT>
void wgmma_settle(float (&)[COUNT]) {}

// Most of what the tests compute: by the processor's instruction where it has one.
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

template <typename Operand, int N>
struct Wgmma {
  static void multiply(float (&acc)[N / 2], uint32_t a, uint32_t b, int keep, uint32_t high = kDescriptorHigh) {
    if (high != kDescriptorHigh && high != kRowsDescriptorHigh) simt::complain("an unknown descriptor");
    const Lies lies = high == kRowsDescriptorHigh ? Lies::kRows : Lies::kPieces;
    order(acc, a, b, keep, lies, lies);
  }

  static void order(float (&acc)[N / 2], uint32_t a, uint32_t b, int keep, Lies a_lies, Lies b_lies) {
    float* const sums = acc;
    const auto run = [=] { multiply_now(sums, a, b, keep, a_lies, b_lies); };
    if (simt::late)
      simt::multiplications[threadIdx.x].order(run);
    else
      run();
  }

  static void read_row(uint32_t operand, int row, float (&values)[32 / sizeof(Operand)]) {
    read_operand_row<Operand>(Lies::kPieces, operand, row, values);
  }

  static void multiply_now(float* acc, uint32_t a, uint32_t b, int keep, Lies a_lies, Lies b_lies) {
    constexpr int kSteps = 32 / sizeof(Operand);
    const int thread = threadIdx.x % 128;
    float weights[2][kSteps];
    for (int i = 0; i < 2; ++i)
      read_operand_row<Operand>(a_lies, a, 16 * (thread / 32) + thread % 32 / 4 + 8 * i, weights[i]);
    for (int j = 0; j < N / 8; ++j)
      for (int e = 0; e < 2; ++e) {
        float pixel[kSteps];
        read_operand_row<Operand>(b_lies, b, 8 * j + 2 * (thread % 4) + e, pixel);
        for (int i = 0; i < 2; ++i) {
          float sum = keep ? acc[4 * j + 2 * i + e] : 0;
          for (int k = 0; k < kSteps; ++k) sum += weights[i][k] * pixel[k];
          acc[4 * j + 2 * i + e] = sum;
        }
      }
  }
};
template <typename Operand, int N>
struct WgmmaTransposed {
  static void multiply(float (&acc)[N / 2], uint32_t a, uint32_t b, int keep, uint32_t high) {
    if (high != kRowsDescriptorHigh) simt::complain("an unknown descriptor");
    Wgmma<Operand, N>::order(acc, a, b, keep, Lies::kRows, Lies::kTransposed);
  }
};
template <typename Operand, int N>
struct WgmmaFirstTransposed {
  static void multiply(float (&acc)[N / 2], uint32_t a, uint32_t b, int keep, uint32_t high) {
    if (high != kRowsDescriptorHigh) simt::complain("an unknown descriptor");
    Wgmma<Operand, N>::order(acc, a, b, keep, Lies::kTransposed, Lies::kRows);
  }
};
template <typename Operand, int N>
struct WgmmaBothTransposed {
  static void multiply(float (&acc)[N / 2], uint32_t a, uint32_t b, int keep, uint32_t high) {
    if (high != kRowsDescriptorHigh) simt::complain("an unknown descriptor");
    Wgmma<Operand, N>::order(acc, a, b, keep, Lies::kTransposed, Lies::kTransposed);
  }
};

inline void named_barrier(int number, int threads) { simt::named_meetings[number].attend(threads); }

// Blocks of 8 x 8 values of 16 bits that the lanes of a warp hold, two of a row each, to pieces of 16 bytes.
inline void store_blocks(uint32_t address, const uint32_t (&words)[4], bool transposed) {
  static uint32_t shown[32][32][4];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  std::memcpy(shown[warp][lane], words, sizeof words);
  simt::check_shared(address, 16);
  __syncwarp();
  uint16_t piece[8];
  for (int i = 0; i < 8; ++i) {
    const int row = transposed ? i : lane % 8, column = transposed ? lane % 8 : i;
    piece[i] = static_cast<uint16_t>(shown[warp][4 * row + column / 2][lane / 8] >> column % 2 * 16);
  }
  std::memcpy(simt::smem + address, piece, sizeof piece);
  __syncwarp();
}
inline void store_matrix(uint32_t address, const uint32_t (&words)[4]) { store_blocks(address, words, false); }
inline void store_matrix_transposed(uint32_t address, const uint32_t (&words)[4]) {
  store_blocks(address, words, true);
}

// The same with rows of `a` in the registers of four threads each, and rows of `b` as read_row(row, values) has them.
template <typename Operand, int N, typename ReadRow>
void multiply_registers(float (&acc)[N / 2], const uint32_t (&a)[4], int keep, const ReadRow& read_row) {
  static uint32_t words[32][32][4];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  std::memcpy(words[warp][lane], a, sizeof a);
  __syncwarp();
  constexpr int kSteps = 32 / sizeof(Operand), kWord = 4 / sizeof(Operand);
  std::array<std::array<float, kSteps>, 2> rows;
  for (int i = 0; i < 2; ++i)
    for (int k = 0; k < kSteps; ++k) {
      const uint32_t& word = words[warp][lane / 4 * 4 + k / kWord % 4][i + 2 * (k / kWord / 4)];
      Operand value;
      std::memcpy(&value, reinterpret_cast<const uint8_t*>(&word) + k % kWord * sizeof value, sizeof value);
      rows[i][k] = value_of(value);
    }
  __syncwarp();
  float* const sums = acc;
  const auto run = [=] {
    for (int j = 0; j < N / 8; ++j)
      for (int e = 0; e < 2; ++e) {
        float weights[kSteps];
        read_row(8 * j + 2 * (lane % 4) + e, weights);
        for (int i = 0; i < 2; ++i) {
          float sum = keep ? sums[4 * j + 2 * i + e] : 0;
          for (int k = 0; k < kSteps; ++k) sum += rows[i][k] * weights[k];
          sums[4 * j + 2 * i + e] = sum;
        }
      }
  };
  if (simt::late)
    simt::multiplications[threadIdx.x].order(run);
  else
    run();
}

// With `b` as pieces of 16 bytes, or as rows of 128 bytes in the order of boxes.
template <typename Operand, int N>
struct WgmmaRegisters {
  static constexpr int kSteps = 32 / sizeof(Operand);

  static void read_row(uint32_t operand, bool rows, int row, float (&values)[kSteps]) {
    if (!rows) return Wgmma<Operand, N>::read_row(operand, row, values);
    const uint32_t begin = (operand & 0x3fff) * 16;
    if (begin % 1024 > 96) simt::complain("an operand that does not begin with a group of eight rows");
    read_operand_row<Operand>(Lies::kRows, operand, row, values);
  }

  static void multiply(float (&acc)[N / 2], const uint32_t (&a)[4], uint32_t b, int keep,
                       uint32_t b_high = kDescriptorHigh) {
    if (b_high != kDescriptorHigh && b_high != kRowsDescriptorHigh) simt::complain("an unknown descriptor");
    const bool rows = b_high == kRowsDescriptorHigh;
    multiply_registers<Operand, N>(acc, a, keep, [=](int row, auto& values) { read_row(b, rows, row, values); });
  }
};

inline uint32_t warp_max(uint32_t value) {
  uint64_t(&values)[32] = simt::shuffled[threadIdx.x / 32];
  values[threadIdx.x % 32] = value;
  __syncwarp();
  const uint64_t largest = *std::max_element(values, values + 32);
  __syncwarp();
  return static_cast<uint32_t>(largest);
}

inline void check_words(uint32_t address, uint32_t bytes) {
  if (address % bytes != 0 || address + bytes > simt::granted_bytes)
    simt::complain("a wild address in shared memory");
}
inline void load_shared(uint32_t& word, uint32_t address) {
  check_words(address, 4);
  std::memcpy(&word, simt::smem + address, 4);
}
inline void store_shared(uint32_t address, uint32_t word) {
  check_words(address, 4);
  std::memcpy(simt::smem + address, &word, 4);
}
inline void load_matrix(uint32_t (&a)[4], uint32_t address) {
  static uint32_t addresses[32][32];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  simt::check_shared(address, 16);
  addresses[warp][lane] = address;
  __syncwarp();
  for (int e = 0; e < 4; ++e) load_shared(a[e], addresses[warp][8 * e + lane / 4] + lane % 4 * 4);
  __syncwarp();
}

}  // namespace hopper
}  // namespace modelnew
