"""python -m bench summarize TOPIC: write bench/results/TOPIC.json, a summary of raw results.

    python -m bench summarize cpu --raw-commit 78dad4b cpu/engine_peers_zen4.json cpu/two_serves.json
    python -m bench summarize cpu --raw-commit 78dad4b run.json --append

Raw results stay out of the tree. They are read below bench/results in the working tree, or else from the commit that
holds them (`git show COMMIT:bench/results/FILE`), which the summary names.
"""

import argparse
import json
import re
import statistics
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
# Numbers that say which case a row is, where all others say what came out.
CASE_NUMBERS = {
    "batch", "prompt", "context", "concurrency", "rows", "bytes", "sequences", "block_size", "tokens", "outputs",
    "inputs", "hidden", "vocab", "ranks", "width", "temperature", "n", "layers", "rate", "attempt",
}  # fmt: skip
REPETITIONS = {"rep", "call", "seed"}
# What a run was made with. Commit and date of a record in a list are part of its case.
ORIGIN = {"command", "commit", "machine", "device", "gpu", "processor", "date", "started_at", "method", "note", "how"}
VERSIONS = {"python", "aiohttp", "torch", "triton", "transformers", "vllm", "xllamacpp", "gguf", "numpy", "cudnn"}
# Counts and times that no page quotes; the raw file has them.
LEFT_OUT = {
    "p90", "options", "failures", "failed_requests", "misses", "hostile_answers", "requests", "steps", "curves",
    "checks", "prompt_tokens", "output_tokens", "total_tokens_per_second", "events_per_token", "duration_seconds",
    "flops", "end_to_end_seconds", "time_per_output_token_seconds", "output_tokens_per_second", "scale", "kv_bytes",
    "max_model_len", "s", "out_tok_s", "total_tok_s", "mean_context",
}  # fmt: skip

MACHINE_PATH = re.compile(r"(?<=[ =])(?:/|~/|\.\w+/)[\w./-]+")  # in a command: where a model lay, where output went


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench summarize", description="Summarize raw results.")
    parser.add_argument("topic", metavar="TOPIC", help="name of the summary, such as cpu")
    parser.add_argument("files", metavar="FILE", nargs="+", help="raw results, as paths below bench/results")
    parser.add_argument("--raw-commit", metavar="COMMIT", required=True, help="commit that holds the raw files")
    parser.add_argument("--without", metavar="NAME", action="append", default=[], help="a field to leave out")
    parser.add_argument("--cases", metavar="REGEX", default="", help="keep only cases that match")
    parser.add_argument("--append", action="store_true", help="keep the sources that the summary has already")
    arguments = parser.parse_args(argv)
    path = RESULTS / f"{arguments.topic}.json"
    sources = json.loads(path.read_text())["sources"] if arguments.append else []
    sources = [source for source in sources if source["raw"] not in arguments.files]
    for name in arguments.files:
        source = summary_of(name, read_raw(name, arguments.raw_commit), frozenset(arguments.without))
        source = {"raw": name, "raw_commit": arguments.raw_commit} | source
        found = source["figures"].items()
        source["figures"] = {case: figures for case, figures in found if re.search(arguments.cases, case)}
        sources.append(source)
    path.write_text(_dumped({"topic": arguments.topic, "sources": sources}))
    return 0


def read_raw(name: str, commit: str) -> str:
    """Return a raw file of the working tree, or of `commit`."""
    if (RESULTS / name).exists():
        return (RESULTS / name).read_text()
    command = ["git", "show", f"{commit}:bench/results/{name}"]
    return subprocess.run(command, cwd=RESULTS.parent, capture_output=True, text=True, check=True).stdout


def summary_of(name: str, text: str, without: frozenset[str] = frozenset()) -> dict[str, Any]:
    """Return origin, versions, number of runs, and the median and spread of each figure of each case."""
    lines = name.endswith(".jsonl")
    document = [json.loads(line) for line in text.splitlines() if line.strip()] if lines else json.loads(text)
    collector = _Collector(LEFT_OUT | without)
    runs: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for case, measure, value in collector.figures(document, (), ""):
        runs[" ".join(case)][measure].append(value)
    shown: dict[str, Any] = {"raw": name}
    shown |= {key: "; ".join(sorted(values)) for key, values in sorted(collector.origin.items())}
    shown["versions"] = {key: ", ".join(sorted(values)) for key, values in sorted(collector.versions.items())}
    shown["runs"] = max((len(values) for case in runs.values() for values in case.values()), default=0)
    shown["figures"] = {case: {key: _spread(values) for key, values in found.items()} for case, found in runs.items()}
    return shown


