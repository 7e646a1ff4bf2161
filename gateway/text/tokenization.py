"""Text -> token ids, by the model's own tokenizer and chat template. Pure.

Special tokens in a chat come from the template alone. A message that spells one, such as `<|im_end|>`, could otherwise
end its own turn and speak as the system. So every spelling of a special token in client text is replaced by a random
stand-in before the template is rendered; the rendering is split at the special tokens that remain, which the template
put there; the text between them is encoded, spellings back in place, by a tokenizer that takes specials as plain text.
Text without such a spelling is encoded whole, exactly as transformers would. Splitting at specials first is what a
tokenizer does itself, so both ways agree; only tokenizers that treat the start of a text apart (a SentencePiece dummy
prefix) may differ by a space, and only in messages that spell a special token.

Not covered: the prompt of /v1/completions, which is raw by definition, and added tokens that are not marked special.

A chat's way in, where its prompt becomes token ids. It knows no request, no limit of a model and no API.
"""

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, Unpack

from tokenizers import Tokenizer

from gateway.text.chat_template import ChatMessage, ChatTemplate, ChatTemplateError, TemplateOptions, told_of_tools
from gateway.text.output_text import ByteLevelVocabulary, Detokenizer, IncrementalDetokenizer
from gateway.text.token_spellings import TokenBytes, TokenSpellings

_Json: TypeAlias = Any


class PromptEncoder:
    def __init__(self, tokenizer_json: str, chat_template: ChatTemplate | None) -> None:
        self._tokenizer = Tokenizer.from_str(tokenizer_json)
        self._plain_tokenizer = Tokenizer.from_str(tokenizer_json)
        self._plain_tokenizer.encode_special_tokens = True  # "encode them as text", not "recognise them"
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

    def least_tokens(self, text: str) -> int:
        """No encoding of `text` has fewer tokens. Costs nothing, so a hopeless text is refused before it is encoded."""
        return -(-len(text) // self._longest_token_chars)

    def encode_text(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Raw text: special tokens it spells are special tokens."""
        return self._wrapped(self._encode(self._tokenizer, text), add_special_tokens)

    @property
    def template_source(self) -> str:
        """The source of the chat template; empty if there is none."""
        return self._chat_template.source if self._chat_template is not None else ""

    def has_special(self, text: str) -> bool:
        """Whether `text` is a special token, which detokenizers leave out."""
        return text in self._special_ids

    def special_id(self, text: str) -> int | None:
        """The id of a special token; None if `text` is none."""
        return self._special_ids.get(text)

    def encode_chat(
        self,
        messages: Sequence[ChatMessage],
        *,
        add_special_tokens: bool = False,
        check: Callable[[str], None] = lambda text: None,
        **options: Unpack[TemplateOptions],
    ) -> list[int]:
        """`check` is told the text before it is encoded. Raises ChatTemplateError, and what it raises."""
        text, stand_ins = self.render_chat(messages, **options)
        check(text)
        from_template = self._special_pattern.findall(text)
        if not stand_ins.used:
            ids = self._encode(self._tokenizer, text)
            # More specials than the template wrote: text that becomes one by normalization (full-width letters).
            if sum(token_id in self._special_id_set for token_id in ids) == len(from_template):
                return self._wrapped(ids, add_special_tokens)
        return self._wrapped(self._encode_apart(text, stand_ins), add_special_tokens)

    def render_chat(
        self, messages: Sequence[ChatMessage], **options: Unpack[TemplateOptions]
    ) -> "tuple[str, StandIns]":
        """The template's text, stand-ins still in place. Raises ChatTemplateError. A template that does not know of
        `tools` is told of them in words."""
        template = self._chat_template
        if template is None:
            raise ChatTemplateError("this model has no chat template; use /v1/completions")
        tools = options.get("tools", ())
        if not template.takes_tools:
            messages, tools = told_of_tools(messages, tools), ()
        stand_ins = StandIns(self._special_pattern, list(self._special_ids))
        options["tools"] = [stand_ins.hide(tool) for tool in tools]
        options["template_kwargs"] = stand_ins.hide(options.get("template_kwargs") or {})
        text = template.render([stand_ins.hide(message) for message in messages], **options)
        return text, stand_ins

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        # As in _encode(): of one sequence by itself the interpreter's lock is held, 1 us a token.
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
        # The batch call lets other threads run meanwhile; the single one holds the interpreter's lock.
        (encoding,) = tokenizer.encode_batch_fast([text], add_special_tokens=False)
        return list(encoding.ids)

    def _wrapped(self, token_ids: list[int], add_special_tokens: bool) -> list[int]:
        return self._prefix_ids + token_ids + self._suffix_ids if add_special_tokens else token_ids

    def _wrapping(self) -> tuple[list[int], list[int]]:
        """The ids that `add_special_tokens` puts before and behind a text."""
        self._special_id_set = frozenset(self._special_ids.values())
        bare = self._tokenizer.encode("a", add_special_tokens=False).ids
        full = self._tokenizer.encode("a", add_special_tokens=True).ids
        start = next(i for i in range(len(full)) if full[i : i + len(bare)] == bare)
        return full[:start], full[start + len(bare) :]


class StandIns:
    """Replaces spellings of special tokens by `U+E000 nonce : which U+E001` and back; no client can guess the nonce."""

    def __init__(self, pattern: re.Pattern[str], spellings: list[str]) -> None:
        self._pattern = pattern
        self._spellings = spellings
        self._nonce = secrets.token_hex(8)
        self.used = False

    def hide(self, value: _Json) -> _Json:
        """In every text of a JSON value."""
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
