"""python -m engine_worker.convert_gguf SOURCE.gguf TARGET_DIR: from GGUF to a Hugging Face style model directory.

TARGET_DIR gets config.json, generation_config.json, model.safetensors (bf16) and the tokenizer; it appears whole or not
at all (written beside it, then renamed). Needs no torch, so it runs before anything else is set up. What cannot be
converted faithfully is refused with a ConversionError. Knows the layout of the directory; gguf_config, gguf_tokenizer
and gguf_weights know its contents.
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

from gguf import GGUFReader

from engine_worker.gguf_config import ConversionError, model_config
from engine_worker.gguf_tokenizer import tokenizer, tokenizer_config
from engine_worker.gguf_weights import write_safetensors

Report = Callable[[float, str], None]  # progress 0..1, what is being done

_READ_SHARE = 0.4  # of the whole time, for the demo model: parsing the header's 98,052 strings takes as long as a third


def convert(source: Path, target: Path, report: Report) -> None:
    """Write the model in `source` as directory `target`, which must not exist yet."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConversionError(f"{target} exists already; remove it to convert again")

    def report_weights(share: float, detail: str) -> None:
        report(_READ_SHARE + share * (1 - _READ_SHARE), detail)

    report(0.0, f"reading {source.name}")
    reader = _open(source)
    config = model_config(reader)
    target.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}.partial-"))
    try:
        work.chmod(0o755)  # mkdtemp makes 0700; a model directory may be read by another user's gateway
        report(_READ_SHARE, "writing tokenizer")
        tokenizer(reader).save(str(work / "tokenizer.json"))
        _write_json(work / "tokenizer_config.json", tokenizer_config(reader))
        _write_json(work / "config.json", config)
        _write_json(work / "generation_config.json", _generation_config(config))
        write_safetensors(reader, config, work / "model.safetensors", report_weights)
        work.rename(target)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise


def _open(source: Path) -> GGUFReader:
    try:
        return GGUFReader(source)
    except FileNotFoundError:
        raise ConversionError(f"{source} does not exist") from None
    except (ValueError, IndexError) as error:  # what gguf raises for a wrong magic, a wrong version, a file cut short
        raise ConversionError(f"{source} is not a readable GGUF file: {error}") from error


def _generation_config(config: dict[str, Any]) -> dict[str, Any]:
    keys = ("bos_token_id", "eos_token_id", "pad_token_id")
    return {key: config[key] for key in keys if key in config}


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m engine_worker.convert_gguf", description=__doc__.split("\n")[0])
    parser.add_argument("source", type=Path, help="a .gguf file of a Llama-architecture model")
    parser.add_argument("target", type=Path, help="the directory to write; must not exist")
    args = parser.parse_args(argv)
    started = time.monotonic()

    def report(progress: float, detail: str) -> None:
        print(f"convert {progress:4.0%} {time.monotonic() - started:5.1f} s  {detail}", flush=True)

    try:
        convert(args.source, args.target, report)
    except (ConversionError, OSError) as error:
        print(f"convert: {error}", file=sys.stderr)
        return 1
    report(1.0, f"wrote {args.target}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
