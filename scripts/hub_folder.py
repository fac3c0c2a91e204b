"""The folder of a published head: weights, configuration, trees, recipe, figures, card, and the code for transformers.

Nothing that only means something on this machine goes in, and all that is in is looked through: see scripts/leaks.py.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from string import Template
from typing import Any

import headstart
from headstart.errors import HeadError, warn
from headstart.eval.plot import acceptance_plot
from headstart.eval.tables import Report
from headstart.eval.trees import TREES
from headstart.heads.published import ADAPTER_FILES, CONFIG, WEIGHTS
from headstart.heads.store import load_head, read_description
from headstart.recipe import PACKAGED, Recipe, override, quoted
from headstart.scripts.leaks import find_leaks
from headstart.scripts.model_card import FILES, HUB_ID, PAGE, PLOT, Published, model_card

BASE_OF_BUNDLED = "HuggingFaceTB/SmolLM2-135M-Instruct"
"""What the bundled target was made of."""
CARD = "README.md"
CODE = "custom_generate/generate.py"
REQUIREMENTS = "custom_generate/requirements.txt"
REPORT = "report.json"
OURS = {*FILES, PLOT, REQUIREMENTS}
"""What an export may hold beside the card; of these, a later export removes what it has not."""


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
    for name in (WEIGHTS, TREES, *ADAPTER_FILES):
        if (head / name).is_file():
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(head / name, folder / name)
    write_code(folder, repo)
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


def write_code(folder: Path, repo: str) -> None:
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
