// x [T, K], rotated and quantised per row, times packed int8 weights, for one instruction set.
//
//   out[r][n] = x_scale[r] * w_scale[n] * (x_start[r] + sum over k of q[r][k] * u[n][k])
//
// with u = w + 128, because the fastest instruction multiplies unsigned by signed bytes, and
// x_start = -128 * sum of q: the 128 costs a sum over inputs, and no bytes of weights. The sum is an
// exact i32 (K <= 2^16), so it has the same value on every instruction set, for any number of rows
// and threads; the f32 steps around it are lane-wise or, as maxima, do not depend on their order.
//
// The rotation is x viewed as [b, K / b] and multiplied by a Hadamard matrix along the first axis:
// it spreads an outlier over b inputs, so that it takes no bits from the others (Ashkboos et al. 2024,
// QuaRot). The weights were rotated likewise when they were packed, which undoes it.

#include <utility>

#include "int8_matmul.h"
#include "row_blocks.h"
#include "simd.h"

namespace systole::SYSTOLE_ISA {
namespace {

constexpr int kVectors = kInt8Group / kLanes;
#if defined(__AVX512VNNI__)
constexpr int kMaxRows = 12;  // 24 accumulators of 32 registers
constexpr int kWordsPerWord = 1;  // four bytes
#elif defined(__AVX512F__)
constexpr int kMaxRows = 8;
constexpr int kWordsPerWord = 2;  // inputs 0 and 2, then 1 and 3, of 16 bits each
#elif defined(__AVX2__)
constexpr int kMaxRows = 3;  // 12 of 16
constexpr int kWordsPerWord = 2;
#else
constexpr int kMaxRows = 1;
constexpr int kWordsPerWord = 2;
#endif
constexpr int64_t kAhead = 4096;             // bytes of weights asked for in advance
constexpr float kMagic = 12582912.0f;        // 1.5 * 2^23: adding it rounds to an integer
constexpr uint32_t kMagicBits = 0x4B400000;  // of which the low bits are that integer

SYSTOLE_INLINE F32 load_f32(const float* p, int n) { return as_f32(load_words(p, n)); }
SYSTOLE_INLINE int lanes_at(int64_t i, int64_t end) {
  return static_cast<int>(end - i < kLanes ? end - i : kLanes);
}

// Two stages of the butterfly on rows of `run` floats: with four rows at a time every value is
// loaded and stored half as often.
void rotate_by_four(float* x, int64_t run, int64_t end) {
  for (int64_t base = 0; base < end; base += 4 * run) {
    for (int64_t i = 0; i < run; i += kLanes) {
      float* p = x + base + i;
      const int n = lanes_at(i, run);
      const F32 a = load_f32(p, n), b = load_f32(p + run, n);
      const F32 c = load_f32(p + 2 * run, n), d = load_f32(p + 3 * run, n);
      const F32 ab = a + b, a_b = a - b, cd = c + d, c_d = c - d;
      store_f32(p, ab + cd, n);
      store_f32(p + run, a_b + c_d, n);
      store_f32(p + 2 * run, ab - cd, n);
      store_f32(p + 3 * run, a_b - c_d, n);
    }
  }
}

void rotate_by_two(float* x, int64_t run, int64_t end) {
  for (int64_t base = 0; base < end; base += 2 * run) {
    for (int64_t i = 0; i < run; i += kLanes) {
      float* p = x + base + i;
      const int n = lanes_at(i, run);
      const F32 a = load_f32(p, n), b = load_f32(p + run, n);
      store_f32(p, a + b, n);
      store_f32(p + run, a - b, n);
    }
  }
}

// Multiplies by the Hadamard matrix of size `rotation`, without its factor rotation^-1/2.
void rotate(float* x, int64_t rotation, int64_t inputs) {
  int64_t run = inputs / rotation;
  for (; 4 * run <= inputs; run *= 4) rotate_by_four(x, run, inputs);
  if (2 * run <= inputs) rotate_by_two(x, run, inputs);
}

void load_row(const Int8MatmulArgs& args, int64_t row, float* to) {
  const int64_t inputs = args.num_inputs;
  for (int64_t k = 0; k < inputs; k += kLanes) {
    const int n = lanes_at(k, inputs);
    const int64_t at = row * inputs + k;
    const F32 x = args.is_x_bf16
                      ? as_f32(shift_left(load_halves(static_cast<const uint16_t*>(args.x) + at, n), 16))
                      : load_f32(static_cast<const float*>(args.x) + at, n);
    store_f32(to + k, x, n);
  }
}

// The largest magnitude. As the largest bits, so that a NaN counts as larger than infinity.
float find_largest(const float* x, int64_t inputs) {
  U32 largest = broadcast_u32(0);
  for (int64_t k = 0; k < inputs; k += kLanes) {
    const U32 bits = and_u32(load_words(x + k, lanes_at(k, inputs)), broadcast_u32(0x7FFFFFFF));
    largest = max_u32(largest, bits);
  }
  float lanes[kLanes];
  store_u32(reinterpret_cast<uint32_t*>(lanes), largest);
  uint32_t result = 0;
  for (float lane : lanes) {
    uint32_t bits;
    std::memcpy(&bits, &lane, sizeof bits);
    if (bits > result) result = bits;
  }
  float value;
  std::memcpy(&value, &result, sizeof value);
  return value;
}

// Writes the row's bytes over its floats, zeros up to a whole word; returns the sum of the integers.
int32_t quantise_row(float* x, int64_t inputs, float inverse) {
  uint8_t* bytes = reinterpret_cast<uint8_t*>(x);
  U32 sums = broadcast_u32(0);
  for (int64_t k = 0; k < inputs; k += kLanes) {
    const F32 scaled = load_f32(x + k, lanes_at(k, inputs)) * broadcast(inverse);
    const U32 bits = as_u32(scaled + broadcast(kMagic));
    sums = add_u32(sums, add_u32(bits, broadcast_u32(-kMagicBits)));
    store_low_bytes(bytes + k, bits);
  }
  uint32_t lanes[kLanes], sum = 0;
  store_u32(lanes, sums);
  for (uint32_t lane : lanes) sum += lane;
  return static_cast<int32_t>(sum);
}

// Bytes 0 and 2 as signed 16-bit integers.
SYSTOLE_INLINE uint32_t widen_even_bytes(uint32_t word) {
  const auto low = static_cast<uint16_t>(static_cast<int8_t>(word));
  const auto high = static_cast<uint16_t>(static_cast<int8_t>(word >> 16));
  return low | static_cast<uint32_t>(high) << 16;
}

// Packs a block of rows as [words][kWordsPerWord][rows of the block].
void pack_rows(const Int8MatmulArgs& args, float* scratch, int64_t begin, int64_t end) {
  const int64_t words = args.num_words(), rows = end - begin;
  uint32_t* to = args.packed_x + begin * words * kWordsPerWord;
  for (int64_t r = 0; r < rows; ++r) {
    load_row(args, begin + r, scratch);
    rotate(scratch, args.rotation, args.num_inputs);
    const float largest = find_largest(scratch, args.num_inputs);
    // A row of next to nothing gives zeros; one with a NaN or an infinity gives NaN.
    const bool is_finite = largest - largest == 0.0f, is_zero = largest < 1e-30f;
    args.x_scale[begin + r] = is_zero ? 0.0f : is_finite ? largest * (1.0f / 127.0f) : __builtin_nanf("");
    const float inverse = is_finite && !is_zero ? 127.0f / largest : 0.0f;
    args.x_start[begin + r] = -128 * quantise_row(scratch, args.num_inputs, inverse);
    const uint8_t* bytes = reinterpret_cast<const uint8_t*>(scratch);
    for (int64_t i = 0; i < words; ++i) {
      uint32_t word;
      std::memcpy(&word, bytes + 4 * i, sizeof word);
      if constexpr (kWordsPerWord == 1) {
        to[i * rows + r] = word;
      } else {
        to[2 * i * rows + r] = widen_even_bytes(word);
        to[(2 * i + 1) * rows + r] = widen_even_bytes(word >> 8);
      }
    }
  }
}

// Scales the sums of one row and stores them, through SiLU where the group is gates and ups.
template <typename Out>
void store_row(const Int8MatmulArgs& args, int64_t row, int64_t group, const uint32_t* sums) {
  const F32 x_scale = broadcast(args.x_scale[row]);
  F32 y[kVectors];
  SYSTOLE_UNROLL for (int c = 0; c < kVectors; ++c) {
    const F32 w_scale = load(args.w_scale + group * kInt8Group + c * kLanes);
    y[c] = to_f32(load_u32(sums + c * kLanes)) * x_scale * w_scale;
  }
  const int64_t group_width = args.is_silu ? kInt8Group / 2 : kInt8Group;
  const int64_t width = args.is_silu ? args.num_outputs / 2 : args.num_outputs;
  const int64_t column = group * group_width;
  const int64_t left = width - column < group_width ? width - column : group_width;
  Out* out = static_cast<Out*>(args.out) + row * width + column;
  SYSTOLE_UNROLL for (int c = 0; c < kVectors; ++c) {
    if (c * kLanes >= left) break;
    // Past the first half c + kVectors / 2 is out of range, but then the loop has ended.
    const F32 value = args.is_silu ? silu(y[c]) * y[(c + kVectors / 2) % kVectors] : y[c];
    store_out(out + c * kLanes, value, lanes_at(c * kLanes, left));
  }
}

// Adds the products of four inputs of R rows and the group's outputs.
template <int R>
SYSTOLE_INLINE void add_products(U32 acc[R][kVectors], const uint32_t* w, const uint32_t* x) {
#if defined(__AVX512VNNI__)
  U32 weights[kVectors];
  SYSTOLE_UNROLL for (int c = 0; c < kVectors; ++c) weights[c] = load_u32(w + c * kLanes);
  SYSTOLE_UNROLL for (int r = 0; r < R; ++r) {
    const U32 value = broadcast_u32(x[r]);
    SYSTOLE_UNROLL for (int c = 0; c < kVectors; ++c) acc[r][c] = add_dot4(acc[r][c], weights[c], value);
  }
#else
  SYSTOLE_UNROLL for (int c = 0; c < kVectors; ++c) {
    const U32 weights = load_u32(w + c * kLanes);
    const U32 even = and_u32(weights, broadcast_u32(0x00FF00FF));
    const U32 odd = and_u32(shift_right(weights, 8), broadcast_u32(0x00FF00FF));
    SYSTOLE_UNROLL for (int r = 0; r < R; ++r) {
      const U32 sum = add_u32(dot2(even, broadcast_u32(x[r])), dot2(odd, broadcast_u32(x[R + r])));
      acc[r][c] = add_u32(acc[r][c], sum);
    }
  }
#endif
}

template <int R>
void multiply_block(const Int8MatmulArgs& args, int64_t row, int64_t group, const char* ahead) {
  const int64_t words = args.num_words();
  const uint32_t* w = args.w + group * words * kInt8Group;
  const uint32_t* x = args.packed_x + row * words * kWordsPerWord;
  U32 acc[R][kVectors];
  SYSTOLE_UNROLL for (int r = 0; r < R; ++r) {
    const U32 start = broadcast_u32(static_cast<uint32_t>(args.x_start[row + r]));
    SYSTOLE_UNROLL for (int c = 0; c < kVectors; ++c) acc[r][c] = start;
  }
  for (int64_t i = 0; i < words; ++i) {
    prefetch_weights(w, kAhead, ahead, i);
    add_products<R>(acc, w, x);
    w += kInt8Group;
    x += R * kWordsPerWord;
  }
  // Through memory: the code that follows the loop is then a loop over rows, and short.
  uint32_t sums[R][kInt8Group];
  SYSTOLE_UNROLL for (int r = 0; r < R; ++r) {
    SYSTOLE_UNROLL for (int c = 0; c < kVectors; ++c) store_u32(sums[r] + c * kLanes, acc[r][c]);
  }
  for (int r = 0; r < R; ++r) {
    if (args.is_out_bf16) {
      store_row<uint16_t>(args, row + r, group, sums[r]);
    } else {
      store_row<float>(args, row + r, group, sums[r]);
    }
  }
}

using MultiplyBlock = void (*)(const Int8MatmulArgs& args, int64_t row, int64_t group, const char* ahead);

template <int... I>
MultiplyBlock block_of(int64_t rows, std::integer_sequence<int, I...>) {
  static constexpr MultiplyBlock kBlocks[] = {multiply_block<I + 1>...};
  return kBlocks[rows - 1];
}

void multiply(const Int8MatmulArgs& args, int64_t rows_per_block, int64_t begin, int64_t end) {
  const int64_t group_bytes = args.num_words() * kInt8Group * 4;
  for_each_block(args.w, group_bytes, args.num_rows, rows_per_block, begin, end,
                 [&args](int64_t rows, int64_t row, int64_t group, const char* ahead) {
                   block_of(rows, std::make_integer_sequence<int, kMaxRows>())(args, row, group, ahead);
                 });
}

}  // namespace

extern const Int8MatmulKernel kInt8Matmul = {kMaxRows, kWordsPerWord, pack_rows, multiply};

}  // namespace systole::SYSTOLE_ISA
