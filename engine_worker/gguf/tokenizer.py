"""Make tokenizer.json and tokenizer_config.json from the vocabulary in a GGUF file.

The model is `gpt2` (byte-level BPE with a list of merges) or `llama` (SentencePiece BPE, whose merges follow from its
scores). The pre-tokenizer is known only by name. A wrong one gives other ids than in training, so unknown names are
refused.
"""

from dataclasses import dataclass
from typing import Any

from gguf import TokenType
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from engine_worker.gguf.metadata import ConversionError, GgufFile
from engine_worker.gguf.sentence_piece import sentence_piece_tokenizer
from engine_worker.model.architectures.gguf_family import GgufFamily

_SPECIAL = frozenset({TokenType.CONTROL, TokenType.UNKNOWN})

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_SIGNS_AND_SPACES = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_THREE_DIGITS = _WORDS + r"\p{N}{1,3}" + _SIGNS_AND_SPACES
_ONE_DIGIT = _WORDS + r"\p{N}" + _SIGNS_AND_SPACES
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _cased_words(suffix: str, digits: str) -> str:
    """Return a pattern in which upper-case letters start a word and do not end one."""
    start = r"[^\r\n\p{L}\p{N}]?"
    words = f"{start}{_UPPER}*{_LOWER}+{suffix}|{start}{_UPPER}+{_LOWER}*{suffix}|{digits}"
    return words + r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True)
class PreTokenizer:
    """How text is split before merging.

    Attributes:
        pattern: Regular expression of a word; empty: GPT-2's.
        individual_digits: Split numbers into digits.
        ignore_merges: A word that is a token needs no merges.
        normalizes: Normalize to NFC.
        adds_bos: Default of `tokenizer.ggml.add_bos_token`.
    """

    pattern: str = ""
    individual_digits: bool = False
    ignore_merges: bool = False
    normalizes: bool = False
    adds_bos: bool = False


PRE_TOKENIZERS = {
    "gpt-2": PreTokenizer(),
    "smollm": PreTokenizer(individual_digits=True),
    "llama-bpe": PreTokenizer(_THREE_DIGITS, ignore_merges=True, adds_bos=True),
    "lfm2": PreTokenizer(_THREE_DIGITS, ignore_merges=True, adds_bos=True),
    "dbrx": PreTokenizer(_THREE_DIGITS),  # also Phi-4
    "qwen2": PreTokenizer(_ONE_DIGIT, normalizes=True),
    "deepseek-r1-qwen": PreTokenizer(_ONE_DIGIT, normalizes=True),
    "tekken": PreTokenizer(_cased_words("", r"\p{N}"), ignore_merges=True, adds_bos=True),
    "gpt-4o": PreTokenizer(_cased_words("(?i:'s|'t|'re|'ve|'m|'ll|'d)?", r"\p{N}{1,3}")),
}


def tokenizer(file: GgufFile, family: GgufFamily) -> Tokenizer:
    """Build the tokenizer of a GGUF file.

    Raises:
        ConversionError: If the tokenizer or its pre-tokenizer is not supported.
    """
    kind = file.required("tokenizer.ggml.model")
    keep_space: frozenset[str] | None = None
    if kind == "gpt2":
        result = _byte_level_tokenizer(file)
    elif kind == "llama":
        result, keep_space = sentence_piece_tokenizer(file), family.tokens_that_keep_space
    else:
        known = "'gpt2' (byte-level BPE) and 'llama' (SentencePiece)"
        raise ConversionError(f"tokenizer {kind!r} is not supported; supported: {known}")
    tokens, types = (file.required(f"tokenizer.ggml.{name}") for name in ("tokens", "token_type"))
    special = [token for token, type_ in zip(tokens, types, strict=True) if type_ in _SPECIAL]
    result.add_special_tokens([_added(token, keep_space is not None and token not in keep_space) for token in special])
    plain = [token for token, type_ in zip(tokens, types, strict=True) if type_ == TokenType.USER_DEFINED]
    result.add_tokens([AddedToken(token, normalized=False) for token in plain])
    if post_processor := _post_processor(file, tokens):
        result.post_processor = post_processor
    return result


def tokenizer_config(file: GgufFile) -> dict[str, Any]:
    """Return the tokenizer_config.json of a GGUF file."""
    tokens = file.required("tokenizer.ggml.tokens")
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": file.of_model_required("context_length"),
        "add_bos_token": _adds(file, "bos"),
        "clean_up_tokenization_spaces": False,
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = file.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is not None:
            config[f"{name}_token"] = tokens[token_id]
    template = file.get("tokenizer.chat_template")
    if template is not None:
        config["chat_template"] = template
    return config


def _added(token: str, swallows_space: bool) -> AddedToken:
    return AddedToken(token, special=True, normalized=False, rstrip=swallows_space)


def _byte_level_tokenizer(file: GgufFile) -> Tokenizer:
    pre = _pre_tokenizer(file)
    merges = [tuple(merge.split(" ")) for merge in file.required("tokenizer.ggml.merges")]
    vocabulary = {token: token_id for token_id, token in enumerate(file.required("tokenizer.ggml.tokens"))}
    result = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=pre.ignore_merges))
    if pre.normalizes:
        result.normalizer = normalizers.NFC()
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not pre.pattern)
    cuts: list[pre_tokenizers.PreTokenizer] = []
    if pre.individual_digits:
        cuts.append(pre_tokenizers.Digits(individual_digits=True))
    if pre.pattern:
        cuts.append(pre_tokenizers.Split(Regex(pre.pattern), behavior="isolated"))
    result.pre_tokenizer = pre_tokenizers.Sequence([*cuts, byte_level])
    result.decoder = decoders.ByteLevel()
    return result


def _pre_tokenizer(file: GgufFile) -> PreTokenizer:
    name = file.required("tokenizer.ggml.pre")
    if name not in PRE_TOKENIZERS:
        raise ConversionError(f"pre-tokenizer {name!r} is not supported; supported: {', '.join(PRE_TOKENIZERS)}")
    return PRE_TOKENIZERS[name]


def _adds(file: GgufFile, name: str) -> bool:
    """Return whether `bos` or `eos` is added to every text; missing keys use llama.cpp's defaults."""
    flag = file.get(f"tokenizer.ggml.add_{name}_token")
    if flag is None and name == "bos":
        return file.get("tokenizer.ggml.model") == "llama" or _pre_tokenizer(file).adds_bos
    return bool(flag)


def _post_processor(file: GgufFile, tokens: list[str]) -> processors.PostProcessor | None:
    ids = {name: file.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos")}
    added = {name: token_id for name, token_id in ids.items() if token_id is not None and _adds(file, name)}
    if not added:
        return None
    before, after = ([tokens[added[name]]] if name in added else [] for name in ("bos", "eos"))
    special = [(tokens[token_id], token_id) for token_id in added.values()]
    return processors.TemplateProcessing(single=[*before, "$A", *after], special_tokens=special)
