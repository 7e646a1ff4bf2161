"""Open WebUI in a headless browser: it is asked once, and its answer must grow on the page.

At temperature 0 its last text equals this server's direct answer to the same message. Open WebUI's 36 tools are off,
because their descriptions are 7,000 prompt tokens, which take minutes on a CPU.
"""

import json
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

from playwright.sync_api import Page, sync_playwright

from bench.serving.free_port import free_port
from tests.peers.peer import OFFLINE, Environment, PeerFailed, Report, Served, expect

PACKAGE = "open-webui"
QUESTION = "What is the capital of France?"
START_SECONDS = 240.0
ANSWER_SECONDS = 240.0
SETTINGS = {
    **OFFLINE,
    "OFFLINE_MODE": "True",
    "WEBUI_AUTH": "False",
    "WEBUI_SECRET_KEY": "of one run",
    "ENABLE_OLLAMA_API": "False",
    "RAG_EMBEDDING_ENGINE": "openai",  # otherwise it looks for an embedding model
    "BYPASS_EMBEDDING_AND_RETRIEVAL": "True",
    "DEFAULT_MODEL_METADATA": json.dumps({"capabilities": {"builtin_tools": False}}),
    "DEFAULT_MODEL_PARAMS": json.dumps({"temperature": 0}),
    "ENABLE_FOLLOW_UP_GENERATION": "False",
    "ENABLE_TAGS_GENERATION": "False",
}


def run(served: Served, environment: Environment) -> Report:
    chromium = shutil.which("chromium")
    if chromium is None:
        raise PeerFailed("no Chromium on this machine: apt-get install chromium")
    with _open_webui(served, environment) as url:
        user = _post(f"{url}/api/v1/auths/signin", {"email": "", "password": ""})
        models = _get(f"{url}/api/models", {"Authorization": f"Bearer {user['token']}"})["data"]
        expect("the models that it lists", [model["id"] for model in models], [served.name])
        message = {"role": "user", "content": QUESTION}
        body = {"model": served.name, "messages": [message], "temperature": 0}
        answer = _post(f"{served.url}/v1/chat/completions", body)["choices"][0]["message"]["content"]
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
            page = browser.new_page(viewport={"width": 1000, "height": 500})
            seen = _texts_seen(page, url, answer.strip())
            browser.close()
    if len(seen) < 3:
        raise PeerFailed(f"the answer did not grow: {seen}")
    for earlier, later in pairwise(seen):
        expect("the text so far", later.startswith(earlier), True)
    texts = "\n".join(repr(text) for text in seen)
    return Report(
        f"{len(seen)} growing texts on its page, the last {seen[-1]!r}", f"asked: {QUESTION}\nseen:\n{texts}\n"
    )


@contextmanager
def _open_webui(served: Served, environment: Environment) -> Iterator[str]:
    port = free_port()
    own = {"OPENAI_API_BASE_URL": f"{served.url}/v1", "DATA_DIR": str(environment.folder)}
    log = environment.folder / "output.txt"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [environment.directory / "bin" / "open-webui", "serve", "--host", "127.0.0.1", "--port", str(port)],
            env=environment.variables({**SETTINGS, **own}),
            cwd=environment.folder,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    try:
        deadline = time.monotonic() + START_SECONDS
        while not _is_healthy(f"http://127.0.0.1:{port}/health"):
            if process.poll() is not None or time.monotonic() > deadline:
                raise PeerFailed(f"it does not start:\n{log.read_text(errors='replace')[-3000:]}")
            time.sleep(0.2)  # polls another process, which has no event to wait for
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def _texts_seen(page: Page, url: str, last: str) -> list[str]:
    """Return each text of the answer that the page showed, up to `last`."""
    page.goto(url, wait_until="domcontentloaded")
    page.wait_for_selector("#chat-input", timeout=START_SECONDS * 1000)
    page.get_by_role("button", name="Okay, Let's Go!").click()  # the release notes
    page.click("#chat-input")
    page.keyboard.type(QUESTION)
    page.keyboard.press("Enter")
    seen: list[str] = []
    deadline = time.monotonic() + ANSWER_SECONDS
    while (not seen or seen[-1] != last) and time.monotonic() < deadline:
        for text in page.locator(".chat-assistant").all_inner_texts():
            if text.strip() and text.strip() not in seen[-1:]:
                seen.append(text.strip())
        page.wait_for_timeout(20)
    if not seen or seen[-1] != last:
        raise PeerFailed(f"the page shows {seen[-1:]}, asked for directly the answer is {last!r}")
    return seen


def _is_healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


def _get(url: str, headers: dict[str, str]) -> Any:
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=60) as reply:
        return json.load(reply)


def _post(url: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as reply:
        return json.load(reply)
