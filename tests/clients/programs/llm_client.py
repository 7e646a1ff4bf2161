"""Use Simon Willison's llm: URL MODEL -> what its command line prints, streamed and whole, as JSON."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

QUESTION = "What is the capital of France?"


def main(url: str, model: str) -> dict[str, str]:
    with tempfile.TemporaryDirectory() as home:
        entry = f"- model_id: ours\n  model_name: {model}\n  api_base: {url}/v1\n  api_key_name: ours\n"
        (Path(home) / "extra-openai-models.yaml").write_text(entry)
        (Path(home) / "keys.json").write_text('{"ours": "none"}')
        command = [sys.executable, "-m", "llm", "-m", "ours", "-o", "temperature", "0", "-o", "max_tokens", "30"]

        def ask(*options: str) -> str:
            argv = [*command, *options, QUESTION]
            environ = {**os.environ, "LLM_USER_PATH": home}
            return subprocess.run(argv, env=environ, capture_output=True, text=True, check=True).stdout.strip()

        return {"streamed": ask(), "text": ask("--no-stream"), "usage": ask("--usage")}


print(json.dumps(main(*sys.argv[1:])))
