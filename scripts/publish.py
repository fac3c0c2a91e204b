"""`headstart export --to hub`: a head with all that others need to use it, in one commit on the Hugging Face Hub.

    headstart export --head runs/quickstart --to hub org/tides-medusa --dry-run
    headstart export --head runs/quickstart --to hub org/tides-medusa

The export is a folder on this disk first (runs/NAME/hub), looked through for paths, keys and names, and only then sent.
An upload that was interrupted is repeated by the same command: what has arrived is not sent again.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import httpx2
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)

import headstart
from headstart.atomic import publish, start_folder
from headstart.errors import HeadError, RecipeError, warn
from headstart.eval.trained import find_head
from headstart.heads.published import hub_name
from headstart.recipe import Recipe, load_recipe
from headstart.scripts.hub_folder import CODE, OURS, write_export
from headstart.scripts.model_card import HUB_ID


def run(
    head: str,
    repo: str | None = None,
    *,
    overrides: Sequence[str] = (),
    target_name: str | None = None,
    output: str | None = None,
    dry_run: bool = False,
) -> None:
    """Writes the export of a run (or of a head's folder) and sends it. repo: ORG/NAME; default: the recipe's
    `export.repo`. target_name: the target's hub id, where it was loaded from a folder. output: where the export goes;
    default: `hub` beside the head. dry_run: only says what would be sent. Raises HeadstartError."""
    source, folder = find_head(Path(head))
    recipe = _recipe(source, overrides)
    repo = repo or (recipe.export.repo if recipe else None)
    if repo is None or not HUB_ID.fullmatch(repo):
        found = "no repository is named" if repo is None else f"the repository is {repo!r}"
        raise RecipeError(f"{found}, expected ORG/NAME; write --to hub ORG/NAME, or set export.repo in the recipe")
    private = recipe.export.private if recipe else True
    if dry_run:
        with tempfile.TemporaryDirectory() as scratch:
            write_export(source, folder, Path(scratch), repo, recipe, target_name)
            _show(Path(scratch), f"{repo} ({'private' if private else 'public'}) would get")
        return
    if hub_name(head) and not output:
        raise HeadError(f"{head} lies in the hub's cache, where nothing is written; give its export an --output")
    exported = Path(output) if output else (source or folder.parent) / "hub"
    if exported.exists() and not (exported / CODE).is_file():
        raise HeadError(f"{exported} exists, is no such export, and is kept; give another --output")
    partial = start_folder(exported)
    try:
        write_export(source, folder, partial, repo, recipe, target_name)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    publish(partial, exported)
    _show(exported, f"{exported}:")
    print(send(exported, repo, private=private))


def _recipe(source: Path | None, overrides: Sequence[str]) -> Recipe | None:
    if source is None:
        if overrides:
            raise RecipeError("--set changes the recipe of a run, and a head's folder alone has none; leave it out")
        return None
    return load_recipe(source / "recipe.yaml", overrides)


def _show(folder: Path, heading: str) -> None:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    print(heading)
    for path in files:
        print(f"  {path.stat().st_size:>14,} bytes  {path.relative_to(folder).as_posix()}")
    print(f"  {sum(path.stat().st_size for path in files):>14,} bytes  in {len(files)} files")


# -- the upload ------------------------------------------------------------------------------------------------------


def send(folder: Path, repo: str, *, private: bool) -> str:
    """One commit with the whole folder, and without what an earlier export left there; returns where it is.

    Raises HeadError, and leaves `folder` as it is, for whatever stops it; the same call goes on with it later.
    """
    api = HfApi(library_name="headstart", library_version=headstart.__version__)
    try:
        api.create_repo(repo, private=private, exist_ok=True)
        there = api.model_info(repo)
        if private and not there.private:
            raise HeadError(
                f"{repo} is there already and everybody sees it; publish with --set export.private=false, or make it "
                "private on its settings page first"
            )
        files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
        stale = {one.rfilename for one in there.siblings or []} & OURS - files.keys()
        commit = api.create_commit(
            repo,
            [CommitOperationAdd(name, path) for name, path in sorted(files.items())]
            + [CommitOperationDelete(name) for name in sorted(stale)],
            commit_message=f"Head exported by headstart {headstart.__version__}",
        )
    except _FAULTS as error:
        raise HeadError(f"{repo} was not published ({_reason(error)}); the export is whole in {folder}") from error
    if there.private and not private:
        warn(f"{repo} was private before and stays so; its settings page on the hub changes that")
    return f"{commit.repo_url.rstrip('/')}: commit {commit.oid[:10]}, {'private' if there.private else 'public'}"


_FAULTS = (HfHubHTTPError, HFValidationError, OfflineModeIsEnabled, httpx2.HTTPError, OSError, RuntimeError, ValueError)
"""What the client raises; of its threads, RuntimeError, and of a card that the hub does not take, ValueError."""


def _reason(error: Exception) -> str:
    """The cause and what to do about it. The client wraps the faults of its threads, so that causes are looked into."""
    status = None
    cause: BaseException | None = error
    while cause is not None and status is None:
        status = getattr(getattr(cause, "response", None), "status_code", None)
        cause = cause.__cause__
    if isinstance(error, LocalTokenNotFoundError) or status == 401:
        return "the hub knows no token of yours; `hf auth login` with one that may write"
    if status == 403:
        return "your token may not write there; check the organisation's name and the token's rights"
    if isinstance(error, RepositoryNotFoundError) or status == 404:
        return "the hub shows no such place; check the organisation's name"
    first = (str(error).strip() or type(error).__name__).splitlines()[0]
    return f"{first}; run the same command again, what has arrived is not sent twice"
