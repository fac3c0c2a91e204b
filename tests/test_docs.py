"""The text stays true: links lead somewhere, commands parse, make targets exist, the tree of folders is the tree."""

from __future__ import annotations

import re
import shlex
from importlib.util import find_spec
from pathlib import Path

import pytest
import tiny
from head_cases import untrained_run

from headstart.cli import build_parser
from headstart.errors import HeadstartError
from headstart.recipe import load_recipe
from headstart.scripts.recipe_page import PAGE
from headstart.scripts.recipe_page import page as recipe_page
from headstart.train.preparation import parse_arguments

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "data" / "bundled").glob("*.md")])


def code_blocks(page: Path) -> list[str]:
    return re.findall(r"```(?:sh|bash)\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)


def commands(page: Path) -> list[str]:
    """All that is typed; a line that ends in `# needs ...` is not, for lack of a GPU, a network or a package."""
    lines = "\n".join(code_blocks(page)).splitlines()
    typed = [line for line in lines if line.strip() and not line.startswith("#") and "# needs " not in line]
    return [line.split("#")[0].strip() for line in typed]


def python_snippets(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page):
    for link in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
        if not link.startswith(("http://", "https://")):
            assert (page.parent / link).exists(), f"{page.name} links to {link}"


def check_command(command: str) -> None:
    """Fails where a command would end at its own command line. `make` has a test of its own."""
    words = shlex.split(command)
    while "=" in words[0]:  # variables
        words.pop(0)
    name = Path(words[0]).name
    if name == "headstart":
        build_parser().parse_args(words[1:])
    elif name in ("accelerate", "python"):
        place = next(place for place, word in enumerate(words) if word.endswith(".py") or word == "-m")
        if words[place] == "-m":
            assert find_spec(words[place + 1]), f"there is no module {words[place + 1]}"
            return
        assert (ROOT / words[place]).is_file(), f"there is no file {words[place]}"
        if "--config_file" in words:
            assert (ROOT / words[words.index("--config_file") + 1]).is_file()
        if words[place].startswith("train/"):
            load_recipe(parse_arguments("", words[place + 1 :]).recipe)
    else:
        assert name == "make" or command == "pip install .", (
            f"nothing checks {command!r}; write `# needs ...` behind it"
        )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_would_start_or_says_what_it_needs(page):
    for command in commands(page):
        check_command(command)


@pytest.mark.parametrize("command", ["headstart evil", "accelerate launch train/medusa.py --recipe lama.yaml", "rm x"])
def test_a_command_that_would_not_start_is_found(command):
    with pytest.raises((AssertionError, SystemExit, HeadstartError)):
        check_command(command)


def test_the_page_of_recipes_is_fresh():
    assert PAGE.read_text(encoding="utf-8") == recipe_page(), "run `make docs`"


def test_all_pages_are_named_in_the_readme():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    missing = [path.name for path in (ROOT / "docs").glob("*.md") if f"docs/{path.name}" not in text]
    assert not missing


def test_snippets_of_the_front_door_run(tmp_path, monkeypatch):
    """With a tiny target and an untrained head in the places that the pages name."""
    untrained_run(tmp_path / "runs/my-model", tiny.save(tmp_path / "models/my-model", "llama"))
    (tmp_path / "runs/quickstart").symlink_to(tmp_path / "runs/my-model")
    monkeypatch.chdir(tmp_path)
    snippets = {place: python_snippets(ROOT / place) for place in ("README.md", "docs/python.md")}
    assert len(snippets["README.md"]) == 1 and len(snippets["docs/python.md"]) == 7
    for place, texts in snippets.items():
        for text in texts:
            exec(compile(text, place, "exec"), {})


@pytest.mark.parametrize("page", ["how-it-works.md", "como-funciona.md"])
def test_snippets_run(page):
    snippets = python_snippets(ROOT / "docs" / page)
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
