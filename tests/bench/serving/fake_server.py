"""Serve an OpenAI-compatible API that generates `x`: `python fake_server.py PORT [TOKENS MISSING]`.

Starts a child process that must be stopped with it.
"""

import json
import subprocess
import sys

from aiohttp import web


async def completions(request: web.Request) -> web.StreamResponse:
    body = await request.json()
    response = web.StreamResponse()
    await response.prepare(request)
    num_tokens = body["max_tokens"] - int(sys.argv[2])
    usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": num_tokens}
    events = [{"choices": [{"text": "x"}]}] * num_tokens + [{"choices": [], "usage": usage}]
    for event in events:
        await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
    await response.write(b"data: [DONE]\n\n")
    return response


async def health(request: web.Request) -> web.Response:
    return web.Response()


def main() -> None:
    if sys.argv[1] == "sleep":  # a child that does not exit by itself
        sys.stdin.read()
        return
    subprocess.Popen([sys.executable, __file__, "sleep"], stdin=subprocess.PIPE)
    app = web.Application()
    app.add_routes([web.get("/health", health), web.post("/v1/completions", completions)])
    web.run_app(app, host="127.0.0.1", port=int(sys.argv[1]), print=None)


if __name__ == "__main__":
    main()
