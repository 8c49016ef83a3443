#pragma once
#define cudaGetLastError() cudaSuccess
#define cudaGetDevice(number) cudaSuccess
#define cudaDeviceGetAttribute(value, attribute, number) cudaSuccess
#define cudaFuncSetAttribute(kernel, attribute, value) cudaSuccess
#define cudaMemsetAsync(place, value, bytes, stream) cudaSuccess
#define cudaLaunchKernelEx(config, kernel, params) (rtc::launch(kernel, 1, 1), cudaSuccess)
#define cudaOccupancyMaxActiveClusters(found, kernel, config) (*(found) = 1, cudaSuccess)
namespace rtc {
struct Launch { template <class... T> void operator()(const T&...) const {} };
template <class Kernel> Launch launch(Kernel*, dim3, dim3, size_t = 0, cudaStream_t = nullptr) { return {}; }
}
namespace modelnew {
namespace hopper {
struct BoxMap;
enum class BoxUse { kStore, kStoreHalves, kStoreQuarters, kLoad, kLoadRows, kLoadHalves, kLoadQuarters };
template <class... T> cudaError_t make_box_map(T&&...) { return cudaSuccess; }
template <class... T>
cudaError_t make_box_map(BoxUse, const void*, int, const uint64_t (&)[4], const uint64_t (&)[3], T&&...) {
  return cudaSuccess;
}
template <class... T> cudaError_t make_columns_map(T&&...) { return cudaSuccess; }
template <class Kernel, class... Params>
cudaError_t launch_early(Kernel*, unsigned, int, size_t, cudaStream_t, const Params&...) { return cudaSuccess; }
template <class Kernel, class... Params>
cudaError_t launch_early_in_clusters(Kernel*, unsigned, unsigned, int, size_t, cudaStream_t, const Params&...) {
  return cudaSuccess;
}
struct ClusterLaunch {
  int config;
  ClusterLaunch(unsigned, int, int, int, cudaStream_t) {}
};
}
}
