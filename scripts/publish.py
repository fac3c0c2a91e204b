"""`headstart export --to hub`: a head with all that others need to use it, in one commit on the Hugging Face Hub.

    headstart export --head runs/quickstart --to hub org/tides-medusa --dry-run
    headstart export --head runs/quickstart --to hub org/tides-medusa

The export is a folder on this disk first (runs/NAME/hub), looked through for paths, keys and names, and only then sent.
An upload that was interrupted is repeated by the same command: what has arrived is not sent again.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from string import Template
from typing import Any

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
from headstart.eval.plot import acceptance_plot
from headstart.eval.tables import Report
from headstart.eval.trained import find_head
from headstart.eval.trees import TREES
from headstart.heads.published import CONFIG, WEIGHTS, hub_name
from headstart.heads.store import load_head, read_description
from headstart.recipe import PACKAGED, Recipe, load_recipe, override, quoted
from headstart.scripts.leaks import find_leaks
from headstart.scripts.model_card import FILES, HUB_ID, PAGE, PLOT, Published, model_card

BASE_OF_BUNDLED = "HuggingFaceTB/SmolLM2-135M-Instruct"
"""What the bundled target was made of."""
CARD = "README.md"
CODE = "custom_generate/generate.py"
REQUIREMENTS = "custom_generate/requirements.txt"
REPORT = "report.json"


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


# -- the folder ------------------------------------------------------------------------------------------------------


def write_export(
    source: Path | None, head: Path, folder: Path, repo: str, recipe: Recipe | None, target_name: str | None
) -> None:
    """Everything that is published, into an empty folder, and a look through all of it; HeadError names what leaks."""
    load_head(head)  # whole and readable, or nothing goes out
    description = read_description(head)
    stored = recipe.target.name if recipe else str(description["target"].get("name") or "")
    target = target_name or stored
    if target_name:
        description["target"]["name"] = target_name
    if recipe is not None:
        recipe = override(recipe, [f"export.repo={repo}", *_changes(recipe, target_name)])
        recipe = Recipe.model_validate(_without_paths(recipe.model_dump()))
        (folder / "recipe.yaml").write_text(recipe.to_yaml(), encoding="utf-8")
    _write_json(folder / CONFIG, description)
    for name in (WEIGHTS, TREES):
        if (head / name).is_file():
            shutil.copyfile(head / name, folder / name)
    _write_code(folder, repo)
    reports = _reports(source)
    if reports:
        _write_figures(folder, reports)
    base = _base_model(target)
    published = Published(
        repo=repo,
        recipe=recipe,
        description=description,
        base_model=base,
        target=target if base else Path(target).name,
        reports=reports,
        files=[name for name in (*FILES, PLOT) if (folder / name).is_file()],
    )
    (folder / CARD).write_text(model_card(published), encoding="utf-8")
    _refuse_leaks(folder, repo, base)


def _changes(recipe: Recipe, target_name: str | None) -> list[str]:
    """What in a recipe would be of no use elsewhere: a folder's name, and a file that does not come with headstart."""
    architecture = recipe.target.architecture
    own = architecture is not None and not (PACKAGED / architecture).is_file()
    name = target_name or Path(recipe.target.name).name
    moved = target_name or Path(recipe.target.name).exists()
    named = [f"target.name={quoted(name)}", "target.revision=null"] if moved else []
    return [*named, *(["target.architecture=null"] if own else [])]


def _base_model(target: str) -> str | None:
    """A hub id, or None with a warning: a folder's path never goes into a card."""
    if target.startswith("bundled:"):
        return BASE_OF_BUNDLED
    if HUB_ID.fullmatch(target) and not Path(target).exists():
        return target
    warn("the target was loaded from a folder, so that the card names no base_model; give --target-name ORG/MODEL")
    return None


def _without_paths(value: Any) -> Any:
    """Of recipes and reports: places on this disk by their last part alone. What is said to the model stays as it is
    (`/no_think` is no path)."""
    if isinstance(value, dict):
        return {key: one if key == "chat" else _without_paths(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_without_paths(one) for one in value]
    if isinstance(value, str) and re.match(r"/|~|[A-Za-z]:[\\/]|file:/", value) and "\n" not in value:
        return re.split(r"[\\/]", value.rstrip("\\/"))[-1] or "folder"
    return value


def _reports(source: Path | None) -> dict[str, Report]:
    """The reports of a run by the name of what was asked: held-out rows first, then each benchmark."""
    found: dict[str, Report] = {}
    for path in [source / REPORT, *sorted(source.glob(f"bench-*/{REPORT}"))] if source else []:
        if path.is_file():
            report = _without_paths(json.loads(path.read_text(encoding="utf-8")))
            prompts = report["details"]["settings"]["prompts"]
            own = prompts if isinstance(prompts, str) else ", ".join(map(str, prompts))
            found[own if path.parent == source else path.parent.name.removeprefix("bench-")] = report
    return found


def _write_figures(folder: Path, reports: dict[str, Report]) -> None:
    name, first = next(iter(reports.items()))
    _write_json(folder / REPORT, reports)
    depths = first["details"]["per_depth"]
    if depths:
        (folder / PLOT).write_bytes(acceptance_plot(f"Share of drafts accepted, by depth: {name}", depths))


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _write_code(folder: Path, repo: str) -> None:
    (folder / CODE).parent.mkdir()
    (folder / CODE).write_text(GENERATE.substitute(repo=repo), encoding="utf-8")
    (folder / REQUIREMENTS).write_text(f"headstart>={headstart.__version__}\n", encoding="utf-8")


GENERATE = Template('''\
"""Drafts with the head of this repository and lets the model check every token; the texts are the model's own.

    model.generate(**inputs, custom_generate="$repo", trust_remote_code=True)
"""

try:
    from headstart.eval.custom_generate import generate_for_transformers
except ImportError as error:
    raise ImportError(f"$repo drafts with headstart, which is not here ({error}); pip install headstart") from None


def generate(model, **arguments):
    return generate_for_transformers(model, "$repo", code=__file__, **arguments)
''')


def _refuse_leaks(folder: Path, repo: str, base: str | None) -> None:
    ours = set(re.findall(r"[a-z0-9]+", (PAGE.template + GENERATE.template + " ".join(FILES.values())).lower()))
    leaks = find_leaks(folder, allowed=[repo, *([base] if base else [])], ordinary=ours)
    if leaks:
        shown = "; ".join(dict.fromkeys(map(str, leaks[:5])))
        more = f"; and {len(leaks) - 5} more" if len(leaks) > 5 else ""
        raise HeadError(
            f"nothing was uploaded: {shown}{more}; mend it where it comes from (the run's recipe.yaml with --set, the "
            "head's config.json, the report), then export again"
        )


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
        stale = {one.rfilename for one in there.siblings or []} & {*FILES, PLOT, REQUIREMENTS} - files.keys()
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
