// The FFI target of the packed matmul: splits rows into equal blocks and outputs over threads.

#include "matmul.h"

#include <algorithm>
#include <cstdlib>

#include "cpu.h"
#include "team.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace systole {
namespace {

constexpr int64_t kChunksPerThread = 8;  // at least where there are as many groups, for balance
constexpr int64_t kMaxRun = 16;          // groups per chunk

const MatmulKernel& select_kernel() {
#if defined(__x86_64__)
  switch (instruction_set()) {
    case InstructionSet::kAvx512Vnni:
    case InstructionSet::kAvx512: return avx512::kMatmul;
    case InstructionSet::kAvx2: return avx2::kMatmul;
    case InstructionSet::kGeneric: break;
  }
#endif
  return generic::kMatmul;
}

// The caller's packed rows, grown as needed and kept for the next call.
struct PackedRows {
  float* data = nullptr;
  int64_t size = 0;
  ~PackedRows() { std::free(data); }
  float* reserve(int64_t count) {
    if (count > size) {
      std::free(data);
      size = (count + 15) / 16 * 16;
      data = static_cast<float*>(std::aligned_alloc(64, static_cast<size_t>(size) * sizeof(float)));
      if (data == nullptr) std::abort();
    }
    return data;
  }
};
thread_local PackedRows packed_rows;

// Shapes and dtypes are checked by the Python wrapper when the program is traced.
ffi::Error linear(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::Buffer<ffi::BF16> w, bool is_silu,
                  ffi::Result<ffi::AnyBuffer> out) {
  const MatmulKernel& kernel = select_kernel();
  MatmulArgs args;
  args.x = x.untyped_data();
  args.w = reinterpret_cast<const uint16_t*>(w.untyped_data());
  args.out = out->untyped_data();
  args.num_tokens = x.dimensions()[0];
  args.num_inputs = x.dimensions()[1];
  args.num_outputs = out->dimensions()[1] * (is_silu ? 2 : 1);
  args.is_x_bf16 = x.element_type() == ffi::BF16;
  args.is_out_bf16 = out->element_type() == ffi::BF16;
  args.is_silu = is_silu;
  if (args.num_tokens == 0) return ffi::Error::Success();
  args.packed_x = packed_rows.reserve(args.num_tokens * args.num_inputs);

  const int64_t num_blocks = (args.num_tokens + kernel.max_rows - 1) / kernel.max_rows;
  const int64_t rows = (args.num_tokens + num_blocks - 1) / num_blocks;  // 16 rows are 8 + 8, not 12 + 4
  const int64_t used_blocks = (args.num_tokens + rows - 1) / rows;
  const int64_t num_groups = w.dimensions()[0];
  const int64_t num_threads = std::min<int64_t>(std::max<int64_t>(pool.num_threads(), 1), num_groups);
  const int64_t run = std::clamp<int64_t>(num_groups / (num_threads * kChunksPerThread), 1, kMaxRun);
  run_stages(
      pool, num_threads - 1, static_cast<int32_t>(used_blocks),
      [&args, &kernel, rows](int32_t i) {
        kernel.pack_rows(args, i * rows, std::min((i + 1) * rows, args.num_tokens));
      },
      static_cast<int32_t>((num_groups + run - 1) / run), [&args, &kernel, rows, run, num_groups](int32_t i) {
        kernel.multiply(args, rows, i * run, std::min((i + 1) * run, num_groups));
      });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace systole

#pragma GCC visibility push(default)
XLA_FFI_DEFINE_HANDLER_SYMBOL(systole_linear, systole::linear,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::BF16>>()
                                  .Attr<bool>("is_silu")
                                  .Ret<ffi::AnyBuffer>());
#pragma GCC visibility pop
