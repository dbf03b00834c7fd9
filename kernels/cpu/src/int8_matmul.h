// What the FFI handler and the per-instruction-set kernels of the int8 matmul share: plain data.
#ifndef SYSTOLE_INT8_MATMUL_H_
#define SYSTOLE_INT8_MATMUL_H_

#include <cstdint>

namespace systole {

constexpr int kInt8Group = 32;  // outputs whose weights lie together: [N / 32][ceil(K / 4)][32][4]

struct Int8MatmulArgs {
  const void* x;         // [T, K]; only the rows in use are read
  const uint32_t* w;     // packed: a word is an output's weights of four inputs, each plus 128
  const float* w_scale;  // [N], in packed order
  void* out;             // [T, N], or [T, N / 2] with silu
  uint32_t* packed_x;    // the rows in use, quantised, in blocks (see pack_rows)
  float* x_scale;        // of each row in use
  int32_t* x_start;      // of each row in use: -128 * sum of its integers, which undoes the 128 above
  int64_t num_rows;      // in use, <= T
  int64_t num_inputs;    // K
  int64_t num_outputs;   // N of the weights that exist (the last group may be partial)
  int64_t rotation;      // size of the Hadamard transform over inputs, a power of two that divides K
  bool is_x_bf16;        // else f32
  bool is_out_bf16;      // else f32
  bool is_silu;          // each group is 16 gates and their 16 ups: out = silu(gate) * up
  int64_t num_words() const { return (num_inputs + 3) / 4; }  // of a row
  int64_t num_columns() const { return is_silu ? num_outputs / 2 : num_outputs; }  // of the output
};

struct Int8MatmulKernel {
  int64_t max_rows;        // of a block
  int64_t words_per_word;  // of packed_x per four inputs
  // Rotates, quantises and packs rows [begin, end) of x, which are one block. `scratch`, of
  // num_inputs floats and 64 bytes more, is the calling thread's.
  void (*pack_rows)(const Int8MatmulArgs& args, float* scratch, int64_t begin, int64_t end);
  // Computes groups [begin, end) of the outputs for the rows in use, in blocks of `rows_per_block`.
  void (*multiply)(const Int8MatmulArgs& args, int64_t rows_per_block, int64_t begin, int64_t end);
};

namespace generic { extern const Int8MatmulKernel kInt8Matmul; }
#if defined(__x86_64__)
namespace avx2 { extern const Int8MatmulKernel kInt8Matmul; }
namespace avx512 { extern const Int8MatmulKernel kInt8Matmul; }
namespace avx512_vnni { extern const Int8MatmulKernel kInt8Matmul; }
#endif

}  // namespace systole

#endif  // SYSTOLE_INT8_MATMUL_H_
