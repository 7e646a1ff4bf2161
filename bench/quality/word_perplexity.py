"""Measure each format's quality by lm-eval's word perplexity: `make quality`.

    python -m bench word-perplexity --out FILE [--model DIR] [--formats A,B] [--keep FOLDER]

Wikipedia articles are scored by lm-eval: `local-completions` through our own server, which echoes token ids with
log-probabilities, and `hf` through transformers with the same weights. The result has each word perplexity, its change
against our bfloat16 and transformers', its standard deviation over texts, and the share of equal top tokens. A change
below its deviation is none. --keep reuses earlier results. A CPU takes minutes per format; other load does no harm.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.provenance import provenance
from bench.quality.comparison import Scored, change, deviation_of_change, same_likeliest
from bench.quality.text import write_articles
from bench.serving.own_server import own_server
from pagestream.demo_model import ensure_demo_model

PYTHON = Path(sys.prefix) / "peers" / "quality" / "bin" / "python"
HERE = Path(__file__).parent
PEER, TASK = HERE / "lm_eval_peer.py", HERE / "articles.yaml"
BASE, BASE_OF_TRANSFORMERS = "bfloat16", "transformers bfloat16"
_SERVED_ON_A_CPU = ("--dtype", "auto")  # alone, these compute in float32 there with a bfloat16 KV cache
FORMATS: dict[str, list[str]] = {
    BASE: ["--quantization", "none"],
    "as-stored": ["--quantization", "as-stored", *_SERVED_ON_A_CPU],
    "as-stored and float32 KV": ["--quantization", "as-stored", *_SERVED_ON_A_CPU, "--kv-cache-dtype", "float32"],
    "int4": ["--quantization", "int4", *_SERVED_ON_A_CPU],
    "int8": ["--quantization", "int8", *_SERVED_ON_A_CPU],
    "fp8 KV": ["--quantization", "none", "--kv-cache-dtype", "fp8"],
    "fp8": ["--quantization", "fp8"],
    "fp8 and fp8 KV": ["--quantization", "fp8", "--kv-cache-dtype", "fp8"],
    "float32": ["--quantization", "none", "--dtype", "float32"],
}
REFERENCES = {BASE_OF_TRANSFORMERS: "bfloat16", "transformers float32": "float32"}
WINDOW = 1022  # tokens scored together; lm-eval uses two less than the max_length it is given for a server
# Half a window per step, so that keys and values are read from the cache as in serving.
SERVED = ["--max-num-batched-tokens", "512", "--max-model-len", "2048", "--kv-cache-memory-bytes", "512M"]
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OPENAI_API_KEY": "unused"}


def main(argv: list[str]) -> int:
    options = _parser().parse_args(argv)
    if not PYTHON.exists():
        print(f"{PYTHON} does not exist; run `make quality`", file=sys.stderr)
        return 2
    model = options.model or ensure_demo_model(lambda phase, progress, detail: None)
    answers: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="ps-") as folder:
        work = options.keep or Path(folder)
        work.mkdir(parents=True, exist_ok=True)
        shutil.copy(TASK, work)
        if not (articles := work / "articles.jsonl").exists():
            write_articles(PYTHON, articles, options.num_words)
        for name in options.formats:
            answers[name] = _answer_of(name, model, work, options)
            print(f"{name}: {answers[name]['word_perplexity']:.4f}", flush=True)
    result = {**provenance(["word-perplexity", *argv]), **described(model, answers), "formats": rows(answers)}
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(table(result["formats"]))
    return 0


def described(model: Path, answers: dict[str, dict[str, Any]]) -> dict[str, Any]:
    some = next(iter(answers.values()))
    tokens = Scored.of(some).tokens
    return {"model": model.name, "words": some["words"], "tokens": tokens, "versions": some["versions"]}


def rows(answers: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    scored = {name: Scored.of(one) for name, one in answers.items()}
    made = []
    for name, one in scored.items():
        row: dict[str, Any] = {"format": name, "word_perplexity": round(one.word_perplexity, 4)}
        for key, base in (("to_bfloat16", BASE), ("to_transformers_bfloat16", BASE_OF_TRANSFORMERS)):
            if base in scored:
                row[key] = round(change(one, scored[base]), 5)
                row[f"{key}_deviation"] = round(deviation_of_change(one, scored[base]), 5)
        if BASE in scored:
            row["same_likeliest"] = round(same_likeliest(one, scored[BASE]), 4)
        made.append(row)
    return made


def table(made: list[dict[str, Any]]) -> str:
    lines = [f"{'format':24}{'perplexity':>11}{'to bfloat16':>19}{'to transformers':>19}{'same likeliest':>16}"]
    for row in made:
        changes = "".join(
            f"{row[key]:>+10.2%} ±{row[f'{key}_deviation']:>6.2%}" if key in row else f"{'-':>18}"
            for key in ("to_bfloat16", "to_transformers_bfloat16")
        )
        same = f"{row['same_likeliest']:>15.1%}" if "same_likeliest" in row else f"{'-':>15}"
        lines.append(f"{row['format']:24}{row['word_perplexity']:>11.4f}{changes} {same}")
    return "\n".join(lines)


def _answer_of(name: str, model: Path, work: Path, options: argparse.Namespace) -> dict[str, Any]:
    out = work / f"{name.replace(' ', '_')}.json"
    if not out.exists():
        (_ask_transformers if name in REFERENCES else _ask_ours)(name, model, work, out, options.device)
    answers: dict[str, Any] = json.loads(out.read_text())
    return answers


def _ask_transformers(name: str, model: Path, work: Path, out: Path, device: str) -> None:
    arguments = f"pretrained={model},dtype={REFERENCES[name]},softmax_dtype=float32,max_length={WINDOW}"
    _evaluate(work, out, "hf", f"{arguments},device={device}")


def _ask_ours(name: str, model: Path, work: Path, out: Path, device: str) -> None:
    flags = [*SERVED, "--device", device, "--dtype", BASE, *FORMATS[name]]
    with own_server(model, "m", flags) as server:
        arguments = f"model=m,base_url={server.url}/v1/completions,tokenizer={model},tokenizer_backend=huggingface"
        _evaluate(work, out, "local-completions", f"{arguments},max_length={WINDOW + 2},timeout=1800")


def _evaluate(work: Path, out: Path, kind: str, arguments: str) -> None:
    partial = out.with_suffix(".partial")
    command = [str(PYTHON), str(PEER), str(partial.resolve()), kind, arguments]
    log = out.with_suffix(".log")
    with log.open("wb") as file:
        done = subprocess.run(
            command, cwd=work, env={**os.environ, **OFFLINE}, stdout=file, stderr=subprocess.STDOUT, check=False
        )
    if done.returncode:
        raise SystemExit(f"lm-eval ended with status {done.returncode}:\n{log.read_text(errors='replace')[-3000:]}")
    partial.rename(out)


def _formats(text: str) -> list[str]:
    names = text.split(",")
    known = [*REFERENCES, *FORMATS]
    if unknown := [name for name in names if name not in known]:
        raise argparse.ArgumentTypeError(f"unknown formats: {', '.join(unknown)}; allowed: {', '.join(known)}")
    return names


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench word-perplexity", description=__doc__.splitlines()[0])
    parser.add_argument("--model", metavar="PATH", type=Path)
    parser.add_argument("--formats", metavar="NAME,NAME,...", type=_formats, default=[*REFERENCES, *FORMATS])
    parser.add_argument("--keep", metavar="PATH", type=Path)
    parser.add_argument("--num-words", metavar="N", type=int, default=20_000)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--out", metavar="PATH", type=Path)
    return parser
