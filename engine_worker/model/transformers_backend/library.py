"""The package `transformers`, imported when a model needs it and refused where it would mislead.

    skeleton(config) -> a causal model of its own classes, on the meta device: a shape without weights

Its classes are looked up by config.json's model type in its own tables, which no model can add code to. Knows nothing
of attention but the name under which ours is registered. It is used once, at a worker's start.
"""

from collections.abc import Mapping
from importlib import metadata
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ATTENTION = "pagestream"  # in config._attn_implementation


class ModelNotServed(ValueError):
    """transformers may know this model, but it cannot be served here; the message says why."""


def refuse_foreign_kernels() -> None:
    """transformers takes whatever package is called `kernels` for one that fetches code (ADR 0008)."""
    try:
        version = metadata.version("kernels")
    except metadata.PackageNotFoundError:
        return
    raise ModelNotServed(
        f"the package kernels {version} is installed beside pagestream, whose own package has this name: "
        "`pip uninstall kernels`, then install pagestream again"
    )


def require_library(model_type: object) -> None:
    refuse_foreign_kernels()
    if find_spec("transformers") is None:
        raise ModelNotServed(
            f"config.json: model_type {model_type!r} has no implementation of its own here and would run through the "
            "package transformers, which is not installed: `pip install 'pagestream[transformers]'`"
        )


def skeleton(config: Mapping[str, Any]) -> "PreTrainedModel":
    """Raises ModelNotServed for what transformers does not know, or will not make of this config.json."""
    model_type = config.get("model_type")
    require_library(model_type)
    from transformers import AttentionInterface  # noqa: PLC0415 - takes seconds
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # noqa: PLC0415
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING  # noqa: PLC0415

    from engine_worker.model.transformers_backend.attention import paged_attention  # noqa: PLC0415

    if model_type not in CONFIG_MAPPING or CONFIG_MAPPING[model_type] not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelNotServed(
            f"config.json: model_type {model_type!r} is no causal language model of transformers "
            f"{metadata.version('transformers')}; code that comes with a model is never run"
        )
    AttentionInterface.register(ATTENTION, paged_attention)
    try:
        known = CONFIG_MAPPING[model_type].from_dict(dict(config))
        with torch.device("meta"):
            model = MODEL_FOR_CAUSAL_LM_MAPPING[type(known)]._from_config(known, attn_implementation=ATTENTION)
    except Exception as error:  # of any model's code
        why = f"transformers makes no {model_type} of config.json: {in_short(error)}"
        if isinstance(error, KeyError) and error.args == (ATTENTION,):  # it has a table of its own
            why = f"through transformers: {model_type} computes attention by itself; there is nothing to exchange"
        raise ModelNotServed(why) from error
    # Nothing is padded here; some models look for padding in every step's tokens, which makes the host wait.
    model.config.get_text_config().pad_token_id = None
    return model.eval()


def in_short(error: Exception) -> str:
    """Its kind and its first line."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
