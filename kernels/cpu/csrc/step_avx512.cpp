// The functions of step.h for AVX512.
#define NAME(function) function##_avx512
#include "step.h"
