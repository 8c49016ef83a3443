// CUDA's execution model on one CPU thread, for kernels that synchronise by __syncthreads alone: one fibre for each
// thread of a block, resumed in shuffled order from barrier to barrier. Shared memory starts as NaN in every block.
#pragma once
#include <dlfcn.h>
#include <setjmp.h>
#include <signal.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __constant__ static const
#define __grid_constant__
#define __forceinline__ inline
#define __noinline__
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __launch_bounds__(...)
#define __syncthreads() simt::block_barrier(__LINE__)

extern "C" {
int simt_mutation = 0;  // what takes place of a text made by with_mutations
int simt_poison = 0xff;  // bytes of shared memory at first: four of them are a NaN
}

using cudaStream_t = void*;
enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorInvalidConfiguration = 9,
  cudaErrorLaunchFailure = 719
};
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };
enum cudaDeviceAttr {
  cudaDevAttrMultiProcessorCount = 16,
  cudaDevAttrComputeCapabilityMajor = 75,
  cudaDevAttrComputeCapabilityMinor = 76,
  cudaDevAttrMaxSharedMemoryPerBlockOptin = 97
};

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

inline dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace simt {

constexpr size_t kStackBytes = 128 << 10, kDefaultSmemBytes = 48 << 10, kMaxSmemBytes = 232448, kMarginBytes = 1024;
constexpr int kExited = -1, kWaiting = -2;

// The block's shared memory, 227 KiB as on sm_90, and a margin behind it in which stray writes are seen.
alignas(128) inline unsigned char smem[kMaxSmemBytes + kMarginBytes];

struct Fibre {
  std::unique_ptr<char[]> stack{new char[kStackBytes]};
  jmp_buf suspended;
  bool started = false;
  int line = 0;  // of the barrier it waits at
  const unsigned* place = nullptr;  // where it waits for another value than this one
  unsigned value = 0;

  bool waits() const { return place != nullptr && *place == value; }
};

inline std::vector<Fibre> fibres;
inline std::function<void()> body;
inline jmp_buf scheduler;
inline std::mt19937 shuffler;
inline std::map<const void*, size_t> smem_limits;
inline cudaError_t last_error = cudaSuccess;
inline std::string message;
inline std::set<std::string> launched;  // symbols of the kernels that ran
inline size_t granted_bytes = 0;  // of shared memory, to the launch

// For kernels whose threads wait for one another in other ways: they run independently, each until it has to wait.
inline bool independent = false;
inline uint64_t progress = 0;  // counts events that a thread may wait for
inline std::function<void()> before_block = [] {};
inline std::function<bool()> between_rounds = [] { return false; };  // whether something is still on its way
constexpr int kPatience = 1000;  // rounds without progress

inline void suspend(int line) {
  Fibre& fibre = fibres[threadIdx.x];
  fibre.line = line;
  if (_setjmp(fibre.suspended) == 0) _longjmp(scheduler, 1);
}

inline void (*block_barrier)(int) = suspend;

// Waits while a place has this value. The scheduler looks at the place, which is cheaper than to resume the thread.
inline void wait_while(const unsigned& place, unsigned value) {
  Fibre& fibre = fibres[threadIdx.x];
  fibre.place = &place, fibre.value = value;
  while (place == value) suspend(kWaiting);
  fibre.place = nullptr;
}

// A fibre outlives its block: it waits at kExited for the next one, so that switching needs no system call.
inline void fibre_main() {
  for (;;) {
    body();
    suspend(kExited);
  }
}

inline void fail(const std::string& what) {
  if (last_error == cudaSuccess) message = what;
  last_error = cudaErrorLaunchFailure;
  fibres.clear();
}

// The same from within a thread, which does not go on.
inline void complain(const std::string& what) {
  if (last_error == cudaSuccess) message = what + ", thread " + std::to_string(threadIdx.x);
  last_error = cudaErrorLaunchFailure;
  for (;;) suspend(kWaiting);
}

inline void on_signal(int signal_number) { _longjmp(scheduler, 1 + signal_number); }

// Runs one thread up to its next barrier. False when it died of a bad access.
inline bool resume(unsigned thread) {
  threadIdx.x = thread;
  if (int cause = _setjmp(scheduler)) {
    if (cause == 1) return true;
    fail("signal " + std::to_string(cause - 1) + " (misaligned or wild access) in thread " +
         std::to_string(threadIdx.x) + " of block " + std::to_string(blockIdx.x));
    return false;
  }
  Fibre& fibre = fibres[thread];
  if (fibre.started) _longjmp(fibre.suspended, 1);
  fibre.started = true;
  ucontext_t context;
  getcontext(&context);
  context.uc_stack.ss_sp = fibre.stack.get();
  context.uc_stack.ss_size = kStackBytes;
  makecontext(&context, fibre_main, 0);
  setcontext(&context);
  return false;
}

// Threads of some warps, round by round, in shuffled order, until all have ended. Some warps are faster than others.
inline bool run_independently(const std::vector<unsigned>& order) {
  int patience = kPatience;
  std::vector<unsigned> of_round;
  unsigned often[32];  // of 32 rounds
  for (unsigned& times : often) times = 1u << shuffler() % 6;
  for (size_t ended = 0; ended < order.size();) {
    const uint64_t before = progress;
    bool runs[32];
    for (int warp = 0; warp < 32; ++warp) runs[warp] = shuffler() % 32 < often[warp];
    of_round.clear();
    for (unsigned thread : order)
      if (runs[thread / 32] && fibres[thread].line != kExited) of_round.push_back(thread);
    std::shuffle(of_round.begin(), of_round.end(), shuffler);
    for (unsigned thread : of_round) {
      if (fibres[thread].waits()) continue;
      if (!resume(thread)) return false;
      if (fibres[thread].line == kExited) ++ended, ++progress;
    }
    const bool waits = !between_rounds() && progress == before;
    patience = waits ? patience - 1 : kPatience;
    if (patience == 0) {
      fail("threads that wait for one another for ever");
      return false;
    }
    if (last_error != cudaSuccess) {
      fibres.clear();
      return false;
    }
  }
  return true;
}

// All threads from barrier to barrier.
inline bool run_in_step(std::vector<unsigned>& order) {
  do {
    std::shuffle(order.begin(), order.end(), shuffler);
    for (unsigned thread : order)
      if (!resume(thread)) return false;
    for (unsigned thread : order)
      if (fibres[thread].line != fibres[order[0]].line) {
        fail("divergent barrier: lines " + std::to_string(fibres[thread].line) + " and " +
             std::to_string(fibres[order[0]].line) + " (-1 is the end of the kernel)");
        return false;
      }
  } while (fibres[order[0]].line != kExited);
  return true;
}

inline bool run_block(size_t smem_bytes) {
  unsigned char* const end = smem + smem_bytes;
  std::memset(smem, simt_poison, smem_bytes + kMarginBytes);
  granted_bytes = smem_bytes;
  std::vector<unsigned> order(blockDim.x);
  std::iota(order.begin(), order.end(), 0u);
  for (unsigned thread : order) fibres[thread].line = 0, fibres[thread].place = nullptr;
  before_block();
  if (!(independent ? run_independently(order) : run_in_step(order))) return false;
  if (std::any_of(end, end + kMarginBytes, [](unsigned char byte) { return byte != simt_poison; })) {
    fail("write beyond the shared memory asked for");
    return false;
  }
  return true;
}

inline void run(const void* kernel, dim3 grid, dim3 block, size_t smem_bytes) {
  const size_t limit = smem_limits.count(kernel) ? smem_limits[kernel] : kDefaultSmemBytes;
  const bool flat = grid.z * block.y * block.z == 1;
  const bool fits = grid.x > 0 && grid.x <= 0x7fffffffu && grid.y > 0 && grid.y <= 0xffffu;
  if (!flat || !fits || block.x == 0 || block.x > 1024 || smem_bytes > limit) {
    message = "bad launch configuration";
    last_error = cudaErrorInvalidConfiguration;
    return;
  }
  if (Dl_info info; dladdr(kernel, &info) && info.dli_sname) launched.insert(info.dli_sname);
  gridDim = grid, blockDim = block;
  if (fibres.size() < block.x) fibres.resize(block.x);
  std::vector<unsigned> blocks(grid.x * grid.y);
  std::iota(blocks.begin(), blocks.end(), 0u);
  std::shuffle(blocks.begin(), blocks.end(), shuffler);

  struct sigaction mine = {}, old[3];
  const int caught[3] = {SIGSEGV, SIGBUS, SIGILL};
  mine.sa_handler = on_signal;
  mine.sa_flags = SA_NODEFER;
  for (int i = 0; i < 3; ++i) sigaction(caught[i], &mine, &old[i]);
  for (unsigned index : blocks) {
    blockIdx.x = index % grid.x, blockIdx.y = index / grid.x;
    if (!run_block(smem_bytes)) break;
  }
  for (int i = 0; i < 3; ++i) sigaction(caught[i], &old[i], nullptr);
}

template <class... Parameters>
struct Launch {
  void (*kernel)(Parameters...);
  dim3 grid, block;
  size_t smem_bytes;
  template <class... Arguments>
  void operator()(const Arguments&... arguments) const {
    body = [&] { kernel(arguments...); };
    run(reinterpret_cast<const void*>(kernel), grid, block, smem_bytes);
  }
};

// kernel<<<grid, block, smem_bytes, stream>>>(arguments) becomes simt::launch(kernel, grid, ...)(arguments).
template <class... Parameters>
Launch<Parameters...> launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t smem_bytes = 0,
                             cudaStream_t = nullptr) {
  return {kernel, grid, block, smem_bytes};
}

}  // namespace simt

