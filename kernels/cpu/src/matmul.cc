// The FFI target of the packed bf16 matmul.

#include "matmul.h"

#include "cpu.h"
#include "matmul_schedule.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace systole {
namespace {

const MatmulKernel& select_kernel() {
#if defined(__x86_64__)
  switch (instruction_set()) {
    case InstructionSet::kAvx512Bf16: return avx512_bf16::kMatmul;
    case InstructionSet::kAvx512Vnni:
    case InstructionSet::kAvx512: return avx512::kMatmul;
    case InstructionSet::kAvx2: return avx2::kMatmul;
    case InstructionSet::kGeneric: break;
  }
#endif
  return generic::kMatmul;
}

thread_local Scratch packed_rows;  // of the caller

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
  if (ffi::Error fault = check_num_rows(args.num_rows, num_tokens); fault.failure()) return fault;
  args.packed_x = packed_rows.reserve<uint32_t>(args.num_rows * args.num_inputs / kernel.inputs_per_word);

  const MatmulSize size = {
      .num_tokens = num_tokens,
      .num_rows = args.num_rows,
      .max_rows = kernel.max_rows,
      .num_groups = num_groups,
      .row_bytes = out->dimensions()[1] * (args.is_out_bf16 ? 2 : 4),
  };
  run_matmul(
      pool, size, args.out,
      [&args, &kernel](int64_t begin, int64_t end) { kernel.pack_rows(args, begin, end); },
      [&args, &kernel](int64_t rows, int64_t begin, int64_t end) {
        kernel.multiply(args, rows, begin, end);
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
