"""The shapes of tokenization, for the API description."""

import msgspec


class TokenizedBody(msgspec.Struct, kw_only=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class TokenizerInfoBody(msgspec.Struct, kw_only=True):
    """Tokenizer settings; it also has other fields of tokenizer_config.json."""

    tokenizer_class: str
    bos_token: str | None
    eos_token: str | None
    unk_token: str | None
    pad_token: str | None
    added_tokens_decoder: dict[str, str]


class DetokenizedBody(msgspec.Struct, kw_only=True):
    prompt: str
