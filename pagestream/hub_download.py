"""python -m pagestream.hub_download ORG/NAME REVISION LINK: download a Hugging Face model into the local hub cache.

`huggingface_hub` downloads the missing files that serving reads and resumes partial ones. HF_HOME, HF_HUB_CACHE,
HF_HUB_OFFLINE, HF_ENDPOINT, HF_TOKEN and the token of `hf auth login` have their usual meaning. LINK points to the
snapshot once it is complete. It is a separate process, so that only downloads import the library, and so that
a download can be stopped at once.
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
    "chat_template.jinja", "chat_template.json", "hf_quant_config.json", "modules.json", "*_Pooling/config.json",
    "model*.safetensors", "model.safetensors.index.json",
)  # fmt: skip
_REPORT_SECONDS = 0.5
_GB = 1e9


class DownloadError(RuntimeError):
    """The model cannot be downloaded; the message gives the reason and a fix."""


class _Progress(tqdm):  # type: ignore[misc]
    """The progress bar of all bytes, printed as lines for the supervisor; other bars are silent."""

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
    """Download a snapshot and return its folder; raise DownloadError."""
    try:
        found = snapshot_download(repository, revision=revision, allow_patterns=list(FILES), tqdm_class=_Progress)
    except GatedRepoError:
        raise DownloadError(
            f"{repository} is gated: accept its terms at {constants.ENDPOINT}/{repository}, then set a token with "
            "access (HF_TOKEN, or `hf auth login`)"
        ) from None
    except RepositoryNotFoundError:
        raise DownloadError(
            f"{constants.ENDPOINT} has no model {repository}, or it is private (HF_TOKEN, or `hf auth login`); no "
            "local folder has this name either"
        ) from None
    except RevisionNotFoundError:
        raise DownloadError(f"{repository} has no revision {revision!r}: use a branch, tag or commit") from None
    except (LocalEntryNotFoundError, IncompleteSnapshotError) as error:
        raise DownloadError(_unreachable(repository, revision, error)) from None
    except (HfHubHTTPError, OSError) as error:
        raise DownloadError(f"downloading {repository} from {constants.ENDPOINT} failed: {_line(error)}") from error
    folder = Path(found)
    _check_whole(folder, repository, revision)
    return folder


def _unreachable(repository: str, revision: str, error: Exception) -> str:
    state = "incomplete" if isinstance(error, IncompleteSnapshotError) else "missing"
    if constants.HF_HUB_OFFLINE:
        reason = "HF_HUB_OFFLINE is set"
    else:
        reason = f"{constants.ENDPOINT} is not reachable (mirror: HF_ENDPOINT, proxy: HTTPS_PROXY)"
    return (
        f"{repository} ({revision}): {state} in {constants.HF_HUB_CACHE}, and {reason}. On a machine with network "
        f"access run `hf download {repository}` and copy that folder here (see HF_HOME), or pass a model directory"
    )


def _check_whole(folder: Path, repository: str, revision: str) -> None:
    wanted = {"config.json", "tokenizer.json"}
    index = folder / "model.safetensors.index.json"
    try:
        wanted |= set(read_json(index)["weight_map"].values()) if index.is_file() else {"model.safetensors"}
    except (ModelFilesError, KeyError, AttributeError, TypeError) as error:
        raise DownloadError(f"{repository}: {index.name} is not a weights index: {error}") from error
    if missing := sorted(name for name in wanted if not (folder / str(name)).is_file()):
        raise DownloadError(
            f"{repository} ({revision}) lacks {', '.join(missing[:4])}: serving needs safetensors, config.json and "
            "tokenizer.json; another --revision (`refs/pr/N`) or repository may have them"
        )


def _line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def point(link: Path, folder: Path) -> None:
    """Point `link` at `folder` atomically."""
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
    except (DownloadError, ValueError, OSError) as error:
        print(f"download: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(status)  # do not wait for threads of an aborted download
