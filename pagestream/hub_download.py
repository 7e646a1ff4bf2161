"""python -m pagestream.hub_download ORG/NAME REVISION LINK [TAG]: download a model from the Hugging Face hub.

`huggingface_hub` downloads what is missing in its cache, and resumes partial files: those of a model directory that
serving reads, or with TAG one GGUF file. HF_HOME, HF_HUB_CACHE, HF_HUB_OFFLINE, HF_ENDPOINT, HF_TOKEN and the token of
`hf auth login` have their usual meaning. LINK points to the snapshot or file once it is complete. It is a separate
process, so that only downloads import the library, and so that a download can be stopped at once.
"""

import fnmatch
import os
import sys
import time
from collections.abc import Sequence
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

from pagestream.directories import point
from shared.model_files import ModelFilesError, read_json

FILES = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "chat_template.jinja", "chat_template.json", "hf_quant_config.json", "modules.json", "*_Pooling/config.json",
    "model*.safetensors", "model.safetensors.index.json",
)  # fmt: skip
_OF_IMAGES = "*mmproj*"  # GGUF files of encoders for images
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
    """Download a model directory and return it; raise DownloadError."""
    folder = _snapshot(repository, revision, FILES)
    _check_whole(folder, repository, revision)
    return folder


def download_gguf(repository: str, revision: str, tag: str) -> Path:
    """Download the GGUF file whose name ends with `tag`, in any case, and return it; raise DownloadError."""
    pattern = "*[-._]" + "".join(f"[{one.lower()}{one.upper()}]" if one.isalpha() else one for one in tag) + ".gguf"
    folder = _snapshot(repository, revision, [pattern])
    names = [str(path.relative_to(folder)) for path in folder.rglob("*.gguf")]
    found = sorted(name for name in fnmatch.filter(names, pattern) if not fnmatch.fnmatch(name, _OF_IMAGES))
    if len(found) != 1:
        listed = "no file whose name ends" if not found else f"{len(found)} files ({', '.join(found[:3])}) that end"
        raise DownloadError(
            f"{repository} ({revision}) has {listed} with {tag}.gguf; see {constants.ENDPOINT}/{repository}/tree/"
            f"{revision}. A file in several parts must be joined first"
        )
    return folder / found[0]


def _snapshot(repository: str, revision: str, patterns: Sequence[str]) -> Path:
    """Download the files that match and return their folder; raise DownloadError."""
    try:
        found = snapshot_download(
            repository,
            revision=revision,
            allow_patterns=list(patterns),
            ignore_patterns=[_OF_IMAGES],
            tqdm_class=_Progress,
        )
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
    return Path(found)


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
            "tokenizer.json; another --revision (`refs/pr/N`) or repository may have them. ORG/NAME:Q4_K_M is the GGUF "
            "file whose name ends so"
        )


def _line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def main(argv: list[str]) -> int:
    repository, revision, link, *tag = argv
    try:
        found = download_gguf(repository, revision, *tag) if tag else download(repository, revision)
        point(Path(link), found)
    except (DownloadError, ValueError, OSError) as error:
        print(f"download: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(status)  # do not wait for threads of an aborted download
