"""A model directory that is made in milliseconds: a byte-level tokenizer, a chat template, and no weights."""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT, IM_START, IM_END = 0, 1, 2
MAX_MODEL_LEN = 256
VOCAB_SIZE = 320  # more than the tokenizer has, as in models with padded embeddings
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def write_tiny_model(directory: Path, max_model_len: int = MAX_MODEL_LEN) -> Path:
    """Write the directory; the tokenizer has few merges, so characters outside ASCII take several tokens."""
    directory.mkdir()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = [
        AddedToken(text, special=True, normalized=False) for text in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    ]
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the capital of France is Paris, the end of the user and the assistant"], trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    files: dict[str, dict[str, Any]] = {
        "config.json": {"vocab_size": VOCAB_SIZE, "max_position_embeddings": max_model_len},
        "generation_config.json": {"eos_token_id": IM_END},
        "tokenizer_config.json": {
            "chat_template": CHAT_TEMPLATE,
            "bos_token": "<|im_start|>",
            "eos_token": {"content": "<|im_end|>"},
        },
    }
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content))
    return directory
