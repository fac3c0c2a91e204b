"""Heads on the Hugging Face Hub: `ORG/NAME`, or `ORG/NAME@REVISION`, wherever a run or the folder of a head is named.

    name = hub_name("org/tides-eagle3@v1")
    folder = fetch_head(name)              # in the hub client's own cache, where nothing is written

A folder of that name comes first, and so does a mistyped one: `runs/quikstart` is no repository where there is a folder
`runs`. With a revision (`@main` will do) the hub is meant in any case.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import httpx2
from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

import headstart
from headstart.errors import HeadError

WEIGHTS, CONFIG = "head.safetensors", "config.json"
FILES = (WEIGHTS, CONFIG, "trees.json", "recipe.yaml")
"""What decoding reads of a published head; the card and the figures stay where they are."""
ADAPTER_FILES = ("adapter/adapter_config.json", "adapter/adapter_model.safetensors")
"""And of one whose target learnt with it."""


@dataclass(frozen=True)
class HubName:
    """A repository, and the branch, tag or commit of it (None: its default branch)."""

    repo: str
    revision: str | None = None

    def __str__(self) -> str:
        return f"{self.repo}@{self.revision}" if self.revision else self.repo


def hub_name(name: str) -> HubName | None:
    """What a name means on the hub; None where it is a place on this disk, or can only have been meant as one."""
    matched = re.fullmatch(r"(\w[\w.-]*)/(\w[\w.-]*)(?:@(\w[\w./-]*))?", name)
    if matched is None or Path(name).exists():
        return None
    owner, repo, revision = matched.groups()
    if revision is None and Path(owner).is_dir():
        return None
    return HubName(f"{owner}/{repo}", revision)


def fetch_head(
    name: HubName,
    *,
    token: str | bool | None = None,
    cache_dir: str | Path | None = None,
    local_files_only: bool = False,
) -> Path:
    """The folder of a published head, fetched unless it is cached. token, cache_dir, local_files_only: as the hub's
    client takes them. Raises HeadError in one sentence for whatever keeps it from coming."""
    try:
        folder = snapshot_download(
            name.repo,
            revision=name.revision,
            allow_patterns=[*FILES, *ADAPTER_FILES],
            token=token,
            cache_dir=cache_dir,
            local_files_only=local_files_only,
            library_name="headstart",
            library_version=headstart.__version__,
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, httpx2.HTTPError, OSError) as error:
        raise HeadError(f"there is no run {name} here, and {_reason(name, error)}") from error
    if not (Path(folder) / WEIGHTS).is_file():
        raise HeadError(
            f"{name} on the hub holds no head of headstart's ({WEIGHTS} is missing); one of another tool becomes one: "
            f"hf download {name.repo} --local-dir DIR, then headstart import DIR --target TARGET --output HEAD"
        )
    return Path(folder)


def _reason(name: HubName, error: Exception) -> str:
    if isinstance(error, GatedRepoError):
        return f"{name.repo} on the hub is gated; accept its terms on its page, then `hf auth login`"
    if isinstance(error, RepositoryNotFoundError):
        return f"the hub shows no {name.repo} either; check the spelling, or `hf auth login` if it is private"
    if isinstance(error, RevisionNotFoundError):
        return f"{name.repo} on the hub has no revision {name.revision}; look at its branches and tags"
    if isinstance(error, HFValidationError):
        return f"{name.repo} cannot be a name on the hub; name a folder that training wrote, such as runs/quickstart"
    cause = (str(error.__cause__ or error).strip() or type(error).__name__).splitlines()[0]
    return (
        f"no copy of {name.repo} is cached, and the hub does not answer ({cause.rstrip('.')}); connect, or name a "
        "folder that training wrote, such as runs/quickstart"
    )
