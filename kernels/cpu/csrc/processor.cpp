// Instruction sets that the processor has and the operating system saves. Compiled for every x86.
#include "processor.h"

PAGESTREAM_EXPORT int pagestream_has_instruction_set(int instruction_set) {
    __builtin_cpu_init();
    const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    if (instruction_set == AVX2) return has_avx2;
    if (instruction_set == AVX512_VNNI)
        return has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
               __builtin_cpu_supports("avx512vnni");
    return 0;
}
