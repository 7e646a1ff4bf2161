"""Parts of a layer get their inputs quantized, plain, or both, as each of their linear layers reads them."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from engine_worker.model.linear import Input
from engine_worker.model.parts.experts import MixtureOfExperts
from engine_worker.model.parts.gated_delta import GatedDelta
from engine_worker.model.parts.mlp import GatedMlp
from kernels.scaled import Scaling, quantize_rows_reference

PLAIN = torch.randn(3, 8)
ROWS = replace(quantize_rows_reference(PLAIN), plain=PLAIN)


class RecordingLayer:
    """A linear layer, or experts, that keeps its input."""

    has_shared = False

    def __init__(self, scaling: Scaling) -> None:
        self.scaling, self.given = scaling, list[Input]()

    def __call__(self, x: Input) -> Tensor:
        self.given.append(x)
        return PLAIN.clone()

    def gated(self, x: Input, *_: Any) -> Tensor:
        return self(x)


@pytest.mark.parametrize(("of_gates", "expected"), [(Scaling.ROWS, ROWS), (Scaling.NONE, PLAIN)])
def test_gates_of_the_delta_rule_may_be_unquantized(of_gates: Scaling, expected: Input) -> None:
    enter, gates, leave = RecordingLayer(Scaling.ROWS), RecordingLayer(of_gates), RecordingLayer(Scaling.NONE)
    weights: Any = None
    mixer = GatedDelta(enter, gates, leave, weights, 0)
    step: Any = SimpleNamespace(recurrent=SimpleNamespace(gated_delta=lambda *_: PLAIN))
    mixer(step, ROWS)
    assert mixer.scaling is Scaling.ROWS and mixer.reads_plain == (of_gates is Scaling.NONE)
    assert enter.given == [ROWS] and gates.given[0] is expected


@pytest.mark.parametrize(("of_shared", "expected"), [(Scaling.ROWS, ROWS), (Scaling.NONE, PLAIN)])
def test_shared_expert_reads_what_the_routed_ones_read(of_shared: Scaling, expected: Input) -> None:
    experts, gate_up, gate = RecordingLayer(Scaling.ROWS), RecordingLayer(of_shared), torch.randn(8)
    spec: Any = None
    shared = GatedMlp(gate_up, RecordingLayer(Scaling.NONE), spec)
    mixture = MixtureOfExperts(experts, shared, gate, lambda rows: rows)
    outputs = mixture(ROWS)
    assert mixture.scaling is Scaling.ROWS and mixture.reads_plain
    assert experts.given == [ROWS] and gate_up.given[0] is expected
    assert torch.allclose(outputs, PLAIN * (1 + torch.sigmoid(PLAIN @ gate))[:, None]), "the gate reads plain rows"
