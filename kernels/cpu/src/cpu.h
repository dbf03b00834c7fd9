// The instruction sets that kernels are compiled for, and which of them this machine runs.
#ifndef SYSTOLE_CPU_H_
#define SYSTOLE_CPU_H_

namespace systole {

enum class InstructionSet { kGeneric, kAvx2, kAvx512 };

inline InstructionSet instruction_set() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") &&
                          __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                          __builtin_cpu_supports("avx512vl");
  if (has_avx512) return InstructionSet::kAvx512;
  if (has_avx2) return InstructionSet::kAvx2;
#endif
  return InstructionSet::kGeneric;
}

}  // namespace systole

#endif  // SYSTOLE_CPU_H_
