"""Mixtures of experts on a CPU: the choice, uneven loads, stacked tensors, and a dense model as equal experts."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine_worker.model.checkpoint import check_checkpoint, stored_tensors
from engine_worker.model.implementation import blueprint_from_directory
from engine_worker.model.linear import ExpertsLoad, RouterWeights
from engine_worker.model.quantization import linear_method
from engine_worker.model.quantization.dense_cpu import combined
from engine_worker.model.quantization.router_values import router_of
from engine_worker.model.spec import ModelSpec
from engine_worker.model.specs.experts import ExpertsSpec, RouterSpec, Scoring
from engine_worker.model.specs.mlp import GateKind, GateSpec
from engine_worker.model.specs.names import ExpertNames
from engine_worker.model.specs.part import Part
from engine_worker.model.weight_format import DENSE, INT8, ONLINE, WeightFormat
from engine_worker.model.weights import RandomWeights
from kernels.moe.choice import choose
from shared.model_files import ModelFilesError
from tests.builders import make_request
from tests.engine_worker.execution.reference import TINY, make_engine, make_runner, run_engine_to_end
from tests.engine_worker.model.families import prompts, write_family
from tests.engine_worker.model.family_cases import Case

HIDDEN, INNER, EXPERTS = 32, 16, 5
STACKED = ExpertNames(gate_up=("mlp.experts.gate_up_proj",), down="mlp.experts.down_proj")


class Given(RandomWeights):
    """A source of given tensors."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        super().__init__(torch.device("cpu"), torch.float32)
        self._tensors = tensors

    def get(
        self, name: str, shape: tuple[int, ...], part: Part | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        assert self._tensors[name].shape == shape, name
        return self._tensors[name]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))) * 0.3


def make_tensors(router: Tensor) -> dict[str, Tensor]:
    """Return stacked tensors, gate rows first, with biases."""
    return {
        "mlp.gate.weight": router,
        "mlp.experts.gate_up_proj": random(EXPERTS, 2 * INNER, HIDDEN),
        "mlp.experts.down_proj": random(EXPERTS, HIDDEN, INNER),
        "mlp.experts.gate_up_proj_bias": random(EXPERTS, 2 * INNER),
        "mlp.experts.down_proj_bias": random(EXPERTS, HIDDEN),
    }