extern "C" {
int recomputed = 0;  // of the latest run, if its engine counts them: outputs that were not finite at first
const char* simt_message() { return simt::message.c_str(); }
const char* simt_launched() {  // kernels since it was cleared, mangled
  static std::string names;
  names.clear();
  for (const std::string& name : simt::launched) names += name + "\n";
  return names.c_str();
}
}
// An engine's workspace, as large as it asks for: full of NaN, as is what surrounds it.
class Workspace {
 public:
  explicit Workspace(int64_t bytes)
      : room_(bytes + 2 * kMargin, 255),
        begin_(room_.data() + kMargin - reinterpret_cast<uint64_t>(room_.data()) % 256),
        end_(begin_ + bytes) {}
  uint8_t* data() { return begin_; }
  bool intact() const {
    const auto untouched = [](uint8_t byte) { return byte == 255; };
    return std::all_of(room_.data(), static_cast<const uint8_t*>(begin_), untouched) &&
           std::all_of(static_cast<const uint8_t*>(end_), room_.data() + room_.size(), untouched);
  }

 private:
  static constexpr int kMargin = 1024;
  std::vector<uint8_t> room_;
  uint8_t *begin_, *end_;
};

inline cudaError_t cudaGetLastError() { return std::exchange(simt::last_error, cudaSuccess); }
template <class Kernel>
cudaError_t cudaFuncSetAttribute(Kernel* kernel, cudaFuncAttribute, int value) {
  if (value < 0 || static_cast<size_t>(value) > simt::kMaxSmemBytes) return cudaErrorInvalidValue;
  simt::smem_limits[reinterpret_cast<const void*>(kernel)] = value;
  return cudaSuccess;
}
inline cudaError_t cudaMemsetAsync(void* place, int value, size_t bytes, cudaStream_t) {
  std::memset(place, value, bytes);
  return cudaSuccess;
}
inline cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = attribute == cudaDevAttrMultiProcessorCount ? 4 : static_cast<int>(simt::kMaxSmemBytes);
  return cudaSuccess;
}
