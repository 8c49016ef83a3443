// Which kernels a build has. The library has every instance of its kernel templates. A bundle for given problems (see
// bundle() in modelnew.py) compiles the instances that these problems launch: it defines MODELNEW_INSTANCES, a list of
// them. The list is found by a dry run (dry_run.cpp), in which every launcher records its instance.
//
//   template <typename Format, int TILE>
//   cudaError_t run(...) {
//     constexpr Instance kInstance{"name_kernel", {Format::ID, TILE}};
//     record(kInstance);
//     if constexpr (is_built(kInstance)) { ... name_kernel<Format, TILE><<<...>>>(...); }
//     return cudaErrorInvalidConfiguration;
//   }
#pragma once

namespace modelnew {

struct Instance {
  const char* kernel;
  int arguments[6];  // of the template, as numbers; unused ones are 0
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