def separated(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return one tensor per expert and linear layer."""
    separate = {"mlp.gate.weight": tensors["mlp.gate.weight"]}
    for expert in range(EXPERTS):
        gates, ups = tensors["mlp.experts.gate_up_proj"][expert].chunk(2)
        weights = {"gate": gates, "up": ups, "down": tensors["mlp.experts.down_proj"][expert]}
        separate |= {f"mlp.experts.{expert}.{name}_proj.weight": weight for name, weight in weights.items()}
    return separate


def apply(
    spec: ExpertsSpec,
    tensors: dict[str, Tensor],
    x: Tensor,
    names: ExpertNames = STACKED,
    stored: WeightFormat = DENSE,
) -> Tensor:
    router = RouterWeights(tensors["mlp.gate.weight"], None, None)
    load = ExpertsLoad(spec=spec, router=router, names=names, prefix="", hidden=HIDDEN, has_down_bias=spec.bias)
    return linear_method(stored, "cpu").experts(load, Given(tensors))(x)


def expected(spec: ExpertsSpec, tensors: dict[str, Tensor], x: Tensor) -> Tensor:
    """Return every expert's outputs in float64, weighted by zero if it was not chosen."""
    ids, weights = choose(x @ tensors["mlp.gate.weight"].T, router_of(spec.router))
    of_all = torch.zeros(len(x), EXPERTS, dtype=torch.float64).scatter_(1, ids, weights.double())
    total = torch.zeros_like(x, dtype=torch.float64)
    for expert in spec.experts:
        gate_up, down = (tensors[name][expert].double() for name in (*STACKED.gate_up, STACKED.down))
        inner = x.double() @ gate_up.T
        if spec.bias:
            inner += tensors["mlp.experts.gate_up_proj_bias"][expert].double()
        gate, (gates, ups) = spec.gate, inner.chunk(2, dim=-1)
        assert gate is not None
        if gate.limit:
            gates, ups = gates.clamp(max=gate.limit), ups.clamp(-gate.limit, gate.limit)
        outputs = gates * torch.sigmoid(gate.alpha * gates) * (ups + gate.up_offset) @ down.T
        if spec.bias:
            outputs += tensors["mlp.experts.down_proj_bias"][expert].double()
        total += of_all[:, expert, None] * outputs
    return total


def router_spec(top_k: int = 2, **changes: Any) -> RouterSpec:
    return RouterSpec(num_experts=EXPERTS, top_k=top_k, **changes)


@pytest.mark.parametrize("top_k", [1, 2, EXPERTS])
@pytest.mark.parametrize("num_tokens", [0, 1, 40])
def test_experts_of_uneven_load_match_float64(top_k: int, num_tokens: int) -> None:
    router = random(EXPERTS, HIDDEN)
    x = random(num_tokens, HIDDEN)
    x[:, 0] = 3.0
    router[:, 0] = torch.tensor([-9.0, 2.0, 0.0, 4.0, 1.0])  # expert 0 is idle unless all are chosen
    spec, tensors = ExpertsSpec(router=router_spec(top_k), inner=INNER), make_tensors(router)
    torch.testing.assert_close(apply(spec, tensors, x).double(), expected(spec, tensors, x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_forms_of_stacked_tensors_give_one_result(interleaved: bool, transposed: bool) -> None:
    gate = GateSpec(alpha=1.702, limit=0.5, up_offset=1.0)
    plain = ExpertsSpec(router=router_spec(bias=False), inner=INNER, bias=True, gate=gate)
    tensors, x = make_tensors(random(EXPERTS, HIDDEN)), random(7, HIDDEN)
    stored = dict(tensors)
    if interleaved:
        for name in ("mlp.experts.gate_up_proj", "mlp.experts.gate_up_proj_bias"):
            gates, ups = tensors[name].chunk(2, dim=1)
            stored[name] = torch.stack((gates, ups), dim=2).flatten(1, 2)
    if transposed:
        stored |= {name: stored[name].mT.contiguous() for name in (*STACKED.gate_up, STACKED.down)}
    spec = ExpertsSpec(
        router=plain.router, inner=INNER, bias=True, gate=gate, interleaved=interleaved, transposed=transposed
    )
    found = apply(spec, stored, x)
    assert torch.equal(found, apply(plain, tensors, x))
    torch.testing.assert_close(found.double(), expected(plain, tensors, x), rtol=1e-4, atol=1e-5)


def test_separate_tensors_equal_stacked_ones() -> None:
    spec, tensors = ExpertsSpec(router=router_spec(), inner=INNER), make_tensors(random(EXPERTS, HIDDEN))
    x = random(9, HIDDEN)
    assert torch.equal(apply(spec, separated(tensors), x, ExpertNames()), apply(spec, tensors, x))


@pytest.mark.parametrize("stored", [INT8, ONLINE])
def test_quantized_experts_stay_near_the_exact_ones(stored: WeightFormat) -> None:
    """A quantized router would choose other experts."""
    spec, tensors = ExpertsSpec(router=router_spec(), inner=32), make_tensors(random(EXPERTS, HIDDEN))
    tensors |= {STACKED.gate_up[0]: random(EXPERTS, 64, HIDDEN), STACKED.down: random(EXPERTS, HIDDEN, 32)}
    x = random(200, HIDDEN)
    exact = expected(spec, tensors, x)
    found = apply(spec, separated(tensors), x, ExpertNames(), stored)
    assert (found - exact).abs().max() < 0.1 * exact.abs().max()


def test_owned_experts_of_two_ranks_add_up() -> None:
    tensors, x = make_tensors(random(EXPERTS, HIDDEN)), random(9, HIDDEN)
    parts = []
    for owned in ((0, 2), (2, EXPERTS)):
        mine = {name: t if name == "mlp.gate.weight" else t[slice(*owned)] for name, t in tensors.items()}
        spec = ExpertsSpec(router=router_spec(), inner=INNER, bias=True, owned=owned)
        parts.append(apply(spec, mine, x))
    whole = ExpertsSpec(router=router_spec(), inner=INNER, bias=True)
    torch.testing.assert_close(sum(parts), apply(whole, tensors, x))


def test_equal_scores_choose_the_lower_experts() -> None:
    ids, weights = choose(torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0]]), router_of(router_spec(renormalize=True)))
    assert ids.tolist() == [[1, 2]] and weights.tolist() == [[0.5, 0.5]]


def test_softmax_weights_are_renormalized_and_scaled() -> None:
    logits = random(4, EXPERTS)
    ids, plain = choose(logits, router_of(router_spec()))
    assert torch.equal(plain, logits.softmax(-1).gather(-1, ids))
    _, chosen = choose(logits, router_of(router_spec(scoring=Scoring.SOFTMAX_OF_CHOSEN, scale=2.5)))
    torch.testing.assert_close(chosen, logits.gather(-1, ids).softmax(-1) * 2.5)


