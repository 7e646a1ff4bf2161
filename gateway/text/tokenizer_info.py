"""What is told of a model's tokenizer, in vLLM's shape: lm-eval takes special tokens and the chat template from it.

Of tokenizer_config.json those fields alone that say how text becomes tokens: others may hold paths of the machine on
which it was written. Pure.

`GET /tokenizer_info` answers with it. No chat comes by, and nothing here encodes.
"""

from collections.abc import Mapping
from typing import Any

from tokenizers import Tokenizer

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")
_MORE_TOKENS = ("cls_token", "sep_token", "mask_token")
_FLAGS = (
    "add_bos_token",
    "add_eos_token",
    "add_prefix_space",
    "clean_up_tokenization_spaces",
    "legacy",
    "spaces_between_special_tokens",
    "split_special_tokens",
    "use_default_system_prompt",
)
_WORDS = {"errors": ("strict", "ignore", "replace"), "padding_side": ("left", "right")}
_GENERIC_CLASS = "PreTrainedTokenizerFast"  # of transformers: reads any tokenizer.json


def tokenizer_info(config: Mapping[str, Any], tokenizer: Tokenizer, chat_template: str | None) -> dict[str, Any]:
    """`config`: of tokenizer_config.json, where anything may stand."""
    named = config.get("tokenizer_class")
    is_name = isinstance(named, str) and named.isidentifier()
    more = config.get("additional_special_tokens")
    added = tokenizer.get_added_tokens_decoder()
    info: dict[str, Any] = {"tokenizer_class": named if is_name else _GENERIC_CLASS}
    info |= {name: token_text(config.get(name)) for name in SPECIAL_TOKENS}  # null where there is none
    info |= {name: text for name in _MORE_TOKENS if (text := token_text(config.get(name))) is not None}
    if isinstance(more, list):
        info["additional_special_tokens"] = [text for token in more if (text := token_text(token)) is not None]
    info |= {name: config[name] for name in _FLAGS if isinstance(config.get(name), bool)}
    info |= {name: config[name] for name, words in _WORDS.items() if config.get(name) in words}
    longest = config.get("model_max_length")
    if isinstance(longest, int | float) and not isinstance(longest, bool) and 0 < longest < float("inf"):
        info["model_max_length"] = int(longest)
    info["added_tokens_decoder"] = {str(token_id): added[token_id].content for token_id in sorted(added)}
    return info | ({"chat_template": chat_template} if chat_template else {})


def token_text(token: Any) -> str | None:
    """Of a special token, which is written as its text or as an object that has it."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None
