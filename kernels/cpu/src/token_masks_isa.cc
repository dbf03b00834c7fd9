// The logits that a mask allows and the best of them, for one instruction set (SYSTOLE_ISA, the -m
// flags select it). One pass over a row; a block of 32 tokens without an allowed one is not read.

#include "token_masks.h"

#include <limits>

#include "simd.h"

namespace systole::SYSTOLE_ISA {
namespace {

constexpr int64_t kBlock = 32;  // tokens of a word of the mask
constexpr float kNever = -std::numeric_limits<float>::infinity();

// The largest allowed logit of a block; also writes the block where `out` is given.
SYSTOLE_INLINE float mask_block(uint32_t bits, const float* x, float* out) {
  const F32 never = broadcast(kNever);
  F32 top = never;
  SYSTOLE_UNROLL for (int64_t i = 0; i < kBlock; i += kLanes) {
    const F32 allowed = select_bits(bits >> i, load(x + i), never);
    if (out != nullptr) store(out + i, allowed);
    top = max(allowed, top);
  }
  return reduce_max(top);
}

float mask_tail(uint32_t bits, const float* x, float* out, int64_t count) {
  float top = kNever;
  for (int64_t i = 0; i < count; ++i) {
    const float allowed = bits >> i & 1 ? x[i] : kNever;
    if (out != nullptr) out[i] = allowed;
    if (allowed > top) top = allowed;
  }
  return top;
}

void mask_row(const TokenMaskArgs& args, int64_t row) {
  const int64_t vocab = args.vocab_size;
  const int64_t num_words = (vocab + kBlock - 1) / kBlock;
  const int64_t last = args.num_logit_rows - 1;
  const int64_t from = args.rows[row] < 0 ? 0 : args.rows[row] > last ? last : args.rows[row];
  const float* logits = args.logits + from * vocab;
  const uint32_t* masks = args.masks + row * num_words;
  float* allowed = args.needs_logits[row] ? args.allowed + row * vocab : nullptr;
  float best = kNever;
  int64_t best_word = 0;
  for (int64_t word = 0; word < num_words; ++word) {
    const int64_t at = word * kBlock;
    float* out = allowed == nullptr ? nullptr : allowed + at;
    float top = kNever;
    if (vocab - at < kBlock) {
      top = mask_tail(masks[word], logits + at, out, vocab - at);
    } else if (masks[word] != 0) {
      top = mask_block(masks[word], logits + at, out);
    } else if (out != nullptr) {
      SYSTOLE_UNROLL for (int64_t i = 0; i < kBlock; i += kLanes) store(out + i, broadcast(kNever));
    }
    if (top > best) {  // the first block among equals
      best = top;
      best_word = word;
    }
  }
  args.best[row] = 0;  // of a row without an allowed token, or of NaN
  for (int64_t at = best_word * kBlock; at < vocab && at < (best_word + 1) * kBlock; ++at) {
    if ((masks[best_word] >> (at % kBlock) & 1) && logits[at] == best) {
      args.best[row] = static_cast<int32_t>(at);
      break;
    }
  }
}

}  // namespace

extern const MaskRow kMaskRow = mask_row;

}  // namespace systole::SYSTOLE_ISA
