// What every source shares: how its functions are exported, and the numbers of instruction sets (library.py has them).
#pragma once

#define PAGESTREAM_EXPORT extern "C" __attribute__((visibility("default")))

enum InstructionSet { AVX2 = 1, AVX512_VNNI = 2 };
