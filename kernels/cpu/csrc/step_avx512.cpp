// The functions of step.h for AVX-512.
#define NAME(function) function##_avx512
#include "step.h"
