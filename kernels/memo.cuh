// Remembers the results of a function of a problem. A network repeats few problems, and planning one takes as long as
// launching it. Host only.
#pragma once

#include <array>
#include <unordered_map>

#include "problem.cuh"

namespace modelnew {

// Everything that a plan may depend on; no two problems share a key. `gpu` is find_gpu()'s number where it matters.
using ProblemKey = std::array<int64_t, 35>;

inline ProblemKey key_of(const Problem& p, Operator op, uint64_t in, uint64_t w, uint64_t out, int gpu = 0,
                         int sms = 0) {
  ProblemKey key = {p.N, p.C,      p.H,        p.W,        p.K,     p.R,     p.S,          p.P,
                    p.Q, p.groups, p.stride_h, p.stride_w, p.pad_h, p.pad_w, p.dilation_h, p.dilation_w};
  for (int i = 0; i < 4; ++i) {
    key[16 + i] = p.x_stride[i];
    key[20 + i] = p.w_stride[i];
    key[24 + i] = p.y_stride[i];
  }
  key[28] = static_cast<int64_t>(p.dtype) * 2 + p.tf32_allowed;
  key[29] = static_cast<int64_t>(op);
  // Plans depend on the alignment of addresses only, up to what bulk copies need.
  key[30] = static_cast<int64_t>(in % 256);
  key[31] = static_cast<int64_t>(w % 256);
  key[32] = static_cast<int64_t>(out % 256);
  key[33] = gpu;
  key[34] = sms;
  return key;
}

// Each thread has its own, without locks. A result stays at its address until kMostProblems are remembered; then all
// are forgotten at once. A table with evictions was slower (docs/lab/hopper.md).
template <typename Value>
class Memo {
 public:
  template <typename Compute>
  const Value& get(const ProblemKey& key, const Compute& compute) {
    const auto found = values_.find(key);
    if (found != values_.end()) return found->second;
    if (values_.size() >= kMostProblems) values_.clear();
    return values_.emplace(key, compute()).first->second;
  }

 private:
  static constexpr size_t kMostProblems = 1024;
  struct Hash {  // FNV-1a over words
    size_t operator()(const ProblemKey& key) const {
      uint64_t hash = 14695981039346656037u;
      for (int64_t word : key) hash = (hash ^ static_cast<uint64_t>(word)) * 1099511628211u;
      return static_cast<size_t>(hash ^ hash >> 32);
    }
  };
  std::unordered_map<ProblemKey, Value, Hash> values_;
};

}  // namespace modelnew
