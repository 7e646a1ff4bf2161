"""python -m engine_worker.convert_gguf SOURCE.gguf TARGET_DIR: from GGUF to a Hugging Face style model directory.

TARGET_DIR gets config.json, generation_config.json, model.safetensors, the tokenizer, and stored_blocks.safetensors
where the file has blocks that a CPU multiplies as they are; it appears whole or not at all (written beside it, then
renamed). Needs no torch, so it runs before anything else is set up. What cannot be converted faithfully is refused with
a ValueError. Knows the layout of the directory; engine_worker/gguf knows its contents. It runs at
the start of `serve`, as a process of its own.
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
from engine_worker.gguf.stored_blocks import write_stored_blocks
from engine_worker.gguf.tokenizer import tokenizer, tokenizer_config
from engine_worker.gguf.weights import tensors_of, write_safetensors
from engine_worker.model.architectures import gguf_family_of, spec_from_json

Report = Callable[[float, str], None]  # progress 0..1, what is being done

_READ_SHARE = 0.4  # of the whole time, for the demo model: parsing the header's 98,052 strings takes as long as a third


def convert(source: Path, target: Path, report: Report) -> None:
    """Write the model in `source` as directory `target`, which must not exist yet. Raises ValueError."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConversionError(f"{target} exists already; remove it to convert again")

    def report_weights(share: float, detail: str) -> None:
        report(_READ_SHARE + share * (1 - _READ_SHARE), detail)

    report(0.0, f"reading {source.name}")
    if architecture := architecture_of(source):
        gguf_family_of(architecture)  # what is not read from GGUF is refused before its vocabulary is read, for seconds
    file = GgufFile(source)
    family = gguf_family_of(file.architecture)
    config = model_config(file, family)
    tensors = tensors_of(file, spec_from_json(config, {}), family)
    target.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}.partial-"))
    try:
        work.chmod(0o755)  # mkdtemp makes 0700; a model directory may be read by another user's gateway
        report(_READ_SHARE, "writing tokenizer")
        tokenizer(file, family).save(str(work / "tokenizer.json"))
        _write_json(work / "tokenizer_config.json", tokenizer_config(file))
        _write_json(work / "config.json", config)
        _write_json(work / "generation_config.json", generation_config(file, config))
        write_safetensors(tensors, config["torch_dtype"], work / "model.safetensors", report_weights)
        write_stored_blocks(tensors, work)
        work.rename(target)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m engine_worker.convert_gguf", description=__doc__.split("\n")[0])
    parser.add_argument("source", type=Path, help="a .gguf file")
    parser.add_argument("target", type=Path, help="the directory to write; must not exist")
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
