// Shared by all sources: exported symbols and the values of instruction sets (as in library.py).
#pragma once

#define PAGESTREAM_EXPORT extern "C" __attribute__((visibility("default")))

enum InstructionSet { AVX2 = 1, AVX512_VNNI = 2 };
