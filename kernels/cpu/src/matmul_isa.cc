// The rows in use of x [T, K] times packed bf16 weights, for one instruction set (SYSTOLE_ISA, the -m flags select it).
//
// Weights come in groups of 32 outputs, [K / 2][32][2]: one stream, read once per block of rows. A
// 32-bit lane holds an output's weights of two inputs. Where one instruction multiplies such pairs and
// is the faster way (cpu.h), rows are packed likewise; else shifting and masking make them two f32.
//
//   acc[r][32 outputs] += x[r][k] * w[k][32 outputs]     k in order, one accumulator per output
//
// The sum over K is never split, so an output's bits depend neither on the number of rows, nor on
// the block that a row falls into, nor on threads (which share N).

#include <utility>

#include "matmul.h"
#include "row_blocks.h"
#include "simd.h"

namespace systole::SYSTOLE_ISA {
namespace {

constexpr int kVectors = kGroup / kLanes;
#if defined(__AVX512F__)
constexpr int kMaxRows = 12;  // 24 accumulators of 32 registers
#elif defined(__AVX2__)
constexpr int kMaxRows = 3;  // 12 of 16
#else
constexpr int kMaxRows = 1;
#endif
static_assert(kMaxRows <= kLanes, "a block of rows is packed by one transposition");
#if defined(__AVX512BF16__)
constexpr int kInputsPerWord = 2;
#else
constexpr int kInputsPerWord = 1;
#endif
constexpr int64_t kAhead = 2048;  // bytes of its own weights that a block of rows asks for in advance

#if defined(__AVX512BF16__)
// n pairs of inputs from element `at` of x on, as bf16.
SYSTOLE_INLINE U32 load_x(const MatmulArgs& args, int64_t at, int n) {
  if (args.is_x_bf16) return load_words(static_cast<const uint16_t*>(args.x) + at, n);
  const float* x = static_cast<const float*>(args.x) + at;
  const int inputs = 2 * n, second = inputs > kLanes ? inputs - kLanes : 0;
  uint16_t halves[2 * kLanes];
  store_halves(halves, round_to_bf16(as_f32(load_words(x, inputs))), kLanes);
  store_halves(halves + kLanes, round_to_bf16(as_f32(load_words(x + inputs - second, second))), kLanes);
  return load_words(halves, kLanes);
}
#else
// n inputs from element `at` of x on, as f32 of bf16 precision.
SYSTOLE_INLINE U32 load_x(const MatmulArgs& args, int64_t at, int n) {
  const U32 halves = args.is_x_bf16
                         ? load_halves(static_cast<const uint16_t*>(args.x) + at, n)
                         : round_to_bf16(as_f32(load_words(static_cast<const float*>(args.x) + at, n)));
  return shift_left(halves, 16);
}
#endif

void pack_rows(const MatmulArgs& args, int64_t begin, int64_t end) {
  const int64_t words = args.num_inputs / kInputsPerWord;
  const int64_t rows = end - begin;
  uint32_t* to = args.packed_x + begin * words;
  for (int64_t i = 0; i < words; i += kLanes) {
    const int n = static_cast<int>(words - i < kLanes ? words - i : kLanes);
    U32 x[kLanes];
    SYSTOLE_UNROLL for (int r = 0; r < kLanes; ++r) {
      x[r] = broadcast_u32(0);
      if (r < rows) x[r] = load_x(args, (begin + r) * args.num_inputs + i * kInputsPerWord, n);
    }
    if (rows == 1) {
      store_words(to + i, x[0], n);
      continue;
    }
    transpose(x);
    SYSTOLE_UNROLL for (int k = 0; k < kLanes; ++k) {
      if (k < n) store_words(to + (i + k) * rows, x[k], static_cast<int>(rows));
    }
  }
}

template <int R, typename Out>
SYSTOLE_INLINE void store_block(const MatmulArgs& args, int64_t row, int64_t group, F32 acc[R][kVectors]) {
  Out* out = static_cast<Out*>(args.out);
  if (args.is_silu) {
    constexpr int kHalf = kVectors / 2;
    const int64_t width = args.num_outputs / 2;
    const int64_t column = group * (kGroup / 2);
    SYSTOLE_UNROLL for (int r = 0; r < R; ++r) {
      SYSTOLE_UNROLL for (int c = 0; c < kHalf; ++c) {
        const int left = static_cast<int>(width - column) - c * kLanes;
        if (left <= 0) break;
        store_out(out + (row + r) * width + column + c * kLanes, silu(acc[r][c]) * acc[r][c + kHalf], left);
      }
    }
    return;
  }
  const int64_t column = group * kGroup;
  SYSTOLE_UNROLL for (int r = 0; r < R; ++r) {
    SYSTOLE_UNROLL for (int c = 0; c < kVectors; ++c) {
      const int left = static_cast<int>(args.num_outputs - column) - c * kLanes;
      if (left <= 0) break;
      store_out(out + (row + r) * args.num_outputs + column + c * kLanes, acc[r][c], left);
    }
  }
}

// Adds the products of two inputs of R rows and the group's outputs.
template <int R>
SYSTOLE_INLINE void add_products(F32 acc[R][kVectors], const uint32_t* w, const uint32_t* x) {
#if defined(__AVX512BF16__)
  U32 weights[kVectors];
  SYSTOLE_UNROLL for (int c = 0; c < kVectors; ++c) weights[c] = load_u32(w + c * kLanes);
  SYSTOLE_UNROLL for (int r = 0; r < R; ++r) {
    const U32 value = broadcast_u32(x[r]);
    SYSTOLE_UNROLL for (int c = 0; c < kVectors; ++c) acc[r][c] = add_dot2_bf16(acc[r][c], weights[c], value);
  }
#else
  F32 even[kVectors], odd[kVectors];
  SYSTOLE_UNROLL for (int c = 0; c < kVectors; ++c) {
    const U32 both = load_u32(w + c * kLanes);
    even[c] = as_f32(shift_left(both, 16));
    odd[c] = as_f32(and_u32(both, broadcast_u32(0xFFFF0000u)));
  }
  SYSTOLE_UNROLL for (int r = 0; r < R; ++r) {
    const F32 value = as_f32(broadcast_u32(x[r]));
    SYSTOLE_UNROLL for (int c = 0; c < kVectors; ++c) acc[r][c] = fma(value, even[c], acc[r][c]);
  }
  SYSTOLE_UNROLL for (int r = 0; r < R; ++r) {
    const F32 value = as_f32(broadcast_u32(x[R + r]));
    SYSTOLE_UNROLL for (int c = 0; c < kVectors; ++c) acc[r][c] = fma(value, odd[c], acc[r][c]);
  }
#endif
}

template <int R>
void multiply_block(const MatmulArgs& args, int64_t row, int64_t group, const char* ahead) {
  const int64_t pairs = args.num_inputs / 2;
  const uint32_t* w = reinterpret_cast<const uint32_t*>(args.w) + group * pairs * kGroup;
  const uint32_t* x = args.packed_x + row * (args.num_inputs / kInputsPerWord);
  F32 acc[R][kVectors];
  SYSTOLE_UNROLL for (int r = 0; r < R; ++r) {
    SYSTOLE_UNROLL for (int c = 0; c < kVectors; ++c) acc[r][c] = broadcast(0.0f);
  }
  for (int64_t pair = 0; pair < pairs; ++pair) {
    prefetch_weights(w, kAhead, ahead, pair);
    add_products<R>(acc, w, x);
    w += kGroup;
    x += R * 2 / kInputsPerWord;
  }
  if (args.is_out_bf16) {
    store_block<R, uint16_t>(args, row, group, acc);
  } else {
    store_block<R, float>(args, row, group, acc);
  }
}

using MultiplyBlock = void (*)(const MatmulArgs& args, int64_t row, int64_t group, const char* ahead);

template <int... I>
MultiplyBlock block_of(int64_t rows, std::integer_sequence<int, I...>) {
  static constexpr MultiplyBlock kBlocks[] = {multiply_block<I + 1>...};
  return kBlocks[rows - 1];
}

void multiply(const MatmulArgs& args, int64_t rows_per_block, int64_t begin, int64_t end) {
  const int64_t group_bytes = args.num_inputs * kGroup * 2;
  for_each_block(args.w, group_bytes, args.num_rows, rows_per_block, begin, end,
                 [&args](int64_t rows, int64_t row, int64_t group, const char* ahead) {
                   block_of(rows, std::make_integer_sequence<int, kMaxRows>())(args, row, group, ahead);
                 });
}

}  // namespace

extern const MatmulKernel kMatmul = {kMaxRows, kInputsPerWord, pack_rows, multiply};

}  // namespace systole::SYSTOLE_ISA
