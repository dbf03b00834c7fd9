// How a matmul kernel takes its blocks of rows through groups of outputs, and which weights it asks
// memory for meanwhile. For *_isa.cc files, and without external linkage for the reason in simd.h.
#ifndef SYSTOLE_ROW_BLOCKS_H_
#define SYSTOLE_ROW_BLOCKS_H_

#include "simd.h"

namespace {

// Called while the 128 bytes of weights at `w`, the i-th of a group, are used. `ahead` is the half of
// the next group to ask for; null where a block asks for its own weights, `own_ahead` bytes on.
SYSTOLE_INLINE void prefetch_weights(const uint32_t* w, int64_t own_ahead, const char* ahead, int64_t i) {
  if (ahead != nullptr) {
    __builtin_prefetch(ahead + i * 64, 0, 2);
    return;
  }
  SYSTOLE_UNROLL for (int at = 0; at < 128; at += 64) {
    __builtin_prefetch(reinterpret_cast<const char*>(w) + own_ahead + at);
  }
}

// Calls run(rows, row, group, ahead) for every block of rows of every group in [begin, end). With
// several blocks a group stays in the second-level cache for all of them. The first two fetch the
// next group into it: memory would rest while the later blocks compute.
template <typename Run>
SYSTOLE_INLINE void for_each_block(const void* w, int64_t group_bytes, int64_t num_rows, int64_t rows_per_block,
                                   int64_t begin, int64_t end, const Run& run) {
  const bool is_alone = num_rows <= rows_per_block;
  for (int64_t group = begin; group < end; ++group) {
    const char* next = static_cast<const char*>(w) + (group + 1) * group_bytes;
    for (int64_t row = 0; row < num_rows; row += rows_per_block) {
      const int64_t left = num_rows - row;
      const bool is_own = is_alone || row >= 2 * rows_per_block;
      const char* ahead = is_own ? nullptr : row == 0 ? next : next + group_bytes / 2;
      run(left < rows_per_block ? left : rows_per_block, row, group, ahead);
    }
  }
}

}  // namespace

#endif  // SYSTOLE_ROW_BLOCKS_H_
