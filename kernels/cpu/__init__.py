"""Kernels of x86 processors in C++, one shared library with a C interface: how it is built, found and called.

csrc/NAME.cpp runs on every x86; csrc/NAME_avx2.cpp and csrc/NAME_avx512.cpp have the same functions for one instruction
set each, and are called only where the processor has it. It is used from a worker's start on. Nothing here knows a
model or a request.
"""
