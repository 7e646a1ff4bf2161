"""The bytes of single tokens add up to the bytes of the text, whatever the text of a single token looks like."""

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models

from gateway.text.served_model import ServedModel
from gateway.text.token_spellings import TokenBytes


@pytest.mark.parametrize("text", ["It is Paris.\n", "ça 🦀 \t", "<|im_start|>user", "\x00\x7f\xad"])
def test_byte_level_tokens_give_the_bytes_of_the_text(tiny_model: ServedModel, text: str) -> None:
    encoder = tiny_model.encoder
    pieces = [encoder.token_bytes.of(token_id) for token_id in encoder.encode_text(text)]
    assert b"".join(pieces) == text.encode()


def test_parts_of_a_character_have_their_own_bytes(tiny_model: ServedModel) -> None:
    pieces = [tiny_model.encoder.token_bytes.of(token_id) for token_id in tiny_model.encoder.encode_text("é")]
    assert pieces == [b"\xc3", b"\xa9"]


def test_token_outside_the_byte_alphabet_is_its_own_text() -> None:
    """Use the tokenizer's decoding, not one byte for each letter that is in the alphabet."""
    spellings = ["Ġa", "Ġ€", "é\xad", "é "]
    tokenizer = Tokenizer(models.BPE({spelling: place for place, spelling in enumerate(spellings)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    token_bytes = TokenBytes(tokenizer)
    for place, expected in enumerate([b" a", "Ġ€".encode(), "é\xad".encode(), "é ".encode()]):
        assert token_bytes.of(place) == expected and tokenizer.decode([place]) == expected.decode()


def test_id_above_the_vocabulary_has_no_bytes(tiny_model: ServedModel) -> None:
    assert tiny_model.encoder.token_bytes.of(tiny_model.vocab_size + 5) == b""


def test_sentencepiece_tokens_give_spaces_and_bytes() -> None:
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


def test_tokenizer_without_decoder_uses_token_text() -> None:
    assert TokenBytes(Tokenizer(models.BPE({"é": 0}, []))).of(0) == "é".encode()
