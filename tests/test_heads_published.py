"""Heads by their name on the hub: what is a name, what comes, what is said where nothing does."""

from __future__ import annotations

from pathlib import Path

import hub_cases
import pytest
import torch
from eagle_cases import target_of
from hub_server import HubServer

from headstart import cli
from headstart.errors import HeadError
from headstart.eval.drafters import plan_drafter
from headstart.eval.measure import _default_folder
from headstart.eval.trained import find_head, find_named
from headstart.heads.configs import Eagle3Config
from headstart.heads.published import FILES, HubName, fetch_head, hub_name
from headstart.heads.store import build_head, load_head, save_head

REPO = "org/tiny-eagle3"


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run as it lies on the hub: the head's files beside the recipe."""
    folder = tmp_path_factory.mktemp("runs") / "demo"
    hub_cases.write_run(folder, "org/tiny", "target.trust_remote_code=true")
    for path in (folder / "head").iterdir():
        path.rename(folder / path.name)
    (folder / "head").rmdir()
    (folder / "notes.txt").write_text("not needed to decode")
    return folder


@pytest.fixture
def hub(tmp_path, monkeypatch, run):
    monkeypatch.chdir(tmp_path)
    with HubServer() as server:
        server.client(tmp_path / "cache", monkeypatch)
        server.add(REPO, run)
        yield server


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("org/head", HubName("org/head")),
        ("org/head@v1.0", HubName("org/head", "v1.0")),
        ("org/head@refs/pr/3", HubName("org/head", "refs/pr/3")),
        ("here/run", None),  # it is
        ("here/mistyped", None),  # beside it
        ("here/mistyped@main", HubName("here/mistyped", "main")),
        ("head", None),
        ("a/b/c", None),
        ("./org/head", None),
        ("../head", None),
        ("/org/head", None),
        ("~/head", None),
    ],
)
def test_what_is_a_name_on_the_hub(name, meant, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here" / "run").mkdir(parents=True)
    assert hub_name(name) == meant
    assert meant is None or str(meant) == name


def test_a_head_comes_with_what_decoding_reads_and_is_cached(hub, run):
    folder = fetch_head(HubName(REPO))
    assert {path.name for path in folder.iterdir()} == {path.name for path in run.iterdir()} & set(FILES)
    ours, theirs = load_head(run).state_dict(), load_head(folder, target_of()).state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    downloads = hub.count("/large/")
    assert fetch_head(HubName(REPO)) == folder and hub.count("/large/") == downloads
    assert find_head(Path(REPO)) == (folder, folder)
    assert plan_drafter(f"head:{REPO}@main", None, "auto").budget == plan_drafter(f"head:{run}", None, "auto").budget


def test_a_revision_is_the_head_of_its_time(hub, run):
    repo = hub.repos[REPO]
    repo.revisions["v1"] = repo.revisions["main"]
    newer = build_head(Eagle3Config(num_layers=2), target_of())
    save_head(newer, run.parent / "newer", fingerprint=target_of().fingerprint())
    repo.commit(hub.files(REPO) | {name: (run.parent / "newer" / name).read_bytes() for name in FILES[:2]})
    first, last = (load_head(fetch_head(HubName(REPO, revision))) for revision in ("v1", None))
    assert first.config != last.config and first.config == load_head(run).config
    assert find_named(f"{REPO}@v1").published == HubName(REPO, "v1")


def test_somebody_elses_recipe_decides_no_code_and_its_folder_is_not_written(hub, run, capsys):
    named = find_named(REPO)
    assert named.recipe.target.name == "org/tiny" and not named.recipe.target.trust_remote_code
    assert find_named(REPO, overrides=["target.trust_remote_code=true"]).recipe.target.trust_remote_code
    assert _default_folder(named, ["head"], None) == Path("runs/org-tiny-eagle3-head")
    assert find_named(run).recipe.target.trust_remote_code and find_named(run).published is None
    assert cli.main(["tune", "--head", REPO]) == 1
    assert f"hf download {REPO} --local-dir runs/tiny-eagle3, and tune that" in capsys.readouterr().err
    assert cli.main(["export", "--head", REPO, "--to", "hub", "me/copy"]) == 1
    assert "nothing is written; give its export an --output" in capsys.readouterr().err


def test_training_goes_on_from_a_published_head(hub, run):
    started = build_head(Eagle3Config(init=REPO), target_of())
    mine, theirs = started.state_dict(), load_head(run).state_dict()
    assert all(torch.equal(mine[name], theirs[name].float()) for name in theirs)


def test_what_keeps_a_head_from_coming_is_one_sentence(hub, monkeypatch):
    hub.repos["org/other"] = type(hub.repos[REPO])(private=False)
    hub.repos["org/other"].commit({"config.json": b"{}", "model.safetensors": b"eagle"})
    hub.repos["org/secret"] = type(hub.repos[REPO])(private=True)
    for name, said in {
        "org/nothing": "there is no run org/nothing here, and the hub shows no org/nothing either; check the spelling",
        f"{REPO}@v9": f"{REPO} on the hub has no revision v9",
        "org/other": "org/other on the hub holds no head of headstart's (head.safetensors is missing)",
        "org/a..b": "org/a..b cannot be a name on the hub",
    }.items():
        with pytest.raises(HeadError) as caught:
            find_named(name)
        assert said in str(caught.value) and "\n" not in str(caught.value)
    monkeypatch.setenv("HF_TOKEN", "hf_of_somebody_else")
    with pytest.raises(HeadError, match="or `hf auth login` if it is private"):
        find_named("org/secret")


def test_without_a_network_a_cached_head_still_comes(hub, monkeypatch):
    folder = fetch_head(HubName(REPO))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert fetch_head(HubName(REPO)) == folder
    with pytest.raises(HeadError, match="there is no run org/never here, and no copy of org/never is cached"):
        find_named("org/never")


def test_a_mistyped_run_never_asks_the_hub(hub, tmp_path, capsys):
    (tmp_path / "runs").mkdir()
    assert cli.main(["generate", "--head", "runs/quikstart", "Hello"]) == 1
    assert "there is no run runs/quikstart; name a folder that training wrote" in capsys.readouterr().err
    assert not hub.asked
