// One vector vocabulary for every instruction set.
//
// Each *_isa.cc file is compiled once per instruction set into its own namespace (SYSTOLE_ISA), and
// nothing here has external linkage: the linker must never merge code built with different -m flags.
// All arithmetic is lane-wise and every fused multiply-add is written as one (-ffp-contract=off), so
// a result depends on the order written in the kernel and on nothing the compiler chooses.
#ifndef SYSTOLE_SIMD_H_
#define SYSTOLE_SIMD_H_

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#define SYSTOLE_INLINE inline __attribute__((always_inline))
#define SYSTOLE_UNROLL _Pragma("GCC unroll 32")

namespace {

#if defined(__AVX512F__)

constexpr int kLanes = 16;
using F32 = __m512;
using U32 = __m512i;

SYSTOLE_INLINE F32 broadcast(float x) { return _mm512_set1_ps(x); }
SYSTOLE_INLINE U32 broadcast_u32(uint32_t x) { return _mm512_set1_epi32(static_cast<int>(x)); }
SYSTOLE_INLINE F32 load(const float* p) { return _mm512_loadu_ps(p); }
SYSTOLE_INLINE void store(float* p, F32 x) { _mm512_storeu_ps(p, x); }
SYSTOLE_INLINE U32 load_u32(const uint32_t* p) { return _mm512_loadu_si512(p); }
SYSTOLE_INLINE void store_u32(uint32_t* p, U32 x) { _mm512_storeu_si512(p, x); }
SYSTOLE_INLINE F32 fma(F32 a, F32 b, F32 c) { return _mm512_fmadd_ps(a, b, c); }
SYSTOLE_INLINE F32 max(F32 a, F32 b) { return _mm512_max_ps(a, b); }
SYSTOLE_INLINE float reduce_max(F32 a) { return _mm512_reduce_max_ps(a); }
SYSTOLE_INLINE F32 as_f32(U32 x) { return _mm512_castsi512_ps(x); }
SYSTOLE_INLINE U32 as_u32(F32 x) { return _mm512_castps_si512(x); }
SYSTOLE_INLINE U32 shift_left(U32 x, int n) { return _mm512_slli_epi32(x, n); }
SYSTOLE_INLINE U32 shift_right(U32 x, int n) { return _mm512_srli_epi32(x, n); }
SYSTOLE_INLINE U32 shift_right_signed(U32 x, int n) { return _mm512_srai_epi32(x, n); }
SYSTOLE_INLINE U32 add_u32(U32 a, U32 b) { return _mm512_add_epi32(a, b); }
SYSTOLE_INLINE U32 and_u32(U32 a, U32 b) { return _mm512_and_si512(a, b); }
SYSTOLE_INLINE U32 or_u32(U32 a, U32 b) { return _mm512_or_si512(a, b); }
SYSTOLE_INLINE U32 max_u32(U32 a, U32 b) { return _mm512_max_epu32(a, b); }
SYSTOLE_INLINE F32 to_f32(U32 x) { return _mm512_cvtepi32_ps(x); }  // of signed integers
// Per lane, the sum of the products of two signed 16-bit integers.
SYSTOLE_INLINE U32 dot2(U32 a, U32 b) { return _mm512_madd_epi16(a, b); }
#if defined(__AVX512VNNI__)
// acc plus, per lane, the sum of the products of a's four unsigned and b's four signed bytes. Not by
// intrinsic: GCC 12 then keeps only some of the accumulators of a loop in registers.
SYSTOLE_INLINE U32 add_dot4(U32 acc, U32 a, U32 b) {
  asm("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(a), "v"(b));
  return acc;
}
#endif
#if defined(__AVX512BF16__)
// acc plus, per lane, the products of a's and b's two bf16. By assembly for the same reason.
SYSTOLE_INLINE F32 add_dot2_bf16(F32 acc, U32 a, U32 b) {
  asm("vdpbf16ps %2, %1, %0" : "+v"(acc) : "v"(a), "v"(b));
  return acc;
}
#endif
// The low byte of every lane.
SYSTOLE_INLINE void store_low_bytes(uint8_t* p, U32 x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(x));
}
// Lane i of x where lo <= i < hi, of y elsewhere.
SYSTOLE_INLINE F32 select_range(int lo, int hi, F32 x, F32 y) {
  const U32 lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __mmask16 m = _mm512_cmpge_epi32_mask(lane, _mm512_set1_epi32(lo)) &
                      _mm512_cmplt_epi32_mask(lane, _mm512_set1_epi32(hi));
  return _mm512_mask_blend_ps(m, y, x);
}
// Lane i of x where bit i is set, of y elsewhere.
SYSTOLE_INLINE F32 select_bits(uint32_t bits, F32 x, F32 y) {
  return _mm512_mask_blend_ps(static_cast<__mmask16>(bits), y, x);
}
// Lanes of a where x has its sign bit set, of b elsewhere.
SYSTOLE_INLINE F32 select_negative(F32 x, F32 a, F32 b) {
  return _mm512_mask_blend_ps(_mm512_movepi32_mask(_mm512_castps_si512(x)), b, a);
}
SYSTOLE_INLINE __mmask16 first_lanes(int n) {
  return static_cast<__mmask16>(n >= 16 ? 0xFFFFu : (1u << n) - 1u);
}
// The first n words at p, zeros after them. Reads nothing beyond.
SYSTOLE_INLINE U32 load_words(const void* p, int n) {
  return _mm512_maskz_loadu_epi32(first_lanes(n), p);
}
SYSTOLE_INLINE U32 load_halves(const uint16_t* p) {
  return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
// n bf16 at p, one per 32-bit lane (low half), zeros after them.
SYSTOLE_INLINE U32 load_halves(const uint16_t* p, int n) {
  return _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(first_lanes(n), p));
}
// The first n signed bytes at p, one per 32-bit lane, zeros after them.
SYSTOLE_INLINE U32 load_bytes(const int8_t* p, int n) {
  return _mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(first_lanes(n), p));
}
SYSTOLE_INLINE void store_f32(float* p, F32 x, int n) {
  _mm512_mask_storeu_ps(p, first_lanes(n), x);
}
// The low halves of the first n lanes.
SYSTOLE_INLINE void store_halves(uint16_t* p, U32 x, int n) {
  _mm256_mask_storeu_epi16(p, first_lanes(n), _mm512_cvtepi32_epi16(x));
}

