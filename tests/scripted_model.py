"""A model that works as a coding agent by a script: it writes a file with the client's own tool, then ends."""

import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from shared.messages import GenerationRequest, StreamEvent
from tests.gateway.fake_inference import says
from tests.tiny_model import IM_END, write_tiny_model

TEXT = "hello\n"
DONE = "Done."
# The format of Hermes and Qwen, one tool per line.
CHAT_TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>system\\n<tools>' }}{% for tool in tools %}{{ '\\n' + tool | tojson }}{% endfor %}"
    '{{ \'\\n</tools><tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>\\n\' }}{% endif %}'
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + (message.content or '') }}"
    "{% for call in message.tool_calls or [] %}{{ '<tool_call>' + call.function | tojson + '</tool_call>' }}"
    "{% endfor %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def write_scripted_model(directory: Path, max_model_len: int, tokenizer_of: Path | None = None) -> Path:
    """Write a model directory whose chat template accepts tools.

    Args:
        directory: Where; it must not exist.
        max_model_len: Longest context in tokens.
        tokenizer_of: A directory of SmolLM2, whose tokenizer is used; without it a token is about one byte.
    """
    write_tiny_model(directory, max_model_len)
    if tokenizer_of is not None:
        shutil.copy(tokenizer_of / "tokenizer.json", directory)
        vocabulary = json.loads((tokenizer_of / "config.json").read_text())["vocab_size"]
        config = json.loads((directory / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps(config | {"vocab_size": vocabulary}))
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": CHAT_TEMPLATE}))
    return directory


def calls_that_write(path: Path) -> dict[str, dict[str, Any]]:
    """Return arguments that write TEXT to a file, by tool."""
    return {
        "Write": {"file_path": str(path), "content": TEXT},  # Claude Code
        "write": {"filePath": str(path), "content": TEXT},  # opencode
        "write_file": {"file_path": str(path), "content": TEXT},  # qwen-code
        "editor": {"path": str(path), "new_text": TEXT},  # cline
        "exec_command": {"cmd": f"printf '{TEXT.strip()}\\n' > {path}"},  # Codex
    }


CALLS_THAT_END = {"submit_and_exit": {"summary": "The file is written.", "verified": True}}  # cline


class ScriptedModel:
    """The script of a fake engine. `said` lists each answer: the name of the called tool, or the text."""

    def __init__(self, directory: Path, path: Path) -> None:
        """Create the script for the model in `directory`; it writes the file `path`."""
        self.said: list[str] = []
        self._tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        self._first = calls_that_write(path)
        # Without tools: a file of aider, its name and its content.
        self._first_text = f"{path.name}\n```\n{TEXT}```\n"

    def __call__(self, request: GenerationRequest) -> Iterable[StreamEvent]:
        prompt = self._tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False)
        head, _, messages = prompt.rpartition("</tools>")
        names = [json.loads(line)["function"]["name"] for line in head.splitlines() if line.startswith("{")]
        is_done = "<|im_start|>tool\n" in messages.rpartition("<|im_start|>user\n")[2]
        if is_done:
            text = self._answer(names, CALLS_THAT_END, DONE)
        else:
            text = self._answer(names, self._first, DONE if names else self._first_text)
        token_ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        groups = [token_ids[start : start + 3] for start in range(0, len(token_ids), 3)]
        return says(*groups, [IM_END])(request)

    def _answer(self, names: list[str], calls: Mapping[str, Any], otherwise: str) -> str:
        """Return the first of the calls whose tool is offered, or the text."""
        name = next((name for name in calls if name in names), "")
        self.said.append(name or otherwise)
        return f"<tool_call>{json.dumps({'name': name, 'arguments': calls[name]})}</tool_call>" if name else otherwise
