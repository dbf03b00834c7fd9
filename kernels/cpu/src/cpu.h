// The instruction sets that kernels are compiled for, and the one in use.
#ifndef SYSTOLE_CPU_H_
#define SYSTOLE_CPU_H_

namespace systole {

// Each includes the ones before it. AVX-512 is F, BW, DQ and VL; VNNI multiplies bytes.
enum class InstructionSet { kGeneric, kAvx2, kAvx512, kAvx512Vnni };

// The best that this machine runs, unless systole_use_instruction_set chose a lesser one.
InstructionSet instruction_set();

}  // namespace systole

#endif  // SYSTOLE_CPU_H_
