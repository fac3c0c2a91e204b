"""The text stays true: links lead somewhere, commands parse, make targets exist, the tree of folders is the tree."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from headstart.cli import build_parser
from headstart.recipe import load_recipe

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "data" / "bundled").glob("*.md")])


def code_blocks(page: Path) -> list[str]:
    return re.findall(r"```(?:sh|bash)\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)


def commands(page: Path) -> list[str]:
    lines = "\n".join(code_blocks(page)).splitlines()
    return [line.split("#")[0].strip() for line in lines if line.strip() and not line.startswith("#")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page):
    for link in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
        if not link.startswith(("http://", "https://")):
            assert (page.parent / link).exists(), f"{page.name} links to {link}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_headstart_commands_parse(page):
    for command in commands(page):
        words = shlex.split(command)
        if words and Path(words[0]).name == "headstart":
            build_parser().parse_args(words[1:])


@pytest.mark.parametrize("page", ["how-it-works.md", "como-funciona.md"])
def test_snippets_run(page):
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    snippets = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert len(snippets) >= 4 and all("assert " in snippet for snippet in snippets)
    for snippet in snippets:
        exec(compile(snippet, page, "exec"), {})


def test_the_page_in_spanish_has_what_the_english_one_has():
    """The same headings, lists and tables, figures and links, in the same order."""
    english, spanish = (
        (ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("how-it-works.md", "como-funciona.md")
    )
    for pattern in (r"^(#+) ", r"^([-|]) ", r"\d+\.\d+"):
        assert re.findall(pattern, english, flags=re.MULTILINE) == re.findall(pattern, spanish, flags=re.MULTILINE)
    links = [set(re.findall(r"\]\((.*?)\)", text)) for text in (english, spanish)]
    assert links[0] - {"como-funciona.md"} == links[1] - {"how-it-works.md"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_make_targets_exist(page):
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
    for target in re.findall(r"`?make ([a-z][a-z0-9-]*)`", page.read_text(encoding="utf-8")):
        assert target in targets


def test_the_tree_in_the_readme_has_every_room():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    rooms = [path.parent.name for path in ROOT.glob("*/__init__.py")] + ["tests"]
    assert rooms and all(re.search(rf"^{room}/ ", text, flags=re.MULTILINE) for room in rooms)


def test_launch_lines_of_recipes_name_recipes_that_load():
    for path in (ROOT / "recipes").glob("*.yaml"):
        header = "\n".join(line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("#"))
        named = re.findall(r"--recipe (\S+\.yaml)", header)
        assert named, f"{path.name} has no launch line"
        for name in named:
            load_recipe(name)


def test_python_files_that_run_open_with_their_commands():
    for path in [ROOT / "train" / "medusa.py", ROOT / "scripts" / "quickstart.py", ROOT / "headstart" / "cli.py"]:
        docstring = path.read_text(encoding="utf-8").split('"""')[1]
        assert path.name in docstring or "headstart " in docstring
