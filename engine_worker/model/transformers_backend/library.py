"""Import the package `transformers` on demand, and refuse models for which it would be wrong.

Classes are looked up in transformers' own tables, so code that comes with a model never runs.
"""

from collections.abc import Mapping
from importlib import metadata
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ATTENTION = "pagestream"  # value of config._attn_implementation


class ModelNotServed(ValueError):
    """The model cannot be served through transformers; the message gives the reason."""


def refuse_foreign_kernels() -> None:
    """Refuse a foreign package `kernels`, which transformers would use to fetch code (ADR 0008)."""
    try:
        version = metadata.version("kernels")
    except metadata.PackageNotFoundError:
        return
    raise ModelNotServed(
        f"the package kernels {version} conflicts with pagestream's package of this name: "
        "run `pip uninstall kernels`, then reinstall pagestream"
    )


def require_library(model_type: object) -> None:
    """Check that transformers is installed and safe to import."""
    refuse_foreign_kernels()
    if find_spec("transformers") is None:
        raise ModelNotServed(
            f"config.json: model_type {model_type!r} has no native implementation and needs the package transformers, "
            "which is not installed: run `pip install 'pagestream[transformers]'`"
        )


def skeleton(config: Mapping[str, Any]) -> "PreTrainedModel":
    """Return a causal model of transformers' own classes on the meta device, without weights.

    Raises:
        ModelNotServed: If transformers does not know the model or cannot make it from config.json.
    """
    model_type = config.get("model_type")
    require_library(model_type)
    from transformers import AttentionInterface  # noqa: PLC0415 - takes seconds
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # noqa: PLC0415
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING  # noqa: PLC0415

    from engine_worker.model.transformers_backend.attention import paged_attention  # noqa: PLC0415

    if model_type not in CONFIG_MAPPING or CONFIG_MAPPING[model_type] not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelNotServed(
            f"config.json: model_type {model_type!r} is not a causal language model of transformers "
            f"{metadata.version('transformers')}; code that comes with a model never runs"
        )
    AttentionInterface.register(ATTENTION, paged_attention)
    try:
        known = CONFIG_MAPPING[model_type].from_dict(dict(config))
        with torch.device("meta"):
            model = MODEL_FOR_CAUSAL_LM_MAPPING[type(known)]._from_config(known, attn_implementation=ATTENTION)
    except Exception as error:  # any error of the model's code
        why = f"transformers cannot make {model_type} from config.json: {in_short(error)}"
        if isinstance(error, KeyError) and error.args == (ATTENTION,):  # it has its own table
            why = f"through transformers: {model_type} computes attention itself, so it cannot be replaced"
        raise ModelNotServed(why) from error
    # Nothing is padded. Some models look for padding in every step's tokens, which makes the host wait.
    model.config.get_text_config().pad_token_id = None
    return model.eval()


def in_short(error: Exception) -> str:
    """Return the error's type and first line."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
