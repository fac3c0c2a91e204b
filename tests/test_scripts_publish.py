"""`headstart export --to hub`: what is sent, what is never sent, and an upload that is interrupted and repeated."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import hub_cases
import pytest
import yaml
from hub_server import HubServer
from PIL import Image

from headstart import cli
from headstart.heads.published import FILES
from headstart.heads.store import read_description
from headstart.recipe import load_recipe

REPO = "me/tiny-eagle3"
EVERYTHING = {
    *("README.md", "acceptance.png", "config.json", "head.safetensors", "recipe.yaml", "report.json", "trees.json"),
    *("custom_generate/generate.py", "custom_generate/requirements.txt"),
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """A run with a tuned tree and two reports, whose target lay in a folder of its own."""
    folder = tmp_path_factory.mktemp("home")
    target = hub_cases.write_target(folder / "models" / "tiny")
    run = hub_cases.write_run(folder / "runs" / "demo", target, "export.license=apache-2.0")
    trees = {"choices": {"4": [[0], [0, 0], [1]]}, "best": 4, "device": "cpu", "dtype": "float64"}
    (run / "head" / "trees.json").write_text(json.dumps(trees | {"forecast": {}}, indent=1))
    hub_cases.write_report(run, "held out in training")
    hub_cases.write_report(run / "bench-question", ["question.jsonl (train)"], speedup=None, acceptance_length=1.75)
    return run


@pytest.fixture
def run(finished, tmp_path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "runs" / "demo"))


@pytest.fixture
def hub(tmp_path, monkeypatch):
    with HubServer() as server:
        server.client(tmp_path / "cache", monkeypatch)
        yield server


def export(run: Path, *words: str | Path, repo: str | None = REPO) -> int:
    place = ["hub", *([repo] if repo else [])]
    return cli.main(["export", "--head", str(run), "--to", *place, *map(str, words)])


def card(hub: HubServer) -> tuple[dict, str]:
    """Front matter and page."""
    _, front, page = hub.files(REPO)["README.md"].decode().split("---\n", 2)
    return yaml.safe_load(front), page


def test_a_dry_run_shows_every_file_and_asks_nobody(run, hub, capsys):
    assert export(run, "--dry-run", "--target-name", "org/tiny") == 0
    said = capsys.readouterr().out
    assert f"{REPO} (private) would get" in said and "in 9 files" in said
    assert set(re.findall(r"bytes  (?!in )(\S+)", said)) == EVERYTHING
    assert not hub.asked and not (run / "hub").exists()
    size = (run / "head" / "head.safetensors").stat().st_size
    assert re.search(rf" {size:,} bytes  head.safetensors", said)
    assert export(run, "--target-name", "org/tiny") == 0
    sizes = {name: len(content) for name, content in hub.files(REPO).items()}
    assert all(re.search(rf" {size:,} bytes  {re.escape(name)}\n", said) for name, size in sizes.items())


def test_the_head_and_all_that_goes_with_it_is_one_private_commit(run, hub):
    assert export(run, "--target-name", "org/tiny") == 0
    sent = hub.files(REPO)
    assert hub.repos[REPO].private and len(hub.repos[REPO].commits) == 1
    assert set(sent) == EVERYTHING >= set(FILES)
    assert sent == {name: (run / "hub" / name).read_bytes() for name in EVERYTHING}
    assert sent["head.safetensors"] == (run / "head" / "head.safetensors").read_bytes()
    assert read_description(run / "hub")["target"]["name"] == "org/tiny"
    assert load_recipe(run / "hub" / "recipe.yaml").target.name == "org/tiny"
    assert Image.open(run / "hub" / "acceptance.png").size == (1200, 640)
    assert json.loads(sent["report.json"])["held out in training"]["acceptance_length"] == 2.0425


def test_the_card_has_the_figures_of_the_reports(run, hub):
    assert export(run, "--target-name", "org/tiny") == 0
    front, page = card(hub)
    assert front["base_model"] == "org/tiny" and front["library_name"] == "headstart"
    assert front["license"] == "apache-2.0" and front["pipeline_tag"] == "text-generation"
    assert {"speculative-decoding", "eagle3", "custom_generate"} <= set(front["tags"])
    (index,) = front["model-index"]
    figures = {
        (result["dataset"]["name"], metric["type"]): metric["value"]
        for result in index["results"]
        for metric in result["metrics"]
    }
    assert figures == {
        ("held out in training", "acceptance_length"): 2.042,
        ("held out in training", "speedup"): 1.312,
        ("question", "acceptance_length"): 1.75,  # its speedup was withheld
    }
    assert "| held out in training | 2.04 [1.90, 2.15] | 1.31 [1.25, 1.37] | 5 of 5 |" in page
    assert "| question | 1.75 [1.90, 2.15] | n/a | 5 of 5 |" in page
    assert "![Share of drafts accepted, by depth](acceptance.png)" in page
    assert f'custom_generate="{REPO}"' in page and f"headstart generate --head {REPO}" in page
    named = set(re.findall(r"^\| `(\S+)` \|", page, flags=re.MULTILINE))
    assert named == EVERYTHING - {"README.md", "acceptance.png", "custom_generate/requirements.txt"}


def test_an_interrupted_upload_is_repeated_and_nothing_is_sent_twice(run, hub, capsys):
    hub.drop.add("commit")
    assert export(run, "--target-name", "org/tiny") == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith(f"{REPO} was not published (") and said.endswith(f"the export is whole in {run / 'hub'}")
    assert "run the same command again" in said
    assert not hub.repos[REPO].commits and len(hub.large) == 2, "the large files are there, no commit is"
    assert {path.relative_to(run / "hub").as_posix() for path in (run / "hub").rglob("*.*")} == EVERYTHING
    uploads = hub.count("^PUT /upload")
    assert export(run, "--target-name", "org/tiny") == 0
    assert hub.count("^PUT /upload") == uploads == 2
    assert set(hub.files(REPO)) == EVERYTHING
    # and once more: nothing has changed, so nothing is committed
    assert export(run, "--target-name", "org/tiny") == 0
    assert len(hub.repos[REPO].commits) == 1 and hub.count("^PUT /upload") == 2


def test_what_an_earlier_export_left_behind_goes(run, hub):
    assert export(run, "--target-name", "org/tiny") == 0
    hub.repos[REPO].commit(hub.files(REPO) | {"NOTES.md": b"by hand"})
    (run / "head" / "trees.json").unlink()
    shutil.rmtree(run / "bench-question")
    (run / "report.json").unlink()
    assert export(run, "--target-name", "org/tiny") == 0
    sent = hub.files(REPO)
    assert set(sent) == EVERYTHING - {"trees.json", "report.json", "acceptance.png"} | {"NOTES.md"}
    front, page = card(hub)
    assert "Not measured yet." in page and "model-index" not in front and "acceptance.png" not in page


def test_a_target_from_a_folder_leaves_no_path_anywhere(run, finished, hub, capsys):
    recipe = load_recipe(run / "recipe.yaml", ['data.train=[{source: "/data/secret place/mine.jsonl"}]'])
    (run / "recipe.yaml").write_text(recipe.to_yaml())
    hub_cases.write_report(run, [f"{finished.parents[1]}/kept/mine.jsonl"])
    assert export(run) == 0
    assert "the card names no base_model; give --target-name ORG/MODEL" in capsys.readouterr().err
    front, page = card(hub)
    assert "base_model" not in front and "`tiny`" in page and "`mine.jsonl` (train)" in page
    for name, content in hub.files(REPO).items():
        for private in (finished.parents[1], run, "secret place"):
            assert str(private).encode() not in content, name
    assert load_recipe(run / "hub" / "recipe.yaml").target.name == "tiny"


def test_a_folder_named_from_here_is_no_hub_id_either(finished, run, hub, monkeypatch):
    monkeypatch.chdir(finished.parents[1])
    (run / "recipe.yaml").write_text(load_recipe(run / "recipe.yaml", ["target.name=models/tiny"]).to_yaml())
    assert export(run) == 0
    assert "base_model" not in card(hub)[0]
    assert load_recipe(run / "hub" / "recipe.yaml").target.name == "tiny"


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        (
            'data.chat.system="read /srv/models/tiny first"',
            "recipe.yaml line 47 holds an absolute path (/srv/models/tiny",
        ),
        ('data.chat.system="hf_abcdefghijklmnopqrstuvwxyz"', "holds a key of the hub (hf_abc…)"),
        ('logging.project="0123456789abcdef0123456789abcdef01234567"', "holds a key of wandb (012345…)"),
        ('data.chat.system="kept in my-own-secret-value"', "holds the value of SOME_API_KEY (my…)"),
        ('data.chat.system="ask Grandmaster42, please"', "holds the name of this user (Grandmaster42)"),
        ("name=run-of-workbox7", "holds the name of this host (workbox7)"),
    ],
)
def test_what_must_not_leave_is_refused_by_name_before_anything_is_sent(setting, said, run, hub, capsys, monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", "my-own-secret-value")
    monkeypatch.setattr("headstart.scripts.leaks.getpass.getuser", lambda: "grandmaster42")
    monkeypatch.setattr("headstart.scripts.leaks.socket.gethostname", lambda: "workbox7")
    (run / "recipe.yaml").write_text(load_recipe(run / "recipe.yaml", [setting]).to_yaml())
    assert export(run, "--target-name", "org/tiny") == 1
    error = capsys.readouterr().err
    assert "nothing was uploaded: recipe.yaml line" in error and re.sub(r"line \d+", "", said) in re.sub(
        r"line \d+", "", error
    )
    assert "my-own-secret" not in error and not hub.asked and not (run / "hub").exists()


def test_a_path_in_the_training_record_is_found_too(finished, tmp_path, hub, capsys):
    run = hub_cases.write_run(tmp_path / "other", "org/tiny", record={"note": "from /home/ada/x"})
    assert export(run) == 1
    assert "config.json line" in capsys.readouterr().err and not hub.asked


def test_an_ordinary_word_as_a_user_name_is_no_leak(run, hub, monkeypatch):
    monkeypatch.setattr("headstart.scripts.leaks.getpass.getuser", lambda: "training")
    monkeypatch.setattr("headstart.scripts.leaks.socket.gethostname", lambda: "localhost")
    assert export(run, "--target-name", "org/tiny") == 0


def test_visibility_is_what_was_asked_for_or_nothing_is_published(run, hub, capsys):
    assert export(run, "--target-name", "org/tiny", "--set", "export.private=false") == 0
    assert not hub.repos[REPO].private
    commits = len(hub.repos[REPO].commits)
    assert export(run, "--target-name", "org/tiny") == 1
    assert "is there already and everybody sees it" in capsys.readouterr().err
    assert len(hub.repos[REPO].commits) == commits
    hub.repos[REPO].private = True
    assert export(run, "--target-name", "org/tiny", "--set", "export.private=false") == 0
    assert "was private before and stays so" in capsys.readouterr().err


def test_the_repository_may_stand_in_the_recipe(run, hub):
    (run / "recipe.yaml").write_text(load_recipe(run / "recipe.yaml", [f"export.repo={REPO}"]).to_yaml())
    assert export(run, "--target-name", "org/tiny", repo=None) == 0
    assert REPO in hub.repos


@pytest.mark.parametrize(
    ("token", "repo", "said"),
    [("hf_wrong", REPO, "`hf auth login` with one that may write"), ("", "others/x", "your token may not write there")],
)
def test_refusals_of_the_hub_end_in_a_sentence(token, repo, said, run, hub, capsys, monkeypatch):
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    assert export(run, "--target-name", "org/tiny", repo=repo) == 1
    error = capsys.readouterr().err
    assert said in error and f"the export is whole in {run / 'hub'}" in error


def test_no_hub_at_all_leaves_the_export(run, tmp_path, capsys):
    assert export(run, "--target-name", "org/tiny") == 1  # the tests are offline
    assert "was not published (Cannot reach" in capsys.readouterr().err
    assert (run / "hub" / "README.md").is_file()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--to", "hub", "a/b"], "--head RUN --to hub ORG/NAME"),
        (["--head", "runs/x", "--to", "shelf"], "--head RUN --to hub ORG/NAME"),
        (["--head", "runs/x", "--to", "hub", "a/b", "--format", "sglang"], "--format has no meaning with --to hub"),
        (
            ["--head", "runs/x", "--dry-run", "--format", "sglang", "--output", "y"],
            "--dry-run and --set go with --to hub",
        ),
    ],
)
def test_half_a_command_line_is_refused(words, said, capsys):
    assert cli.main(["export", *words]) == 2
    assert said in capsys.readouterr().err


def test_names_that_are_no_repository_are_refused(run, capsys):
    assert export(run, repo="no-organisation") == 2
    assert "the repository is 'no-organisation', expected ORG/NAME" in capsys.readouterr().err
    assert export(run, repo=None) == 2
    assert "no repository is named" in capsys.readouterr().err


def test_a_folder_that_is_no_export_is_kept(run, tmp_path, capsys):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    assert export(run, "--output", tmp_path / "mine") == 1
    assert "is no such export, and is kept" in capsys.readouterr().err
    assert (tmp_path / "mine" / "thesis.txt").is_file()
