// Copies of ptx.cuh for the CPU. They happen as late as they may, unless `late` is taken back.
#include <deque>

#include "numerics.cuh"

namespace simt {

inline bool late = true;  // whether what is asynchronous happens late

// Actions of one thread, in groups, which are done at the latest when the thread waits for them.
struct Ordered {
  struct One {
    std::function<void()> run;
    int group;
    void operator()() const { run(); }
  };
  std::deque<One> all;
  int groups = 0;  // committed

  template <typename Run>
  void queue(const Run& run) {
    all.push_back({run, groups});
  }
  template <typename Run>
  void order(const Run& run) {
    if (late)
      queue(run);
    else
      run();
  }
  void clear() {
    all.clear();
    groups = 0;
  }
  void wait(int pending) {
    for (; !all.empty() && all.front().group < groups - pending; all.pop_front()) all.front()();
  }
};
inline Ordered own_copies[1024];
inline void forget_copies() {
  for (unsigned thread = 0; thread < blockDim.x; ++thread) own_copies[thread].clear();
}
inline const bool forgets_copies = [] {
  before_block = forget_copies;
  return true;
}();

inline void check_shared(uint32_t address, size_t bytes, size_t alignment = 16) {
  if (address % alignment != 0 || address + bytes > granted_bytes) complain("a wild address in shared memory");
}

// Ranges that __ldg and copies may read; all memory if there are none.
inline std::vector<std::pair<const char*, const char*>> readable;

inline void check_readable(const void* from, size_t bytes) {
  const auto first = static_cast<const char*>(from);
  bool inside = readable.empty();
  for (const auto& [start, end] : readable) inside |= first >= start && first + bytes <= end;
  if (!inside) complain("a load outside of what it may read");
}

}  // namespace simt

namespace modelnew {
namespace hopper {

// 2 bytes, and 4, 8 or 16.
inline void load_2(const void* address, bool exist, uint32_t& word) {
  word = exist ? *reinterpret_cast<const uint16_t*>(address) : 0;
}
template <int COUNT>
void load_words(const void* address, bool exist, uint32_t (&words)[COUNT]) {
  memset(words, 0, sizeof words);
  if (exist) memcpy(words, address, sizeof words);
}

inline uint32_t smem_address(const void* pointer) {
  return static_cast<uint32_t>(static_cast<const unsigned char*>(pointer) - simt::smem);
}

// The first `size` of BYTES, and zeros for the rest.
template <int BYTES>
void copy_async(uint32_t to, const void* from, int size) {
  simt::check_shared(to, BYTES, BYTES);
  if (size < 0 || size > BYTES) simt::complain("more than a copy");
  if (size > 0 && reinterpret_cast<uint64_t>(from) % BYTES != 0) simt::complain("a copy that is not aligned");
  if (size > 0) simt::check_readable(from, size);
  simt::own_copies[threadIdx.x].order([=] {
    std::memset(simt::smem + to, 0, BYTES);
    if (size > 0) std::memcpy(simt::smem + to, from, size);  // else any address will do
  });
}
inline uint64_t evict_first() { return 0; }
template <int BYTES>
void copy_async(uint32_t to, const void* from, int size, uint64_t) {
  const bool aligned = reinterpret_cast<uint64_t>(from) % BYTES == 0;
  if ((size != BYTES && size != 0) || !aligned) simt::complain("a wild copy");
  copy_async<BYTES>(to, from, size);
}
inline void copies_commit() { ++simt::own_copies[threadIdx.x].groups; }
template <int PENDING>
void copies_wait() {
  simt::own_copies[threadIdx.x].wait(PENDING);
}

}  // namespace hopper
}  // namespace modelnew
