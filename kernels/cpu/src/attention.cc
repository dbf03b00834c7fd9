// The FFI target of paged attention: checks its arguments, plans the items, picks the kernel.

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "attention.h"
#include "cpu.h"
#include "team.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace systole {
namespace {

constexpr int64_t kMaxQueryVectors = 96;   // rows x group of an item: 24 KB of q, 24 KB of acc at D = 64
constexpr int64_t kMaxRows = 32;           // of an item
constexpr int64_t kWriteRows = 32;         // rows of k, v written per chunk
constexpr int64_t kHelperWork = 1 << 12;   // query-key pairs that repay waking another thread
constexpr int64_t kChunksPerThread = 8;    // at least, for balance
constexpr int64_t kMaxRun = 6;             // items per chunk

const AttentionKernel& select_kernel() {
#if defined(__x86_64__)
  switch (instruction_set()) {
    case InstructionSet::kAvx512Bf16:
    case InstructionSet::kAvx512Vnni:
    case InstructionSet::kAvx512: return avx512::kAttention;
    case InstructionSet::kAvx2: return avx2::kAttention;
    case InstructionSet::kGeneric: break;
  }
#endif
  return generic::kAttention;
}

// The first fault of the ragged description, or empty. Everything read or written lies inside the
// buffers when it passes, so a wrong index is an error and never a wild write.
std::string find_fault(const AttentionArgs& args, int64_t num_tokens, int64_t num_pages) {
  if (args.cu_q_lens[0] != 0) return "cu_q_lens[0] must be 0, got " + std::to_string(args.cu_q_lens[0]);
  for (int64_t s = 0; s < args.num_seqs; ++s) {
    const int64_t begin = args.cu_q_lens[s], end = args.cu_q_lens[s + 1], length = args.kv_lens[s];
    const std::string name = " (sequence " + std::to_string(s) + ")";
    if (end < begin || end > num_tokens) {
      return "cu_q_lens must not decrease nor exceed " + std::to_string(num_tokens) + " rows, got " +
             std::to_string(begin) + ", " + std::to_string(end) + name;
    }
    if (length < end - begin) {
      return "kv_lens must count the new tokens: " + std::to_string(length) + " < " +
             std::to_string(end - begin) + name;
    }
    if (length > args.pages_per_seq * args.page_size) {
      return "kv_lens " + std::to_string(length) + " exceeds " + std::to_string(args.pages_per_seq) +
             " pages of " + std::to_string(args.page_size) + name;
    }
    if (end == begin) continue;
    const int64_t oldest = std::max<int64_t>(0, length - (end - begin) - args.window + 1);
    for (int64_t p = oldest / args.page_size; p * args.page_size < length; ++p) {
      const int32_t page = args.page_indices[s * args.pages_per_seq + p];
      if (page < 0 || page >= num_pages) {
        return "page_indices must lie in [0, " + std::to_string(num_pages) + "), got " +
               std::to_string(page) + name;
      }
    }
  }
  return "";
}

// Items, the costliest first, so that the threads end together.
std::vector<AttentionItem> plan(const AttentionArgs& args, int64_t* work) {
  const int64_t group = args.heads / args.kv_heads;
  const int64_t rows = std::clamp<int64_t>(kMaxQueryVectors / group, 1, kMaxRows);
  struct Block {
    int64_t cost;
    int32_t seq, begin, end;
  };
  std::vector<Block> blocks;
  *work = 0;
  for (int64_t s = 0; s < args.num_seqs; ++s) {
    const int64_t q_end = args.cu_q_lens[s + 1];
    for (int64_t begin = args.cu_q_lens[s]; begin < q_end; begin += rows) {
      const int64_t end = std::min(begin + rows, q_end);
      const int64_t keys = std::min(args.kv_lens[s] - (q_end - end), args.window + end - begin);
      const int64_t cost = (end - begin) * group * keys;
      *work += cost * args.kv_heads;
      blocks.push_back({cost, static_cast<int32_t>(s), static_cast<int32_t>(begin), static_cast<int32_t>(end)});
    }
  }
  std::sort(blocks.begin(), blocks.end(), [](const Block& a, const Block& b) {
    return a.cost != b.cost ? a.cost > b.cost : a.begin < b.begin;
  });
  std::vector<AttentionItem> items;
  items.reserve(blocks.size() * static_cast<size_t>(args.kv_heads));
  for (const Block& block : blocks) {
    for (int32_t head = 0; head < args.kv_heads; ++head) {
      items.push_back({block.seq, head, block.begin, block.end});
    }
  }
  return items;
}

KvType kv_type(ffi::DataType type) {
  switch (type) {
    case ffi::BF16: return KvType::kBf16;
    case ffi::S8: return KvType::kInt8;
    default: return KvType::kF32;
  }
}

// Shapes and dtypes are checked by the Python wrapper when the program is traced. `scales` are those of
// int8 pages, null for others.
ffi::Error ragged_paged_attention(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer k,
                                  ffi::AnyBuffer v, ffi::AnyBuffer kv_pages, float* scales,
                                  ffi::Buffer<ffi::S32> kv_lens, ffi::Buffer<ffi::S32> page_indices,
                                  ffi::Buffer<ffi::S32> cu_q_lens, ffi::Buffer<ffi::S32> num_seqs,
                                  ffi::Buffer<ffi::F32> sinks, float scale, int64_t window, int64_t layer,
                                  ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer> pages_out) {
  if (kv_pages.untyped_data() != pages_out->untyped_data()) {
    return ffi::Error::Internal("kv_pages was not aliased to its output");
  }
  // [N, 2K, page, D] of one layer, or [L, N, 2K, page, D] of all.
  const int64_t* page_shape = kv_pages.dimensions().end() - 4;
  const int64_t num_layers = kv_pages.dimensions().size() == 5 ? kv_pages.dimensions()[0] : 1;
  const int64_t num_rows_of_layer = page_shape[0] * page_shape[1] * page_shape[2];
  AttentionArgs args;
  args.q = q.untyped_data();
  args.k = k.untyped_data();
  args.v = v.untyped_data();
  args.pages = static_cast<char*>(pages_out->untyped_data()) +
               kv_pages.size_bytes() / static_cast<size_t>(num_layers) * static_cast<size_t>(layer);
  args.scales = scales == nullptr ? nullptr : scales + num_rows_of_layer * layer;
  args.out = out->untyped_data();
  args.kv_lens = kv_lens.typed_data();
  args.page_indices = page_indices.typed_data();
  args.cu_q_lens = cu_q_lens.typed_data();
  args.sinks = sinks.element_count() == 0 ? nullptr : sinks.typed_data();
  args.num_seqs = num_seqs.typed_data()[0];
  args.heads = q.dimensions()[1];
  args.kv_heads = k.dimensions()[1];
  args.head_dim = q.dimensions()[2];
  args.page_size = page_shape[2];
  args.pages_per_seq = page_indices.dimensions()[1];
  args.scale = scale * 1.44269504f;
  args.window = window;
  args.is_q_bf16 = q.element_type() == ffi::BF16;
  args.kv_type = kv_type(kv_pages.element_type());

  const int64_t num_tokens = q.dimensions()[0];
  if (args.num_seqs < 0 || args.num_seqs > static_cast<int64_t>(kv_lens.element_count())) {
    return ffi::Error::InvalidArgument("num_seqs must lie in [0, " + std::to_string(kv_lens.element_count()) +
                                       "], got " + std::to_string(args.num_seqs));
  }
  const std::string fault = find_fault(args, num_tokens, page_shape[0]);
  if (!fault.empty()) return ffi::Error::InvalidArgument(fault);

  const AttentionKernel& kernel = select_kernel();
  const int64_t num_rows = args.cu_q_lens[args.num_seqs];
  int64_t work = 0;
  const std::vector<AttentionItem> items = plan(args, &work);
  const int64_t num_items = static_cast<int64_t>(items.size());
  const int64_t num_threads = 1 + std::clamp<int64_t>(work / kHelperWork, 0, pool.num_threads() - 1);
  const int64_t run = std::clamp<int64_t>(num_items / (num_threads * kChunksPerThread), 1, kMaxRun);
  run_stages(
      pool, num_threads - 1, static_cast<int32_t>((num_rows + kWriteRows - 1) / kWriteRows),
      [&args, &kernel, num_rows](int32_t i) {
        kernel.write_rows(args, i * kWriteRows, std::min((i + 1) * kWriteRows, num_rows));
      },
      static_cast<int32_t>((num_items + run - 1) / run), [&args, &kernel, &items, run, num_items](int32_t i) {
        kernel.attend(args, items.data() + i * run, std::min(run, num_items - i * run));
      });

  const size_t row_bytes = static_cast<size_t>(args.heads * args.head_dim) * (args.is_q_bf16 ? 2 : 4);
  std::memset(static_cast<char*>(args.out) + static_cast<size_t>(num_rows) * row_bytes, 0,
              static_cast<size_t>(num_tokens - num_rows) * row_bytes);
  return ffi::Error::Success();
}

ffi::Error attend_floats(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v,
                         ffi::AnyBuffer kv_pages, ffi::Buffer<ffi::S32> kv_lens,
                         ffi::Buffer<ffi::S32> page_indices, ffi::Buffer<ffi::S32> cu_q_lens,
                         ffi::Buffer<ffi::S32> num_seqs, ffi::Buffer<ffi::F32> sinks, float scale,
                         int64_t window, int64_t layer, ffi::Result<ffi::AnyBuffer> out,
                         ffi::Result<ffi::AnyBuffer> pages_out) {
  return ragged_paged_attention(pool, q, k, v, kv_pages, nullptr, kv_lens, page_indices, cu_q_lens, num_seqs,
                                sinks, scale, window, layer, out, pages_out);
}

ffi::Error attend_quantized(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v,
                            ffi::AnyBuffer kv_pages, ffi::Buffer<ffi::F32> scales,
                            ffi::Buffer<ffi::S32> kv_lens, ffi::Buffer<ffi::S32> page_indices,
                            ffi::Buffer<ffi::S32> cu_q_lens, ffi::Buffer<ffi::S32> num_seqs,
                            ffi::Buffer<ffi::F32> sinks, float scale, int64_t window, int64_t layer,
                            ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer> pages_out,
                            ffi::Result<ffi::Buffer<ffi::F32>> scales_out) {
  if (scales.untyped_data() != scales_out->untyped_data()) {
    return ffi::Error::Internal("the pages' scales were not aliased to their output");
  }
  return ragged_paged_attention(pool, q, k, v, kv_pages, scales_out->typed_data(), kv_lens, page_indices,
                                cu_q_lens, num_seqs, sinks, scale, window, layer, out, pages_out);
}

}  // namespace
}  // namespace systole

#pragma GCC visibility push(default)
XLA_FFI_DEFINE_HANDLER_SYMBOL(systole_ragged_paged_attention, systole::attend_floats,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Attr<float>("scale")
                                  .Attr<int64_t>("window")
                                  .Attr<int64_t>("layer")
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(systole_quantized_paged_attention, systole::attend_quantized,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Attr<float>("scale")
                                  .Attr<int64_t>("window")
                                  .Attr<int64_t>("layer")
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::Buffer<ffi::F32>>());
#pragma GCC visibility pop