class _Collector:
    """Collects the origin and versions of a document while it yields its figures."""

    def __init__(self, left_out: frozenset[str] | set[str]) -> None:
        self.origin: dict[str, set[str]] = defaultdict(set)
        self.versions: dict[str, set[str]] = defaultdict(set)
        self._left_out = left_out

    def figures(self, value: Any, case: tuple[str, ...], measure: str) -> Iterator[tuple[tuple[str, ...], str, float]]:
        """Yield (case, measure, number) of everything below `value`."""
        if isinstance(value, dict):
            case = (*case, *self._case_of(value))
            for key, item in value.items():
                yield from self._field(key, item, case, measure)
        elif isinstance(value, list):
            for item in value:
                made = [key for key in ("commit", "date") if isinstance(item, dict) and key in item]
                yield from self.figures(item, (*case, *(f"{key}={item[key]}" for key in made)), measure)
        elif _is_number(value):
            yield case, measure or "value", float(value)

    def _field(
        self, key: str, item: Any, case: tuple[str, ...], measure: str
    ) -> Iterator[tuple[tuple[str, ...], str, float]]:
        if key in self._left_out | REPETITIONS or (key in CASE_NUMBERS and _is_number(item)):
            return
        if isinstance(item, str):
            if key in ORIGIN | VERSIONS:
                (self.origin if key in ORIGIN else self.versions)[key].add(MACHINE_PATH.sub("PATH", item))
        elif isinstance(item, dict) and _has_records(item):
            yield from self.figures(item, (*case, key), "")
        elif isinstance(item, list) and item and isinstance(item[0], dict):
            yield from self.figures(item, case, "")
        else:
            yield from self.figures(item, case, f"{measure}.{key}" if measure else key)

    def _case_of(self, record: dict[str, Any]) -> tuple[str, ...]:
        left_out = ORIGIN | VERSIONS | REPETITIONS | self._left_out
        named = [(key, item) for key, item in record.items() if key not in left_out]
        named += list(record.get("load", {}).items()) if isinstance(record.get("load"), dict) else []
        return tuple(
            f"{key}={item}"
            for key, item in named
            if isinstance(item, str) or (key in CASE_NUMBERS and _is_number(item))
        )


def _is_number(item: Any) -> bool:
    return isinstance(item, int | float) and not isinstance(item, bool)


def _has_records(item: dict[str, Any]) -> bool:
    """Whether its keys are names of cases, not of measures: it holds dictionaries, or lists of them."""
    parts = [part[0] if isinstance(part, list) and part else part for part in item.values()]
    return any(isinstance(part, dict) for part in parts)


def _spread(values: list[float]) -> Any:
    """Return median, smallest and largest number, or the only number."""
    median, least, most = (float(f"{value:.5g}") for value in (statistics.median(values), min(values), max(values)))
    return _short(median) if least == most else {"median": _short(median), "spread": [_short(least), _short(most)]}


def _short(value: float) -> float:
    return int(value) if value.is_integer() and abs(value) < 2**53 else value


def _dumped(summary: dict[str, Any]) -> str:
    """One case per line, so that a change of a figure is a change of one line."""
    head = {key: value for key, value in summary.items() if key != "sources"}
    lines = [json.dumps(head)[:-1] + ', "sources": [']
    for number, source in enumerate(summary["sources"]):
        known = {key: value for key, value in source.items() if key != "figures"}
        lines.append((", " if number else "") + json.dumps(known)[:-1] + ', "figures": {')
        cases = [f"  {json.dumps(case)}: {json.dumps(found)}" for case, found in source["figures"].items()]
        lines.append(",\n".join(cases) + "}}")
    return "\n".join([*lines, "]}"]) + "\n"
