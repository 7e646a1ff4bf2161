"""Run llama.cpp's server in the environment of `make peers`: PYTHON llama_cpp_peer.py FILE [--bf16 FILE] OPTIONS.

FILE is a GGUF file. With --bf16, its BF16 twin is served, and created first if missing. When it serves, it prints one
line of JSON with its address and versions. It ends when standard input closes, so it never outlives its parent. It runs
under another Python and imports nothing of this repository.
"""

import argparse
import json
import sys
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

_BF16_FILE = 32  # llama.h: LLAMA_FTYPE_MOSTLY_BF16


def main() -> None:
    options = _parser().parse_args()
    if options.bf16 is not None and not options.bf16.exists():
        write_bf16(options.file, options.bf16)
    server = _server(options)
    versions = {name: version(name) for name in ("xllamacpp", "gguf")}
    print(json.dumps({"url": server.listening_address, "versions": versions}), flush=True)
    sys.stdin.read()


def _server(options: argparse.Namespace) -> Any:
    """Start llama.cpp's HTTP server with separate cells per slot and without a prompt cache."""
    binding = import_module("xllamacpp")
    parameters = binding.CommonParams()
    parameters.model.path = str(options.bf16 or options.file)
    parameters.n_ctx = options.slots * options.slot_tokens
    parameters.n_parallel = options.slots
    parameters.kv_unified = False
    parameters.cache_ram_mib = 0
    parameters.n_gpu_layers = 0
    parameters.cpuparams.n_threads = options.threads
    parameters.cpuparams_batch.n_threads = options.threads
    parameters.ui = False
    parameters.hostnames = ["127.0.0.1"]
    parameters.port = 0
    return binding.Server(parameters)


def write_bf16(source: Path, target: Path) -> None:
    """Write the file with every matrix in BF16 and vectors unchanged; it appears complete."""
    gguf = import_module("gguf")
    reader = gguf.GGUFReader(source)
    partial = target.with_suffix(".partial")
    writer = gguf.GGUFWriter(partial, reader.get_field("general.architecture").contents())
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name not in ("general.architecture", "general.file_type"):
            kind = field.types[0]
            of_items = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), kind, sub_type=of_items)
    writer.add_file_type(_BF16_FILE)
    for tensor in reader.tensors:
        values, kind = tensor.data, tensor.tensor_type
        if len(tensor.shape) > 1:
            kind = gguf.GGMLQuantizationType.BF16
            values = gguf.quants.quantize(gguf.quants.dequantize(tensor.data, tensor.tensor_type), kind)
        writer.add_tensor(tensor.name, values, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.rename(target)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="llama.cpp's server")
    parser.add_argument("file", metavar="PATH", type=Path)
    parser.add_argument("--bf16", metavar="PATH", type=Path, default=None)
    parser.add_argument("--threads", metavar="N", type=int, required=True)
    parser.add_argument("--slots", metavar="N", type=int, required=True, help="concurrent sequences")
    parser.add_argument("--slot-tokens", metavar="N", type=int, required=True, help="maximum tokens per sequence")
    return parser


if __name__ == "__main__":
    main()
