// How the matmuls split over threads: first the rows in use, in equal blocks that are packed, then
// the groups of outputs. Nothing splits over inputs, so no sum depends on the number of threads.
#ifndef SYSTOLE_MATMUL_SCHEDULE_H_
#define SYSTOLE_MATMUL_SCHEDULE_H_

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>

#include "team.h"

namespace systole {

constexpr int64_t kChunksPerThread = 8;  // at least where there are as many groups, for balance
constexpr int64_t kMaxRun = 16;          // groups per chunk
constexpr int64_t kZeroBytes = 1 << 16;  // of padding rows zeroed per chunk

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Memory that grows as needed and is kept for the next call; aligned to 64 bytes.
class Scratch {
 public:
  Scratch() = default;
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() { std::free(data_); }

  template <typename T>
  T* reserve(int64_t count) {
    const int64_t bytes = ceil_div(count * static_cast<int64_t>(sizeof(T)), 64) * 64;
    if (bytes > bytes_) {
      std::free(data_);
      data_ = std::aligned_alloc(64, static_cast<size_t>(bytes));
      if (data_ == nullptr) std::abort();
      bytes_ = bytes;
    }
    return static_cast<T*>(data_);
  }

 private:
  void* data_ = nullptr;
  int64_t bytes_ = 0;
};

struct MatmulSize {
  int64_t num_tokens;  // rows of the output
  int64_t num_rows;    // of these, in use; the others become zeros
  int64_t max_rows;    // of a block
  int64_t num_groups;  // of outputs
  int64_t row_bytes;   // of a row of the output
};

// The fault of a call of which `num_rows` rows are in use, if there is one.
inline xla::ffi::Error check_num_rows(int64_t num_rows, int64_t num_tokens) {
  if (num_rows >= 0 && num_rows <= num_tokens) return xla::ffi::Error::Success();
  return xla::ffi::Error::InvalidArgument("num_rows must lie in [0, " + std::to_string(num_tokens) + "], got " +
                                          std::to_string(num_rows));
}

// Calls pack(begin, end) once per block of rows, then multiply(rows_per_block, begin, end) for runs
// of groups, and zeroes the output's rows that are not in use.
template <typename Pack, typename Multiply>
void run_matmul(xla::ffi::ThreadPool pool, const MatmulSize& size, void* out, const Pack& pack,
                const Multiply& multiply) {
  // Padding rows are zeros: cheap, and whatever reads them stays finite.
  const int64_t zeros_begin = size.num_rows * size.row_bytes;
  const int64_t zeros_end = size.num_tokens * size.row_bytes;
  if (size.num_rows == 0) {
    std::memset(out, 0, static_cast<size_t>(zeros_end));
    return;
  }
  const int64_t num_blocks = ceil_div(size.num_rows, size.max_rows);
  const int64_t rows = ceil_div(size.num_rows, num_blocks);  // 16 rows are 8 + 8, not 12 + 4
  const int64_t num_threads =
      std::min<int64_t>(std::max<int64_t>(pool.num_threads(), 1), size.num_groups);
  const int64_t run =
      std::clamp<int64_t>(size.num_groups / (num_threads * kChunksPerThread), 1, kMaxRun);
  const int64_t num_zero_chunks = ceil_div(zeros_end - zeros_begin, kZeroBytes);
  run_stages(
      pool, num_threads - 1, static_cast<int32_t>(ceil_div(size.num_rows, rows)),
      [&](int32_t i) { pack(i * rows, std::min((i + 1) * rows, size.num_rows)); },
      static_cast<int32_t>(num_zero_chunks + ceil_div(size.num_groups, run)), [&](int32_t i) {
        if (i < num_zero_chunks) {
          const int64_t begin = zeros_begin + i * kZeroBytes;
          std::memset(static_cast<char*>(out) + begin, 0,
                      static_cast<size_t>(std::min(kZeroBytes, zeros_end - begin)));
          return;
        }
        const int64_t begin = (i - num_zero_chunks) * run;
        multiply(rows, begin, std::min(begin + run, size.num_groups));
      },
      /*is_contiguous=*/true);
}

}  // namespace systole

#endif  // SYSTOLE_MATMUL_SCHEDULE_H_
