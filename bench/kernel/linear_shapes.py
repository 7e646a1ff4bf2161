"""Shapes of the linear layers of well-known models, whole and split over GPUs."""

from dataclasses import dataclass

from engine_worker.model.sharding import padded_head_rows


@dataclass(frozen=True, slots=True)
class ModelSizes:
    hidden: int
    intermediate: int  # 0: no dense MLP, because the layers have experts
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab: int


MODELS = {
    "Qwen3-0.6B": ModelSizes(1024, 3072, 16, 8, 128, 151_936),
    "Qwen3-4B": ModelSizes(2560, 9728, 32, 8, 128, 151_936),
    "Qwen3-8B": ModelSizes(4096, 12_288, 32, 8, 128, 151_936),
    "Qwen3-32B": ModelSizes(5120, 25_600, 64, 8, 128, 151_936),
    "Llama-3.2-1B": ModelSizes(2048, 8192, 32, 8, 64, 128_256),
    "Llama-3.2-3B": ModelSizes(3072, 8192, 24, 8, 128, 128_256),
    "Llama-3.1-8B": ModelSizes(4096, 14_336, 32, 8, 128, 128_256),
    "Llama-3.1-70B": ModelSizes(8192, 28_672, 64, 8, 128, 128_256),
    "Mistral-24B": ModelSizes(5120, 32_768, 32, 8, 128, 131_072),
    "Phi-4": ModelSizes(5120, 17_920, 40, 10, 128, 100_352),
    "gpt-oss-20b": ModelSizes(2880, 0, 64, 8, 64, 201_088),
}
ON_TWO_GPUS = ("Qwen3-8B", "Qwen3-32B", "Llama-3.1-8B", "Llama-3.1-70B")

Shape = tuple[int, int, bool]  # outputs (gated: of gate and up each), inputs, is gated


def linear_shapes_of(model: ModelSizes, num_ranks: int = 1) -> dict[str, Shape]:
    """Return the linear layers of one of `num_ranks` GPUs by name."""
    query, inner = model.num_heads * model.head_dim // num_ranks, model.intermediate // num_ranks
    kv = max(1, model.num_kv_heads // num_ranks) * model.head_dim
    mlp = {"gate_up": (inner, model.hidden, True), "down": (model.hidden, inner, False)} if inner else {}
    return {
        "qkv": (query + 2 * kv, model.hidden, False),
        "o": (model.hidden, query, False),
        **mlp,
        "head": (padded_head_rows(model.vocab, num_ranks), model.hidden, False),
    }


def all_shapes() -> dict[Shape, list[str]]:
    """Return shape -> names such as `Phi-4 down`."""
    shapes: dict[Shape, list[str]] = {}
    for name, model in MODELS.items():
        for num_ranks in (1, 2) if name in ON_TWO_GPUS else (1,):
            for layer, shape in linear_shapes_of(model, num_ranks).items():
                shapes.setdefault(shape, []).append(f"{name} {layer}" + (" of 2 GPUs" if num_ranks == 2 else ""))
    return shapes
