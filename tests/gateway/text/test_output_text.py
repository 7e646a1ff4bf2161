"""Stop strings, end-of-sequence tokens and broken UTF-8, for any grouping of tokens."""

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from gateway.text.output_text import (
    ByteLevelDetokenizer,
    ByteLevelVocabulary,
    Detokenizer,
    IncrementalDetokenizer,
    OutputText,
    StopStrings,
)
from gateway.text.served_model import ServedModel
from shared.messages import FinishReason
from tests.gateway.conftest import IM_END


class LetterDetokenizer:
    """A detokenizer in which token id n is chr(n)."""

    def push(self, token_id: int) -> str:
        return chr(token_id)

    def flush(self) -> str:
        return ""


def output(
    stops: Sequence[str] = (), *, terminal: int | None = None, include: bool = False, **options: int
) -> OutputText:
    terminal_ids = frozenset() if terminal is None else frozenset({terminal})
    stop_strings = StopStrings(stops, include_in_output=include)
    return OutputText(
        LetterDetokenizer(), stop_strings, terminal_token_ids=terminal_ids, include_stop_token=include, **options
    )


def ids(text: str) -> list[int]:
    return [ord(character) for character in text]


def read(text: OutputText, groups: list[str], reason: FinishReason = FinishReason.LENGTH) -> str:
    pieces = [text.push(token_id) for group in groups for token_id in ids(group)]
    return "".join(pieces) + text.finish(reason)


@pytest.mark.parametrize(
    ("stops", "text", "expected", "tokens"),
    [
        ([], "abc", "abc", 3),
        (["b"], "abc", "a", 2),
        (["bc"], "abbcd", "ab", 4),
        (["bcd", "c"], "abcd", "ab", 3),  # the stop string that completes first wins, not the one that begins first
        (["abc", "bc"], "xabcx", "x", 4),  # of two that end together, the longer one wins
        (["aab"], "aaab", "a", 4),
        (["xyz"], "abxy", "abxy", 4),  # withheld, then emitted at the end
        (["\n\n"], "a\nb\n\nc", "a\nb", 5),
    ],
)
def test_stop_string_cuts_the_text(stops: list[str], text: str, expected: str, tokens: int) -> None:
    text_of = output(stops)
    assert read(text_of, list(text)) == joined(stops, [text]) == expected
    assert text_of.num_tokens == tokens


def joined(stops: list[str], pieces: list[str], *, include: bool = False) -> str:
    """Return the text that StopStrings emits. A piece, like a token, may have any length."""
    finder = StopStrings(stops, include_in_output=include)
    text = ""
    for piece in pieces:
        certain, met = finder.push(piece)
        text += certain
        if met:
            return text
    return text + finder.flush()


@given(
    st.text("ab\n", max_size=30),
    st.lists(st.text("ab\n", min_size=1, max_size=5), max_size=4),
    st.lists(st.integers(1, 6)),
    st.booleans(),
)
def test_grouping_does_not_change_the_text(text: str, stops: list[str], sizes: list[int], include: bool) -> None:
    groups, rest = [], text
    for size in sizes:
        groups.append(rest[:size])
        rest = rest[size:]
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    expected = text
    if ends:
        end = min(ends)
        start = min(end - len(stop) for stop in stops if text[:end].endswith(stop))
        expected = text[: end if include else start]
    assert joined(stops, [*groups, rest], include=include) == expected


def test_text_is_withheld_no_longer_than_needed() -> None:
    text = output(["abc"])
    assert [text.push(token_id) for token_id in ids("xabxabab")] == ["x", "", "", "abx", "", "", "ab", ""]
    assert text.finish(FinishReason.LENGTH) == "ab"


def test_stop_string_is_in_the_output_if_requested() -> None:
    assert read(output(["bc"], include=True), ["a", "b", "c", "d"]) == "abc"


def test_stop_string_within_min_tokens_is_ignored() -> None:
    text = output(["b"], min_tokens=3)
    assert read(text, list("abbab")) == "abba"
    assert text.num_tokens == 5


@pytest.mark.parametrize(
    ("reason", "include", "expected"),
    [
        (FinishReason.STOP, False, "a"),
        (FinishReason.STOP, True, "a$"),
        (FinishReason.LENGTH, False, "a$"),  # the last allowed token, which did not end the sequence
    ],
)
def test_end_token_is_no_text(reason: FinishReason, include: bool, expected: str) -> None:
    text = output(terminal=ord("$"), include=include)
    assert read(text, ["a$"], reason) == expected
    assert text.num_tokens == 2


def test_terminal_token_that_did_not_end_is_text() -> None:
    assert read(output(terminal=ord("$")), ["a$", "b$"], FinishReason.STOP) == "a$b"


