"""python -m pagestream.hub_download ORG/NAME REVISION LINK: a model of the Hugging Face hub into its local cache.

`huggingface_hub` looks into the cache, downloads what is missing (only what serving reads), and goes on with a file
that was begun. HF_HOME, HF_HUB_CACHE, HF_HUB_OFFLINE, HF_ENDPOINT, HF_TOKEN and the token of `hf auth login` mean what
they mean everywhere. LINK leads to the whole snapshot; it appears when all files are there. A process of its own, so
that only who downloads imports the library, and so that a download can be stopped at once.

hub_model.py starts it before there are workers. It knows the library's cache, and not what serves the model.
"""

import contextlib
import os
import sys
import time
from pathlib import Path
from typing import Any

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    IncompleteSnapshotError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from tqdm.std import tqdm

from shared.model_files import ModelFilesError, read_json

FILES = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "chat_template.jinja", "hf_quant_config.json", "model*.safetensors", "model.safetensors.index.json",
)  # fmt: skip
_REPORT_SECONDS = 0.5
_GB = 1e9


class NotToBeHad(RuntimeError):
    """The model cannot be had from here; the message says why and what would help."""


class _Progress(tqdm):  # type: ignore[misc]
    """The bar of all bytes, as lines that a supervisor reads; other bars are silent."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self._reported_at = 0.0
        options.pop("name", None)
        super().__init__(*args, **{**options, "file": sys.stderr, "disable": False})

    def display(self, *_args: Any, **_options: Any) -> bool:
        now = time.monotonic()
        if self.unit == "B" and self.total and now - self._reported_at >= _REPORT_SECONDS:
            self._reported_at = now
            share = min(1.0, self.n / self.total)
            print(f"download {share:4.0%} {self.n / _GB:.2f} of {self.total / _GB:.2f} GB", flush=True)
        return True

    def close(self) -> None:
        self.disable = True


def download(repository: str, revision: str) -> Path:
    """The folder of the whole snapshot. Raises NotToBeHad."""
    try:
        found = snapshot_download(repository, revision=revision, allow_patterns=list(FILES), tqdm_class=_Progress)
    except GatedRepoError:
        raise NotToBeHad(
            f"{repository} is gated: accept its terms at {constants.ENDPOINT}/{repository}, then give a token that may "
            "read it (HF_TOKEN, or `hf auth login`)"
        ) from None
    except RepositoryNotFoundError:
        raise NotToBeHad(
            f"{constants.ENDPOINT} has no model {repository}, or it is private (HF_TOKEN, or `hf auth login`); there "
            "is no folder of this name here either"
        ) from None
    except RevisionNotFoundError:
        raise NotToBeHad(f"{repository} has no revision {revision!r}: give a branch, a tag or a commit") from None
    except (LocalEntryNotFoundError, IncompleteSnapshotError) as error:
        raise NotToBeHad(_unreachable(repository, revision, error)) from None
    except (HfHubHTTPError, OSError) as error:
        raise NotToBeHad(f"{repository} could not be downloaded from {constants.ENDPOINT}: {_line(error)}") from error
    folder = Path(found)
    _check_whole(folder, repository, revision)
    return folder


def _unreachable(repository: str, revision: str, error: Exception) -> str:
    held = "only a part of it is" if isinstance(error, IncompleteSnapshotError) else "it is not"
    if constants.HF_HUB_OFFLINE:
        why = "HF_HUB_OFFLINE is set"
    else:
        why = f"{constants.ENDPOINT} cannot be reached (a mirror: HF_ENDPOINT; a proxy: HTTPS_PROXY)"
    return (
        f"{repository} ({revision}): {held} in {constants.HF_HUB_CACHE}, and {why}. Where there is a network run "
        f"`hf download {repository}`, and bring that folder here (HF_HOME says where), or give a model directory"
    )


def _check_whole(folder: Path, repository: str, revision: str) -> None:
    wanted = {"config.json", "tokenizer.json"}
    index = folder / "model.safetensors.index.json"
    try:
        wanted |= set(read_json(index)["weight_map"].values()) if index.is_file() else {"model.safetensors"}
    except (ModelFilesError, KeyError, AttributeError, TypeError) as error:
        raise NotToBeHad(f"{repository}: {index.name} is no index of weights: {error}") from error
    if missing := sorted(name for name in wanted if not (folder / str(name)).is_file()):
        raise NotToBeHad(
            f"{repository} ({revision}) has no {', '.join(missing[:4])}: a model is served from safetensors, "
            "config.json and tokenizer.json; another --revision (`refs/pr/N`) or repository may have them"
        )


def _line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def point(link: Path, folder: Path) -> None:
    """`link` leads to `folder` from one moment to the next."""
    link.parent.mkdir(parents=True, exist_ok=True)
    new = link.with_name(f".{link.name}.{os.getpid()}")
    with contextlib.suppress(FileNotFoundError):
        new.unlink()
    new.symlink_to(folder)
    new.replace(link)


def main(argv: list[str]) -> int:
    repository, revision, link = argv
    try:
        point(Path(link), download(repository, revision))
    except (NotToBeHad, ValueError, OSError) as error:
        print(f"download: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(status)  # threads of an aborted download are not waited for
