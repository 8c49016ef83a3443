// ptx.cuh as far as an engine of the same kind takes it: copies that happen as late as they may.

#include <deque>

#include "numerics.cuh"

namespace simt {
struct OrderedCopy {
  uint32_t to;
  const void* from;
  int bytes, group;
};
inline std::deque<OrderedCopy> ordered[1024];
inline int groups[1024];
inline const bool copies_begin_anew = [] {
  before_block = [] {
    for (int thread = 0; thread < 1024; ++thread) ordered[thread].clear(), groups[thread] = 0;
  };
  return true;
}();
}  // namespace simt

namespace modelnew {
namespace hopper {
inline uint32_t smem_address(const void* pointer) {
  return static_cast<uint32_t>(static_cast<const unsigned char*>(pointer) - simt::smem);
}
inline uint64_t evict_first() { return 0; }
template <int BYTES>
void copy_async(uint32_t to, const void* from, int size, uint64_t) {
  const bool aligned = (to | reinterpret_cast<uint64_t>(from)) % BYTES == 0;
  if ((size != BYTES && size != 0) || !aligned || to + BYTES > simt::granted_bytes) simt::complain("a wild copy");
  simt::ordered[threadIdx.x].push_back({to, size == 0 ? nullptr : from, BYTES, simt::groups[threadIdx.x]});
}
inline void copies_commit() { ++simt::groups[threadIdx.x]; }
template <int PENDING>
void copies_wait() {
  auto& mine = simt::ordered[threadIdx.x];
  for (; !mine.empty() && mine.front().group < simt::groups[threadIdx.x] - PENDING; mine.pop_front())
    if (mine.front().from != nullptr)
      std::memcpy(simt::smem + mine.front().to, mine.front().from, mine.front().bytes);
    else
      std::memset(simt::smem + mine.front().to, 0, mine.front().bytes);
}
}  // namespace hopper
}  // namespace modelnew
