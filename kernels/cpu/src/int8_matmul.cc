// The FFI targets of the int8 matmul: rows by one weight, and rows by the weight of their expert.

#include "int8_matmul.h"

#include "cpu.h"
#include "matmul_schedule.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace systole {
namespace {

const Int8MatmulKernel& select_kernel() {
#if defined(__x86_64__)
  switch (instruction_set()) {
    case InstructionSet::kAvx512Bf16:
    case InstructionSet::kAvx512Vnni: return avx512_vnni::kInt8Matmul;
    case InstructionSet::kAvx512: return avx512::kInt8Matmul;
    case InstructionSet::kAvx2: return avx2::kInt8Matmul;
    case InstructionSet::kGeneric: break;
  }
#endif
  return generic::kInt8Matmul;
}

struct PackedRows {
  Scratch words, scales, starts;
};
thread_local PackedRows packed_rows;  // of the caller
thread_local Scratch row_floats;      // of each thread

// Multiplies the rows that `args` describes by its weights; rows of the output past those in use, up
// to `num_tokens`, become zeros.
void run(ffi::ThreadPool pool, const Int8MatmulKernel& kernel, Int8MatmulArgs& args, int64_t num_tokens,
         int64_t num_groups) {
  args.packed_x =
      packed_rows.words.reserve<uint32_t>(args.num_rows * args.num_words() * kernel.words_per_word);
  args.x_scale = packed_rows.scales.reserve<float>(args.num_rows);
  args.x_start = packed_rows.starts.reserve<int32_t>(args.num_rows);
  const MatmulSize size = {
      .num_tokens = num_tokens,
      .num_rows = args.num_rows,
      .max_rows = kernel.max_rows,
      .num_groups = num_groups,
      .row_bytes = args.num_columns() * (args.is_out_bf16 ? 2 : 4),
  };
  run_matmul(
      pool, size, args.out,
      [&args, &kernel](int64_t begin, int64_t end) {
        kernel.pack_rows(args, row_floats.reserve<float>(args.num_inputs + 16), begin, end);
      },
      [&args, &kernel](int64_t rows, int64_t begin, int64_t end) {
        kernel.multiply(args, rows, begin, end);
      });
}

// Shapes and dtypes are checked by the Python wrappers when the program is traced.
ffi::Error int8_linear(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::Buffer<ffi::U8> w,
                       ffi::Buffer<ffi::F32> w_scale, ffi::Buffer<ffi::S32> num_rows, int64_t layer,
                       int64_t rotation, bool is_silu, ffi::Result<ffi::AnyBuffer> out) {
  const int64_t num_tokens = x.dimensions()[0];
  const int64_t num_groups = w.dimensions()[w.dimensions().size() - 4];  // of one layer of [L, ...]
  Int8MatmulArgs args;
  args.num_rows = num_rows.typed_data()[0];
  if (ffi::Error fault = check_num_rows(args.num_rows, num_tokens); fault.failure()) return fault;
  args.x = x.untyped_data();
  args.out = out->untyped_data();
  args.num_inputs = x.dimensions()[1];
  args.num_outputs = out->dimensions()[1] * (is_silu ? 2 : 1);
  args.rotation = rotation;
  args.is_x_bf16 = x.element_type() == ffi::BF16;
  args.is_out_bf16 = out->element_type() == ffi::BF16;
  args.is_silu = is_silu;
  const int64_t num_packed_outputs = num_groups * kInt8Group;
  args.w = static_cast<const uint32_t*>(w.untyped_data()) + layer * num_packed_outputs * args.num_words();
  args.w_scale = w_scale.typed_data() + layer * num_packed_outputs;
  run(pool, select_kernel(), args, num_tokens, num_groups);
  return ffi::Error::Success();
}

// Rows [R, K] in order of their experts, each run of them by the weights of its own: one matmul for
// every expert that has rows, none for the others.
ffi::Error int8_experts(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::Buffer<ffi::U8> w,
                        ffi::Buffer<ffi::F32> w_scale, ffi::Buffer<ffi::S32> sizes, int64_t rotation,
                        ffi::Result<ffi::Buffer<ffi::F32>> out) {
  const int64_t num_experts = w.dimensions()[0], num_groups = w.dimensions()[1];
  const int64_t num_rows = x.dimensions()[0], num_outputs = out->dimensions()[1];
  int64_t num_in_use = 0;
  for (int64_t expert = 0; expert < num_experts; ++expert) {
    const int64_t size = sizes.typed_data()[expert];
    if (ffi::Error fault = check_num_rows(size, num_rows - num_in_use); fault.failure()) return fault;
    num_in_use += size;
  }
  const int64_t num_packed_outputs = num_groups * kInt8Group;
  Int8MatmulArgs args;
  args.num_inputs = x.dimensions()[1];
  args.num_outputs = num_outputs;
  args.rotation = rotation;
  args.is_x_bf16 = x.element_type() == ffi::BF16;
  args.is_out_bf16 = false;
  args.is_silu = false;
  const Int8MatmulKernel& kernel = select_kernel();
  const int64_t x_row_bytes = args.num_inputs * (args.is_x_bf16 ? 2 : 4);
  int64_t row = 0;
  for (int64_t expert = 0; expert < num_experts; ++expert) {
    args.num_rows = sizes.typed_data()[expert];
    if (args.num_rows == 0) continue;
    args.x = static_cast<const char*>(x.untyped_data()) + row * x_row_bytes;
    args.out = out->typed_data() + row * num_outputs;
    args.w = static_cast<const uint32_t*>(w.untyped_data()) + expert * num_packed_outputs * args.num_words();
    args.w_scale = w_scale.typed_data() + expert * num_packed_outputs;
    run(pool, kernel, args, args.num_rows, num_groups);
    row += args.num_rows;
  }
  const int64_t num_zeros = (num_rows - row) * num_outputs;
  std::memset(out->typed_data() + row * num_outputs, 0, static_cast<size_t>(num_zeros) * sizeof(float));
  return ffi::Error::Success();
}

}  // namespace
}  // namespace systole

#pragma GCC visibility push(default)
XLA_FFI_DEFINE_HANDLER_SYMBOL(systole_int8_linear, systole::int8_linear,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::U8>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Attr<int64_t>("layer")
                                  .Attr<int64_t>("rotation")
                                  .Attr<bool>("is_silu")
                                  .Ret<ffi::AnyBuffer>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(systole_int8_experts, systole::int8_experts,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::U8>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Attr<int64_t>("rotation")
                                  .Ret<ffi::Buffer<ffi::F32>>());
#pragma GCC visibility pop
