"""`serve ORG/NAME`: the hub's own library with a hub on 127.0.0.1, and the cache that it leaves."""

import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from pagestream.gguf_model import ModelUnavailable
from pagestream.hub_model import HubModel, hub_model
from pagestream.served_models import find_model
from tests.engine_worker.gguf.test_convert_gguf import write_gguf
from tests.pagestream.fake_hub import COMMIT, FakeHub, running

INDEX = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
FILES = {
    "config.json": b"{}",
    "generation_config.json": b"{} ",
    "hf_quant_config.json": b"{}    ",
    "tokenizer.json": b"{}  ",
    "tokenizer_config.json": b"{}   ",
    "model.safetensors.index.json": json.dumps(INDEX).encode(),
    "model-00001-of-00002.safetensors": b"a" * 300_000,
    "model-00002-of-00002.safetensors": b"b" * 300_000,
    "modules.json": b"[]",
    "1_Pooling/config.json": b"{}     ",
    "1_Pooling/model.safetensors": b"never",
    "pytorch_model.bin": b"never",
    "consolidated.safetensors": b"the same once more",
    "original/model.safetensors": b"never",
    "README.md": b"never",
    "modeling_own.py": b"never",
}
CHUNK_BYTES = 10 * 2**20  # the library's write size; a shorter part of a file is not kept
WANTED = sorted(name for name in FILES if not FILES[name].startswith((b"never", b"the same")))


@pytest.fixture(autouse=True)
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("HF_", "HUGGING"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_HUB_ETAG_TIMEOUT", "2")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with running(FakeHub(dict(FILES))) as found:
        monkeypatch.setenv("HF_ENDPOINT", found.endpoint)
        yield found


async def prepare(model: str = "org/tiny", revision: str = "main") -> tuple[Path, list[tuple[str, float]]]:
    reports: list[tuple[str, float]] = []
    source = find_model(model, revision)
    await source.prepare(lambda phase, progress, detail: reports.append((phase, progress)))
    assert source.name == model
    return source.directory, reports


async def test_only_served_files_are_downloaded_once(hub: FakeHub) -> None:
    directory, reports = await prepare()
    files = [path for path in directory.rglob("*") if path.is_file()]
    assert sorted(str(path.relative_to(directory)) for path in files) == WANTED
    assert (directory / "model-00002-of-00002.safetensors").read_bytes() == FILES["model-00002-of-00002.safetensors"]
    assert sorted(hub.downloads()) == WANTED
    assert reports[0] == ("download", 0.0) and reports[-1] == ("download", 1.0)
    hub.asked.clear()
    await prepare()
    assert hub.downloads() == []


async def test_cache_suffices_without_a_network(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, _ = await prepare()
    directory.unlink()
    hub.asked.clear()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert (await prepare())[0].resolve().name == COMMIT
    assert (await prepare(revision=COMMIT))[0].resolve().name == COMMIT
    assert hub.asked == []


async def test_interrupted_download_resumes(hub: FakeHub) -> None:
    name = "model-00002-of-00002.safetensors"
    hub.files[name] = b"b" * (2 * CHUNK_BYTES)
    hub.cut_after[name] = CHUNK_BYTES + 1000
    try:
        await prepare()
    except ModelUnavailable:  # the library may resume by itself, or at the next start
        assert not find_model("org/tiny").directory.exists()
        await prepare()
    assert (find_model("org/tiny").directory / name).read_bytes() == hub.files[name]
    ranges = [asked for method, file, asked in hub.asked if method == "GET" and file == name]
    assert ranges == [None, f"bytes={CHUNK_BYTES}-"]


async def test_stored_token_opens_a_gated_model(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.token = "hf_secret"
    with pytest.raises(ModelUnavailable, match=r"org/tiny is gated: accept its terms at http.*HF_TOKEN"):
        await prepare()
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    directory, _ = await prepare()
    assert (directory / "config.json").is_file()


async def test_unknown_hub_model_is_refused(hub: FakeHub) -> None:
    with pytest.raises(ModelUnavailable, match=r"has no model org/other, or it is private .*no local folder"):
        await prepare("org/other")
    with pytest.raises(ModelUnavailable, match="org/tiny has no revision 'v9': use a branch, tag or commit"):
        await prepare(revision="v9")


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "model-00001-of-00002.safetensors"])
async def test_unservable_model_is_refused_by_its_files(hub: FakeHub, missing: str) -> None:
    del hub.files[missing]
    with pytest.raises(ModelUnavailable, match=rf"org/tiny \(main\) lacks {missing}: serving needs safetensors"):
        await prepare()
    assert not find_model("org/tiny").directory.exists()


@pytest.mark.parametrize("offline", [True, False])
async def test_unreachable_hub_is_named_in_the_error(offline: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as unheard:  # bound without a listener
        unheard.bind(("127.0.0.1", 0))
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{unheard.getsockname()[1]}")
        if offline:
            monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        why = "HF_HUB_OFFLINE is set" if offline else r"is not reachable \(mirror: HF_ENDPOINT, proxy: HTTPS_PROXY\)"
        with pytest.raises(ModelUnavailable, match=rf"missing in .*/hf/hub, and .*{why}.*`hf download org/tiny`"):
            await prepare()


async def test_gguf_file_is_found_by_the_end_of_its_name_and_converted(hub: FakeHub, tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf")
    hub.files |= dict.fromkeys(("tiny-Q4_K_M.gguf", "mmproj-q4_k.gguf", "tiny.gguf"), b"never")
    hub.files["tiny-q4_k.gguf"] = (tmp_path / "m.gguf").read_bytes()
    directory, reports = await prepare("org/tiny:Q4_K")
    assert hub.downloads() == ["tiny-q4_k.gguf"]
    assert json.loads((directory / "config.json").read_text())["model_type"] == "llama"
    assert reports[0] == ("download", 0.0) and reports[-1] == ("convert", 1.0)
    hub.asked.clear()
    assert (await prepare("org/tiny:Q4_K"))[0].resolve() == directory.resolve() and hub.downloads() == []


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        (["tiny-Q8_0.gguf", "tiny-Q4_K_M-00001-of-00002.gguf"], "no file whose name ends with Q4_K_M.gguf"),
        (["a-Q4_K_M.gguf", "b-Q4_K_M.gguf"], r"2 files \(a-Q4_K_M.gguf, b-Q4_K_M.gguf\) that end with"),
    ],
)
async def test_gguf_files_that_are_not_one_are_refused(hub: FakeHub, names: list[str], problem: str) -> None:
    hub.files |= dict.fromkeys(names, b"x")
    with pytest.raises(ModelUnavailable, match=rf"org/tiny \(main\) has {problem}"):
        await prepare("org/tiny:Q4_K_M")


def test_local_directory_precedes_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_model("org/tiny").directory == HubModel("org/tiny", "", "main").directory
    (tmp_path / "org" / "tiny").mkdir(parents=True)
    assert find_model("org/tiny").directory == tmp_path / "org" / "tiny"


@pytest.mark.parametrize(
    "name", ["/abs/dir", "./a/b", "../a/b", "a/b/c", "name", "a/", "a b/c", "a/..", "-a/b", "a/b:", "a/b:*"]
)
def test_invalid_hub_name_is_refused(name: str) -> None:
    assert hub_model(name) is None


def test_revisions_have_separate_directories() -> None:
    places = {HubModel("a/b", "", revision).directory for revision in ("main", "refs/pr/1", "v1.0")}
    assert len(places) == 3 and all(place.parent.name == "models" for place in places)
