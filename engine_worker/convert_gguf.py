"""Convert a GGUF file to a Hugging Face style model directory, without torch.

The directory gets config.json, generation_config.json, model.safetensors, the tokenizer, and stored_blocks.safetensors
if the file has quantized tensors, for CPUs. It is written under a temporary name and renamed, so it appears
complete or not at all. What cannot be converted faithfully is refused. engine_worker/gguf reads the contents.
"""

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine_worker.gguf.config import generation_config, model_config
from engine_worker.gguf.metadata import ConversionError, GgufFile, architecture_of
from engine_worker.gguf.mxfp4 import expert_tensors
from engine_worker.gguf.tokenizer import tokenizer, tokenizer_config
from engine_worker.gguf.weights import tensors_of
from engine_worker.gguf.writer import write_tensors
from engine_worker.model.architectures import gguf_family_of, spec_from_json

Report = Callable[[float, str], None]  # progress 0..1, current activity

_READ_SHARE = 0.4  # for the demo model: parsing the header's 98,052 strings takes a third of the time


def convert(source: Path, target: Path, report: Report) -> None:
    """Write the model in `source` to the directory `target`, which must be empty or missing.

    Raises:
        ValueError: If `target` is not empty, or the file cannot be converted faithfully.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConversionError(f"{target} already exists; remove it to convert again")

    def report_weights(share: float, detail: str) -> None:
        report(_READ_SHARE + share * (1 - _READ_SHARE), detail)

    report(0.0, f"reading {source.name}")
    if architecture := architecture_of(source):
        gguf_family_of(architecture)  # refuse unsupported families before the vocabulary is read, which takes seconds
    file = GgufFile(source)
    family = gguf_family_of(file.architecture)
    config = model_config(file, family)
    spec = spec_from_json(config, {})
    experts = expert_tensors(file, spec.num_layers) if family.has_mxfp4 else []
    apart = {each.name: [source.name for source in each.sources] for each in experts}
    tensors = tensors_of(file, spec, family, apart)
    target.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}.partial-"))
    try:
        work.chmod(0o755)  # mkdtemp makes 0700; the gateway may run as another user
        report(_READ_SHARE, "writing tokenizer")
        tokenizer(file, family).save(str(work / "tokenizer.json"))
        _write_json(work / "tokenizer_config.json", tokenizer_config(file))
        _write_json(work / "config.json", config)
        _write_json(work / "generation_config.json", generation_config(file, config))
        write_tensors(tensors, experts, config["torch_dtype"], work, report_weights)
        work.rename(target)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m engine_worker.convert_gguf", description=__doc__.split("\n")[0])
    parser.add_argument("source", type=Path, metavar="PATH", help="GGUF file")
    parser.add_argument("target", type=Path, metavar="PATH", help="model directory to write; must be empty or missing")
    args = parser.parse_args(argv)
    started = time.monotonic()

    def report(progress: float, detail: str) -> None:
        print(f"convert {progress:4.0%} {time.monotonic() - started:5.1f} s  {detail}", flush=True)

    try:
        convert(args.source, args.target, report)
    except (ValueError, OSError) as error:
        print(f"convert: {error}", file=sys.stderr)
        return 1
    report(1.0, f"wrote {args.target}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
