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
// All products are f32 multiply-adds, for bf16 too: VDPBF16PS starts every second cycle on Intel's
// cores (90 GFLOP/s measured against 185 for VFMADD), and the weights keep their f32 precision.

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

int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// Memory of one thread, grown as needed and kept for the next call.
struct Scratch {
  float* data = nullptr;
  int64_t size = 0;
  ~Scratch() { std::free(data); }
  float* reserve(int64_t count) {
    if (count > size) {
      std::free(data);
      data = static_cast<float*>(std::aligned_alloc(64, static_cast<size_t>(count) * sizeof(float)));
      if (data == nullptr) std::abort();
      size = count;
    }
    return data;
  }
};
thread_local Scratch scratch;

template <bool kBf16>
using Element = std::conditional_t<kBf16, uint16_t, float>;

SYSTOLE_INLINE F32 load_f32(const uint16_t* p, int n) {
  return as_f32(shift_left(n >= kLanes ? load_halves(p) : load_halves(p, n), 16));
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

// Transposes the rows of 32 keys, widened, into kt[d][32].
template <typename KV>
void pack_keys(const KV* const rows[kTile], int64_t dim, float* kt) {
  constexpr int kElements = 4 / sizeof(KV);  // of a 32-bit word: 1 f32 or 2 bf16
  const int words = static_cast<int>(dim) / kElements;
  for (int group = 0; group < kTile; group += kLanes) {
    for (int w = 0; w < words; w += kLanes) {
      const int n = words - w < kLanes ? words - w : kLanes;
      U32 x[kLanes];
      if (n == kLanes) {
        SYSTOLE_UNROLL for (int i = 0; i < kLanes; ++i) {
          x[i] = load_u32(reinterpret_cast<const uint32_t*>(rows[group + i] + w * kElements));
        }
      } else {
        SYSTOLE_UNROLL for (int i = 0; i < kLanes; ++i) {
          x[i] = load_words(rows[group + i] + w * kElements, n);
        }
      }
      transpose(x);
      float* to = kt + w * kElements * kTile + group;
      SYSTOLE_UNROLL for (int i = 0; i < kLanes; ++i) {
        if (i == n) break;
        if constexpr (kElements == 2) {
          store(to + 2 * i * kTile, as_f32(shift_left(x[i], 16)));
          store(to + (2 * i + 1) * kTile, as_f32(and_u32(x[i], broadcast_u32(0xFFFF0000u))));
        } else {
          store(to + i * kTile, as_f32(x[i]));
        }
      }
    }
  }
}

// Widens the rows of the first `keys` values into v[key][padded_dim].
template <typename KV>
void pack_values(const KV* const rows[kTile], int keys, int64_t dim, int64_t padded_dim, float* v) {
  for (int key = 0; key < keys; ++key) {
    for (int64_t d = 0; d < dim; d += kLanes) {
      store(v + key * padded_dim + d, load_f32(rows[key] + d, static_cast<int>(dim - d)));
    }
  }
}

// s[r] = q[r] . kt over head_dim.
template <int R>
SYSTOLE_INLINE void score(const float* kt, const float* q, int64_t dim, F32 s[kRows][kVectors]) {
  SYSTOLE_UNROLL for (int r = 0; r < R; ++r) {
    SYSTOLE_UNROLL for (int n = 0; n < kVectors; ++n) s[r][n] = broadcast(0.0f);
  }
  for (int64_t d = 0; d < dim; ++d) {
    F32 key[kVectors];
    SYSTOLE_UNROLL for (int n = 0; n < kVectors; ++n) key[n] = load(kt + d * kTile + n * kLanes);
    SYSTOLE_UNROLL for (int r = 0; r < R; ++r) {
      const F32 x = broadcast(q[r * dim + d]);
      SYSTOLE_UNROLL for (int n = 0; n < kVectors; ++n) s[r][n] = fma(x, key[n], s[r][n]);
    }
  }
}

// acc[r] += p[r] . v over the first `keys` keys, C vectors of columns at a time.
template <int R, int C>
SYSTOLE_INLINE void accumulate(const float* v, const float* p, int keys, int64_t padded_dim, float* acc) {
  F32 a[R][C];
  SYSTOLE_UNROLL for (int r = 0; r < R; ++r) {
    SYSTOLE_UNROLL for (int c = 0; c < C; ++c) a[r][c] = load(acc + r * padded_dim + c * kLanes);
  }
  for (int key = 0; key < keys; ++key) {
    F32 value[C];
    SYSTOLE_UNROLL for (int c = 0; c < C; ++c) value[c] = load(v + key * padded_dim + c * kLanes);
    SYSTOLE_UNROLL for (int r = 0; r < R; ++r) {
      const F32 weight = broadcast(p[r * kTile + key]);
      SYSTOLE_UNROLL for (int c = 0; c < C; ++c) a[r][c] = fma(weight, value[c], a[r][c]);
    }
  }
  SYSTOLE_UNROLL for (int r = 0; r < R; ++r) {
    SYSTOLE_UNROLL for (int c = 0; c < C; ++c) store(acc + r * padded_dim + c * kLanes, a[r][c]);
  }
}

// One query vector's softmax over a tile: weights to p, running maximum, sum and accumulator updated.
SYSTOLE_INLINE void soften(F32 s[kVectors], float scale, int lo, int hi, int64_t padded_dim, float* m,
                           float* sum, float* acc, float* p) {
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
  SYSTOLE_UNROLL for (int n = 0; n < kVectors; ++n) {
    F32 weight = exp2_nonpositive(s[n] - broadcast(*m));
    if (!is_whole) weight = select_range(lo - n * kLanes, hi - n * kLanes, weight, broadcast(0.0f));
    total = total + weight;
    store(p + n * kLanes, weight);
  }
  store(sum, total);
}

// The query vectors of an item and their running softmax.
struct Block {
  float* q;    // [n, dim]
  float* acc;  // [n, padded_dim]
  float* sum;  // [n, kLanes]
  float* m;    // [n]
  int64_t dim, padded_dim;
  int64_t group;           // query vectors per row
  int64_t first_position;  // of the first row
  int64_t window;
  float scale;
};

template <int R>
void process(const Block& block, int64_t i, int64_t base, int keys, const float* kt, const float* v) {
  F32 s[kRows][kVectors];
  alignas(64) float p[R * kTile];
  score<R>(kt, block.q + i * block.dim, block.dim, s);
  SYSTOLE_UNROLL for (int r = 0; r < R; ++r) {
    const int64_t position = block.first_position + (i + r) / block.group;
    const int64_t begin = position - block.window + 1;
    const int lo = static_cast<int>(begin > base ? begin - base : 0);
    const int hi = static_cast<int>(position + 1 - base);
    soften(s[r], block.scale, lo, hi, block.padded_dim, block.m + i + r, block.sum + (i + r) * kLanes,
           block.acc + (i + r) * block.padded_dim, p + r * kTile);
  }
  float* acc = block.acc + i * block.padded_dim;
  int64_t d = 0;
  for (; d + kColumns * kLanes <= block.padded_dim; d += kColumns * kLanes) {
    accumulate<R, kColumns>(v + d, p, keys, block.padded_dim, acc + d);
  }
  for (; d < block.padded_dim; d += kLanes) accumulate<R, 1>(v + d, p, keys, block.padded_dim, acc + d);
}

void process_all(const Block& block, int64_t n, int64_t base, int keys, const float* kt, const float* v) {
  int64_t i = 0;
  for (; i + kRows <= n; i += kRows) process<kRows>(block, i, base, keys, kt, v);
  switch (n - i) {
#if defined(__AVX512F__)
    case 5: return process<5>(block, i, base, keys, kt, v);
    case 4: return process<4>(block, i, base, keys, kt, v);
    case 3: return process<3>(block, i, base, keys, kt, v);
    case 2: return process<2>(block, i, base, keys, kt, v);
#endif
    case 1: return process<1>(block, i, base, keys, kt, v);
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

template <bool kQBf16, bool kKvBf16>
void attend_typed(const AttentionArgs& args, const AttentionItem& item) {
  using Q = Element<kQBf16>;
  using KV = Element<kKvBf16>;
  const int64_t dim = args.head_dim;
  const int64_t group = args.heads / args.kv_heads;
  const int64_t n = (item.end - item.begin) * group;
  const int64_t q_end = args.cu_q_lens[item.seq + 1];
  const int64_t limit = args.kv_lens[item.seq] - (q_end - item.end);  // keys that the last row sees
  Block block;
  block.dim = dim;
  block.padded_dim = round_up(dim, kLanes);
  block.group = group;
  block.first_position = args.kv_lens[item.seq] - (q_end - item.begin);
  block.window = args.window;
  block.scale = args.scale;

  // Regions of the thread's scratch, each a whole number of cache lines.
  const int64_t kt_size = dim * kTile;
  const int64_t v_size = kTile * block.padded_dim;
  const int64_t q_size = round_up(n * dim, 16);
  const int64_t acc_size = round_up(n * block.padded_dim, 16);
  const int64_t sum_size = round_up(n * kLanes, 16);
  float* kt = scratch.reserve(kt_size + v_size + q_size + acc_size + sum_size + round_up(n, 16));
  float* v = kt + kt_size;
  block.q = v + v_size;
  block.acc = block.q + q_size;
  block.sum = block.acc + acc_size;
  block.m = block.sum + sum_size;

  const int64_t offset = (item.begin * args.kv_heads + item.head) * group * dim;
  const auto row_offset = [&](int64_t i) { return offset + (i / group * args.heads + i % group) * dim; };
  for (int64_t i = 0; i < n; ++i) {
    convert_row(static_cast<const Q*>(args.q) + row_offset(i), block.q + i * dim, dim);
    for (int64_t d = 0; d < block.padded_dim; d += kLanes) {
      store(block.acc + i * block.padded_dim + d, broadcast(0.0f));
    }
    store(block.sum + i * kLanes, broadcast(0.0f));
    block.m[i] = kNoMax;
  }

  const PageView<KV> view(args, item.seq, item.head);
  const int64_t oldest = block.first_position - args.window + 1;
  const int64_t begin = oldest > 0 ? oldest : 0;  // of the keys that any row sees
  for (int64_t base = begin / kTile * kTile; base < limit; base += kTile) {
    const int64_t end = base + kTile < limit ? base + kTile : limit;
    prefetch_tile(view, end, end + kTile < limit ? end + kTile : limit);
    // A key outside [begin, limit) is masked for every row: its place is taken by one inside, since
    // what lies there (another page's NaN, say) must not meet the zero weight.
    const KV* key_rows[kTile];
    const KV* value_rows[kTile];
    for (int i = 0; i < kTile; ++i) {
      const int64_t position = base + i < begin ? begin : base + i < limit ? base + i : limit - 1;
      key_rows[i] = view.key(position);
      value_rows[i] = key_rows[i] + view.value_offset();
    }
    const int keys = static_cast<int>(end - base);
    pack_keys(key_rows, dim, kt);
    pack_values(value_rows, keys, dim, block.padded_dim, v);
    process_all(block, n, base, keys, kt, v);
  }

  for (int64_t i = 0; i < n; ++i) {
    Q* to = static_cast<Q*>(args.out) + row_offset(i);
    const F32 inverse = broadcast(1.0f / reduce_add(load(block.sum + i * kLanes)));
    for (int64_t d = 0; d < dim; d += kLanes) {
      const F32 x = load(block.acc + i * block.padded_dim + d) * inverse + broadcast(0.0f);
      store_rounded(to + d, x, static_cast<int>(dim - d));
    }
  }
}

void attend(const AttentionArgs& args, const AttentionItem& item) {
  const auto run = args.is_q_bf16 ? (args.is_kv_bf16 ? attend_typed<true, true> : attend_typed<true, false>)
                                  : (args.is_kv_bf16 ? attend_typed<false, true> : attend_typed<false, false>);
  run(args, item);
}

}  // namespace

#define SYSTOLE_STRING_(x) #x
#define SYSTOLE_STRING(x) SYSTOLE_STRING_(x)
extern const AttentionKernel kAttention = {SYSTOLE_STRING(SYSTOLE_ISA), write_rows, attend};

}  // namespace systole::SYSTOLE_ISA