def test_withheld_terminal_token_completes_a_stop_string() -> None:
    text = output(["$"], terminal=ord("$"))
    assert [text.push(token_id) for token_id in ids("a$b")] == ["a", "", ""]
    assert text.stop_string is not None and text.num_tokens == 2


def of_bytes(model: ServedModel, prompt: Sequence[int] = (), *, skip_special_tokens: bool = True) -> Detokenizer:
    chosen = model.encoder.detokenizer(prompt, skip_special_tokens=skip_special_tokens)
    assert isinstance(chosen, ByteLevelDetokenizer)
    return chosen


def of_any(model: ServedModel, prompt: Sequence[int] = (), *, skip_special_tokens: bool = True) -> Detokenizer:
    return IncrementalDetokenizer(model.encoder.tokenizer, prompt, skip_special_tokens=skip_special_tokens)


both = pytest.mark.parametrize("detokenizer", [of_bytes, of_any])
MakeDetokenizer = Callable[..., Detokenizer]


def read_all(stream: Detokenizer, token_ids: Sequence[int]) -> str:
    return "".join(stream.push(token_id) for token_id in token_ids) + stream.flush()


@given(token_ids=st.lists(st.integers(0, 320), max_size=40), skip=st.booleans())
def test_pieces_together_are_the_decoded_whole(tiny_model: ServedModel, token_ids: list[int], skip: bool) -> None:
    """Random ids of a byte-level vocabulary are mostly broken UTF-8; some ids belong to no token."""
    whole = tiny_model.encoder.decode(token_ids, skip_special_tokens=skip)
    assert read_all(of_bytes(tiny_model, skip_special_tokens=skip), token_ids) == whole
    if skip:
        text = read_all(of_any(tiny_model), token_ids)
        assert text.replace("\ufffd", "") == whole.replace("\ufffd", "")


def test_token_outside_the_byte_alphabet_is_its_own_text() -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(["\u4f60a", "\u0120b", "\xa0", "c"])
    vocabulary = ByteLevelVocabulary.of(tokenizer)
    assert vocabulary is not None
    assert read_all(vocabulary.detokenizer(skip_special_tokens=False), range(4)) == tokenizer.decode([0, 1, 2, 3])


def test_decoders_beyond_bytes_use_the_tokenizers_stream() -> None:
    tokenizer = Tokenizer(models.BPE())
    assert ByteLevelVocabulary.of(tokenizer) is None
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    assert ByteLevelVocabulary.of(tokenizer) is None


@both
@given(text=st.text(max_size=40))
def test_any_text_is_rebuilt_token_by_token(tiny_model: ServedModel, detokenizer: MakeDetokenizer, text: str) -> None:
    stream = detokenizer(tiny_model)
    token_ids = tiny_model.encoder.encode_text(text)
    pieces = [stream.push(token_id) for token_id in token_ids]
    assert "".join(pieces) + stream.flush() == tiny_model.encoder.decode(token_ids)
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text


def test_broken_bytes_are_not_withheld_forever(tiny_model: ServedModel) -> None:
    """A client can force one byte with logit_bias; each further byte would make every later step slower."""
    (byte,) = {token for token in tiny_model.encoder.encode_text("é")[:1]}
    stream = of_any(tiny_model)
    given_at = [index for index in range(100) if stream.push(byte)]
    assert given_at == list(range(7, 100, 8))


@both
def test_unfinished_character_is_emitted_at_the_end(tiny_model: ServedModel, detokenizer: MakeDetokenizer) -> None:
    stream = detokenizer(tiny_model)
    *start, _ = tiny_model.encoder.encode_text("a🎉")
    assert "".join(stream.push(token_id) for token_id in start) == "a"
    assert stream.flush() == "\ufffd"


@both
def test_unknown_token_ids_are_no_text(tiny_model: ServedModel, detokenizer: MakeDetokenizer) -> None:
    stream = detokenizer(tiny_model)
    assert [stream.push(310), stream.push(*tiny_model.encoder.encode_text("a")), stream.flush()] == ["", "a", ""]


@both
def test_special_tokens_are_emitted_on_request(tiny_model: ServedModel, detokenizer: MakeDetokenizer) -> None:
    assert detokenizer(tiny_model).push(IM_END) == ""
    assert detokenizer(tiny_model, skip_special_tokens=False).push(IM_END) == "<|im_end|>"


@both
def test_prompt_that_ends_within_a_character_is_continued(
    tiny_model: ServedModel, detokenizer: MakeDetokenizer
) -> None:
    *start, last = tiny_model.encoder.encode_text("Hello 🎉")
    stream = detokenizer(tiny_model, start)
    pieces = [stream.push(token_id) for token_id in [last, *tiny_model.encoder.encode_text("ok")]]
    assert "Hello" not in "".join(pieces) and "".join(pieces).endswith("ok")
