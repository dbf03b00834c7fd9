// Ragged paged attention for one instruction set (SYSTOLE_ISA names it, the -m flags select it).
//
// An item is (sequence, block of query rows, kv head). Its keys come in tiles of 32 at absolute
// positions. A tile is packed once into L1 (K transposed, V as it is, both widened) and used by all
// rows x (H / K) query heads of the item, in register blocks of kRows query vectors:
//
//   scores  s[r][32 keys] += q[r][d] * kt[d][32 keys]        d in order, one accumulator
//   softmax online, base 2, f32; a row rescales only where its maximum grows
//   output  acc[r][d] += p[r][key] * v[key][d]               keys in order, one accumulator
//
// Every query vector goes through the same operations in the same order whatever shares its block,
// so its bits depend neither on the batch, nor on chunking, nor on the number of rows. A tile or a
// key that a row may not see leaves it exactly as it was (p = 0), and the final `+ 0.0f` removes the
// one trace this could leave, the sign of a zero.
//
// With bf16 queries and pages on AVX512_BF16, products are pairs of bf16 summed in f32 by VDPBF16PS
// and the softmax weights are rounded to bf16 (their sum is taken after rounding).

#include "attention.h"
#include "simd.h"

#include <cstdlib>
#include <type_traits>

namespace systole::SYSTOLE_ISA {
namespace {

constexpr int kVectors = kTile / kLanes;  // vectors of scores per query vector
#if defined(__AVX512F__)
constexpr int kRows = 6;     // query vectors per register block
constexpr int kColumns = 4;  // vectors of head_dim per register block
#elif defined(__AVX2__)
constexpr int kRows = 2;
constexpr int kColumns = 4;
#else
constexpr int kRows = 1;
constexpr int kColumns = 4;
#endif
constexpr float kNoMax = -1e30f;  // below every score, and finite: kNoMax - kNoMax is 0

// How a product is formed. A word is what one lane of one multiply step reads from each side.
struct F32Products {
  using Word = float;
  static constexpr int kWidth = 1;  // elements per word
  static SYSTOLE_INLINE F32 step(F32 acc, const Word* a, const Word* b) {
    return fma(broadcast(*a), load(b), acc);
  }
};
#if defined(__AVX512BF16__)
struct Bf16Products {
  using Word = uint32_t;
  static constexpr int kWidth = 2;
  static SYSTOLE_INLINE F32 step(F32 acc, const Word* a, const Word* b) {
    return _mm512_dpbf16_ps(acc, (__m512bh)broadcast_u32(*a), (__m512bh)load_u32(b));
  }
};
#endif

int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// Memory of one thread, grown as needed and kept for the next call.
struct Scratch {
  uint32_t* data = nullptr;
  size_t size = 0;
  ~Scratch() { std::free(data); }
  uint32_t* reserve(size_t words) {
    if (words > size) {
      std::free(data);
      data = static_cast<uint32_t*>(std::aligned_alloc(64, words * 4));
      if (data == nullptr) std::abort();
      size = words;
    }
    return data;
  }
};
thread_local Scratch scratch;

template <bool kBf16>
using Element = std::conditional_t<kBf16, uint16_t, float>;

SYSTOLE_INLINE F32 load_f32(const uint16_t* p, int n) {
  return as_f32(shift_left(load_halves(p, n), 16));
}
SYSTOLE_INLINE F32 load_f32(const float* p, int n) { return as_f32(load_words(p, n)); }
SYSTOLE_INLINE void store_rounded(uint16_t* p, F32 x, int n) { store_halves(p, round_to_bf16(x), n); }
SYSTOLE_INLINE void store_rounded(float* p, F32 x, int n) { store_f32(p, x, n); }

// Where a sequence's key of a position lives: row of K at address(position), of V one row further.
template <typename T>
struct PageView {
  const T* pages;
  const int32_t* indices;
  int64_t page_size, head_dim, page_stride, head_offset;
  int shift;
  PageView(const AttentionArgs& args, int32_t seq, int32_t head)
      : pages(static_cast<const T*>(args.pages)),
        indices(args.page_indices + seq * args.pages_per_seq),
        page_size(args.page_size),
        head_dim(args.head_dim),
        page_stride(2 * args.kv_heads * args.page_size * args.head_dim),
        head_offset(2 * head * args.page_size * args.head_dim),
        shift(__builtin_ctzll(static_cast<unsigned long long>(args.page_size))) {}
  SYSTOLE_INLINE const T* key(int64_t position) const {
    return pages + indices[position >> shift] * page_stride + head_offset +
           (position & (page_size - 1)) * head_dim;
  }
  SYSTOLE_INLINE int64_t value_offset() const { return page_size * head_dim; }
};

template <typename From, typename To>
void convert_row(const From* from, To* to, int64_t n) {
  if constexpr (std::is_same_v<From, To>) {
    std::memcpy(to, from, static_cast<size_t>(n) * sizeof(From));
  } else {
    for (int64_t d = 0; d < n; d += kLanes) {
      const int left = static_cast<int>(n - d);
      store_rounded(to + d, load_f32(from + d, left), left);
    }
  }
}

template <bool kQBf16, bool kKvBf16>
void write_rows_typed(const AttentionArgs& args, int64_t begin, int64_t end) {
  using Q = Element<kQBf16>;
  using KV = Element<kKvBf16>;
  const int64_t dim = args.head_dim;
  int64_t seq = 0;
  for (int64_t row = begin; row < end; ++row) {
    while (row >= args.cu_q_lens[seq + 1]) ++seq;
    const int64_t position = args.kv_lens[seq] - (args.cu_q_lens[seq + 1] - row);
    for (int32_t head = 0; head < args.kv_heads; ++head) {
      const PageView<KV> view(args, static_cast<int32_t>(seq), head);
      KV* key = const_cast<KV*>(view.key(position));
      const int64_t source = (row * args.kv_heads + head) * dim;
      convert_row(static_cast<const Q*>(args.k) + source, key, dim);
      convert_row(static_cast<const Q*>(args.v) + source, key + view.value_offset(), dim);
    }
  }
}

void write_rows(const AttentionArgs& args, int64_t begin, int64_t end) {
  const auto write = args.is_q_bf16
                         ? (args.is_kv_bf16 ? write_rows_typed<true, true> : write_rows_typed<true, false>)
                         : (args.is_kv_bf16 ? write_rows_typed<false, true> : write_rows_typed<false, false>);
  write(args, begin, end);
}

// Transposes up to 32 key rows into kt[word][32]. rows[i] == nullptr packs zeros.
template <typename Products, typename KV>
void pack_keys(const KV* const rows[kTile], int64_t dim, typename Products::Word* kt) {
  constexpr int kWordElements = 4 / sizeof(KV);  // of the source: a 32-bit word is 1 f32 or 2 bf16
  const int words = static_cast<int>(dim) / kWordElements;
  for (int group = 0; group < kTile; group += kLanes) {
    for (int w = 0; w < words; w += kLanes) {
      U32 x[kLanes];
      SYSTOLE_UNROLL for (int i = 0; i < kLanes; ++i) {
        const KV* row = rows[group + i];
        x[i] = load_words(row + w * kWordElements, row == nullptr ? 0 : words - w);
      }
      transpose(x);
      const int n = words - w < kLanes ? words - w : kLanes;
      for (int i = 0; i < n; ++i) {
        typename Products::Word* to = kt + (w + i) * kWordElements / Products::kWidth * kTile + group;
        if constexpr (Products::kWidth == 2) {
          store_u32(to, x[i]);
        } else if constexpr (kWordElements == 2) {
          store(to, as_f32(shift_left(x[i], 16)));
          store(to + kTile, as_f32(and_u32(x[i], broadcast_u32(0xFFFF0000u))));
        } else {
          store(to, as_f32(x[i]));
        }
      }
    }
  }
}

// v[key / width][padded dim], a word holding `width` consecutive keys. rows[i] == nullptr is zeros.
template <typename Products, typename KV>
void pack_values(const KV* const rows[kTile], int keys, int64_t value_offset, int64_t dim,
                 int64_t padded_dim, typename Products::Word* out) {
  for (int key = 0; key < keys; key += Products::kWidth) {
    typename Products::Word* to = out + key / Products::kWidth * padded_dim;
    const KV* row = rows[key];
    for (int64_t d = 0; d < padded_dim; d += kLanes) {
      const int left = static_cast<int>(dim - d);
      if constexpr (Products::kWidth == 1) {
        store(to + d, load_f32(row + value_offset + d, row == nullptr ? 0 : left));
      } else {
        const KV* next = rows[key + 1];
        const U32 low = load_halves(row + value_offset + d, row == nullptr ? 0 : left);
        const U32 high = load_halves(next + value_offset + d, next == nullptr ? 0 : left);
        store_u32(to + d, or_u32(low, shift_left(high, 16)));
      }
    }
  }
}

// s[r] += q[r] . kt over all words.
template <typename Products, int R>
SYSTOLE_INLINE void score(const typename Products::Word* kt, const typename Products::Word* q,
                          int64_t words, F32 s[kRows][kVectors]) {
  SYSTOLE_UNROLL for (int r = 0; r < R; ++r) {
    SYSTOLE_UNROLL for (int n = 0; n < kVectors; ++n) s[r][n] = broadcast(0.0f);
  }
  for (int64_t w = 0; w < words; ++w) {
    SYSTOLE_UNROLL for (int r = 0; r < R; ++r) {
      SYSTOLE_UNROLL for (int n = 0; n < kVectors; ++n) {
        s[r][n] = Products::step(s[r][n], q + r * words + w, kt + w * kTile + n * kLanes);
      }
    }
  }
}

// acc[r] += p[r] . v over the first `steps` words of keys, C vectors of columns at a time.
template <typename Products, int R, int C>
SYSTOLE_INLINE void accumulate(const typename Products::Word* v, const typename Products::Word* p,
                               int steps, int64_t padded_dim, float* acc) {
  F32 a[R][C];
  SYSTOLE_UNROLL for (int r = 0; r < R; ++r) {
    SYSTOLE_UNROLL for (int c = 0; c < C; ++c) a[r][c] = load(acc + r * padded_dim + c * kLanes);
  }
  for (int j = 0; j < steps; ++j) {
    SYSTOLE_UNROLL for (int c = 0; c < C; ++c) {
      SYSTOLE_UNROLL for (int r = 0; r < R; ++r) {
        a[r][c] = Products::step(a[r][c], p + r * kTile / Products::kWidth + j,
                                 v + j * padded_dim + c * kLanes);
      }
    }
  }
  SYSTOLE_UNROLL for (int r = 0; r < R; ++r) {
    SYSTOLE_UNROLL for (int c = 0; c < C; ++c) store(acc + r * padded_dim + c * kLanes, a[r][c]);
  }
}

// One query vector's softmax over a tile: weights to p, running maximum, sum and accumulator updated.
template <typename Products>
SYSTOLE_INLINE void soften(F32 s[kVectors], float scale, int lo, int hi, int64_t padded_dim, float* m,
                           float* sum, float* acc, typename Products::Word* p) {
  const bool is_whole = lo <= 0 && hi >= kTile;
  F32 top = broadcast(kNoMax);
  SYSTOLE_UNROLL for (int n = 0; n < kVectors; ++n) {
    s[n] = s[n] * broadcast(scale);
    if (!is_whole) s[n] = select_range(lo - n * kLanes, hi - n * kLanes, s[n], broadcast(kNoMax));
    top = max(top, s[n]);
  }
  F32 total = load(sum);
  const float tile_max = reduce_max(top);
  if (!(tile_max <= *m)) {  // also taken by a NaN, which then shows
    const F32 alpha = exp2_nonpositive(broadcast(*m) - broadcast(tile_max));
    total = total * alpha;
    for (int64_t d = 0; d < padded_dim; d += kLanes) store(acc + d, load(acc + d) * alpha);
    *m = tile_max;
  }
  F32 weights[kVectors];
  SYSTOLE_UNROLL for (int n = 0; n < kVectors; ++n) {
    F32 x = exp2_nonpositive(s[n] - broadcast(*m));
    if (!is_whole) x = select_range(lo - n * kLanes, hi - n * kLanes, x, broadcast(0.0f));
    weights[n] = x;
  }
  if constexpr (Products::kWidth == 1) {
    SYSTOLE_UNROLL for (int n = 0; n < kVectors; ++n) {
      total = total + weights[n];
      store(p + n * kLanes, weights[n]);
    }
#if defined(__AVX512BF16__)
  } else {
    const __m512bh pairs = _mm512_cvtne2ps_pbh(weights[1], weights[0]);
    store_u32(p, (U32)pairs);
    total = total + as_f32(shift_left((U32)pairs, 16));
    total = total + as_f32(and_u32((U32)pairs, broadcast_u32(0xFFFF0000u)));
#endif
  }
  store(sum, total);
}

// The query vectors of an item and their running softmax.
template <typename Word>
struct Block {
  Word* q;      // [n, words]
  float* acc;   // [n, padded_dim]
  float* sum;   // [n, kLanes]
  float* m;     // [n]
  int64_t words, padded_dim;
  int64_t group;           // query vectors per row
  int64_t first_position;  // of the first row
  int64_t window;
  float scale;
};

template <typename Products, int R>
void process(const Block<typename Products::Word>& block, int64_t i, int64_t base, int keys,
             const typename Products::Word* kt, const typename Products::Word* v) {
  using Word = typename Products::Word;
  F32 s[kRows][kVectors];
  alignas(64) Word p[R * kTile / Products::kWidth];
  score<Products, R>(kt, block.q + i * block.words, block.words, s);
  SYSTOLE_UNROLL for (int r = 0; r < R; ++r) {
    const int64_t position = block.first_position + (i + r) / block.group;
    const int64_t begin = position - block.window + 1;
    const int lo = static_cast<int>(begin > base ? begin - base : 0);
    const int hi = static_cast<int>(position + 1 - base);
    soften<Products>(s[r], block.scale, lo, hi, block.padded_dim, block.m + i + r,
                     block.sum + (i + r) * kLanes, block.acc + (i + r) * block.padded_dim,
                     p + r * kTile / Products::kWidth);
  }
  const int steps = (keys + Products::kWidth - 1) / Products::kWidth;
  float* acc = block.acc + i * block.padded_dim;
  int64_t d = 0;
  for (; d + kColumns * kLanes <= block.padded_dim; d += kColumns * kLanes) {
    accumulate<Products, R, kColumns>(v + d, p, steps, block.padded_dim, acc + d);
  }
  for (; d < block.padded_dim; d += kLanes) {
    accumulate<Products, R, 1>(v + d, p, steps, block.padded_dim, acc + d);
  }
}

template <typename Products>
void process_all(const Block<typename Products::Word>& block, int64_t n, int64_t base, int keys,
                 const typename Products::Word* kt, const typename Products::Word* v) {
  int64_t i = 0;
  for (; i + kRows <= n; i += kRows) process<Products, kRows>(block, i, base, keys, kt, v);
  switch (n - i) {
#if defined(__AVX512F__)
    case 5: return process<Products, 5>(block, i, base, keys, kt, v);
    case 4: return process<Products, 4>(block, i, base, keys, kt, v);
    case 3: return process<Products, 3>(block, i, base, keys, kt, v);
    case 2: return process<Products, 2>(block, i, base, keys, kt, v);
#endif
    case 1: return process<Products, 1>(block, i, base, keys, kt, v);
    default: return;
  }
}

// Asks for the lines of a tile's keys and values before they are needed.
template <typename KV>
SYSTOLE_INLINE void prefetch_tile(const PageView<KV>& view, int64_t begin, int64_t end) {
  const int64_t run = view.page_size < kTile ? view.page_size : kTile;
  for (int64_t position = begin; position < end; position += run) {
    const char* key = reinterpret_cast<const char*>(view.key(position));
    const char* value = key + view.value_offset() * static_cast<int64_t>(sizeof(KV));
    const int64_t rows = end - position < run ? end - position : run;
    const int64_t bytes = rows * view.head_dim * static_cast<int64_t>(sizeof(KV));
    for (int64_t at = 0; at < bytes; at += 64) {
      __builtin_prefetch(key + at);
      __builtin_prefetch(value + at);
    }
  }
}

template <typename Products, bool kQBf16, bool kKvBf16>
void attend_typed(const AttentionArgs& args, const AttentionItem& item) {
  using Word = typename Products::Word;
  using Q = Element<kQBf16>;
  using KV = Element<kKvBf16>;
  const int64_t dim = args.head_dim;
  const int64_t group = args.heads / args.kv_heads;
  const int64_t n = (item.end - item.begin) * group;
  Block<Word> block;
  block.words = dim / Products::kWidth;
  block.padded_dim = round_up(dim, kLanes);
  block.group = group;
  block.window = args.window;
  block.scale = args.scale;
  const int64_t q_end = args.cu_q_lens[item.seq + 1];
  block.first_position = args.kv_lens[item.seq] - (q_end - item.begin);
  const int64_t limit = args.kv_lens[item.seq] - (q_end - item.end);  // keys of the last row

  // Regions of the thread's scratch, in words, each a multiple of a cache line.
  const auto line = [](int64_t count) { return round_up(count, 16); };
  const int64_t kt_size = line(block.words * kTile);
  const int64_t v_size = line(kTile * block.padded_dim);
  const int64_t q_size = line(n * block.words);
  const int64_t acc_size = line(n * block.padded_dim);
  const int64_t sum_size = line(n * kLanes);
  const int64_t total = kt_size + v_size + q_size + acc_size + sum_size + line(n);
  uint32_t* memory = scratch.reserve(static_cast<size_t>(total));
  Word* kt = reinterpret_cast<Word*>(memory);
  Word* v = kt + kt_size;
  block.q = v + v_size;
  block.acc = reinterpret_cast<float*>(block.q + q_size);
  block.sum = block.acc + acc_size;
  block.m = block.sum + sum_size;

  const Q* queries = static_cast<const Q*>(args.q) + (item.begin * args.kv_heads + item.head) * group * dim;
  const int64_t row_stride = args.heads * dim;
  for (int64_t i = 0; i < n; ++i) {
    const Q* from = queries + i / group * row_stride + i % group * dim;
    if constexpr (Products::kWidth == 2) {
      std::memcpy(block.q + i * block.words, from, static_cast<size_t>(dim) * sizeof(Q));
    } else {
      convert_row(from, block.q + i * block.words, dim);
    }
    for (int64_t d = 0; d < block.padded_dim; d += kLanes) {
      store(block.acc + i * block.padded_dim + d, broadcast(0.0f));
    }
    store(block.sum + i * kLanes, broadcast(0.0f));
    block.m[i] = kNoMax;
  }

  const PageView<KV> view(args, item.seq, item.head);
  const int64_t first = block.first_position - args.window + 1;  // oldest key that any row sees
  const int64_t begin = first > 0 ? first : 0;
  for (int64_t base = begin / kTile * kTile; base < limit; base += kTile) {
    const int64_t next = base + kTile;
    if (next < limit) prefetch_tile(view, next, next + kTile < limit ? next + kTile : limit);
    const KV* rows[kTile];
    for (int i = 0; i < kTile; ++i) {
      const int64_t position = base + i;
      rows[i] = position >= begin && position < limit ? view.key(position) : nullptr;
    }
    const int keys = static_cast<int>(limit - base < kTile ? limit - base : kTile);
    pack_keys<Products>(rows, dim, kt);
    pack_values<Products>(rows, keys, view.value_offset(), dim, block.padded_dim, v);
    process_all<Products>(block, n, base, keys, kt, v);
  }

  Q* outs = static_cast<Q*>(args.out) + (item.begin * args.kv_heads + item.head) * group * dim;
  for (int64_t i = 0; i < n; ++i) {
    Q* to = outs + i / group * row_stride + i % group * dim;
    const F32 inverse = broadcast(1.0f / reduce_add(load(block.sum + i * kLanes)));
    for (int64_t d = 0; d < dim; d += kLanes) {
      const F32 x = load(block.acc + i * block.padded_dim + d) * inverse + broadcast(0.0f);
      store_rounded(to + d, x, static_cast<int>(dim - d));
    }
  }
}

void attend(const AttentionArgs& args, const AttentionItem& item) {
  if (args.is_q_bf16 && args.is_kv_bf16) {
#if defined(__AVX512BF16__)
    attend_typed<Bf16Products, true, true>(args, item);
#else
    attend_typed<F32Products, true, true>(args, item);
#endif
  } else if (args.is_q_bf16) {
    attend_typed<F32Products, true, false>(args, item);
  } else if (args.is_kv_bf16) {
    attend_typed<F32Products, false, true>(args, item);
  } else {
    attend_typed<F32Products, false, false>(args, item);
  }
}

}  // namespace

#define SYSTOLE_STRING_(x) #x
#define SYSTOLE_STRING(x) SYSTOLE_STRING_(x)
extern const AttentionKernel kAttention = {SYSTOLE_STRING(SYSTOLE_ISA), write_rows, attend};

}  // namespace systole::SYSTOLE_ISA
