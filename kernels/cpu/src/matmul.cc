// The FFI target of the packed matmul: splits the rows in use into equal blocks and the
// outputs over threads.

#include "matmul.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <string>

#include "cpu.h"
#include "team.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace systole {
namespace {

constexpr int64_t kChunksPerThread = 8;  // at least where there are as many groups, for balance
constexpr int64_t kMaxRun = 16;          // groups per chunk
constexpr int64_t kZeroBytes = 1 << 16;  // of padding rows zeroed per chunk

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

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
ffi::Error linear(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::Buffer<ffi::BF16> w,
                  ffi::Buffer<ffi::S32> num_rows, bool is_silu, int64_t layer,
                  ffi::Result<ffi::AnyBuffer> out) {
  const MatmulKernel& kernel = select_kernel();
  const int64_t num_tokens = x.dimensions()[0];
  const int64_t num_groups = w.dimensions()[w.dimensions().size() - 4];  // of one layer of [L, ...]
  MatmulArgs args;
  args.num_inputs = x.dimensions()[1];
  args.x = x.untyped_data();
  args.w = reinterpret_cast<const uint16_t*>(w.untyped_data()) + layer * num_groups * kGroup * args.num_inputs;
  args.out = out->untyped_data();
  args.num_rows = num_rows.typed_data()[0];
  args.num_outputs = out->dimensions()[1] * (is_silu ? 2 : 1);
  args.is_x_bf16 = x.element_type() == ffi::BF16;
  args.is_out_bf16 = out->element_type() == ffi::BF16;
  args.is_silu = is_silu;
  if (args.num_rows < 0 || args.num_rows > num_tokens) {
    return ffi::Error::InvalidArgument("num_rows must lie in [0, " + std::to_string(num_tokens) + "], got " +
                                       std::to_string(args.num_rows));
  }
  // Padding rows are zeros: cheap, and whatever reads them stays finite.
  const int64_t row_bytes = out->dimensions()[1] * (args.is_out_bf16 ? 2 : 4);
  const int64_t zeros_begin = args.num_rows * row_bytes, zeros_end = num_tokens * row_bytes;
  if (args.num_rows == 0) {
    std::memset(args.out, 0, static_cast<size_t>(zeros_end));
    return ffi::Error::Success();
  }
  args.packed_x = packed_rows.reserve(args.num_rows * args.num_inputs);

  const int64_t num_blocks = ceil_div(args.num_rows, kernel.max_rows);
  const int64_t rows = ceil_div(args.num_rows, num_blocks);  // 16 rows are 8 + 8, not 12 + 4
  const int64_t num_threads = std::min<int64_t>(std::max<int64_t>(pool.num_threads(), 1), num_groups);
  const int64_t run = std::clamp<int64_t>(num_groups / (num_threads * kChunksPerThread), 1, kMaxRun);
  const int64_t num_zero_chunks = ceil_div(zeros_end - zeros_begin, kZeroBytes);
  run_stages(
      pool, num_threads - 1, static_cast<int32_t>(ceil_div(args.num_rows, rows)),
      [&args, &kernel, rows](int32_t i) {
        kernel.pack_rows(args, i * rows, std::min((i + 1) * rows, args.num_rows));
      },
      static_cast<int32_t>(num_zero_chunks + ceil_div(num_groups, run)),
      [&args, &kernel, rows, run, num_groups, num_zero_chunks, zeros_begin, zeros_end](int32_t i) {
        if (i < num_zero_chunks) {
          const int64_t begin = zeros_begin + i * kZeroBytes;
          std::memset(static_cast<char*>(args.out) + begin, 0,
                      static_cast<size_t>(std::min(kZeroBytes, zeros_end - begin)));
          return;
        }
        const int64_t begin = (i - num_zero_chunks) * run;
        kernel.multiply(args, rows, begin, std::min(begin + run, num_groups));
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
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Attr<bool>("is_silu")
                                  .Attr<int64_t>("layer")
                                  .Ret<ffi::AnyBuffer>());
#pragma GCC visibility pop
