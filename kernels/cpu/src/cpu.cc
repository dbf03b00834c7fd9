// Names the instruction set in use, for logs and benches.

#include "cpu.h"

extern "C" __attribute__((visibility("default"))) const char* systole_instruction_set() {
  switch (systole::instruction_set()) {
    case systole::InstructionSet::kAvx512: return "avx512";
    case systole::InstructionSet::kAvx2: return "avx2";
    case systole::InstructionSet::kGeneric: break;
  }
  return "generic";
}
