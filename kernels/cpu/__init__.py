"""C++ kernels for x86 processors in one shared library with a C interface: build, load and call.

csrc/NAME.cpp runs on every x86. csrc/NAME_avx2.cpp and csrc/NAME_avx512.cpp contain the same functions for one
instruction set and are called only on a processor that has it.
"""