template <int kStep>
SYSTOLE_INLINE void interleave(U32& a, U32& b) {
  U32 lo, hi;
  if constexpr (kStep == 1) {
    lo = _mm512_unpacklo_epi32(a, b);
    hi = _mm512_unpackhi_epi32(a, b);
  } else if constexpr (kStep == 2) {
    lo = _mm512_unpacklo_epi64(a, b);
    hi = _mm512_unpackhi_epi64(a, b);
  } else {
    lo = _mm512_shuffle_i64x2(a, b, 0x88);
    hi = _mm512_shuffle_i64x2(a, b, 0xDD);
  }
  a = lo;
  b = hi;
}
// x[i][j] becomes x[j][i], 16 x 16 words.
SYSTOLE_INLINE void transpose(U32 x[kLanes]) {
  SYSTOLE_UNROLL for (int i = 0; i < 16; i += 2) interleave<1>(x[i], x[i + 1]);
  SYSTOLE_UNROLL for (int i = 0; i < 16; i += 4) {
    interleave<2>(x[i], x[i + 2]);
    interleave<2>(x[i + 1], x[i + 3]);
  }
  // x[4g + r] now holds, per 128-bit part p, column 4p + {0, 2, 1, 3}[r] of rows 4g .. 4g + 3.
  SYSTOLE_UNROLL for (int r = 0; r < 4; ++r) {
    interleave<4>(x[r], x[4 + r]);
    interleave<4>(x[8 + r], x[12 + r]);
    interleave<4>(x[r], x[8 + r]);
    interleave<4>(x[4 + r], x[12 + r]);
  }
  // x[r], x[8 + r], x[4 + r], x[12 + r] hold columns c, 8 + c, 4 + c, 12 + c: put them in order.
  const U32 y[kLanes] = {x[0],  x[2],  x[1],  x[3],  x[4],  x[6],  x[5],  x[7],
                         x[8],  x[10], x[9],  x[11], x[12], x[14], x[13], x[15]};
  SYSTOLE_UNROLL for (int i = 0; i < 16; ++i) x[i] = y[i];
}

