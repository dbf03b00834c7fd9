// Ragged paged attention for one instruction set (SYSTOLE_ISA names it, the -m flags select it).
//
// An item is (sequence, block of query rows, kv head). Its keys come in tiles of 32 at absolute
// positions. A tile's keys are packed once into L1, widened and transposed, its values widened (or
// read where they lie, when one pass uses them), for all rows x (H / K) query heads of the item, in
// register blocks of kRows query vectors:
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
// Rows of int8 pages have a factor each: that of a key multiplies its score, that of a value its weight.
//
// All products are f32 multiply-adds, for bf16 too: VDPBF16PS starts every second cycle on Intel's
// cores (90 GFLOP/s measured against 185 for VFMADD), and the weights keep their f32 precision.

#include "attention.h"
#include "simd.h"

#include <bit>
#include <cstdlib>
#include <cstring>
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

SYSTOLE_INLINE F32 load_f32(const uint16_t* p, int n) {
  return as_f32(shift_left(n >= kLanes ? load_halves(p) : load_halves(p, n), 16));
}
SYSTOLE_INLINE F32 load_f32(const float* p, int n) { return as_f32(load_words(p, n)); }
SYSTOLE_INLINE F32 load_f32(const int8_t* p, int n) { return to_f32(load_bytes(p, n)); }
SYSTOLE_INLINE void store_rounded(uint16_t* p, F32 x, int n) { store_halves(p, round_to_bf16(x), n); }
SYSTOLE_INLINE void store_rounded(float* p, F32 x, int n) { store_f32(p, x, n); }

