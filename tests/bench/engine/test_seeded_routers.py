"""Seeded routers: their values, and the distinct experts that `engine-cases --router` reports."""

import json
from pathlib import Path

import numpy as np
import pytest

from bench.engine.cases import main
from bench.engine.router_values import RouterValues
from tests.engine_worker.model.families import write_family
from tests.engine_worker.model.family_cases import Case

NUM_EXPERTS = 24
CASE = Case("qwen3_moe", {"num_experts": NUM_EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
                          "num_hidden_layers": 3, "mlp_only_layers": [1]})  # fmt: skip


@pytest.mark.parametrize("text", ["", "x", "-1", "1:normal", "1:zipf:2"])
def test_unknown_router_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected SEED or SEED:KIND .* uniform, zipf"):
        RouterValues.parse(text)


def test_router_values_depend_on_seed_and_layer_only() -> None:
    values = RouterValues.parse("7")
    assert values == RouterValues(7, "uniform")
    assert np.array_equal(values.weight(3, 8, 16), RouterValues(7).weight(3, 8, 16))
    assert not np.array_equal(values.weight(3, 8, 16), values.weight(4, 8, 16))


def test_zipf_routers_prefer_few_experts() -> None:
    x = np.random.default_rng(0).standard_normal((2000, 64), dtype=np.float32)
    largest = {}
    for kind in ("uniform", "zipf"):
        chosen = (x @ RouterValues(1, kind).weight(0, 64, 64).T).argmax(1)
        largest[kind] = np.bincount(chosen, minlength=64).max() / len(x)
    assert largest["uniform"] < 0.06 and largest["zipf"] > 0.2


@pytest.mark.usefixtures("garbage_as_before")
def test_distinct_experts_are_reported_by_layer(tmp_path: Path) -> None:
    model, trace = write_family(tmp_path / "model", CASE), tmp_path / "trace.json"
    trace.write_text(json.dumps([[9, 4]]))
    flags = ["--model", str(model), "--device", "cpu", "--load-format", "dummy", "--max-model-len", "128",
             "--kv-cache-memory-bytes", "8M", "--max-num-batched-tokens", "512"]  # fmt: skip
    found = {}
    for kind in ("uniform", "zipf"):
        options = ["--trace", str(trace), "--sections", "trace", "--repeats", "1", "--token-ids", "3:900"]
        command = [*options, "--router", f"3:{kind}", "--out", str(tmp_path), "--name", kind, "--", *flags]
        assert main(command) == 0
        rows = [json.loads(line) for line in (tmp_path / f"{kind}.jsonl").read_text().splitlines()]
        found[kind] = {row["rows"]: row["distinct_experts"] for row in rows if row["what"] == "distinct_experts"}
    assert [len(layers) for layers in found["uniform"].values()] == [2] * len(found["uniform"]), "two have experts"
    assert found["uniform"][1] == [2, 2]
    assert all(few <= many for few, many in zip(found["zipf"][32], found["uniform"][32], strict=True))
    assert max(found["uniform"][32]) <= NUM_EXPERTS


def test_seeded_router_of_a_dense_model_is_refused(tmp_path: Path) -> None:
    model, trace = write_family(tmp_path / "model", Case("llama")), tmp_path / "trace.json"
    trace.write_text(json.dumps([[9, 4]]))
    command = ["--trace", str(trace), "--router", "1", "--out", str(tmp_path), "--", "--model", str(model)]
    with pytest.raises(ValueError, match="no layer of model has experts"):
        main([*command, "--load-format", "dummy", "--device", "cpu"])
