"""The wheel, built by way of the source archive, outside the checkout: trains, decodes, and finds every recipe."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.metadata import Metadata

import headstart

ROOT = Path(__file__).parents[1]


def run(*words: str | Path, cwd: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run([str(word) for word in words], cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{words}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout + done.stderr


def check_metadata(wheel: Path) -> None:
    """As a package index reads them before it takes a file."""
    with zipfile.ZipFile(wheel) as files:
        (name,) = [one for one in files.namelist() if one.endswith(".dist-info/METADATA")]
        found = Metadata.from_email(files.read(name), validate=True)
        assert name.replace("METADATA", "licenses/LICENSE") in files.namelist()
    assert (found.name, str(found.version)) == ("headstart", headstart.__version__)
    assert found.license_expression == "Apache-2.0" and found.license_files == ["LICENSE"]
    assert found.description_content_type == "text/markdown" and found.description
    assert found.description.startswith("# headstart")


@pytest.mark.slow
@pytest.mark.network
def test_the_wheel_trains_decodes_and_finds_every_recipe(tmp_path):
    pip = ("-m", "pip", "--disable-pip-version-check", "-q")
    run(sys.executable, "-m", "build", "--outdir", tmp_path, ROOT, cwd=tmp_path)
    (wheel,) = tmp_path.glob("headstart-*.whl")
    check_metadata(wheel)
    (archive,) = tmp_path.glob("headstart-*.tar.gz")
    with tarfile.open(archive) as files:
        assert {"pyproject.toml", "README.md", "LICENSE"} <= {Path(name).name for name in files.getnames()}
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"
    constraints = ("-c", ROOT / "constraints.txt")
    run(python, *pip, "install", *constraints, "torch", cwd=tmp_path)
    run(python, *pip, "install", *constraints, wheel, cwd=tmp_path)
    headstart = tmp_path / "env" / "bin" / "headstart"
    run(headstart, "fetch-demo", cwd=tmp_path)
    where = run(python, "-c", "import headstart.train; print(headstart.train.__file__)", cwd=tmp_path)
    assert str(tmp_path) in where

    listed = "import headstart.recipe as r; print(*sorted(p.name for p in r.PACKAGED.glob('*.yaml')))"
    shipped = run(python, "-c", listed, cwd=tmp_path).split()
    assert shipped == sorted(path.name for path in (ROOT / "recipes").glob("*.yaml"))
    for name in shipped:
        run(python, "-c", f"from headstart.recipe import load_recipe; load_recipe({name!r}, smoke=True)", cwd=tmp_path)

    launch = [tmp_path / "env" / "bin" / "accelerate", "launch", "--quiet", "--cpu", "--num_processes", "1"]
    launch += ["-m", "headstart.train.medusa", "--recipe", "llama70b.yaml", "--smoke"]
    assert "headstart eval --head" in run(*launch, cwd=tmp_path)
    run(headstart, "eval", "--head", "runs/llama70b-smoke", "--set", "eval.num_prompts=2", cwd=tmp_path)
    assert (tmp_path / "runs" / "llama70b-smoke" / "report.json").is_file()
    answer = run(headstart, "generate", "--head", "runs/llama70b-smoke", "--max-new-tokens", "8", "Hi", cwd=tmp_path)
    assert "acceptance length" in answer