// Where a sequence's key of a position lives: row of K at address(position), of V one row further.
template <typename T>
struct PageView {
  const T* pages;
  const int32_t* indices;
  const float* scales;
  int64_t page_size, head_dim, page_stride, head_offset;
  int shift;
  PageView(const AttentionArgs& args, int32_t seq, int32_t head)
      : pages(static_cast<const T*>(args.pages)),
        indices(args.page_indices + seq * args.pages_per_seq),
        scales(args.scales),
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
  // Of an int8 row of K; that of V's is `page_size` further. Rows have head_dim elements, or one scale.
  SYSTOLE_INLINE const float* scale(const T* row) const { return scales + (row - pages) / head_dim; }
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

// The largest magnitude. As the largest bits, so that a NaN counts as larger than infinity.
template <typename Q>
float find_largest(const Q* x, int64_t n) {
  U32 largest = broadcast_u32(0);
  for (int64_t d = 0; d < n; d += kLanes) {
    const U32 bits = as_u32(load_f32(x + d, static_cast<int>(n - d)));
    largest = max_u32(largest, and_u32(bits, broadcast_u32(0x7FFFFFFF)));
  }
  uint32_t lanes[kLanes], result = 0;
  store_u32(lanes, largest);
  for (uint32_t lane : lanes) result = lane > result ? lane : result;
  return std::bit_cast<float>(result);
}

// Writes a row as int8 and returns its scale: kernels/quantized_pages.py, operation for operation.
template <typename Q>
float quantize_row(const Q* from, int8_t* to, int64_t n) {
  const uint32_t bits = std::bit_cast<uint32_t>(find_largest(from, n) * (1.0f / 127.0f));
  const float scale = std::bit_cast<float>((bits + 0xFFFFu) & 0xFFFF0000u);  // to bf16, upwards
  const F32 inverse = broadcast(scale == 0.0f ? 0.0f : 1.0f / scale);
  const F32 magic = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  for (int64_t d = 0; d < n; d += kLanes) {
    const int left = static_cast<int>(n - d);
    uint8_t bytes[kLanes];
    store_low_bytes(bytes, as_u32(load_f32(from + d, left) * inverse + magic));
    std::memcpy(to + d, bytes, static_cast<size_t>(left < kLanes ? left : kLanes));
  }
  return scale;
}

template <typename Q, typename KV>
void write_row(const PageView<KV>& view, const Q* from, const KV* row) {
  KV* to = const_cast<KV*>(row);
  if constexpr (std::is_same_v<KV, int8_t>) {
    *const_cast<float*>(view.scale(row)) = quantize_row(from, to, view.head_dim);
  } else {
    convert_row(from, to, view.head_dim);
  }
}

template <typename Q, typename KV>
void write_rows_typed(const AttentionArgs& args, int64_t begin, int64_t end) {
  const int64_t dim = args.head_dim;
  int64_t seq = 0;
  for (int64_t row = begin; row < end; ++row) {
    while (row >= args.cu_q_lens[seq + 1]) ++seq;
    const int64_t position = args.kv_lens[seq] - (args.cu_q_lens[seq + 1] - row);
    for (int32_t head = 0; head < args.kv_heads; ++head) {
      const PageView<KV> view(args, static_cast<int32_t>(seq), head);
      const KV* key = view.key(position);
      const int64_t source = (row * args.kv_heads + head) * dim;
      write_row(view, static_cast<const Q*>(args.k) + source, key);
      write_row(view, static_cast<const Q*>(args.v) + source, key + view.value_offset());
    }
  }
}

// Calls run<Q, KV> with the element types of the queries and of the pages.
template <typename Run>
void with_types(const AttentionArgs& args, Run run) {
  const auto with_kv = [&]<typename Q>() {
    switch (args.kv_type) {
      case KvType::kF32: return run.template operator()<Q, float>();
      case KvType::kBf16: return run.template operator()<Q, uint16_t>();
      case KvType::kInt8: return run.template operator()<Q, int8_t>();
    }
  };
  args.is_q_bf16 ? with_kv.template operator()<uint16_t>() : with_kv.template operator()<float>();
}

void write_rows(const AttentionArgs& args, int64_t begin, int64_t end) {
  with_types(args, [&]<typename Q, typename KV>() { write_rows_typed<Q, KV>(args, begin, end); });
}

// Transposes the rows of 32 keys, widened, into kt[d][32].
template <typename KV>
void pack_keys(const KV* const rows[kTile], int64_t dim, float* kt) {
  constexpr int kElements = 4 / sizeof(KV);  // of a 32-bit word: 1 f32, 2 bf16 or 4 int8
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
        if constexpr (kElements == 4) {
          SYSTOLE_UNROLL for (int byte = 0; byte < 4; ++byte) {
            const U32 element = shift_right_signed(shift_left(x[i], 24 - 8 * byte), 24);
            store(to + (4 * i + byte) * kTile, to_f32(element));
          }
        } else if constexpr (kElements == 2) {
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

// Rows to be touched next: asked for one by one between the multiplications of `score`, since a burst
// would fill the core's line buffers and stop it.
struct Ahead {
  const char* const* rows;
  int count;
  int bytes;  // of a row
  SYSTOLE_INLINE void prefetch(int64_t i) const {
    if (i >= count) return;
    for (int at = 0; at < bytes; at += 64) __builtin_prefetch(rows[i] + at);
  }
};

// s[r] = q[r] . kt over head_dim.
template <int R>
SYSTOLE_INLINE void score(const float* kt, const float* q, int64_t dim, const Ahead& ahead,
                          F32 s[kRows][kVectors]) {
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
    ahead.prefetch(d);
  }
}

// acc[r] += p[r] . v over the first `keys` keys, in C vectors of columns, the last of `lanes` lanes.
template <int R, int C, typename V>
SYSTOLE_INLINE void accumulate(const V* const rows[kTile], int64_t d, int lanes, const float* p, int keys,
                               int64_t padded_dim, float* acc) {
  F32 a[R][C];
  SYSTOLE_UNROLL for (int r = 0; r < R; ++r) {
    SYSTOLE_UNROLL for (int c = 0; c < C; ++c) a[r][c] = load(acc + r * padded_dim + c * kLanes);
  }
  for (int key = 0; key < keys; ++key) {
    F32 value[C];
    SYSTOLE_UNROLL for (int c = 0; c < C; ++c) value[c] = load_f32(rows[key] + d + c * kLanes, lanes);
    SYSTOLE_UNROLL for (int r = 0; r < R; ++r) {
      const F32 weight = broadcast(p[r * kTile + key]);
      SYSTOLE_UNROLL for (int c = 0; c < C; ++c) a[r][c] = fma(weight, value[c], a[r][c]);
    }
  }
  SYSTOLE_UNROLL for (int r = 0; r < R; ++r) {
    SYSTOLE_UNROLL for (int c = 0; c < C; ++c) store(acc + r * padded_dim + c * kLanes, a[r][c]);
  }
}

// Factors of a tile's rows; null where these need none.
struct TileScales {
  const float* keys;
  const float* values;
};

// One query vector's softmax over a tile: weights to p, running maximum, sum and accumulator updated.
SYSTOLE_INLINE void soften(F32 s[kVectors], float scale, TileScales scales, int lo, int hi,
                           int64_t padded_dim, float* m, float* sum, float* acc, float* p) {
  const bool is_whole = lo <= 0 && hi >= kTile;
  F32 top = broadcast(kNoMax);
  SYSTOLE_UNROLL for (int n = 0; n < kVectors; ++n) {
    s[n] = s[n] * broadcast(scale);
    if (scales.keys != nullptr) s[n] = s[n] * load(scales.keys + n * kLanes);
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
    if (scales.values != nullptr) weight = weight * load(scales.values + n * kLanes);
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

template <int R, typename V>
void process(const Block& block, int64_t i, int64_t base, int keys, const float* kt,
             const V* const rows[kTile], TileScales scales, const Ahead& ahead) {
  F32 s[kRows][kVectors];
  alignas(64) float p[R * kTile];
  score<R>(kt, block.q + i * block.dim, block.dim, ahead, s);
  SYSTOLE_UNROLL for (int r = 0; r < R; ++r) {
    const int64_t position = block.first_position + (i + r) / block.group;
    const int64_t begin = position - block.window + 1;
    const int lo = static_cast<int>(begin > base ? begin - base : 0);
    const int hi = static_cast<int>(position + 1 - base);
    soften(s[r], block.scale, scales, lo, hi, block.padded_dim, block.m + i + r, block.sum + (i + r) * kLanes,
           block.acc + (i + r) * block.padded_dim, p + r * kTile);
  }
  float* acc = block.acc + i * block.padded_dim;
  int64_t d = 0;
  for (; d + kColumns * kLanes <= block.dim; d += kColumns * kLanes) {
    accumulate<R, kColumns>(rows, d, kLanes, p, keys, block.padded_dim, acc + d);
  }
  for (; d < block.dim; d += kLanes) {
    accumulate<R, 1>(rows, d, static_cast<int>(block.dim - d), p, keys, block.padded_dim, acc + d);
  }
}

template <typename V>
void process_all(const Block& block, int64_t n, int64_t base, int keys, const float* kt,
                 const V* const rows[kTile], TileScales scales, Ahead ahead) {
  int64_t i = 0;
  for (; i + kRows <= n; i += kRows) {
    process<kRows>(block, i, base, keys, kt, rows, scales, ahead);
    ahead.count = 0;  // once is enough
  }
  switch (n - i) {
#if defined(__AVX512F__)
    case 5: return process<5>(block, i, base, keys, kt, rows, scales, ahead);
    case 4: return process<4>(block, i, base, keys, kt, rows, scales, ahead);
    case 3: return process<3>(block, i, base, keys, kt, rows, scales, ahead);
    case 2: return process<2>(block, i, base, keys, kt, rows, scales, ahead);
#endif
    case 1: return process<1>(block, i, base, keys, kt, rows, scales, ahead);
    default: return;
  }
}

// The keys that an item's rows see, [begin, end), and where they live.
template <typename KV>
struct Span {
  PageView<KV> view;
  int64_t begin, end;
  Span(const AttentionArgs& args, const AttentionItem& item) : view(args, item.seq, item.head) {
    const int64_t q_end = args.cu_q_lens[item.seq + 1];
    const int64_t oldest = args.kv_lens[item.seq] - (q_end - item.begin) - args.window + 1;
    begin = oldest > 0 ? oldest : 0;
    end = args.kv_lens[item.seq] - (q_end - item.end);
  }
  int64_t first_tile() const { return begin / kTile * kTile; }
};

// A tile's 32 rows of keys and 32 of values. A position outside the span is masked for every query:
// its place is taken by a row inside, since what lies there (NaN, say) must not meet the zero weight.
template <typename KV>
struct TileRows {
  static constexpr bool kHasScales = std::is_same_v<KV, int8_t>;
  const KV* keys[kTile];
  const KV* values[kTile];
  float key_scales[kHasScales ? kTile : 1];  // 0 outside the span
  float value_scales[kHasScales ? kTile : 1];

  SYSTOLE_INLINE void locate(const Span<KV>& span, int64_t base) {
    const PageView<KV>& view = span.view;
    const int run = static_cast<int>(view.page_size < kTile ? view.page_size : kTile);
    const int first = static_cast<int>(span.begin > base ? span.begin - base : 0);
    const int last = static_cast<int>(span.end < base + kTile ? span.end - base : kTile) - 1;
    for (int i = first / run * run; i <= last; i += run) {
      const KV* row = view.key(base + i);
      for (int k = 0; k < run; k += 8) {
        SYSTOLE_UNROLL for (int j = 0; j < 8; ++j) keys[i + k + j] = row + (k + j) * view.head_dim;
      }
    }
    for (int i = 0; i < first; ++i) keys[i] = keys[first];
    for (int i = last + 1; i < kTile; ++i) keys[i] = keys[last];
    for (int i = 0; i < kTile; ++i) values[i] = keys[i] + view.value_offset();
    if constexpr (kHasScales) {
      // Not read where masked: a factor of NaN would not be lost in a weight of zero.
      for (int i = 0; i < kTile; ++i) {
        const float* scale = view.scale(keys[i]);
        const bool is_inside = i >= first && i <= last;
        key_scales[i] = is_inside ? scale[0] : 0.0f;
        value_scales[i] = is_inside ? scale[view.page_size] : 0.0f;
      }
    }
  }

  SYSTOLE_INLINE TileScales scales() const {
    if constexpr (kHasScales) return {key_scales, value_scales};
    return {nullptr, nullptr};
  }
};

template <typename Q, typename KV>
void attend_item(const AttentionArgs& args, const AttentionItem& item, const AttentionItem* next_item,
                 TileRows<KV> tiles[2]) {
  const int64_t dim = args.head_dim;
  const int64_t group = args.heads / args.kv_heads;
  const int64_t n = (item.end - item.begin) * group;
  Block block;
  block.dim = dim;
  block.padded_dim = round_up(dim, kLanes);
  block.group = group;
  block.first_position = args.kv_lens[item.seq] - (args.cu_q_lens[item.seq + 1] - item.begin);
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

  const int64_t offset = item.begin * args.heads + item.head * group;
  const auto row_offset = [&](int64_t i) { return (offset + i / group * args.heads + i % group) * dim; };
  for (int64_t i = 0; i < n; ++i) {
    convert_row(static_cast<const Q*>(args.q) + row_offset(i), block.q + i * dim, dim);
    for (int64_t d = 0; d < block.padded_dim; d += kLanes) {
      store(block.acc + i * block.padded_dim + d, broadcast(0.0f));
    }
    store(block.sum + i * kLanes, broadcast(0.0f));
    block.m[i] = kNoMax;
    if (args.sinks != nullptr) {  // as if a first tile had held the sink
      block.m[i] = args.sinks[item.head * group + i % group] * 1.44269504f;  // base 2
      block.sum[i * kLanes] = 1.0f;
    }
  }

  const Span<KV> span(args, item);
  const Ahead ahead{reinterpret_cast<const char* const*>(tiles[1].keys), 2 * kTile,
                    static_cast<int>(dim * static_cast<int64_t>(sizeof(KV)))};
  Ahead nothing = ahead;
  nothing.count = 0;
  for (int64_t base = span.first_tile(); base < span.end; base += kTile) {
    // tiles[0] is this tile; tiles[1] becomes the one after it, here or in the next item.
    bool has_next = true;
    if (base + kTile < span.end) {
      tiles[1].locate(span, base + kTile);
    } else if (next_item != nullptr) {
      const Span<KV> next(args, *next_item);
      tiles[1].locate(next, next.first_tile());
    } else {
      has_next = false;
    }
    const int keys = static_cast<int>(span.end - base < kTile ? span.end - base : kTile);
    pack_keys(tiles[0].keys, dim, kt);
    if (n <= kRows) {
      process_all(block, n, base, keys, kt, tiles[0].values, tiles[0].scales(), has_next ? ahead : nothing);
    } else {
      const float* packed_rows[kTile];
      for (int i = 0; i < kTile; ++i) packed_rows[i] = v + i * block.padded_dim;
      pack_values(tiles[0].values, keys, dim, block.padded_dim, v);
      process_all(block, n, base, keys, kt, packed_rows, tiles[0].scales(), has_next ? ahead : nothing);
    }
    tiles[0] = tiles[1];
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

template <typename Q, typename KV>
void attend_typed(const AttentionArgs& args, const AttentionItem* items, int64_t count) {
  TileRows<KV> tiles[2];
  const Span<KV> span(args, items[0]);
  tiles[0].locate(span, span.first_tile());
  for (int64_t i = 0; i < count; ++i) {
    attend_item<Q, KV>(args, items[i], i + 1 < count ? items + i + 1 : nullptr, tiles);
  }
}

void attend(const AttentionArgs& args, const AttentionItem* items, int64_t count) {
  with_types(args, [&]<typename Q, typename KV>() { attend_typed<Q, KV>(args, items, count); });
}

}  // namespace

#define SYSTOLE_STRING_(x) #x
#define SYSTOLE_STRING(x) SYSTOLE_STRING_(x)
extern const AttentionKernel kAttention = {SYSTOLE_STRING(SYSTOLE_ISA), write_rows, attend};

}  // namespace systole::SYSTOLE_ISA
