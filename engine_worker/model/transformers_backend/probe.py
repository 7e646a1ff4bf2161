"""Find a model's attention calls by running it once without weights, and refuse unsupported behavior by name.

Models are judged by what they do, not by their type. Each layer must call attention once, causally, over its own keys,
without mask, bias or sink. Positions must be inputs, and nothing else may carry state between tokens.
"""

import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from engine_worker.model.specs.attention import AttentionSpec, RopeSpec
from engine_worker.model.transformers_backend.library import ModelNotServed, in_short
from engine_worker.model.transformers_backend.split import split_head

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

_NUM_TOKENS = 4
# Options without effect here, because positions are applied before. Windows and softcaps are score rules.
_HARMLESS = {"scaling", "dropout", "position_ids", "is_causal", "use_cache", "logits_to_keep"}
_RULES = {"sliding_window", "softcap"}
_LAYER_TYPES = {"full_attention", "sliding_attention"}  # the second one by its window
# Frequencies depend on the longest sequence of a batch, so cached keys would become stale.
_ROPES_OF_THE_BATCH = {"dynamic", "longrope"}


@dataclass(frozen=True)
class AttentionCall:
    """One call of attention as a model made it."""

    module: nn.Module
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    has_mask: bool
    options: dict[str, Any]


@dataclass(frozen=True)
class Probed:
    """The attention of a model, by layer."""

    modules: tuple[nn.Module, ...]  # one per layer
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    attentions: tuple[AttentionSpec, ...]  # of each layer


def probe(model: "PreTrainedModel") -> Probed:
    """Run the model and return its attention.

    Raises:
        ModelNotServed: With the first unsupported property.
    """
    config = model.config.get_text_config()
    refuse(chain(_reasons_of_config(config), _reasons_of_modules(model)))
    with _recorded_calls(model) as calls:
        decoder, head = split_head(model)
        tokens = torch.zeros(1, _NUM_TOKENS, dtype=torch.int64, device="meta")
        hidden = _run(lambda: decoder(input_ids=tokens, position_ids=tokens, use_cache=False).last_hidden_state)
        refuse(_reasons_of_calls(calls, config))
        logits = _run(lambda: head(hidden[:, :2]))
    if len(calls) != config.num_hidden_layers or logits.shape[1] != 2:
        raise ModelNotServed("through transformers: its head needs more than its decoder's last hidden states")
    first = calls[0]
    modules = tuple(call.module for call in calls)
    attentions = tuple(_attention_spec(call, config) for call in calls)
    return Probed(modules, first.num_heads, first.num_kv_heads, first.head_dim, int(logits.shape[-1]), attentions)


def refuse(reasons: Iterator[str]) -> None:
    """Raise ModelNotServed with the first reason, if any."""
    if (reason := next(reasons, None)) is not None:
        raise ModelNotServed(f"through transformers: {reason}")


@contextmanager
def _recorded_calls(model: "PreTrainedModel") -> Iterator[list[AttentionCall]]:
    """Record all attention calls in the context, of any module."""
    calls: list[AttentionCall] = []

    def record(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> Tensor:
        shapes = query.shape[1], key.shape[1], key.shape[3], value.shape[3]
        calls.append(AttentionCall(module, *shapes, mask is not None, options))
        return query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])

    modules = list(model.modules())
    for module in modules:
        module.paged_attention = partial(record, module)
    try:
        yield calls
    finally:
        for module in modules:
            del module.paged_attention


@torch.inference_mode()
def _run(compute: Callable[[], Tensor]) -> Tensor:
    try:
        return compute()
    except Exception as error:  # any error of the model's code, which might also occur in a step
        raise ModelNotServed(
            f"through transformers: the model does not run without weights ({in_short(error)})"
        ) from error


def _reasons_of_config(config: "PreTrainedConfig") -> Iterator[str]:
    if kinds := sorted(set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES):
        yield f"config.json: layer_types has {kinds[0]!r}; supported: full_attention and sliding_attention"
    if getattr(config, "is_encoder_decoder", False) or getattr(config, "add_cross_attention", False):
        yield "it attends to an encoder's output"
    if ropes := sorted(_rope_types(config) & _ROPES_OF_THE_BATCH):
        yield f"config.json: rope type {ropes[0]!r} changes its frequencies as a sequence grows"
    if not isinstance(getattr(config, "max_position_embeddings", None), int):
        yield "config.json has no max_position_embeddings"


def _reasons_of_modules(model: "PreTrainedModel") -> Iterator[str]:
    if getattr(model, "_is_stateful", False):
        yield f"{type(model).__name__} keeps state besides keys and values"
    for name, module in model.named_modules():
        if "Experts" in type(module).__name__:
            yield f"{name}: mixture-of-experts layers are not supported"
        if isinstance(module, (nn.Conv1d, nn.Conv2d, nn.RNNBase)):
            yield f"{name} is a {type(module).__name__}, which sees other tokens"
        if kept := [key for key, value in vars(module).items() if isinstance(value, Tensor)]:
            yield f"{name or type(module).__name__} keeps {kept[0]}, neither a parameter nor a buffer"
    if "position_ids" not in inspect.signature(split_head(model)[0].forward).parameters:
        yield "it takes no position_ids, so its positions cannot be set"


def _reasons_of_calls(calls: list[AttentionCall], config: "PreTrainedConfig") -> Iterator[str]:
    num_layers = config.num_hidden_layers
    if not calls:
        yield "its layers compute attention themselves, or with a bias such as ALiBi, so it cannot be replaced"
    if len(calls) != num_layers or max(Counter(id(call.module) for call in calls).values()) > 1:
        yield f"it calls attention {len(calls)} times for {num_layers} layers; supported: once per layer"
    for index, call in enumerate(calls):
        yield from (f"layer {index}: {reason}" for reason in _reasons_of_call(call, config))
    if len({(call.num_heads, call.num_kv_heads, call.head_dim) for call in calls}) > 1:
        yield "its layers have different numbers or sizes of heads"


def _reasons_of_call(call: AttentionCall, config: "PreTrainedConfig") -> Iterator[str]:
    options = call.options
    if getattr(call.module, "is_causal", True) is False or options.get("is_causal") is False:
        yield "tokens attend to those after them"
    if call.has_mask:
        yield "it makes its own mask"
    if call.value_dim != call.head_dim:
        yield f"keys have {call.head_dim} elements and values {call.value_dim}"
    if call.num_heads % call.num_kv_heads:
        yield f"{call.num_heads} heads cannot share {call.num_kv_heads} key/value heads"
    for name, value in options.items():
        if name not in _HARMLESS | _RULES and not name.startswith("output_") and value is not None:
            yield f"attention with {name} is not supported"


def _attention_spec(call: AttentionCall, config: "PreTrainedConfig") -> AttentionSpec:
    """Return the layer's attention; the model applies its own rotation."""
    options, scale = call.options, call.options.get("scaling")
    window = options.get("sliding_window") or 0
    return AttentionSpec(
        num_heads=call.num_heads,
        num_kv_heads=call.num_kv_heads,
        head_dim=call.head_dim,
        scale=call.head_dim**-0.5 if scale is None else float(scale),
        rope=RopeSpec(dim=0),
        window=window if window < config.max_position_embeddings else 0,
        softcap=float(options.get("softcap") or 0.0),
    )


def _rope_types(config: "PreTrainedConfig") -> set[str]:
    """Return the types in rope_parameters, which is one mapping or one per layer type."""
    parameters = getattr(config, "rope_parameters", None) or {}
    each = [parameters, *(value for value in parameters.values() if isinstance(value, dict))]
    return {str(rope.get("rope_type")) for rope in each}
