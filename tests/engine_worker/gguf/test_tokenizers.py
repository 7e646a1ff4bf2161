"""Tokenizers of GGUF files: pre-tokenization, SentencePiece merges, special tokens."""

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import pytest
from gguf import TokenType
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from engine_worker.gguf.config import end_token_ids
from engine_worker.gguf.metadata import ConversionError, GgufFile
from engine_worker.gguf.tokenizer import tokenizer, tokenizer_config
from engine_worker.model.architectures import gguf_family_of
from gateway.text.tokenization import PromptEncoder

TEXT = "Hello world! It's 12345 days, don't\n\n  you think?\tcafé été ６７ 中文 we'LL x=1;  \r\n end   "
# Expected words from the models' own tokenizer.json.
WORDS_OF_QWEN = [
    "Hello", " world", "!", " It", "'s", " ", "1", "2", "3", "4", "5", " days", ",", " don", "'t", "\n\n", " ",
    " you", " think", "?", "\tcafé", " été", " ", "６", "７", " 中文", " we", "'LL", " x", "=", "1", ";", "  \r\n",
    " end", "   ",
]  # fmt: skip
WORDS_OF_LLAMA_3 = [
    "Hello", " world", "!", " It", "'s", " ", "123", "45", " days", ",", " don", "'t", "\n\n", " ", " you",
    " think", "?", "\tcafé", " été", " ", "６７", " 中文", " we", "'LL", " x", "=", "1", ";", "  \r\n", " end", "   ",
]  # fmt: skip

Fill = Callable[[gguf.GGUFWriter], None]


def gguf_file(path: Path, fill: Fill, architecture: str = "llama") -> GgufFile:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(64)
    fill(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return GgufFile(path)


def byte_level(pre: str, tokens: dict[str, TokenType] | None = None, **ids: int) -> Fill:
    """Return a byte-level vocabulary without merges: each letter is a token."""
    added = tokens or {}

    def fill(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(["a", "b", "ab", *added])
        writer.add_token_types([TokenType.NORMAL] * 3 + list(added.values()))
        writer.add_token_merges(["a b"])
        for name, token_id in ids.items():
            writer.add_uint32(f"tokenizer.ggml.{name}_token_id", token_id)

    return fill


def read(file: GgufFile) -> Tokenizer:
    return tokenizer(file, gguf_family_of(file.architecture))


@pytest.mark.parametrize(("pre", "words"), [("qwen2", WORDS_OF_QWEN), ("llama-bpe", WORDS_OF_LLAMA_3)])
def test_words_split_as_in_the_original_tokenizer(pre: str, words: list[str], tmp_path: Path) -> None:
    cut = read(gguf_file(tmp_path / "m.gguf", byte_level(pre))).pre_tokenizer
    assert cut is not None
    assert [TEXT[start:end] for _word, (start, end) in cut.pre_tokenize_str(TEXT)] == words


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("gpt-2", ["I", "'ve", " 12", " HelloWorld", "'s"]),
        ("smollm", ["I", "'ve", " ", "1", "2", " HelloWorld", "'s"]),
        ("gpt-4o", ["I've", " ", "12", " Hello", "World's"]),
        ("tekken", ["I", "'ve", " ", "1", "2", " Hello", "World", "'s"]),
        ("dbrx", ["I", "'ve", " ", "12", " HelloWorld", "'s"]),
    ],
)
def test_every_pre_tokenizer_splits_differently(pre: str, words: list[str], tmp_path: Path) -> None:
    text = "I've 12 HelloWorld's"
    cut = read(gguf_file(tmp_path / "m.gguf", byte_level(pre))).pre_tokenizer
    assert cut is not None
    assert [text[start:end] for _word, (start, end) in cut.pre_tokenize_str(text)] == words


def test_qwen_normalizes_to_nfc_first(tmp_path: Path) -> None:
    found = read(gguf_file(tmp_path / "m.gguf", byte_level("qwen2")))
    assert found.normalizer is not None and found.normalizer.normalize_str("e\u0301") == "\u00e9"


@pytest.mark.parametrize(
    ("pre", "flag", "begins"), [("llama-bpe", None, True), ("llama-bpe", False, False), ("qwen2", None, False)]
)
def test_bos_token_follows_the_file_or_llama_cpp(pre: str, flag: bool | None, begins: bool, tmp_path: Path) -> None:
    fill = byte_level(pre, {"<s>": TokenType.CONTROL}, bos=3)

    def with_flag(writer: gguf.GGUFWriter) -> None:
        fill(writer)
        if flag is not None:
            writer.add_add_bos_token(flag)

    file = gguf_file(tmp_path / "m.gguf", with_flag)
    assert read(file).encode("ab").ids == ([3, 2] if begins else [2])
    assert tokenizer_config(file)["add_bos_token"] is begins


