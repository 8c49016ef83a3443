// Pairs of blocks, clusters of two that load once what both multiply. Each block has barriers and slots at the same
// addresses.
#pragma once

#include "cluster.cuh"
#include "im2col_map.cuh"

namespace modelnew {
namespace hopper {

// The blocks of a pair meet: before the first use of the other one's barriers, and before either ends.
__device__ __forceinline__ void pair_sync() { cluster_sync(); }

// Arrives at the mbarrier of block `rank`.
__device__ __forceinline__ void barrier_arrive_at(uint32_t barrier, int rank) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [there];\n}" ::"r"(barrier),
      "r"(rank)
      : "memory");
#endif
}

// load_box and load_columns to both blocks, by the one whose turn it is.
__device__ __forceinline__ void load_box_for_both(bool own_turn, const BoxMap& map, uint32_t to_smem, int i, int j,
                                                  int k, int l, uint32_t barrier) {
  if (own_turn)
    asm volatile(
        "{\n.reg .b16 both;\nmov.b16 both, 3;\n"
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
        "[%1, {%2, %3, %4, %5}], [%6], both;\n}" ::"r"(to_smem),
        "l"(&map), "r"(i), "r"(j), "r"(k), "r"(l), "r"(barrier)
        : "memory");
}

__device__ __forceinline__ void load_columns_for_both(bool own_turn, const BoxMap& map, uint32_t to_smem, int i, int j,
                                                      int k, int l, int move_j, int move_k, uint32_t barrier) {
  if (own_turn)
    asm volatile(
        "{\n.reg .b16 move_j, move_k, both;\ncvt.u16.u32 move_j, %7;\ncvt.u16.u32 move_k, %8;\nmov.b16 both, 3;\n"
        "cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
        "[%1, {%2, %3, %4, %5}], [%6], {move_j, move_k}, both;\n}" ::"r"(to_smem),
        "l"(&map), "r"(i), "r"(j), "r"(k), "r"(l), "r"(barrier), "r"(move_j), "r"(move_k)
        : "memory");
}

}  // namespace hopper
}  // namespace modelnew
