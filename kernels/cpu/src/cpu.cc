// Finds the machine's instruction set. Tests and benches may choose a lesser one.

#include "cpu.h"

#include <atomic>
#include <cstring>

namespace systole {
namespace {

constexpr const char* kNames[] = {"generic", "avx2", "avx512", "avx512_vnni", "avx512_bf16"};

InstructionSet detect() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") &&
                          __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                          __builtin_cpu_supports("avx512vl");
  const bool has_vnni = has_avx512 && __builtin_cpu_supports("avx512vnni");
  if (has_vnni && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_is("amd")) {
    return InstructionSet::kAvx512Bf16;
  }
  if (has_vnni) return InstructionSet::kAvx512Vnni;
  if (has_avx512) return InstructionSet::kAvx512;
  if (has_avx2) return InstructionSet::kAvx2;
#endif
  return InstructionSet::kGeneric;
}

std::atomic<InstructionSet>& current() {
  static std::atomic<InstructionSet> value{detect()};
  return value;
}

}  // namespace

InstructionSet instruction_set() { return current().load(std::memory_order_relaxed); }

}  // namespace systole

#pragma GCC visibility push(default)
extern "C" const char* systole_instruction_set() {
  return systole::kNames[static_cast<int>(systole::instruction_set())];
}

// Returns whether the machine runs `name`, and uses it from the next call on if so.
extern "C" bool systole_use_instruction_set(const char* name) {
  for (int i = 0; i <= static_cast<int>(systole::detect()); ++i) {
    if (std::strcmp(name, systole::kNames[i]) != 0) continue;
    systole::current().store(static_cast<systole::InstructionSet>(i), std::memory_order_relaxed);
    return true;
  }
  return false;
}
#pragma GCC visibility pop
