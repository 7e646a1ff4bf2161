"""`pagestream chat`: a conversation with a running server in the terminal. Ctrl-C stops an answer, Ctrl-D exits.

/reset    forget the conversation     /system TEXT    start again with TEXT as the system message
"""

import argparse
import json
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TextIO

Message = dict[str, str]
Answer = Callable[[list[Message]], Iterator[str]]


class ChatError(RuntimeError):
    """An error of the server or of the connection."""


class Conversation:
    def __init__(self, answer: Answer, output: TextIO) -> None:
        self.messages: list[Message] = []
        self._answer = answer
        self._output = output

    def take(self, line: str) -> None:
        """Handle one input line; a stopped answer stays in the conversation."""
        if line == "/reset":
            self.messages.clear()
        elif line.startswith("/system "):
            self.messages[:] = [{"role": "system", "content": line.removeprefix("/system ")}]
        elif line.strip():
            self._ask(line)

    def _ask(self, question: str) -> None:
        messages = [*self.messages, {"role": "user", "content": question}]
        pieces: list[str] = []
        try:
            for piece in self._answer(messages):
                pieces.append(piece)
                self._output.write(piece)
                self._output.flush()
        except KeyboardInterrupt:
            self._output.write(" [stopped]")
        except ChatError as error:
            self._output.write(f"error: {error}\n")
            return  # the user can ask again
        self._output.write("\n")
        self.messages[:] = [*messages, {"role": "assistant", "content": "".join(pieces)}]


def streamed_answers(url: str, api_key: str, options: dict[str, Any]) -> Answer:
    """Return a function that streams answers; closing its generator cancels the request."""
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {})

    def answer(messages: list[Message]) -> Iterator[str]:
        body = json.dumps({"messages": messages, "stream": True, **options}).encode()
        request = urllib.request.Request(f"{url}/v1/chat/completions", body, headers)
        try:
            with urllib.request.urlopen(request) as reply:
                yield from _pieces(reply)
        except urllib.error.HTTPError as error:
            with error:
                raise ChatError(_message(error.read())) from error
        except OSError as error:
            raise ChatError(f"{url}: {error}") from error

    return answer


def _pieces(lines: Any) -> Iterator[str]:
    for line in lines:
        if not line.startswith(b"data: {"):
            continue
        chunk = json.loads(line[6:])
        if "error" in chunk:
            raise ChatError(chunk["error"]["message"])
        for choice in chunk["choices"]:
            yield choice["delta"].get("content") or ""


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace")[:200]


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    options = {"model": args.model, "max_tokens": args.max_tokens, "temperature": args.temperature}
    api_key = os.environ.get("PAGESTREAM_API_KEY", "")
    conversation = Conversation(streamed_answers(args.url, api_key, options), sys.stdout)
    while True:
        try:
            conversation.take(input("> "))
        except KeyboardInterrupt:
            sys.stdout.write("\n")
        except EOFError:
            sys.stdout.write("\n")
            return 0


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pagestream chat",
        description="Talk to a server: /reset, /system TEXT; Ctrl-C stops an answer.",
        epilog="PAGESTREAM_API_KEY is sent as the API key.",
    )
    parser.add_argument(
        "--url", default="http://127.0.0.1:8000", metavar="URL", help="server URL without /v1 (default: %(default)s)"
    )
    parser.add_argument("--model", default=None, metavar="NAME", help="model to ask (default: the server's first)")
    parser.add_argument(
        "--max-tokens", type=int, default=None, metavar="N", help="token limit per answer (default: the server's)"
    )
    parser.add_argument(
        "--temperature", type=float, default=None, metavar="RATIO", help="sampling temperature, 0 to 2 (default: 1)"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
