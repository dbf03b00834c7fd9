// What the FFI handler and the per-instruction-set kernels of the matmul share: plain data.
#ifndef SYSTOLE_MATMUL_H_
#define SYSTOLE_MATMUL_H_

#include <cstdint>

namespace systole {

constexpr int kGroup = 32;  // outputs whose weights lie together: packed as [N / 32][K / 2][32][2]

struct MatmulArgs {
  const void* x;          // [T, K]; only the rows in use are read
  const uint16_t* w;      // packed bf16, of the layer
  void* out;              // [T, N], or [T, N / 2] with silu
  uint32_t* packed_x;     // the rows in use, in blocks, each as [words][rows of the block]
  int64_t num_rows;       // in use, <= T
  int64_t num_inputs;     // K, even
  int64_t num_outputs;    // N of the packed weights that exist (the last group may be partial)
  bool is_x_bf16;         // else f32, rounded to bf16 first
  bool is_out_bf16;       // else f32
  bool is_silu;           // each group is 16 gates and their 16 ups: out = silu(gate) * up
};

struct MatmulKernel {
  int64_t max_rows;         // of a block
  int64_t inputs_per_word;  // of packed_x: one f32, or two bf16
  // Packs rows [begin, end) of x, which are one block.
  void (*pack_rows)(const MatmulArgs& args, int64_t begin, int64_t end);
  // Computes groups [begin, end) of the outputs for the rows in use, in blocks of `rows_per_block`.
  void (*multiply)(const MatmulArgs& args, int64_t rows_per_block, int64_t begin, int64_t end);
};

namespace generic { extern const MatmulKernel kMatmul; }
#if defined(__x86_64__)
namespace avx2 { extern const MatmulKernel kMatmul; }
namespace avx512 { extern const MatmulKernel kMatmul; }
namespace avx512_bf16 { extern const MatmulKernel kMatmul; }
#endif

}  // namespace systole

#endif  // SYSTOLE_MATMUL_H_
