// The instruction sets that kernels are compiled for, and the one in use.
#ifndef SYSTOLE_CPU_H_
#define SYSTOLE_CPU_H_

namespace systole {

// Each includes the ones before it. AVX-512 is F, BW, DQ and VL; VNNI multiplies bytes, BF16 pairs of
// bf16. BF16 counts only where it is the faster way: AMD's cores start VDPBF16PS every cycle (228
// GFLOP/s a core measured on Zen 4, against 115 for VFMADD), Intel's every second (90 against 185).
enum class InstructionSet { kGeneric, kAvx2, kAvx512, kAvx512Vnni, kAvx512Bf16 };

// The best that this machine runs, unless systole_use_instruction_set chose a lesser one.
InstructionSet instruction_set();

}  // namespace systole

#endif  // SYSTOLE_CPU_H_
