"""tokenizer.json and tokenizer_config.json from the vocabulary inside a GGUF file (byte-level BPE only)."""

from typing import Any

from gguf import GGUFReader, TokenType
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from engine_worker.gguf_config import ConversionError, field, required


def tokenizer(reader: GGUFReader) -> Tokenizer:
    kind = required(reader, "tokenizer.ggml.model")
    if kind != "gpt2":
        raise ConversionError(f"tokenizer {kind!r} is not supported; only byte-level BPE ('gpt2') is")
    tokens = required(reader, "tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in required(reader, "tokenizer.ggml.merges")]
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    result = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    result.pre_tokenizer = _pre_tokenizer(required(reader, "tokenizer.ggml.pre"))
    result.decoder = decoders.ByteLevel()
    types = required(reader, "tokenizer.ggml.token_type")
    result.add_special_tokens(_added(tokens, types, TokenType.CONTROL, special=True))
    result.add_tokens(_added(tokens, types, TokenType.USER_DEFINED, special=False))
    return result


def tokenizer_config(reader: GGUFReader) -> dict[str, Any]:
    tokens = required(reader, "tokenizer.ggml.tokens")
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": required(reader, "llama.context_length"),
        "add_bos_token": bool(field(reader, "tokenizer.ggml.add_bos_token", False)),
        "clean_up_tokenization_spaces": False,
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = field(reader, f"tokenizer.ggml.{key}_token_id")
        if token_id is not None:
            config[f"{name}_token"] = tokens[token_id]
    template = field(reader, "tokenizer.chat_template")
    if template is not None:
        config["chat_template"] = template
    return config


def _pre_tokenizer(name: str) -> pre_tokenizers.PreTokenizer:
    """How text is cut before merging. A wrong cut gives other ids than in training, so an unknown name is refused."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if name == "gpt-2":
        return byte_level
    if name == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    raise ConversionError(f"pre-tokenizer {name!r} is not supported; 'smollm' and 'gpt-2' are")


def _added(tokens: list[str], types: list[int], wanted: TokenType, *, special: bool) -> list[AddedToken]:
    pairs = zip(tokens, types, strict=True)
    return [AddedToken(token, special=special, normalized=False) for token, kind in pairs if kind == wanted]