#elif defined(__AVX2__)

constexpr int kLanes = 8;
using F32 = __m256;
using U32 = __m256i;

SYSTOLE_INLINE F32 broadcast(float x) { return _mm256_set1_ps(x); }
SYSTOLE_INLINE U32 broadcast_u32(uint32_t x) { return _mm256_set1_epi32(static_cast<int>(x)); }
SYSTOLE_INLINE F32 load(const float* p) { return _mm256_loadu_ps(p); }
SYSTOLE_INLINE void store(float* p, F32 x) { _mm256_storeu_ps(p, x); }
SYSTOLE_INLINE U32 load_u32(const uint32_t* p) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}
SYSTOLE_INLINE void store_u32(uint32_t* p, U32 x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x);
}
SYSTOLE_INLINE F32 fma(F32 a, F32 b, F32 c) { return _mm256_fmadd_ps(a, b, c); }
SYSTOLE_INLINE F32 max(F32 a, F32 b) { return _mm256_max_ps(a, b); }
SYSTOLE_INLINE float reduce_max(F32 a) {
  __m128 m = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  m = _mm_max_ps(m, _mm_movehl_ps(m, m));
  return _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m)));
}
SYSTOLE_INLINE F32 as_f32(U32 x) { return _mm256_castsi256_ps(x); }
SYSTOLE_INLINE U32 as_u32(F32 x) { return _mm256_castps_si256(x); }
SYSTOLE_INLINE U32 shift_left(U32 x, int n) { return _mm256_slli_epi32(x, n); }
SYSTOLE_INLINE U32 shift_right(U32 x, int n) { return _mm256_srli_epi32(x, n); }
SYSTOLE_INLINE U32 shift_right_signed(U32 x, int n) { return _mm256_srai_epi32(x, n); }
SYSTOLE_INLINE U32 add_u32(U32 a, U32 b) { return _mm256_add_epi32(a, b); }
SYSTOLE_INLINE U32 and_u32(U32 a, U32 b) { return _mm256_and_si256(a, b); }
SYSTOLE_INLINE U32 or_u32(U32 a, U32 b) { return _mm256_or_si256(a, b); }
SYSTOLE_INLINE U32 max_u32(U32 a, U32 b) { return _mm256_max_epu32(a, b); }
SYSTOLE_INLINE F32 to_f32(U32 x) { return _mm256_cvtepi32_ps(x); }
SYSTOLE_INLINE U32 dot2(U32 a, U32 b) { return _mm256_madd_epi16(a, b); }
SYSTOLE_INLINE void store_low_bytes(uint8_t* p, U32 x) {
  const U32 first = _mm256_setr_epi8(0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1,  //
                                     0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1);
  const U32 words = _mm256_shuffle_epi8(x, first);
  const int part[2] = {_mm256_extract_epi32(words, 0), _mm256_extract_epi32(words, 4)};
  std::memcpy(p, part, sizeof part);
}
SYSTOLE_INLINE __m256i lanes_between(int lo, int hi) {
  const U32 lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  return _mm256_andnot_si256(_mm256_cmpgt_epi32(_mm256_set1_epi32(lo), lane),
                             _mm256_cmpgt_epi32(_mm256_set1_epi32(hi), lane));
}
SYSTOLE_INLINE F32 select_range(int lo, int hi, F32 x, F32 y) {
  return _mm256_blendv_ps(y, x, _mm256_castsi256_ps(lanes_between(lo, hi)));
}
SYSTOLE_INLINE F32 select_bits(uint32_t bits, F32 x, F32 y) {
  const U32 lane = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  const U32 is_set = _mm256_cmpeq_epi32(and_u32(broadcast_u32(bits), lane), lane);
  return _mm256_blendv_ps(y, x, _mm256_castsi256_ps(is_set));
}
SYSTOLE_INLINE F32 select_negative(F32 x, F32 a, F32 b) { return _mm256_blendv_ps(b, a, x); }
SYSTOLE_INLINE U32 load_words(const void* p, int n) {
  return _mm256_maskload_epi32(static_cast<const int*>(p), lanes_between(0, n));
}
SYSTOLE_INLINE U32 load_halves(const uint16_t* p) {
  return _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
SYSTOLE_INLINE U32 load_halves(const uint16_t* p, int n) {
  uint16_t part[8] = {};
  std::memcpy(part, p, static_cast<size_t>(n < 8 ? n : 8) * 2);
  return load_halves(part);
}
SYSTOLE_INLINE U32 load_bytes(const int8_t* p, int n) {
  int64_t part = 0;
  std::memcpy(&part, p, static_cast<size_t>(n < 8 ? n : 8));
  return _mm256_cvtepi8_epi32(_mm_cvtsi64_si128(part));
}
SYSTOLE_INLINE void store_f32(float* p, F32 x, int n) {
  _mm256_maskstore_ps(p, lanes_between(0, n), x);
}
SYSTOLE_INLINE void store_halves(uint16_t* p, U32 x, int n) {
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(x, x), 0x08);
  alignas(16) uint16_t part[8];
  _mm_store_si128(reinterpret_cast<__m128i*>(part), _mm256_castsi256_si128(packed));
  std::memcpy(p, part, static_cast<size_t>(n < 8 ? n : 8) * 2);
}
SYSTOLE_INLINE void transpose(U32 x[kLanes]) {
  U32 y[8];
  SYSTOLE_UNROLL for (int i = 0; i < 8; i += 2) {
    y[i] = _mm256_unpacklo_epi32(x[i], x[i + 1]);
    y[i + 1] = _mm256_unpackhi_epi32(x[i], x[i + 1]);
  }
  SYSTOLE_UNROLL for (int g = 0; g < 2; ++g) {
    x[4 * g + 0] = _mm256_unpacklo_epi64(y[4 * g], y[4 * g + 2]);
    x[4 * g + 1] = _mm256_unpackhi_epi64(y[4 * g], y[4 * g + 2]);
    x[4 * g + 2] = _mm256_unpacklo_epi64(y[4 * g + 1], y[4 * g + 3]);
    x[4 * g + 3] = _mm256_unpackhi_epi64(y[4 * g + 1], y[4 * g + 3]);
  }
  SYSTOLE_UNROLL for (int r = 0; r < 4; ++r) {
    y[r] = _mm256_permute2x128_si256(x[r], x[4 + r], 0x20);
    y[4 + r] = _mm256_permute2x128_si256(x[r], x[4 + r], 0x31);
  }
  SYSTOLE_UNROLL for (int i = 0; i < 8; ++i) x[i] = y[i];
}

