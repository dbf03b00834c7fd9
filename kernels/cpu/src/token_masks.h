// What the FFI handler and the per-instruction-set kernels of token masks share: plain data.
#ifndef SYSTOLE_TOKEN_MASKS_H_
#define SYSTOLE_TOKEN_MASKS_H_

#include <cstdint>

namespace systole {

struct TokenMaskArgs {
  const float* logits;       // [R, V]
  const int32_t* rows;       // [N], row of the logits of each row here; clipped to [0, R)
  const uint32_t* masks;     // [N, ceil(V / 32)], a bit for each token, the lowest first
  const bool* needs_logits;  // [N]
  float* allowed;            // [N, V]; only rows that need it are written
  int32_t* best;             // [N]
  int64_t num_logit_rows;    // R
  int64_t vocab_size;        // V
};

// Masks one row and finds its best token.
using MaskRow = void (*)(const TokenMaskArgs& args, int64_t row);

namespace generic { extern const MaskRow kMaskRow; }
#if defined(__x86_64__)
namespace avx2 { extern const MaskRow kMaskRow; }
namespace avx512 { extern const MaskRow kMaskRow; }
#endif

}  // namespace systole

#endif  // SYSTOLE_TOKEN_MASKS_H_
