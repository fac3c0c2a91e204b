"""The shape of the tree: who may import whom, what the wheel holds, and that every setting is documented."""

from __future__ import annotations

import ast
import json
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel

from headstart.heads.configs import HEADS
from headstart.recipe import Recipe
from headstart.recipe_faults import sections_of

ROOT = Path(__file__).parents[1]
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
ROOMS = {name: ROOT / folder for name, folder in SETUPTOOLS["package-dir"].items()}

# Left of it: what a module may import. The front door's own files stand with the step that they belong to.
ORDER = (
    ("headstart.atomic", "headstart.errors", "headstart.heads.configs", "headstart.stopping"),
    (
        "headstart.recipe",
        "headstart.recipe_faults",
        "headstart.recipe_schema",
        "headstart.recipe_smoke",
        "headstart.recipe_yaml",
    ),
    (
        "headstart.adapters",
        "headstart.allocator",
        "headstart.architecture",
        "headstart.borrowed",
        "headstart.bundled",
        "headstart.bypass",
        "headstart.device_kind",
        "headstart.fingerprint",
        "headstart.hub",
        "headstart.light_target",
        "headstart.loading",
        "headstart.quantised_linear",
        "headstart.recipe_target",
        "headstart.rehearsal",
        "headstart.target",
        "headstart.tensor_files",
    ),
    ("headstart.data",),
    ("headstart.heads",),
    ("headstart.decode",),
    ("headstart.train",),
    ("headstart.eval",),
    ("headstart.scripts",),
    ("headstart.cli", "headstart.launch"),
)


def python_files() -> Iterator[tuple[str, Path]]:
    """Every module of headstart with its file."""
    for room, folder in ROOMS.items():
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            yield ".".join((room, *parts)).removesuffix(".__init__"), path


MODULES = dict(python_files())


def step(module: str) -> int:
    """The place of a module in the order: that of the longest name that it is or lies in."""
    places = {name: index for index, names in enumerate(ORDER) for name in names}
    name = module
    while name not in places:
        name, dot, _ = name.rpartition(".")
        assert dot, f"{module} has no place in ORDER; put it where its imports allow"
    return places[name]


def imported(path: Path) -> Iterator[str]:
    """The headstart modules that a file imports, anywhere in it: at the top, inside functions, for types alone."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.partition(".")[0] == "headstart")
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute, from headstart.<room>"
            module = node.module or ""
            if module.partition(".")[0] == "headstart":
                for alias in node.names:
                    inner = f"{module}.{alias.name}"
                    yield inner if inner in MODULES else module


@pytest.mark.parametrize("module", [name for name in MODULES if name != "headstart" and "recipes" not in name])
def test_modules_import_only_what_stands_left_of_them(module):
    for other in imported(MODULES[module]):
        if other == "headstart":  # the version; everything else there is a lazy name for a module of its own
            continue
        assert step(other) <= step(module), f"{module} must not import {other}, which stands right of it"


def test_the_torch_free_modules_name_no_heavy_package():
    for module in (*ORDER[0], *ORDER[1], "headstart.cli", "headstart"):
        for node in ast.parse(MODULES[module].read_text()).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            heavy = {name for name in names if name.split(".")[0] in ("torch", "transformers", "numpy", "accelerate")}
            assert not heavy, f"{module} is to be torch-free and imports {heavy}"


def test_the_wheel_misses_no_folder_and_names_none_that_is_gone():
    on_disk = {name for name, path in MODULES.items() if path.name == "__init__.py"}
    assert set(SETUPTOOLS["packages"]) == on_disk
    for name, path in MODULES.items():
        assert (path.parent / "__init__.py").exists(), f"{name} lies in a folder without __init__.py"
    assert not (ROOT / "headstart" / "data").exists(), "rooms stand at the root"


def test_the_wheel_holds_every_file_of_data_that_lies_in_a_package():
    packages = {name: path.parent for name, path in MODULES.items() if path.name == "__init__.py"}
    for package, folder in packages.items():
        kept = {path for pattern in SETUPTOOLS["package-data"].get(package, []) for path in folder.glob(pattern)}
        left_out = {path for path in folder.iterdir() if path.is_file() and path.suffix not in (".py", ".pyc")} - kept
        assert not left_out, (
            f"package-data of {package} in pyproject.toml leaves out {sorted(p.name for p in left_out)}"
        )


def test_type_checkers_see_every_room():
    for room, folder in ROOMS.items():
        if room != "headstart":
            link = ROOT / ".typing" / Path(*room.split("."))
            assert link.is_symlink() and link.resolve() == folder.resolve(), f"{link} does not lead to {folder}"


def test_every_setting_says_what_it_trades():
    documented = [section for _, section in sections_of(Recipe)] + list(HEADS.values())
    for section in documented:
        assert section.__doc__ and section.__doc__ != BaseModel.__doc__, f"{section.__name__} has no docstring"
        for name, field in section.model_fields.items():
            assert field.description, f"{section.__name__}.{name} has no docstring under it"


def test_architectures_are_published_configurations():
    sizes = {
        "llama-3.1-8b-instruct": (32, 4096, 14336, 32, 8, 128256, 8.03),
        "llama-3.3-70b-instruct": (80, 8192, 28672, 64, 8, 128256, 70.55),
        "qwen3-8b": (36, 4096, 12288, 32, 8, 151936, 8.19),
        "smollm2-135m-instruct": (30, 576, 1536, 9, 3, 49152, 0.1345),
    }
    files = {path.stem: json.loads(path.read_text()) for path in (ROOT / "recipes/architectures").glob("*.json")}
    assert files.keys() == sizes.keys()
    for name, (layers, hidden, inner, heads, key_heads, vocabulary, billions) in sizes.items():
        c = files[name]
        width = (c.get("head_dim") or hidden // heads) * (2 * heads + 2 * key_heads)
        embeddings = 1 if c["tie_word_embeddings"] else 2
        assert (c["num_hidden_layers"], c["hidden_size"], c["intermediate_size"]) == (layers, hidden, inner)
        assert (c["num_attention_heads"], c["num_key_value_heads"], c["vocab_size"]) == (heads, key_heads, vocabulary)
        parameters = layers * hidden * (width + 3 * inner) + embeddings * vocabulary * hidden
        assert parameters / 1e9 == pytest.approx(billions, rel=1e-3), "as many as the model's card says"


def test_files_that_are_run_share_no_name_with_a_module_anyone_imports():
    # `python train/medusa.py` puts train/ first on sys.path
    taken = {
        "queue",
        "logging",
        "data",
        "tokenizers",
        "types",
        "random",
        "json",
        "copy",
        "statistics",
        "profile",
        "code",
    }
    for room in ("train", "eval", "scripts"):
        assert not taken & {path.stem for path in (ROOT / room).glob("*.py")}
