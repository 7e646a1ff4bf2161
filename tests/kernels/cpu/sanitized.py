"""Pytest plugin (`make sanitizers`): build the C++ kernels with the address and undefined-behavior sanitizers.

The library has its own name in the cache; a finding ends the tests. The sanitizers' runtimes must be loaded before
Python, by LD_PRELOAD in the make target.
"""

from kernels.cpu import build

SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-g", "-O1")

build.FLAGS = (*build.FLAGS, *SANITIZERS)  # part of the library's name
