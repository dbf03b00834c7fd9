// What the FFI handler and the per-instruction-set kernels of paged attention share: plain data.
#ifndef SYSTOLE_ATTENTION_H_
#define SYSTOLE_ATTENTION_H_

#include <cstdint>

namespace systole {

// Keys are taken in tiles at absolute positions [32t, 32t + 32): the order of a row's arithmetic is
// a function of its own position only, and not of the page size.
constexpr int kTile = 32;

enum class KvType { kF32, kBf16, kInt8 };

struct AttentionArgs {
  const void* q;                // [T, H, D]
  const void* k;                // [T, K, D]
  const void* v;                // [T, K, D]
  void* pages;                  // [N, 2K, page, D], of the layer
  float* scales;                // [N, 2K, page], of the layer: factors of the rows of int8 pages
  void* out;                    // [T, H, D]
  const int32_t* kv_lens;       // [S]
  const int32_t* page_indices;  // [S, P]
  const int32_t* cu_q_lens;     // [S + 1]
  const float* sinks;           // [H], scores of a key with a value of zero; null for no such key
  int64_t num_seqs;
  int64_t heads;             // H
  int64_t kv_heads;          // K
  int64_t head_dim;          // D
  int64_t page_size;         // a power of two
  int64_t pages_per_seq;     // P
  float scale;               // of the scores, log2(e) included
  int64_t window;            // keys a query sees, itself included
  bool is_q_bf16;            // else f32; k, v and out alike
  KvType kv_type;            // of the pages
};

// The rows of one sequence that one thread takes through its pages, for one kv head.
struct AttentionItem {
  int32_t seq;
  int32_t head;   // kv head
  int32_t begin;  // rows of q, half-open
  int32_t end;
};

// Functions of one instruction set.
struct AttentionKernel {
  const char* name;
  // Writes rows [begin, end) of k and v to their pages.
  void (*write_rows)(const AttentionArgs& args, int64_t begin, int64_t end);
  // Computes `count` items in order (one after the other pays: each prefetches for the next).
  void (*attend)(const AttentionArgs& args, const AttentionItem* items, int64_t count);
};

namespace generic { extern const AttentionKernel kAttention; }
#if defined(__x86_64__)
namespace avx2 { extern const AttentionKernel kAttention; }
namespace avx512 { extern const AttentionKernel kAttention; }
#endif

}  // namespace systole

#endif  // SYSTOLE_ATTENTION_H_
