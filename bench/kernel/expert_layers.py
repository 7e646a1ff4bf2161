"""Layers of experts for the checks and benchmarks: sizes of several models, random weights and routers."""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from kernels.fp8_kv import E4M3
from kernels.moe.activation import Activation, Gate, SquaredRelu, num_halves
from kernels.moe.experts import apply_experts
from kernels.moe.mxfp4 import Mxfp4Experts, pack_mxfp4
from kernels.moe.route import route
from kernels.moe.routing import Router, Routing
from kernels.moe.weights import ExpertProduct, ExpertWeight, Int4Experts, ScaledExperts
from kernels.scaled import GROUP

# fp8: blocks of 128 x 128; int4: groups of 128, or 32 for fewer inputs, awq: with zero points.
Format = Literal["bf16", "fp8", "mxfp4", "int4", "awq"]


@dataclass(frozen=True)
class ExpertModel:
    hidden: int
    inner: int
    router: Router
    activation: Activation
    format: Format
    has_bias: bool = False

    @property
    def bytes_per_expert(self) -> int:
        """Return the bytes of the weights of one expert."""
        values = (num_halves(self.activation) + 1) * self.hidden * self.inner
        of_int4 = values * 33 // 64
        sizes = {"bf16": values * 2, "fp8": values, "mxfp4": values * 17 // 32, "int4": of_int4, "awq": of_int4}
        return sizes[self.format]


_CLAMPED = Gate(alpha=1.702, limit=7.0, up_offset=1.0)
GPT_OSS = ExpertModel(
    2880, 2880, Router(num_experts=32, top_k=4, scoring="softmax_of_chosen"), _CLAMPED, "mxfp4", has_bias=True
)
QWEN3 = ExpertModel(2048, 768, Router(num_experts=128, top_k=8, renormalize=True), Gate(), "bf16")
QWEN3_FP8 = replace(QWEN3, format="fp8")
QWEN3_INT4 = replace(QWEN3, format="int4")
NEMOTRON3 = ExpertModel(
    2688, 1856, Router(num_experts=128, top_k=6, scoring="sigmoid", renormalize=True, scale=2.5), SquaredRelu(), "bf16"
)
QWEN35_MOE = ExpertModel(2048, 512, Router(num_experts=256, top_k=8, renormalize=True, shared="gated"), Gate(), "bf16")
MODELS = {
    "gpt-oss-20b mxfp4": GPT_OSS,
    "qwen3-30b-a3b bf16": QWEN3,
    "qwen3-30b-a3b fp8": QWEN3_FP8,
    "qwen3-30b-a3b int4": QWEN3_INT4,
    "nemotron-3-nano-30b-a3b bf16": NEMOTRON3,
    "qwen3.5-35b-a3b fp8": replace(QWEN35_MOE, format="fp8"),
}


@dataclass(frozen=True)
class ExpertLayer:
    model: ExpertModel
    router_weight: Tensor
    router_bias: Tensor | None
    first: ExpertProduct
    down: ExpertProduct

    def route(self, x: Tensor) -> Routing:
        return route(x, self.router_weight, self.model.router, self.router_bias)

    def apply(self, x: Tensor, routing: Routing) -> Tensor:
        return apply_experts(x, routing, self.first, self.down, self.model.activation)


def random_layer(model: ExpertModel, generator: torch.Generator) -> ExpertLayer:
    """Make a layer whose outputs have magnitudes near 1."""
    router, device = model.router, generator.device
    experts = router.num_experts + router.num_shared

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device=device, generator=generator)

    def product(num_outputs: int, num_inputs: int, halves: int) -> ExpertProduct:
        weight = _random_weight(model.format, (experts, halves * num_outputs, num_inputs), halves == 2, generator)
        return ExpertProduct(weight, random(experts, halves * num_outputs) if model.has_bias else None)

    return ExpertLayer(
        model,
        random(router.num_logits, model.hidden) * model.hidden**-0.5,
        random(router.num_experts) * 0.1 if model.has_bias else None,
        product(model.inner, model.hidden, num_halves(model.activation)),
        product(model.hidden, model.inner, 1),
    )


def _random_weight(
    format_: Format, shape: tuple[int, int, int], is_gated: bool, generator: torch.Generator
) -> ExpertWeight:
    experts, rows, inputs = shape
    device = generator.device
    if format_ == "bf16":
        weight = torch.randn(shape, dtype=torch.bfloat16, device=device, generator=generator)
        return weight.mul_(inputs**-0.5)
    if format_ == "fp8":
        exact = torch.randn(shape, dtype=torch.bfloat16, device=device, generator=generator).mul_(64)
        scales = torch.rand(experts, rows // GROUP, inputs // GROUP, device=device, generator=generator) + 0.5
        return ScaledExperts(exact.to(E4M3), scales * (inputs**-0.5 / 64))
    random = {"dtype": torch.uint8, "device": device, "generator": generator}
    if format_ in {"int4", "awq"}:
        group = 128 if inputs % 128 == 0 else 32
        values = torch.randint(256, (experts, rows, inputs // group, group // 2), **random)  # type: ignore[call-overload]
        of_groups = (experts, inputs // group, rows)
        scales = (torch.rand(of_groups, device=device, generator=generator) + 0.5) * (inputs**-0.5 / 4)
        zeros = torch.randint(16, of_groups, **random) if format_ == "awq" else None  # type: ignore[call-overload]
        return Int4Experts(values, scales.half(), zeros)
    blocks = torch.randint(256, (experts, rows, inputs // 32, 16), **random)  # type: ignore[call-overload]
    # Powers of two around 1 / sqrt(inputs) / 3, since e2m1 values have a root mean square of 2.9.
    center = 127 - round(torch.tensor(3.0 * inputs**0.5).log2().item())
    scales = torch.randint(center - 3, center + 2, (experts, rows, inputs // 32), **random)  # type: ignore[call-overload]
    packed: Mxfp4Experts = pack_mxfp4(blocks, scales, is_gated)
    return packed