def test_special_and_template_tokens_are_recognized(tmp_path: Path) -> None:
    added = {"<|end|>": TokenType.CONTROL, "<tool_call>": TokenType.USER_DEFINED, "<unused>": TokenType.UNUSED}
    found = read(gguf_file(tmp_path / "m.gguf", byte_level("qwen2", added)))
    assert found.encode("ab<|end|><tool_call>b").ids == [2, 3, 4, 1]
    assert found.decode([2, 3, 4, 1]) == "ab<tool_call>b"


def test_end_of_turn_tokens_end_an_answer(tmp_path: Path) -> None:
    ends = ["<|eot_id|>", "<other>", "<|endoftext|>", "<|im_end|>"]
    tokens = dict.fromkeys(ends, TokenType.CONTROL)
    assert end_token_ids(gguf_file(tmp_path / "m.gguf", byte_level("qwen2", tokens, eos=6))) == [6, 3, 5]


@pytest.mark.parametrize("name", ["deepseek-coder", "qwen35"])
def test_unknown_pre_tokenizer_is_refused_by_name(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match=f"'{name}' is not supported; supported: gpt-2, smollm, llama-bpe, "):
        read(gguf_file(tmp_path / "m.gguf", byte_level(name)))


PIECES = {"a": -5.0, "b": -6.0, "c": -7.0, "▁": -4.0, "ab": -1.0, "bc": -0.5, "abc": -3.0, "▁a": -2.0, "▁ab": -2.5,
          "cc": -2.2, "▁abc": -3.5}  # fmt: skip


def sentence_piece(has_prefix: bool) -> Fill:
    def fill(writer: gguf.GGUFWriter) -> None:
        byte_pieces = [f"<0x{byte:02X}>" for byte in range(256)]
        writer.add_tokenizer_model("llama")
        writer.add_token_list(["<unk>", "<s>", "</s>", *byte_pieces, *PIECES])
        writer.add_token_scores([0.0] * 259 + list(PIECES.values()))
        special = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL]
        writer.add_token_types(special + [TokenType.BYTE] * 256 + [TokenType.NORMAL] * len(PIECES))
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_add_space_prefix(has_prefix)

    return fill


def merged_by_score(text: str) -> list[str]:
    """Merge by SentencePiece's definition: join the best-scored adjacent pair that is a piece, until there is none."""
    pieces = list(text.replace(" ", "▁"))
    while True:
        pairs = [(PIECES[a + b], -place) for place, (a, b) in enumerate(pairwise(pieces))
                 if a + b in PIECES]  # fmt: skip
        if not pairs:
            return pieces
        place = -max(pairs)[1]
        pieces[place : place + 2] = [pieces[place] + pieces[place + 1]]


@pytest.fixture(scope="module", params=[True, False], ids=["prefix", "no prefix"])
def spm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, bool]:
    path = tmp_path_factory.mktemp("spm") / "m.gguf"
    return read(gguf_file(path, sentence_piece(request.param))), request.param


@given(text=st.text(alphabet="abc ", min_size=1, max_size=20))
def test_pieces_are_merged_by_score(spm: tuple[Tokenizer, bool], text: str) -> None:
    found, has_prefix = spm
    assert found.encode(text, add_special_tokens=False).tokens == merged_by_score(" " * has_prefix + text)


@given(text=st.text(min_size=1, max_size=20).filter(lambda text: "▁" not in text))
def test_sentence_piece_round_trips_any_text(spm: tuple[Tokenizer, bool], text: str) -> None:
    found, has_prefix = spm
    ids = found.encode(text, add_special_tokens=False).ids
    assert found.decode(ids) == text
    encoder = PromptEncoder(found.to_str(), None)
    stream = encoder.detokenizer([1], skip_special_tokens=True)
    pieces = "".join(stream.push(token_id) for token_id in ids) + stream.flush()
    assert pieces == (" " if has_prefix else "") + text or pieces == text
    assert b"".join(encoder.token_bytes.of(token_id) for token_id in ids).decode() == " " * has_prefix + text


def test_sentence_piece_starts_with_its_bos_token(spm: tuple[Tokenizer, bool]) -> None:
    assert spm[0].encode("ab").ids[0] == 1


def test_phi_3_strips_white_space_after_turn_tokens(tmp_path: Path) -> None:
    file = gguf_file(tmp_path / "m.gguf", sentence_piece(True), architecture="phi3")
    entries: list[dict[str, Any]] = json.loads(read(file).to_str())["added_tokens"]
    added = {entry["content"]: entry["rstrip"] for entry in entries}
    assert added == {"<unk>": False, "<s>": False, "</s>": True}
