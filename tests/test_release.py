"""What a release is made of: the version, the changelog, the metadata, and the workflow that publishes it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

import headstart

ROOT = Path(__file__).parents[1]
WORKFLOW = yaml.safe_load((ROOT / ".github" / "workflows" / "publish.yml").read_text())
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def step(name: str) -> str:
    """The shell commands of one step of the build."""
    (found,) = [one["run"] for one in WORKFLOW["jobs"]["build"]["steps"] if one.get("name") == name]
    return found


def bash(commands: str, folder: Path, tag: str) -> subprocess.CompletedProcess[str]:
    """As GitHub runs a step: it ends with the first command that fails."""
    variables = os.environ | {"GITHUB_REF_NAME": tag, "GITHUB_REPOSITORY": "org/headstart"}
    return subprocess.run(["bash", "-e", "-c", commands], cwd=folder, env=variables, capture_output=True, text=True)


def test_the_changelog_has_this_version():
    assert re.fullmatch(r"\d+\.\d+\.\d+", headstart.__version__)
    assert re.search(rf"^## {re.escape(headstart.__version__)}( |$)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)


def test_the_metadata_say_what_an_index_asks_for():
    assert PROJECT["readme"] == "README.md" and PROJECT["license"] == "Apache-2.0"
    assert all((ROOT / name).is_file() for name in PROJECT["license-files"])
    assert len(PROJECT["description"]) < 200 and PROJECT["keywords"] and PROJECT["authors"]
    classifiers = PROJECT["classifiers"]
    assert len(set(classifiers)) == len(classifiers) and "Typing :: Typed" in classifiers
    assert not any(one.startswith("License ::") for one in classifiers), "the licence is an expression (PEP 639)"
    lowest = PROJECT["requires-python"].removeprefix(">=")
    assert f"Programming Language :: Python :: {lowest}" in classifiers


def test_publishing_needs_a_tag_and_no_secret():
    assert WORKFLOW[True] == {"push": {"tags": ["v*"]}}  # YAML reads `on` as a truth value
    text = (ROOT / ".github" / "workflows" / "publish.yml").read_text()
    assert "secrets." not in text and "password" not in text
    assert WORKFLOW["permissions"] == {"contents": "read"}
    build, publish = WORKFLOW["jobs"]["build"], WORKFLOW["jobs"]["publish"]
    assert "permissions" not in build and publish["permissions"] == {"id-token": "write"}
    assert publish["needs"] == "build" and publish["environment"] == "pypi"
    uses = [one.get("uses", "") for one in publish["steps"]]
    assert [name.partition("@")[0] for name in uses] == ["actions/download-artifact", "pypa/gh-action-pypi-publish"]
    names = {one["with"]["name"] for one in [*build["steps"], *publish["steps"]] if "artifact" in one.get("uses", "")}
    assert names == {"dist"}
    assert "twine check --strict dist/*" in step("Build and check")


@pytest.mark.parametrize(("tag", "good"), [(f"v{headstart.__version__}", True), ("v9.9.9", False)])
def test_the_tag_must_be_the_version(tag, good):
    assert (bash(step("The tag is the version, and the changelog has it"), ROOT, tag).returncode == 0) == good


def test_links_of_the_long_description_lead_out_of_the_checkout(tmp_path):
    for name in ("README.md", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path / name)
    assert bash(step("Links that lead out of the checkout"), tmp_path, "v0.1.0").returncode == 0
    before, after = (re.findall(r"\]\(([^)]+)\)", (folder / "README.md").read_text()) for folder in (ROOT, tmp_path))
    for old, new in zip(before, after, strict=True):
        assert new == (old if "://" in old else f"https://github.com/org/headstart/blob/v0.1.0/{old}")
    urls = tomllib.loads((tmp_path / "pyproject.toml").read_text())["project"]["urls"]
    assert urls["Source"] == "https://github.com/org/headstart"
    assert urls["Documentation"].endswith("/tree/v0.1.0/docs") and {"Changelog", "Issues"} <= urls.keys()
