"""A model's demands on attention, seen by running it once without weights; and those that are not served, by name.

    probe(model) -> Probed: which modules call attention, in the order of layers, and with which heads

Every model of transformers is held to the same questions, by what it does, not by what it is called: does each layer
call attention once, over its own keys, causally, with no mask, bias or sink? Are positions taken from outside? Does
nothing else carry something from token to token? Knows no weights. It is used once, at a worker's start, before its
weights are read.
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

from engine_worker.model.spec import AttentionSpec, RopeSpec
from engine_worker.model.transformers_backend.library import ModelNotServed, in_short
from engine_worker.model.transformers_backend.split import split_head

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

_NUM_TOKENS = 4
# Options that change nothing here: positions are applied before. A window and a cap are rules of scores.
_HARMLESS = {"scaling", "dropout", "position_ids", "is_causal", "use_cache", "logits_to_keep"}
_RULES = {"sliding_window", "softcap"}
_LAYER_TYPES = {"full_attention", "sliding_attention"}  # the second one by its window
# Their frequencies depend on the longest sequence of a batch, so cached keys would go stale.
_ROPES_OF_THE_BATCH = {"dynamic", "longrope"}


@dataclass(frozen=True)
class AttentionCall:
    module: nn.Module
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    has_mask: bool
    options: dict[str, Any]


@dataclass(frozen=True)
class Probed:
    modules: tuple[nn.Module, ...]  # one a layer
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    attentions: tuple[AttentionSpec, ...]  # of each layer


def probe(model: "PreTrainedModel") -> Probed:
    """Raises ModelNotServed with the first thing that this engine does not do."""
    config = model.config.get_text_config()
    refuse(chain(_reasons_of_config(config), _reasons_of_modules(model)))
    with _recorded_calls(model) as calls:
        decoder, head = split_head(model)
        tokens = torch.zeros(1, _NUM_TOKENS, dtype=torch.int64, device="meta")
        hidden = _run(lambda: decoder(input_ids=tokens, position_ids=tokens, use_cache=False).last_hidden_state)
        refuse(_reasons_of_calls(calls, config))
        logits = _run(lambda: head(hidden[:, :2]))
    if len(calls) != config.num_hidden_layers or logits.shape[1] != 2:
        raise ModelNotServed("through transformers: its head is no function of its decoder's last states alone")
    first = calls[0]
    modules = tuple(call.module for call in calls)
    attentions = tuple(_attention_spec(call, config) for call in calls)
    return Probed(modules, first.num_heads, first.num_kv_heads, first.head_dim, int(logits.shape[-1]), attentions)


def refuse(reasons: Iterator[str]) -> None:
    if (reason := next(reasons, None)) is not None:
        raise ModelNotServed(f"through transformers: {reason}")


@contextmanager
def _recorded_calls(model: "PreTrainedModel") -> Iterator[list[AttentionCall]]:
    """Record what attention is asked for meanwhile, whichever module asks."""
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
    except Exception as error:  # of any model's code: what it cannot do without weights it may do in each step
        raise ModelNotServed(f"through transformers: it does not run without weights ({in_short(error)})") from error


def _reasons_of_config(config: "PreTrainedConfig") -> Iterator[str]:
    if kinds := sorted(set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES):
        yield f"config.json: layer_types has {kinds[0]!r}; only full attention is served"
    if getattr(config, "is_encoder_decoder", False) or getattr(config, "add_cross_attention", False):
        yield "it attends to the output of an encoder"
    if ropes := sorted(_rope_types(config) & _ROPES_OF_THE_BATCH):
        yield f"config.json: rope type {ropes[0]!r} computes frequencies again as a sequence grows"
    if not isinstance(getattr(config, "max_position_embeddings", None), int):
        yield "config.json does not say how many positions it has (max_position_embeddings)"


def _reasons_of_modules(model: "PreTrainedModel") -> Iterator[str]:
    if getattr(model, "_is_stateful", False):
        yield f"{type(model).__name__} keeps a state beside keys and values"
    for name, module in model.named_modules():
        if "Experts" in type(module).__name__:
            yield f"{name}: layers of experts are not served"
        if isinstance(module, (nn.Conv1d, nn.Conv2d, nn.RNNBase)):
            yield f"{name} is a {type(module).__name__}, which sees other tokens"
        if kept := [key for key, value in vars(module).items() if isinstance(value, Tensor)]:
            yield f"{name or type(module).__name__} keeps {kept[0]} neither as a parameter nor as a buffer"
    if "position_ids" not in inspect.signature(split_head(model)[0].forward).parameters:
        yield "it takes no position_ids: its positions are those of a whole prompt"


def _reasons_of_calls(calls: list[AttentionCall], config: "PreTrainedConfig") -> Iterator[str]:
    num_layers = config.num_hidden_layers
    if not calls:
        yield "its layers compute attention by themselves, or with a bias such as ALiBi: there is nothing to exchange"
    if len(calls) != num_layers or max(Counter(id(call.module) for call in calls).values()) > 1:
        yield f"it calls attention {len(calls)} times for {num_layers} layers; only once a layer is served"
    for index, call in enumerate(calls):
        yield from (f"layer {index}: {reason}" for reason in _reasons_of_call(call, config))
    if len({(call.num_heads, call.num_kv_heads, call.head_dim) for call in calls}) > 1:
        yield "its layers have different numbers or sizes of heads"


def _reasons_of_call(call: AttentionCall, config: "PreTrainedConfig") -> Iterator[str]:
    options = call.options
    if getattr(call.module, "is_causal", True) is False or options.get("is_causal") is False:
        yield "tokens attend to those after them"
    if call.has_mask:
        yield "it makes a mask of its own"
    if call.value_dim != call.head_dim:
        yield f"keys of {call.head_dim} elements and values of {call.value_dim}"
    if call.num_heads % call.num_kv_heads:
        yield f"{call.num_heads} heads cannot share {call.num_kv_heads} key/value heads"
    for name, value in options.items():
        if name not in _HARMLESS | _RULES and not name.startswith("output_") and value is not None:
            yield f"attention with {name} is not supported"


def _attention_spec(call: AttentionCall, config: "PreTrainedConfig") -> AttentionSpec:
    """Its rotation is the model's own affair."""
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
    """rope_parameters is one mapping, or one for each type of layers."""
    parameters = getattr(config, "rope_parameters", None) or {}
    each = [parameters, *(value for value in parameters.values() if isinstance(value, dict))]
    return {str(rope.get("rope_type")) for rope in each}
