"""From a run to the hub and back in other processes, which know the hub and nothing of the run: the same texts, the
same acceptance, the card's own snippet."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import hub_cases
import pytest
from eagle_cases import learnt
from head_cases import head_for
from hub_server import HubServer

from headstart.heads.store import save_head
from headstart.recipe import load_recipe
from headstart.target import load_target

TESTS = Path(__file__).parent


def program(folder: Path, hub: HubServer, *words: str | Path, fails: bool = False) -> str:
    """What a fresh process prints, in a folder that holds nothing, with a cache of the hub of its own."""
    cwd = folder / "elsewhere"
    cwd.mkdir(exist_ok=True)
    variables = os.environ | hub.environment(folder / "home") | {"PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *map(str, words)], cwd=cwd, env=variables, capture_output=True, text=True, timeout=600
    )
    assert (done.returncode != 0) == fails, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout + done.stderr


def command(folder: Path, hub: HubServer, *words: str | Path, fails: bool = False) -> str:
    return program(folder, hub, "-m", "headstart.cli", *words, fails=fails)


def snippet(hub: HubServer, repo: str) -> str:
    found = re.search(r"```python\n(.*?)```", hub.files(repo)["README.md"].decode(), flags=re.DOTALL)
    assert found is not None
    return found[1]


AGAIN = """
import sys, json
from pathlib import Path
import hub_cases

report = hub_cases.evaluate("me/head", Path(sys.argv[1]), Path("again"))
exec(compile(Path(sys.argv[2]).read_text(), "snippet", "exec"), names := {})
plain = names["model"].generate(**names["prompt"], max_new_tokens=128)
print(json.dumps({"equal": plain.tolist() == names["answer"].tolist()}))
"""


@pytest.mark.slow
def test_there_and_back_in_a_fresh_process(tmp_path):
    target = hub_cases.write_target(tmp_path / "models" / "tiny")
    run = hub_cases.write_run(tmp_path / "runs" / "demo", target, head=learnt("eagle3"))
    bench = hub_cases.write_bench(tmp_path / "known.jsonl")
    here = hub_cases.evaluate(run, bench)
    with HubServer() as hub:
        hub.add("org/tiny", target)
        export = ("export", "--head", run, "--to", "hub", "me/head", "--target-name", "org/tiny")
        hub.drop.add("commit")
        assert "me/head was not published" in command(tmp_path, hub, *export, fails=True)
        command(tmp_path, hub, *export)
        assert hub.count("^PUT") == 2, "the second time, nothing that had arrived"
        assert hub.repos["me/head"].private
        (tmp_path / "again.py").write_text(AGAIN)
        (tmp_path / "snippet.py").write_text(snippet(hub, "me/head"))
        said = program(tmp_path, hub, tmp_path / "again.py", bench, tmp_path / "snippet.py")
    assert json.loads(said[said.index('{"equal"') :].splitlines()[0]) == {"equal": True}
    there = json.loads((tmp_path / "elsewhere" / "again" / "report.json").read_text())
    assert there["acceptance_length"] == here["acceptance_length"] > 1.5
    assert there["details"]["acceptance"] == json.loads(json.dumps(here["details"]["acceptance"]))
    rows = [
        [(row["question"], row["drafted_tokens"], row["acceptance_length"]) for row in report["details"]["prompts"]]
        for report in (here, there)
    ]
    assert rows[0] == rows[1] and there["identical_outputs"] == there["compared_outputs"] == 5


@pytest.mark.slow
def test_a_head_for_the_bundled_target_needs_no_other_model(tmp_path):
    target = load_target("bundled:smollm2-135m", dtype="float32", device="cpu")
    head = head_for(target, num_heads=2, shake=0.0)
    run = tmp_path / "runs" / "small"
    save_head(head, run / "head", fingerprint=target.fingerprint(), training_record={"chat": hub_cases.CHAT})
    (run / "recipe.yaml").write_text(load_recipe("quickstart.yaml", ["target.dtype=float32"]).to_yaml())
    with HubServer() as hub:
        command(tmp_path, hub, "export", "--head", run, "--to", "hub", "me/small")
        assert "base_model: HuggingFaceTB/SmolLM2-135M-Instruct" in hub.files("me/small")["README.md"].decode()
        words = ("--max-new-tokens", "24", "--dtype", "float32", "--device", "cpu", "Explain tides to a child.")
        texts = [
            command(tmp_path, hub, "generate", "--head", named, *words).split("\n[")[0].splitlines()[-1]
            for named in (run, "me/small@main")
        ]
        code = snippet(hub, "me/small").replace('"bundled:smollm2-135m"', '"bundled:smollm2-135m", dtype="float32"')
        (tmp_path / "snippet.py").write_text(code.replace("max_new_tokens=128", "max_new_tokens=24"))
        answer = program(tmp_path, hub, tmp_path / "snippet.py")
    assert texts[0] == texts[1] and texts[0].strip()
    assert texts[0].strip() in answer
