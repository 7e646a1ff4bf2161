"""Text to token ids, with the model's tokenizer and chat template. Pure.

Special tokens in a chat, and in a pair of texts to score, come only from the template; otherwise a message that
contains `<|im_end|>` could end its own turn and speak as the system. Special-token texts in client text are replaced by
random placeholders before rendering. The rendered text is split at the remaining special tokens, which the template
wrote. The text between them is encoded, with the original text restored, by a tokenizer that treats special tokens as
plain text. Text without such spellings is encoded whole, exactly as transformers does. Both ways agree except for
tokenizers that treat the start of a text specially (a SentencePiece dummy prefix): these may differ by a space in
messages that contain a special token.

Not covered: the prompt of /v1/completions, which is raw by definition, and added tokens that are not marked special.
"""

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, Unpack

from tokenizers import Tokenizer

from gateway.text.chat_template import ChatMessage, ChatTemplate, ChatTemplateError, TemplateOptions, with_tools_as_text
from gateway.text.output_text import ByteLevelVocabulary, Detokenizer, IncrementalDetokenizer
from gateway.text.token_spellings import TokenBytes, TokenSpellings

_Json: TypeAlias = Any


class PromptEncoder:
    def __init__(self, tokenizer_json: str, chat_template: ChatTemplate | None) -> None:
        self._tokenizer = Tokenizer.from_str(tokenizer_json)
        self._plain_tokenizer = Tokenizer.from_str(tokenizer_json)
        self._plain_tokenizer.encode_special_tokens = True  # in this API True means: encode them as text
        for tokenizer in (self._tokenizer, self._plain_tokenizer):
            tokenizer.no_truncation()
            tokenizer.no_padding()
        self._chat_template = chat_template
        added = self._tokenizer.get_added_tokens_decoder()
        self._special_ids = {token.content: token_id for token_id, token in added.items() if token.special}
        self._special_pattern = _any_of(self._special_ids)
        self._longest_token_chars = max(map(len, self._tokenizer.get_vocab()), default=1)
        self._prefix_ids, self._suffix_ids = self._wrapping()
        self.token_bytes = TokenBytes(self._tokenizer)
        self._spellings = {by_id: TokenSpellings(self.token_bytes, by_id=by_id) for by_id in (False, True)}
        self._byte_level = ByteLevelVocabulary.of(self._tokenizer)

    @property
    def tokenizer(self) -> Tokenizer:
        return self._tokenizer

    def min_num_tokens(self, text: str) -> int:
        """Return a lower bound of the number of tokens, to refuse a text that is too long before encoding it."""
        return -(-len(text) // self._longest_token_chars)

    def encode_text(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Encode raw text; special tokens in it are recognized."""
        return self._wrapped(self._encode(self._tokenizer, text), add_special_tokens)

    @property
    def template_source(self) -> str:
        """The source of the chat template, or "" if there is none."""
        return self._chat_template.source if self._chat_template is not None else ""

    @property
    def tools_template(self) -> str:
        """The source of the chat template, or "" if it takes no tools: render_chat() writes them in Hermes format."""
        template = self._chat_template
        return template.source if template is not None and template.takes_tools else ""

    def has_special(self, text: str) -> bool:
        """Return whether `text` is a special token, which detokenizers skip."""
        return text in self._special_ids

    def special_id(self, text: str) -> int | None:
        """Return the id of the special token `text`, or None."""
        return self._special_ids.get(text)

    def encode_chat(
        self,
        messages: Sequence[ChatMessage],
        *,
        add_special_tokens: bool = False,
        check: Callable[[str], None] = lambda text: None,
        **options: Unpack[TemplateOptions],
    ) -> list[int]:
        """Render and encode a chat.

        Args:
            messages: The messages.
            add_special_tokens: Whether the tokenizer adds its special tokens.
            check: Called with the rendered text before it is encoded; may raise.
            **options: Rendering options.

        Raises:
            ChatTemplateError: If the template fails.
        """
        text, stand_ins = self.render_chat(messages, **options)
        check(text)
        return self._wrapped(self._encode_rendered(text, stand_ins), add_special_tokens)

    def encode_filled(
        self, template: str, texts: Mapping[str, str], *, check: Callable[[str], None] = lambda text: None
    ) -> list[int]:
        """Encode a template of this server, a format string, filled with texts of a client.

        Args:
            template: The only source of special tokens.
            texts: By name of the template's fields.
            check: Called with the filled text before it is encoded; may raise.
        """
        stand_ins = self._stand_ins()
        text = template.format_map(stand_ins.hide(texts))
        check(text)
        return self._encode_rendered(text, stand_ins)

    def render_chat(
        self, messages: Sequence[ChatMessage], **options: Unpack[TemplateOptions]
    ) -> "tuple[str, StandIns]":
        """Return the rendered text with placeholders still in place; raise ChatTemplateError.

        If the template does not use `tools`, they are written as text.
        """
        template = self._chat_template
        if template is None:
            raise ChatTemplateError("this model has no chat template; use /v1/completions")
        tools = options.get("tools", ())
        if not template.takes_tools:
            messages, tools = with_tools_as_text(messages, tools), ()
        stand_ins = self._stand_ins()
        options["tools"] = stand_ins.hide(list(tools))
        options["template_kwargs"] = stand_ins.hide(options.get("template_kwargs") or {})
        return template.render(stand_ins.hide(list(messages)), **options), stand_ins

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        # The batch call releases the interpreter lock; the single call holds it, 1 us per token.
        (text,) = self._tokenizer.decode_batch([list(token_ids)], skip_special_tokens=skip_special_tokens)
        return str(text)

    def token_strings(self, token_ids: Sequence[int]) -> list[str]:
        return [self._tokenizer.id_to_token(token_id) or "" for token_id in token_ids]

    def spellings(self, *, by_id: bool) -> TokenSpellings:
        return self._spellings[by_id]

    def detokenizer(self, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool) -> Detokenizer:
        if self._byte_level is not None:
            return self._byte_level.detokenizer(skip_special_tokens=skip_special_tokens)
        return IncrementalDetokenizer(self._tokenizer, prompt_token_ids, skip_special_tokens=skip_special_tokens)

    def _stand_ins(self) -> "StandIns":
        return StandIns(self._special_pattern, list(self._special_ids))

    def _encode_rendered(self, text: str, stand_ins: "StandIns") -> list[int]:
        from_template = self._special_pattern.findall(text)
        if not stand_ins.used:
            ids = self._encode(self._tokenizer, text)
            # More special tokens than the template wrote come from normalization, such as full-width letters.
            if sum(map(self._special_id_set.__contains__, ids)) == len(from_template):
                return ids
        return self._encode_apart(text, stand_ins)

    def _encode_apart(self, chat: str, stand_ins: "StandIns") -> list[int]:
        ids: list[int] = []
        start = 0
        for match in self._special_pattern.finditer(chat):
            ids += self._encode(self._plain_tokenizer, stand_ins.reveal(chat[start : match.start()]))
            ids.append(self._special_ids[match[0]])
            start = match.end()
        return ids + self._encode(self._plain_tokenizer, stand_ins.reveal(chat[start:]))

    @staticmethod
    def _encode(tokenizer: Tokenizer, text: str) -> list[int]:
        # The batch call releases the interpreter lock; the single call holds it.
        (encoding,) = tokenizer.encode_batch_fast([text], add_special_tokens=False)
        return list(encoding.ids)

    def _wrapped(self, token_ids: list[int], add_special_tokens: bool) -> list[int]:
        return self._prefix_ids + token_ids + self._suffix_ids if add_special_tokens else token_ids

    def _wrapping(self) -> tuple[list[int], list[int]]:
        """Return the ids that `add_special_tokens` puts before and after a text."""
        self._special_id_set = frozenset(self._special_ids.values())
        bare = self._tokenizer.encode("a", add_special_tokens=False).ids
        full = self._tokenizer.encode("a", add_special_tokens=True).ids
        start = next(i for i in range(len(full)) if full[i : i + len(bare)] == bare)
        return full[:start], full[start + len(bare) :]


class StandIns:
    """Replaces special-token texts with `U+E000 nonce : index U+E001` and back; clients cannot guess the nonce."""

    def __init__(self, pattern: re.Pattern[str], spellings: list[str]) -> None:
        self._pattern = pattern
        self._spellings = spellings
        self._nonce = secrets.token_hex(8)
        self.used = False

    def hide(self, value: _Json) -> _Json:
        """Replace in every text of a JSON value."""
        if isinstance(value, str):
            return self._pattern.sub(self._stand_in, value)
        if isinstance(value, list):
            return [self.hide(item) for item in value]
        if isinstance(value, Mapping):
            return {self.hide(key): self.hide(item) for key, item in value.items()}
        return value

    def reveal(self, text: str) -> str:
        return re.sub(f"\ue000{self._nonce}:(\\d+)\ue001", lambda match: self._spellings[int(match[1])], text)

    def _stand_in(self, match: re.Match[str]) -> str:
        self.used = True
        return f"\ue000{self._nonce}:{self._spellings.index(match[0])}\ue001"


def _any_of(spellings: Sequence[str] | dict[str, int]) -> re.Pattern[str]:
    longest_first = sorted(spellings, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
