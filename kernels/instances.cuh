// Selects the kernel instances that a build compiles. The library compiles all of them. A bundle for given problems
// (bundle() in modelnew.py) defines MODELNEW_INSTANCES, the list of the instances that these problems launch. A dry run
// (dry_run.cpp) finds the list: launchers of large kernel templates record their instance.
//
//   template <typename Format, int TILE>
//   cudaError_t run(...) {
//     constexpr Instance kInstance{"name_kernel", {Format::ID, TILE}};
//     record(kInstance);
//     if constexpr (is_built(kInstance)) { ... name_kernel<Format, TILE><<<...>>>(...); }
//     return cudaErrorInvalidConfiguration;
//   }
//
// The launchers of direct.cu, of patches.cu and of helper kernels (copies, packing, sums of partial results) record
// nothing: a bundle that contains these files compiles all instances of these kernels. listed.cu records its kernel
// without is_built(), so that bundle() finds the file.
#pragma once

namespace modelnew {

struct Instance {
  const char* kernel;
  int arguments[6];  // template arguments as numbers; unused ones are 0
};

constexpr bool operator==(const Instance& a, const Instance& b) {
  const char *left = a.kernel, *right = b.kernel;
  for (; *left == *right && *left != 0; ++left) ++right;
  bool equal = *left == *right;
  for (int i = 0; i < 6; ++i) equal = equal && a.arguments[i] == b.arguments[i];
  return equal;
}

#if defined(MODELNEW_INSTANCES)
constexpr Instance kInstances[] = {MODELNEW_INSTANCES};

constexpr bool is_built(const Instance& instance) {
  for (const Instance& built : kInstances) {
    if (built == instance) return true;
  }
  return false;
}
#else
constexpr bool is_built(const Instance&) { return true; }
#endif

#if defined(MODELNEW_DRY_RUN)
void record(const Instance&);
#else
inline void record(const Instance&) {}
#endif

}  // namespace modelnew
