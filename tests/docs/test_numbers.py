"""Numbers that pages quote are the code's, and the table of flags in docs/operations.md has the programs' defaults.

A number is found by the words around it: whoever changes a page's sentence changes its line here, and sees that it is
held. `module:NAME` is where the code has it.
"""

import re
from dataclasses import MISSING, Field
from importlib import import_module
from typing import Any

import pytest

from shared.settings import options
from tests.docs.facts import ROOT, SETTINGS

NUMBERS = [
    ("operations.md", r"One answer holds at most ([\d,]+) values", "gateway.requests.planning:MAX_VALUES", 1),
    ("operations.md", r"beyond ([\d,]+) pieces", "gateway.fair_pool:MAX_WAITING", 1),
    ("operations.md", r"or (\d+) MiB of it the key", "gateway.fair_pool:MAX_WAITING_BYTES", 2**20),
    ("operations.md", r"first ([\d,]+) plain tokens", "gateway.store.acceptance:RESERVED_TOKENS", 1),
    ("operations.md", r"A key has at most ([\d,]+) batches", "gateway.batches.batch_store:MAX_BATCHES_PER_KEY", 1),
    ("operations.md", r"of the (\d+) batches that a gateway drives", "gateway.batches.service:MAX_DRIVEN", 1),
    ("operations.md", r"one short result a line, then (\d+) MiB", "gateway.batches.results:STEP_BYTES", 2**20),
    ("operations.md", r"has to wait for (\d+) s or longer", "gateway.batches.line_answers:PARK_SECONDS", 1),
    ("operations.md", r"a batch is tried again every (\d+) s", "gateway.batches.service:RETRY_SECONDS", 1),
    ("operations.md", r"memory is (\d+) % full", "gateway.store.store_probe:CLOSE_AT_RATIO", 0.01),
    ("operations.md", r"until it is under (\d+) %", "gateway.store.store_probe:REOPEN_AT_RATIO", 0.01),
    ("operations.md", r"`detach_seconds` \(at least (\d+) s\)", "gateway.answers.retention:MIN_GRACE_SECONDS", 1),
    ("operations.md", r"one that is not kept after (\d+) s", "shared.new_requests:GRACE_SECONDS", 1),
    ("operations.md", r"heartbeats are missed (\d+) times",
     "engine_worker.transport.reaper:MISSED_TICKS_UNTIL_DEAD", 1),
    ("operations.md", r"`--dead-after` \((\d+) s\)", "engine_worker.transport.token_publisher:SELF_FENCE_SECONDS", 1),
    ("operations.md", r"worker is gone for more than (\d+) s", "gateway.admission:STALE_AFTER_SECONDS", 1),
    ("operations.md", r"but at least (\w+), may be open", "gateway.auth.rate_limits:MIN_OTHER_PLACES", 1),
    ("operations.md", r"read again within (\w+) seconds", "gateway.auth.access:RELOAD_SECONDS", 1),
    ("operations.md", r"which (\w+) gateways were killed in a row", "gateway.batches.driver:MAX_STRIKES", 1),
    ("operations.md", r"after (\w+) crashes without a new token", "shared.redis_scripts:MAX_STRIKES", 1),
    ("operations.md", r"keeps an ended request for (\w+) minutes", "shared.new_requests:RETAINED_SECONDS", 60),
    ("clients.md", r"`expires_after` may be (\d+) s", "gateway.routes.files:MIN_EXPIRY_SECONDS", 1),
    ("clients.md", r"sum a conversation up, in ([\d,]+) tokens",
     "gateway.requests.responses_schema:MAX_SUMMARY_TOKENS", 1),
    ("clients.md", r"more than (\d+) is refused, as vLLM", "shared.messages:MAX_LOGPROBS", 1),
    ("structured-output.md", r"A grammar has (\d+) KiB at most", "shared.grammars:MAX_GRAMMAR_BYTES", 2**10),
    ("reliability.md", r"not ready after (\d+) s without a step", "gateway.admission:STALLED_AFTER_SECONDS", 1),
    ("reliability.md", r"their patience ends after ([\d.]+) s", "engine_worker.transport.patience:PATIENCE_SECONDS", 1),
    ("reliability.md", r"admission closes at (\d+) %", "gateway.store.store_probe:CLOSE_AT_RATIO", 0.01),
    ("reliability.md", r"taken over after (\d+) missed beats",
     "engine_worker.transport.reaper:MISSED_TICKS_UNTIL_DEAD", 1),
    ("quickstart.md", r"downloads the demo model \((\d+) MB", "pagestream.demo_model:WHEEL_BYTES", 10**6),
]  # fmt: skip
WORDS = {"two": 2, "three": 3, "eight": 8, "ten": 10}


def told(text: str, pattern: str) -> set[float]:
    """Every number that the pattern finds, as the page says it."""
    found = {match for match in re.findall(pattern, " ".join(text.split())) if match}
    return {float(WORDS.get(number, number.replace(",", ""))) for number in found}


def value(where: str) -> float:
    module, name = where.split(":")
    return float(getattr(import_module(module), name))


@pytest.mark.parametrize(("page", "pattern", "where", "unit"), NUMBERS, ids=lambda part: str(part)[:40])
def test_a_quoted_number_is_the_codes(page: str, pattern: str, where: str, unit: float) -> None:
    (number,) = told((ROOT / "docs" / page).read_text(), pattern)
    assert number == round(value(where) / unit, 1 if unit == 1 else 0), where


def test_a_planted_number_is_found() -> None:
    assert told("One answer holds at most 524,287\nvalues: no", NUMBERS[0][1]) == {524_287.0} != {value(NUMBERS[0][2])}


def shown_default(field: Field[Any]) -> set[str]:
    """Every way in which the table may show it; `yes` where the flag is there and its default is told in words."""
    default = field.default
    if default is MISSING:
        return {"needed"}
    if default in (None, "", ()):
        return {"yes", "none", '`""`', "–", "`demo`", "or a file"}
    if isinstance(default, bool):
        return {f"`{str(default).lower()}`"}
    powers = {"M": 20, "G": 30} if isinstance(default, int) else {}
    return {f"`{default}`", *(f"`{default / 2**power:g}{unit}`" for unit, power in powers.items())}


def wrong_defaults(table: str) -> list[str]:
    """`flag | serve | gateway | worker | what`: a dash where the program has no such flag."""
    known = {program: {f.name.replace("_", "-"): f for f in options(kind)} for program, kind in SETTINGS.items()}
    found = []
    for flag, *cells in re.findall(r"(?m)^\| `--([\w-]+)`[^|]*\| ([^|]+) \| ([^|]+) \| ([^|]+) \|", table):
        for program, cell in zip(known, cells, strict=True):
            field = known[program].get(flag)
            if (field is None and cell != "–") or (field is not None and cell not in shown_default(field)):
                found.append(f"--{flag} of {program}: {cell}")
    return found


def test_the_table_of_flags_has_the_programs_defaults() -> None:
    text = (ROOT / "docs" / "operations.md").read_text()
    assert wrong_defaults(text) == []


def test_a_planted_default_is_found() -> None:
    row = "| `--max-num-queued-reqs` | – | `1000` | – | requests in the queue |\n| `--port` | – | `8000` | – | port |\n"
    assert wrong_defaults(row) == ["--max-num-queued-reqs of gateway: `1000`", "--port of serve: –"]