#else  // 128-bit vector extensions: SSE2, NEON and whatever else GCC and Clang lower them to.

constexpr int kLanes = 4;
typedef float F32 __attribute__((vector_size(16)));
typedef uint32_t U32 __attribute__((vector_size(16)));
typedef int32_t I32 __attribute__((vector_size(16)));

SYSTOLE_INLINE F32 broadcast(float x) { return F32{x, x, x, x}; }
SYSTOLE_INLINE U32 broadcast_u32(uint32_t x) { return U32{x, x, x, x}; }
SYSTOLE_INLINE F32 load(const float* p) {
  F32 x;
  std::memcpy(&x, p, sizeof x);
  return x;
}
SYSTOLE_INLINE void store(float* p, F32 x) { std::memcpy(p, &x, sizeof x); }
SYSTOLE_INLINE U32 load_u32(const uint32_t* p) {
  U32 x;
  std::memcpy(&x, p, sizeof x);
  return x;
}
SYSTOLE_INLINE void store_u32(uint32_t* p, U32 x) { std::memcpy(p, &x, sizeof x); }
SYSTOLE_INLINE F32 fma(F32 a, F32 b, F32 c) { return a * b + c; }
SYSTOLE_INLINE F32 max(F32 a, F32 b) { return a > b ? a : b; }  // b where either is NaN
SYSTOLE_INLINE float reduce_max(F32 a) {
  const float x = a[0] > a[1] ? a[0] : a[1];
  const float y = a[2] > a[3] ? a[2] : a[3];
  return x > y ? x : y;
}
SYSTOLE_INLINE F32 as_f32(U32 x) { return (F32)x; }
SYSTOLE_INLINE U32 as_u32(F32 x) { return (U32)x; }
SYSTOLE_INLINE U32 shift_left(U32 x, int n) { return x << n; }
SYSTOLE_INLINE U32 shift_right(U32 x, int n) { return x >> n; }
SYSTOLE_INLINE U32 shift_right_signed(U32 x, int n) { return (U32)((I32)x >> n); }
SYSTOLE_INLINE U32 add_u32(U32 a, U32 b) { return a + b; }
SYSTOLE_INLINE U32 and_u32(U32 a, U32 b) { return a & b; }
SYSTOLE_INLINE U32 or_u32(U32 a, U32 b) { return a | b; }
SYSTOLE_INLINE U32 max_u32(U32 a, U32 b) { return a > b ? a : b; }
SYSTOLE_INLINE F32 to_f32(U32 x) { return __builtin_convertvector((I32)x, F32); }
SYSTOLE_INLINE U32 dot2(U32 a, U32 b) {
  return (U32)(((I32)(a << 16) >> 16) * ((I32)(b << 16) >> 16) + ((I32)a >> 16) * ((I32)b >> 16));
}
SYSTOLE_INLINE void store_low_bytes(uint8_t* p, U32 x) {
  SYSTOLE_UNROLL for (int i = 0; i < 4; ++i) p[i] = static_cast<uint8_t>(x[i]);
}
SYSTOLE_INLINE F32 select_range(int lo, int hi, F32 x, F32 y) {
  SYSTOLE_UNROLL for (int i = 0; i < 4; ++i) {
    if (i >= lo && i < hi) y[i] = x[i];
  }
  return y;
}
SYSTOLE_INLINE F32 select_bits(uint32_t bits, F32 x, F32 y) {
  return (U32{bits, bits, bits, bits} & U32{1, 2, 4, 8}) != 0 ? x : y;
}
SYSTOLE_INLINE F32 select_negative(F32 x, F32 a, F32 b) { return (U32)x >> 31 ? a : b; }
SYSTOLE_INLINE U32 load_words(const void* p, int n) {
  U32 x = {};
  std::memcpy(&x, p, static_cast<size_t>(n < 4 ? n : 4) * 4);
  return x;
}
SYSTOLE_INLINE U32 load_halves(const uint16_t* p) { return U32{p[0], p[1], p[2], p[3]}; }
SYSTOLE_INLINE U32 load_halves(const uint16_t* p, int n) {
  uint16_t part[4] = {};
  std::memcpy(part, p, static_cast<size_t>(n < 4 ? n : 4) * 2);
  return load_halves(part);
}
SYSTOLE_INLINE U32 load_bytes(const int8_t* p, int n) {
  int8_t part[4] = {};
  std::memcpy(part, p, static_cast<size_t>(n < 4 ? n : 4));
  return (U32)I32{part[0], part[1], part[2], part[3]};
}
SYSTOLE_INLINE void store_f32(float* p, F32 x, int n) {
  std::memcpy(p, &x, static_cast<size_t>(n < 4 ? n : 4) * 4);
}
SYSTOLE_INLINE void store_halves(uint16_t* p, U32 x, int n) {
  const uint16_t part[4] = {static_cast<uint16_t>(x[0]), static_cast<uint16_t>(x[1]),
                            static_cast<uint16_t>(x[2]), static_cast<uint16_t>(x[3])};
  std::memcpy(p, part, static_cast<size_t>(n < 4 ? n : 4) * 2);
}
SYSTOLE_INLINE void transpose(U32 x[kLanes]) {
  const U32 a = x[0], b = x[1], c = x[2], d = x[3];
  SYSTOLE_UNROLL for (int i = 0; i < 4; ++i) x[i] = U32{a[i], b[i], c[i], d[i]};
}

