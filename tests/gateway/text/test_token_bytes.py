"""The bytes of single tokens: together those of the text, whatever a token's own text looks like."""

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models

from gateway.text.served_model import ServedModel
from gateway.text.token_spellings import TokenBytes


@pytest.mark.parametrize("text", ["It is Paris.\n", "ça 🦀 \t", "<|im_start|>user", "\x00\x7f\xad"])
def test_a_byte_level_vocabulary_gives_the_bytes_of_the_text(tiny_model: ServedModel, text: str) -> None:
    encoder = tiny_model.encoder
    pieces = [encoder.token_bytes.of(token_id) for token_id in encoder.encode_text(text)]
    assert b"".join(pieces) == text.encode()


def test_parts_of_a_character_have_their_own_bytes(tiny_model: ServedModel) -> None:
    pieces = [tiny_model.encoder.token_bytes.of(token_id) for token_id in tiny_model.encoder.encode_text("é")]
    assert pieces == [b"\xc3", b"\xa9"]


def test_a_token_with_a_letter_outside_the_alphabet_is_its_own_text() -> None:
    """As the tokenizer decodes it: not a byte for each letter that is in the alphabet."""
    spellings = ["Ġa", "Ġ€", "é\xad", "é "]
    tokenizer = Tokenizer(models.BPE({spelling: place for place, spelling in enumerate(spellings)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    token_bytes = TokenBytes(tokenizer)
    for place, expected in enumerate([b" a", "Ġ€".encode(), "é\xad".encode(), "é ".encode()]):
        assert token_bytes.of(place) == expected and tokenizer.decode([place]) == expected.decode()


def test_an_id_behind_the_tokenizers_own_has_none(tiny_model: ServedModel) -> None:
    assert tiny_model.encoder.token_bytes.of(tiny_model.vocab_size + 5) == b""


def test_a_sentencepiece_vocabulary_writes_spaces_and_bytes_its_own_way() -> None:
    pieces = ["<unk>", "▁Paris", "<0x0A>", "<0xC3>", "é", "<0xZZ>"]
    tokenizer = Tokenizer(models.BPE({piece: place for place, piece in enumerate(pieces)}, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken("▁end", special=True, normalized=False)])
    token_bytes = TokenBytes(tokenizer)
    assert [token_bytes.of(place) for place in range(1, 7)] == [
        b" Paris",
        b"\n",
        b"\xc3",
        "é".encode(),
        b"<0xZZ>",
        "▁end".encode(),
    ]


def test_a_tokenizer_without_a_decoder_has_its_tokens_own_text() -> None:
    assert TokenBytes(Tokenizer(models.BPE({"é": 0}, []))).of(0) == "é".encode()
