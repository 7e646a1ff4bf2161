// The functions of step.h for AVX2.
#define NAME(function) function##_avx2
#include "step.h"
