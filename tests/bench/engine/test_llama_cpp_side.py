"""Measure llama.cpp over HTTP against a fake server whose answers have the form of xllamacpp 2026.10."""

import sys
from pathlib import Path

import pytest

from bench.engine import llama_cpp_side
from bench.engine.llama_cpp_side import llama_cpp
from bench.engine.side import NoPeer

FAKE = """
import json, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        assert body["ignore_eos"] and not body["cache_prompt"]
        answer = json.dumps({"truncated": False, "tokens": body["prompt"][:1] * (body["n_predict"] - SHORT)}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)
    def log_message(self, *arguments):
        pass

import threading
server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
print("a line of a log")
message = {"url": f"http://127.0.0.1:{server.server_port}", "versions": {"xllamacpp": " ".join(sys.argv[1:])}}
print(json.dumps(message), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an environment whose Python is this one, with the peer's program in it."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    monkeypatch.setattr(llama_cpp_side, "ENVIRONMENT", tmp_path)
    monkeypatch.setattr(llama_cpp_side, "_PEER", tmp_path / "peer.py")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def test_tokens_are_counted_after_each_first_token(environment: Path) -> None:
    (environment / "peer.py").write_text(FAKE.replace("SHORT", "0"))
    with llama_cpp(Path("m.gguf"), is_bf16=True, threads=2, slots=3, slot_tokens=24) as server:
        run = server([[5], [6], [7]], 4)
    assert run.outputs == [[5] * 4, [6] * 4, [7] * 4]
    assert run.num_tokens_with_all == 9
    assert 0 < run.seconds_to_first_tokens <= run.seconds
    twin = environment / "pagestream" / "peers" / "m.BF16.gguf"
    assert server.versions["xllamacpp"] == f"m.gguf --threads 2 --slots 3 --slot-tokens 32 --bf16 {twin}"


def test_shorter_answer_is_refused(environment: Path) -> None:
    (environment / "peer.py").write_text(FAKE.replace("SHORT", "1"))
    with (
        llama_cpp(Path("m.gguf"), is_bf16=False, threads=1, slots=1, slot_tokens=8) as server,
        pytest.raises(NoPeer, match="generated 0 of 1 tokens"),
    ):
        server([[5]], 4)


def test_server_exit_is_reported(environment: Path) -> None:
    (environment / "peer.py").write_text("import sys; sys.exit(7)")
    with (
        pytest.raises(NoPeer, match=r"ended with status 7 before it served m\.gguf"),
        llama_cpp(Path("m.gguf"), is_bf16=False, threads=1, slots=1, slot_tokens=8),
    ):
        pass


def test_missing_environment_reports_how_to_make_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama_cpp_side, "ENVIRONMENT", tmp_path / "none")
    with (
        pytest.raises(NoPeer, match="make peers"),
        llama_cpp(Path("m.gguf"), is_bf16=False, threads=1, slots=1, slot_tokens=8),
    ):
        pass
