"""A plugin of pytest (`make sanitizers`): C++ kernels with the sanitizers of addresses and undefined behaviour.

Such a library has a name of its own in the cache; what the sanitizers find ends the tests.

Their libraries must be loaded before Python's own: LD_PRELOAD of the make target.
"""

from kernels.cpu import build

SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-g", "-O1")

build.FLAGS = (*build.FLAGS, *SANITIZERS)  # the library's name depends on them