def test_correction_bias_changes_the_choice_only() -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0, -1.0]])
    correction = torch.tensor([-9.0, 0.0, 0.0, 0.0, 9.0])
    ids, weights = choose(logits, router_of(router_spec(scoring=Scoring.SIGMOID)), correction)
    assert ids.tolist() == [[1, 4]]
    assert torch.equal(weights, logits.sigmoid()[:, [1, 4]])


def test_experts_come_from_the_best_groups() -> None:
    router = RouterSpec(num_experts=6, top_k=2, scoring=Scoring.SIGMOID, num_groups=3, num_chosen_groups=1)
    ids, _ = choose(torch.tensor([[5.0, -5.0, 2.0, 2.0, 1.0, 1.0]]), router_of(router))
    assert ids.tolist() == [[2, 3]]  # the best single expert is in a group with a lower sum


def test_gelu_gates_match_torch() -> None:
    gate_up = random(3, 2 * INNER)
    gates, ups = gate_up.chunk(2, dim=-1)
    found = combined(gate_up, GateSpec(kind=GateKind.GELU_TANH))
    torch.testing.assert_close(found, F.gelu(gates, approximate="tanh") * ups)


def copy_as_experts(dense: Path, directory: Path, num_experts: int, top_k: int) -> Path:
    """Write a dense Qwen3 model with each MLP copied into equal experts, and a random router."""
    directory.mkdir()
    tensors = {}
    for name, tensor in load_file(dense / "model.safetensors").items():
        if ".mlp." not in name:
            tensors[name] = tensor
            continue
        layer, module = name.split(".mlp.")
        tensors |= {f"{layer}.mlp.experts.{expert}.{module}": tensor.clone() for expert in range(num_experts)}
        tensors[f"{layer}.mlp.gate.weight"] = random(num_experts, int(TINY["hidden_size"]))
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    config = json.loads((dense / "config.json").read_text())
    experts = {"num_experts": num_experts, "num_experts_per_tok": top_k, "norm_topk_prob": True}
    config |= {"model_type": "qwen3_moe", "moe_intermediate_size": config["intermediate_size"], **experts}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def greedy(directory: Path) -> dict[str, list[int]]:
    engine = make_engine(make_runner(directory, num_blocks=64), max_num_seqs=8, max_num_batched_tokens=64)
    requests = [
        make_request(prompt, f"p{index}", max_tokens=20, ignore_eos=True) for index, prompt in enumerate(prompts(300))
    ]
    transcript = run_engine_to_end(engine, requests)
    return {request.request_id: transcript.choice(request.request_id, 0) for request in requests}


@pytest.mark.parametrize("top_k", [1, 3])
def test_equal_experts_give_the_tokens_of_the_dense_model(top_k: int, tmp_path: Path) -> None:
    dense = write_family(tmp_path / "dense", Case("qwen3"))
    mixed = copy_as_experts(dense, tmp_path / "mixed", 4, top_k)
    assert greedy(mixed) == greedy(dense)


def test_missing_expert_is_named_before_weights_are_read(tmp_path: Path) -> None:
    mixed = copy_as_experts(write_family(tmp_path / "dense", Case("qwen3")), tmp_path / "mixed", 4, 2)
    spec, found = blueprint_from_directory(mixed).shape, stored_tensors(mixed)
    del found["model.layers.2.mlp.experts.3.up_proj.weight"]
    assert isinstance(spec, ModelSpec)
    with pytest.raises(ModelFilesError, match=r"have no model\.layers\.2\.mlp\.experts\.3\.up_proj\.weight"):
        check_checkpoint(spec, found)


def test_layer_that_predicts_further_tokens_is_not_read(tmp_path: Path) -> None:
    changes = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    directory = write_family(tmp_path, Case("glm4_moe", changes))
    expected = greedy(directory)
    tensors = load_file(directory / "model.safetensors")
    tensors |= {"model.layers.3.enorm.weight": torch.ones(3), "model.layers.3.mlp.gate.weight": torch.ones(3, 3)}
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    spec = blueprint_from_directory(directory).shape
    assert isinstance(spec, ModelSpec) and spec.num_layers == 3
    check_checkpoint(spec, stored_tensors(directory))
    assert greedy(directory) == expected


def test_more_experts_per_token_than_experts_are_refused(tmp_path: Path) -> None:
    mixed = copy_as_experts(write_family(tmp_path / "dense", Case("qwen3")), tmp_path / "mixed", 4, 5)
    with pytest.raises(ValueError, match=r"num_experts_per_tok must be 1 to 4 \(num_experts\), not 5"):
        blueprint_from_directory(mixed)
