// The FFI target that applies token masks to rows of logits.

#include "token_masks.h"

#include "cpu.h"
#include "matmul_schedule.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace systole {
namespace {

MaskRow select_kernel() {
#if defined(__x86_64__)
  switch (instruction_set()) {
    case InstructionSet::kAvx512Bf16:
    case InstructionSet::kAvx512Vnni:
    case InstructionSet::kAvx512: return avx512::kMaskRow;
    case InstructionSet::kAvx2: return avx2::kMaskRow;
    case InstructionSet::kGeneric: break;
  }
#endif
  return generic::kMaskRow;
}

// Shapes are checked by the Python wrapper when the program is traced.
ffi::Error token_masks(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> logits, ffi::Buffer<ffi::S32> rows,
                       ffi::Buffer<ffi::S32> masks, ffi::Buffer<ffi::PRED> needs_logits,
                       ffi::Buffer<ffi::S32> num_rows, ffi::Result<ffi::Buffer<ffi::F32>> allowed,
                       ffi::Result<ffi::Buffer<ffi::S32>> best) {
  const TokenMaskArgs args = {
      .logits = logits.typed_data(),
      .rows = rows.typed_data(),
      .masks = reinterpret_cast<const uint32_t*>(masks.typed_data()),
      .needs_logits = needs_logits.typed_data(),
      .allowed = allowed->typed_data(),
      .best = best->typed_data(),
      .num_logit_rows = logits.dimensions()[0],
      .vocab_size = logits.dimensions()[1],
  };
  const int64_t count = num_rows.typed_data()[0];
  if (ffi::Error fault = check_num_rows(count, rows.dimensions()[0]); fault.failure()) return fault;
  const MaskRow mask_row = select_kernel();
  const int64_t num_threads = std::min(std::max<int64_t>(pool.num_threads(), 1), count);
  run_stages(
      pool, num_threads - 1, 0, [](int32_t) {}, static_cast<int32_t>(count),
      [&args, mask_row](int32_t row) { mask_row(args, row); });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace systole

#pragma GCC visibility push(default)
XLA_FFI_DEFINE_HANDLER_SYMBOL(systole_token_masks, systole::token_masks,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::PRED>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::S32>>());
#pragma GCC visibility pop