#endif

SYSTOLE_INLINE void store_words(uint32_t* p, U32 x, int n) {
  store_f32(reinterpret_cast<float*>(p), as_f32(x), n);
}

// Sum of the lanes as a binary tree over neighbours: one order on every instruction set of a width.
SYSTOLE_INLINE float reduce_add(F32 a) {
  float x[kLanes];
  store(x, a);
  SYSTOLE_UNROLL for (int step = 1; step < kLanes; step *= 2) {
    SYSTOLE_UNROLL for (int i = 0; i < kLanes; i += 2 * step) x[i] += x[i + step];
  }
  return x[0];
}

// f32 to bf16, round to nearest even, in the low half of each lane. A NaN stays a (quiet) NaN.
SYSTOLE_INLINE U32 round_to_bf16(F32 x) {
  const U32 bits = as_u32(x);
  const U32 odd = and_u32(shift_right(bits, 16), broadcast_u32(1));
  const U32 rounded = shift_right(add_u32(add_u32(bits, broadcast_u32(0x7FFF)), odd), 16);
#if defined(__AVX512F__)
  const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  return _mm512_mask_blend_epi32(nan, rounded, _mm512_set1_epi32(0x7FC0));
#elif defined(__AVX2__)
  const F32 nan = _mm256_cmp_ps(x, x, _CMP_UNORD_Q);
  return as_u32(_mm256_blendv_ps(as_f32(rounded), as_f32(broadcast_u32(0x7FC0)), nan));
#else
  return x != x ? broadcast_u32(0x7FC0) : rounded;
#endif
}

