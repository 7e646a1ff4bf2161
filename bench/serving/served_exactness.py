"""Check whether served greedy tokens are those of `transformers`, through the whole system.

    python -m bench served-exactness --model DIR [--device cuda] [--dtype float32] [--out FILE.json]
    python -m bench served-exactness --model DIR --dtype float32 --longest-prompt 260 --output-tokens 16    on a CPU

It starts `pagestream serve` with its own store, streams a chat over HTTP, and sends ragged token-id prompts through the
store, because HTTP hides token ids. Then `transformers` judges each token for the same prefix and dtype: its logit may
be below the highest by at most the margin, and a share of --min-share must be the highest. bf16 logits around 20 are
0.125 apart, and correct kernels with another order of sums differ by one or two steps; hence the default margin 0.5.
"""

import argparse
import asyncio
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import torch
import transformers

from gateway.store.inference_client import InferenceClient
from pagestream.directories import state_directory
from pagestream.embedded_store import EmbeddedStore
from shared.messages import GenerationRequest, SamplingParams, TokenEvent
from shared.redis_client import connect
from shared.redis_keys import RedisKeys

PROMPT_LENGTHS = (1, 2, 7, 15, 16, 17, 31, 33, 64, 100, 129, 200, 257, 400, 513, 777, 1024, 1200, 1337, 1500)
NAME = "exactness"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", metavar="PATH", type=Path, required=True)
    parser.add_argument("--device", metavar="NAME", default="auto")
    parser.add_argument("--port", metavar="PORT", type=int, default=8123)
    parser.add_argument("--margin", metavar="RATIO", type=float, default=0.5)
    parser.add_argument("--min-share", metavar="RATIO", type=float, default=0.98)
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--longest-prompt", metavar="N", type=int, default=max(PROMPT_LENGTHS), help="tokens")
    parser.add_argument("--output-tokens", metavar="N", type=int, default=32, help="of each prompt")
    parser.add_argument("--threads", metavar="N", type=int, help="CPU threads of the server and of transformers")
    parser.add_argument("--out", metavar="PATH", type=Path)
    options = parser.parse_args(argv)
    prompts = _prompts(options.model, options.longest_prompt)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="ps-") as state:
        os.environ["XDG_STATE_HOME"] = state
        server = _start_server(options)
        try:
            _wait_until_ready(options.port, server)
            ready_seconds = time.monotonic() - started
            answer = _chat(options.port, "What is the capital of France?")
            outputs = asyncio.run(_generate_all(prompts, options.output_tokens))
        finally:
            server.terminate()
            server.wait(timeout=60)
    report = {
        "command": " ".join(["python -m bench served-exactness", *argv]),
        "ready_seconds": round(ready_seconds, 2),
        "chat_answer": answer,
        "server_exit_status": server.returncode,
        "margin": options.margin,
        "dtype": options.dtype,
        **_judge(options, prompts, outputs),
    }
    print(json.dumps({**report, "gaps": None}, indent=1))
    if options.out:
        options.out.write_text(json.dumps(report, indent=1))
    is_exact = report["largest_gap"] <= options.margin and report["share_of_exact_argmax"] >= options.min_share
    return 0 if is_exact and server.returncode == 0 else 1


def _prompts(model: Path, longest: int) -> list[list[int]]:
    vocab_size = json.loads((model / "config.json").read_text())["vocab_size"]
    generator = random.Random(7)
    return [[generator.randrange(vocab_size) for _ in range(length)] for length in PROMPT_LENGTHS if length <= longest]


def _start_server(options: argparse.Namespace) -> "subprocess.Popen[bytes]":
    flags = ["--port", str(options.port), "--served-model-name", NAME, "--device", options.device]
    flags += ["--dtype", options.dtype, "--max-model-len", str(options.longest_prompt + options.output_tokens + 64)]
    flags += ["--num-threads", str(options.threads)] if options.threads else []
    return subprocess.Popen(
        [sys.executable, "-m", "pagestream", "serve", str(options.model), "--metrics-port", "0", *flags]
    )


def _wait_until_ready(port: int, server: "subprocess.Popen[bytes]") -> None:
    while server.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=5) as reply:
                if reply.status == 200:
                    return
        except OSError:
            time.sleep(0.1)
    raise SystemExit(f"the server ended with status {server.returncode} before it was ready")


def _chat(port: int, question: str) -> str:
    body = {"model": NAME, "messages": [{"role": "user", "content": question}], "temperature": 0, "stream": True}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions",
        json.dumps({**body, "max_tokens": 32}).encode(),
        {"Content-Type": "application/json"},
    )
    pieces = []
    with urllib.request.urlopen(request, timeout=600) as reply:
        for line in reply:
            if line.startswith(b"data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    pieces.append(choice["delta"].get("content") or "")
    return "".join(pieces)


async def _generate_all(prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    connections = connect(_store_url())
    client = InferenceClient(connections, RedisKeys(NAME), f"exactness-{os.getpid()}")
    await client.start()
    try:
        answers = (_generate(client, index, prompt, num_tokens) for index, prompt in enumerate(prompts))
        return list(await asyncio.gather(*answers))
    finally:
        await client.close()


async def _generate(client: InferenceClient, index: int, prompt: list[int], num_tokens: int) -> list[int]:
    sampling = SamplingParams(max_tokens=num_tokens, seed=0, temperature=0.0, ignore_eos=True)
    request = GenerationRequest(request_id=f"exactness-{index}", prompt_token_ids=prompt, sampling=sampling)
    token_ids: list[int] = []
    inbox, ready = await client.submission.submit(request), asyncio.Event()
    while not inbox.has_ended:
        inbox.on_ready = ready.set
        while (event := inbox.read()) is not None:
            if isinstance(event, TokenEvent):
                token_ids += event.token_ids
        if not inbox.has_ended:
            await ready.wait()
            ready.clear()
    return token_ids


def _store_url() -> str:
    return EmbeddedStore.at(state_directory() / "store", 0).url


def _judge(options: argparse.Namespace, prompts: list[list[int]], outputs: list[list[int]]) -> dict[str, Any]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if options.threads:
        torch.set_num_threads(options.threads)
    dtype = getattr(torch, options.dtype)
    model = transformers.AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype).to(device).eval()
    gaps: list[float] = []
    for prompt, output in zip(prompts, outputs, strict=True):
        assert len(output) == options.output_tokens, f"{len(output)} output tokens for a prompt of {len(prompt)}"
        with torch.inference_mode():
            ids = torch.tensor([prompt + output], device=device)
            choosing = model(ids, logits_to_keep=len(output) + 1).logits[0, :-1].float()
        chosen = choosing.gather(1, torch.tensor(output, device=device)[:, None])[:, 0]
        gaps += (choosing.max(dim=1).values - chosen).tolist()
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.processor(),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "tokens": len(gaps),
        "share_of_exact_argmax": sum(gap == 0 for gap in gaps) / len(gaps),
        "largest_gap": max(gaps),
        "gaps": gaps,
    }
