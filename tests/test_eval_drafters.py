"""From names to drafters: every kind in one report, and names that mean nothing refused in a sentence."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import tiny
import torch

from headstart.data.datastore import build_datastore
from headstart.decode.drafters.adaptive import AdaptiveDrafter
from headstart.decode.drafters.base import NoDraft, Request
from headstart.decode.drafters.layer_skip import EarlyExitDrafter, SkippingDrafter
from headstart.decode.drafters.lookahead import LookaheadDrafter
from headstart.decode.drafters.model import ModelDrafter
from headstart.decode.drafters.ngram import NgramDrafter
from headstart.decode.drafters.quantised import QuantisedDrafter
from headstart.decode.drafters.retrieval import RetrievalDrafter
from headstart.decode.drafters.student import StudentDrafter
from headstart.decode.drafters.union import UnionDrafter
from headstart.decode.engine import Engine
from headstart.decode.sampling import SamplingSettings
from headstart.decode.skips import Skips, save_skips
from headstart.errors import HeadstartError
from headstart.eval import measure
from headstart.eval.drafters import plan_drafter
from headstart.eval.trained import open_trained
from headstart.heads.configs import DraftConfig
from headstart.heads.store import build_head, save_head
from headstart.target import Target


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, str]:
    """By kind, what the names point at."""
    place = tmp_path_factory.mktemp("drafters")
    target = tiny.target("llama")
    return {
        "target": str(tiny.save(place / "target", "llama")),
        "model": str(tiny.save(place / "small", "llama", num_hidden_layers=1, seed=3)),
        "skips": str(save_skips(Skips(attention=(1,), mlp=(2,)), place / "skips", target, length=2)),
        "store": _store(place, target),
        "student": _student(place, target),
    }


def _store(place: Path, target: Target) -> str:
    (place / "text.txt").write_text("Say 0, say 1, say 2. " * 9)
    build_datastore(place / "store", [str(place / "text.txt")], target.tokenizer)
    return str(place / "store")


def _student(place: Path, target: Target) -> str:
    head = build_head(DraftConfig(num_layers=2), target)
    save_head(head, place / "student/head", fingerprint=target.fingerprint(), training_record={})
    return str(place / "student")


def test_a_tuned_student_drafts_as_long_as_tuning_found_best(folders, tmp_path):
    run = shutil.copytree(folders["student"], tmp_path / "run")
    tuned = {"device": "cpu", "dtype": "float32", "best": 3, "choices": {"3": [[0], [0, 0]]}}
    tuned["forecasts"] = {"3": {"acceptance_length": 1.4, "speedup": 1.1}}
    (run / "head/trees.json").write_text(json.dumps(tuned))
    plan = plan_drafter(f"model:{run}", None, "auto")
    drafter = plan.make(tiny.target("llama"))
    assert isinstance(drafter, StudentDrafter) and drafter.length == 2 and plan.budget == 3
    assert plan.forecast["speedup"] == 1.1 and plan.tuned_on == ("cpu", "float32")
    assert plan_drafter(f"model@chain4:{run}", None, "auto").budget == 5
    assert plan_drafter(f"model:{run}", None, 8).budget == 8


def test_without_a_run_every_drafter_has_its_own_size(folders):
    assert open_trained(None, folders["target"]).recipe.eval.tree == "auto"
    assert open_trained(None, folders["target"], overrides=["eval.tree=6"]).recipe.eval.tree == 6


@pytest.mark.parametrize(
    ("name", "kind", "budget"),
    [
        ("model:{model}", ModelDrafter, 5),
        ("model@chain2:{model}", ModelDrafter, 3),
        ("layer-skip", EarlyExitDrafter, 5),
        ("layer-skip@exit1", EarlyExitDrafter, 5),
        ("layer-skip:{skips}", SkippingDrafter, 9),
        ("layer-skip@chain3:{skips}", SkippingDrafter, 4),
        ("union:ngram+ngram@chain3", UnionDrafter, 9),
        ("ngram@tree6", NgramDrafter, 6),
        ("ngram@frequent3", NgramDrafter, 4),
        ("retrieval:{store}", RetrievalDrafter, 16),
        ("lookahead", LookaheadDrafter, 29),
        ("lookahead:4-3-2", LookaheadDrafter, 5),
        ("quantised:int8", QuantisedDrafter, 5),
        ("quantised@chain2:int4", QuantisedDrafter, 3),
        ("model:{student}", StudentDrafter, 5),
        ("head:{student}", StudentDrafter, 5),
        ("adaptive:ngram", AdaptiveDrafter, 9),
        ("adaptive:union:ngram+lookahead:4-3-2", AdaptiveDrafter, 9),
        ("adaptive@heuristic:model@chain3:{student}", AdaptiveDrafter, 4),
    ],
)
def test_a_name_is_a_drafter(name, kind, budget, folders):
    plan = plan_drafter(name.format(**folders), None, "auto")
    drafter = plan.make(tiny.target("llama"))
    assert isinstance(drafter, kind) and plan.budget == budget
    if name == "layer-skip@exit1":
        assert drafter.exit_layer == 1
    if name.startswith("layer-skip:"):
        assert drafter.length == 2


def test_the_recipes_size_of_trees_is_that_of_chains_too(folders):
    for name in ("ngram", "model:{model}", "layer-skip", "layer-skip:{skips}", "union:ngram+layer-skip"):
        assert plan_drafter(name.format(**folders), None, 4).budget == 4


def test_one_report_measures_them_all(folders, tmp_path):
    turns = [{"question_id": str(number), "category": "one", "turns": [f"Say {number}"]} for number in range(3)]
    (tmp_path / "question.jsonl").write_text("\n".join(map(json.dumps, turns)))
    names = ["ngram", f"model:{folders['model']}", "layer-skip", f"layer-skip:{folders['skips']}"]
    names += [f"union:ngram+layer-skip:{folders['skips']}", f"union:lookahead:3-3-3+model:{folders['student']}"]
    names += [f"retrieval:{folders['store']}", "lookahead:3-3-3", "quantised:int8", f"model:{folders['student']}"]
    names += ["adaptive:lookahead:3-3-3", f"adaptive:model@chain3:{folders['student']}", "adaptive:layer-skip@exit2"]
    report = measure.run(
        target=folders["target"],
        drafters=["none", *names],
        bench=str(tmp_path / "question.jsonl"),
        overrides=["eval.max_new_tokens=8", "eval.temperature=[0.0, 0.7]", "eval.identity_prompts=3"],
        output=str(tmp_path / "out"),
        dtype="float32",
        device="cpu",
    )
    lines = report["details"]["drafters"]
    assert len(lines) == len(names) and all(line["identity_holds"] for line in lines)
    assert all(line["identical_outputs"] == line["compared_outputs"] == 3 for line in lines)
    assert len(report["details"]["temperatures"]) == 2 * len(names)
    text = json.dumps(report)
    assert not any(place in text for place in (str(tmp_path), *folders.values())), "a report may be passed on"


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("telepathy", "is not known; expected none, ngram"),
        ("ngram@exit4", "expected ngram@chainN"),
        ("ngram:place", "takes no place"),
        ("ngram@chain0", "drafts nothing"),
        ("model", "needs to know which"),
        ("layer-skip@exit0", "drafts nothing"),
        ("layer-skip@exit99", "cannot draft with the first 99"),
        ("layer-skip:nowhere", "holds no skipped blocks"),
        ("union:ngram", "is no union"),
        ("union:ngram+none", "is no union"),
        ("union:ngram+telepathy", "is not known"),
        ("model:/nowhere/at/all", "nowhere"),
        ("head", "needs to know which"),
        ("lookahead:7", "expected lookahead:W-N-G"),
        ("lookahead:7-2-7", "give 3 or more"),
        ("lookahead:1000-30-300", "asks for 29000 tokens in a step; give numbers up to 256"),
        ("ngram@tree100000", "up to 256"),
        ("model@chain99999999999:here", "up to 256"),
        ("quantised", "how many bits"),
        ("quantised:int3", "3"),
        ("retrieval", "needs texts"),
        ("retrieval:nowhere", "nowhere"),
        ("adaptive", "needs another one"),
        ("adaptive:none", "needs another one"),
    ],
)
def test_a_name_that_means_nothing_is_refused_in_a_sentence(name, told):
    with pytest.raises(HeadstartError, match=told) as caught:
        plan_drafter(name, None, "auto").make(tiny.target("llama", dtype=torch.float32))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "bench"),
    [
        ("model@drawn3:here", None),
        ("ngrams", None),
        ("ngram,", None),
        ("union:ngram+layer-skip:nowhere", None),
        ("adaptive:retrieval:nowhere", None),
        ("quantised:int3", None),
        ("head:nowhere", None),
        ("ngram", "nowhere.jsonl"),
        ("ngram", "bundled:nothing"),
    ],
)
def test_what_was_mistyped_is_refused_before_the_target_is_loaded(name, bench, folders, tmp_path, monkeypatch):
    monkeypatch.setattr(measure, "load_named", lambda *_, **__: pytest.fail("the target is loaded"))
    more = {"bench": bench, "output": str(tmp_path / "out")}
    with pytest.raises(HeadstartError):
        measure.run(target=folders["target"], drafters=name.split(","), **more)
    assert not (tmp_path / "out").exists()


def test_in_a_union_drawn_drafts_of_a_head_are_ranked(folders):
    """Also where its name asks for drawn ones."""
    target = tiny.target("llama", dtype=torch.float64)
    union = plan_drafter("union:ngram+head@drawn3:{student}".format(**folders), None, "auto")
    request = Request(prompt_ids=[1, 2, 3], max_new_tokens=9, settings=SamplingSettings(temperature=0.9, seed=2))
    texts = [
        [one.token_ids for one in Engine(target, drafter, budget=union.budget).generate([request])]
        for drafter in (union.make(target), NoDraft())
    ]
    assert texts[0] == texts[1] and union.budget == 9