// 2^x for x <= 0. Maximum relative error 1.7e-7 (degree-5 polynomial on [-0.5, 0.5] with p(0) = 1);
// below 2^-126 the result is 2^-126, which no sum of softmax weights can see. NaN stays NaN.
SYSTOLE_INLINE F32 exp2_nonpositive(F32 x) {
  const F32 magic = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  x = max(broadcast(-126.0f), x);  // in this order a NaN comes through
  const F32 shifted = x + magic;
  const F32 f = x - (shifted - magic);
  F32 p = broadcast(0.0013264727f);
  p = fma(p, f, broadcast(0.009671513f));
  p = fma(p, f, broadcast(0.055507336f));
  p = fma(p, f, broadcast(0.24022242f));
  p = fma(p, f, broadcast(0.693147f));
  p = fma(p, f, broadcast(1.0f));
  // The low bits of `shifted` are the integer; the bits above leave at the top of the shift.
  return as_f32(add_u32(shift_left(as_u32(shifted), 23), as_u32(p)));
}

SYSTOLE_INLINE F32 silu(F32 x) {
  // With e = exp(-|x|) <= 1: x * (x >= 0 ? 1 : e) / (1 + e).
  const F32 minus_abs = as_f32(or_u32(as_u32(x), broadcast_u32(0x80000000u)));
  const F32 e = exp2_nonpositive(minus_abs * broadcast(1.44269504f));
  return x * select_negative(x, e, broadcast(1.0f)) / (broadcast(1.0f) + e);
}

// The first n lanes as f32, or rounded to bf16 where Out has two bytes.
template <typename Out>
SYSTOLE_INLINE void store_out(Out* p, F32 x, int n) {
  if constexpr (sizeof(Out) == 2) {
    store_halves(p, round_to_bf16(x), n);
  } else {
    store_f32(p, x, n);
  }
}

}  // namespace

#endif  // SYSTOLE_SIMD_H_
