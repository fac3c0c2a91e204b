"""`headstart eval` and `generate` end to end on a tiny target: the report's files, keys and figures."""

from __future__ import annotations

import json
import warnings
from html.parser import HTMLParser
from pathlib import Path

import head_cases
import pytest
import stubs
import tiny

from headstart import cli
from headstart.data.rendering import ChatRenderer
from headstart.errors import HeadstartError
from headstart.eval import generate, measure
from headstart.eval.report import HEADLINE
from headstart.eval.trained import find_named, open_trained
from headstart.recipe import ChatSection

SMALL = ["eval.num_prompts=5", "eval.max_new_tokens=12", "eval.identity_prompts=2"]


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("targets") / "tiny", "llama")


@pytest.fixture(scope="module")
def prompts(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "mine.jsonl"
    kinds = ["echo", "count"]
    records = [{"id": f"p{i}", "kind": kinds[i % 2], "turns": [f"Say {i}{i}"] + ["More"] * (i == 4)} for i in range(6)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory, target_folder) -> Path:
    """A run with an untrained head of two levels and a tuned tree."""
    return head_cases.untrained_run(tmp_path_factory.mktemp("runs") / "demo", target_folder)


class _Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.text = ""

    def handle_starttag(self, tag, attrs):
        self.seen.append(tag)
        assert tag != "script" and not any(name in ("src", "href") for name, _ in attrs), "nothing is loaded"
        if tag not in ("meta", "rect", "line", "circle"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in ("rect", "line", "circle"):
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def parse(path: Path) -> _Tags:
    tags = _Tags()
    tags.feed(path.read_text())
    assert not tags.open
    return tags


def test_a_report_of_ngrams_without_any_head(target_folder, prompts, tmp_path, capsys):
    measure.run(
        target=str(target_folder),
        drafters=["none", "ngram"],
        bench=str(prompts),
        overrides=SMALL,
        output=str(tmp_path / "out"),
        device="cpu",
        dtype="float32",
    )
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert tuple(report) == (*HEADLINE, "details")
    details = report["details"]
    # five questions, one of them with two turns
    assert report["compared_outputs"] == 6 == report["identical_outputs"]
    assert details["identity"]["passed"] and details["identity"]["half_precision"] is None
    assert report["acceptance_length"] >= 1 and report["drafter_parameters"] == 0
    assert report["plain_tokens_per_second"] > 0 and report["transformers_generate_tokens_per_second"] > 0
    assert report["speedup"] == pytest.approx(report["drafted_tokens_per_second"] / report["plain_tokens_per_second"])
    low, high = report["speedup_interval"]
    assert low <= report["speedup"] <= high
    assert report["forecast_speedup"] is None
    for arms in (report["time_to_first_token"], report["inter_chunk_latency"]):
        assert all(0 < arms[arm]["p50"] <= arms[arm]["p95"] for arm in ("plain", "drafted"))
    assert report["memory"]["drafted"]["total_bytes"] > report["memory"]["plain"]["total_bytes"] > 0
    assert {"device", "threads", "packages", "dtype", "date", "commit"} <= set(report["environment"])
    assert str(target_folder) not in json.dumps(report), "no absolute path of this machine"
    assert [row["name"] for row in details["by_kind"]] and sum(row["answers"] for row in details["by_kind"]) == 6
    assert sum(gate["passed"] is False for gate in details["gates"]) <= 1, details["gates"]
    assert len(details["prompts"]) == 6 and details["answers"]["decoded"] == 6

    page = parse(tmp_path / "out" / "report.html")
    assert page.seen.count("svg") == 4 and "viewport" in (tmp_path / "out" / "report.html").read_text()
    markdown = (tmp_path / "out" / "report.md").read_text()
    assert "acceptance length" in markdown and "sum(accepted + 1) / steps" in markdown
    assert not list((tmp_path / "out").glob(".*")), "nothing half-written is left"
    assert "tokens/s" in capsys.readouterr().out


def test_a_report_of_a_run_with_its_tuned_tree_in_bfloat16(run_folder, prompts):
    report = measure.run(head=str(run_folder), bench=str(prompts), overrides=SMALL, device="cpu", dtype="bfloat16")
    folder = run_folder / "bench-mine"
    assert json.loads((folder / "report.json").read_text())["details"]["settings"]["tree"] == [[0], [1], [0, 0]]
    assert report["forecast_acceptance_length"] == 1.25 and report["forecast_speedup"] == 1.1
    assert report["drafter_parameters"] > 0 and report["environment"]["dtype"] == "bfloat16"
    half = report["details"]["identity"]["half_precision"]
    assert half["compared"] == report["details"]["identity"]["full_precision"]["compared"] > 0
    assert any("tuned on cpu, float32" in gate["text"] for gate in report["details"]["gates"])
    assert half["tokens_passed"] and half["limit"] == 2 * half["logit_error"]
    assert [row["depth"] for row in report["details"]["per_depth"]] == [1, 2]


def test_another_size_of_tree_has_no_forecast(run_folder, prompts, tmp_path):
    report = measure.run(
        head=str(run_folder / "head"),
        target=None,
        bench=str(prompts),
        overrides=[*SMALL, "eval.tree=3", "eval.identity_prompts=0", "eval.temperature=[0.0, 1.0]"],
        output=str(tmp_path),
        device="cpu",
    )
    assert report["details"]["settings"]["tree"] == [(0,)] and report["forecast_speedup"] is None
    assert report["details"]["identity"] is None
    assert [row["name"] for row in report["details"]["temperatures"]] == ["temperature 0", "temperature 1"]
    assert "By temperature" in (tmp_path / "report.md").read_text()


def test_every_drafter_has_a_line_by_temperature_and_by_rows_at_a_time(target_folder, prompts, tmp_path):
    report = measure.run(
        target=str(target_folder),
        drafters=["none", "ngram"],
        bench=str(prompts),
        overrides=[*SMALL, "eval.temperature=[0.0, 1.0]", "eval.batch_size=[1, 3]"],
        output=str(tmp_path),
        device="cpu",
        dtype="float32",
    )
    details = report["details"]
    assert [row["name"] for row in details["temperatures"]] == ["temperature 0", "temperature 1"]
    alone, together = details["batches"]
    assert (alone["name"], together["name"]) == ("1 at a time", "3 at a time")
    assert alone["acceptance_length"] == together["acceptance_length"] == report["acceptance_length"]
    assert alone["identical_outputs"] == together["identical_outputs"] == report["compared_outputs"]
    assert alone["identity_holds"] is True and together["identity_holds"] is None
    assert alone["conditional"] == [row["conditional"] for row in details["per_depth"]]
    assert details["settings"]["batch_size"] == 1 and alone["seconds_per_step"]["verify"] > 0
    text = (tmp_path / "report.md").read_text()
    assert "By rows decoded at a time" in text and "not checked" in text


def test_plain_decoding_alone_has_a_report(target_folder, prompts, tmp_path):
    report = measure.run(
        target=str(target_folder), bench=str(prompts), overrides=SMALL, output=str(tmp_path), device="cpu"
    )
    assert report["acceptance_length"] == 1 and report["speedup"] == 1 and report["identical_outputs"] == 6
    parse(tmp_path / "report.html")


def test_template_arguments_other_than_those_of_training_are_named(run_folder, prompts, tmp_path):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trained = open_trained(str(run_folder), overrides=["data.chat.arguments={enable_thinking: false}"])
    (note,) = trained.notes
    assert "data.chat.arguments={}" in note and "'enable_thinking': False" in note
    assert any(note == str(one.message) for one in caught)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"head": "runs/nowhere"}, "there is no run"),
        ({"drafters": ["telepathy"]}, "drafter 'telepathy' is not known; expected none, ngram, "),
        ({"drafters": ["head"]}, "needs to know which"),
        ({"overrides": ["eval.num_prompt=3"]}, "num_prompts"),
    ],
)
def test_mistakes_end_in_a_sentence(options, message, target_folder):
    with pytest.raises(HeadstartError, match=message):
        measure.run(**{"target": str(target_folder), **options})


def test_generate_takes_any_drafter_and_needs_no_head(tmp_path, capsys):
    words = ["generate", "--target", str(tiny.save(tmp_path / "target", "llama")), "--max-new-tokens", "12"]
    texts = []
    for more in ([], ["--drafter", "none"], ["--drafter", "ngram"], ["--drafter", "adaptive@heuristic:layer-skip"]):
        assert cli.main([*words, *more, "¿Qué? 🙂", "--dtype", "float32", "--device", "cpu"]) == 0
        captured = capsys.readouterr()
        texts.append(captured.out)
        assert "acceptance length" in captured.err
    assert len(set(texts)) == 1 and texts[0]
    assert cli.main([*words, "--drafter", "telepathy", "Hello"]) == 2
    assert "'telepathy' is not known" in capsys.readouterr().err
    assert cli.main(["generate", "Hello"]) == 2
    assert "add --head RUN, or --target NAME" in capsys.readouterr().err


def test_a_reports_folder_has_no_longer_a_name_than_disks_allow(tmp_path):
    named = find_named(None, str(tmp_path / "target"))
    short = measure._default_folder(named, ["none", "head:runs/a"], None)
    assert short == Path("runs/target-none-head-runs-a")
    many = [f"model:/models/number-{number}" for number in range(40)]
    names = {measure._default_folder(named, many[:count], None).name for count in (39, 40)}
    assert len(names) == 2 and all(len(name) == measure.LONGEST_NAME for name in names)


def test_generate_streams_the_engines_answer(run_folder, capsys):
    generation = generate.run(str(run_folder), "Say ééé", max_new_tokens=16, device="cpu")
    shown = capsys.readouterr()
    tokenizer = tiny.tokenizer()
    assert shown.out == tokenizer.decode(generation.token_ids, skip_special_tokens=True)
    assert "acceptance length" in shown.err and "tokens/s" in shown.err
    message = {"role": "user", "content": "Say ééé"}
    prompt = ChatRenderer(tokenizer, ChatSection()).prompt([message])
    (plain,) = stubs.plain_answers(tiny.model("llama"), [prompt], 16, end_token_ids=(tiny.END,))
    assert plain == generation.token_ids


def test_a_prompt_that_fills_all_positions_is_refused(run_folder, target_folder, tmp_path):
    long = "word " * 2000
    with pytest.raises(HeadstartError, match=r"the prompt has \d+ tokens.*shorten the prompt"):
        generate.run(str(run_folder), long, device="cpu")
    (tmp_path / "long.jsonl").write_text(json.dumps({"turns": [long]}) + "\n")
    with pytest.raises(HeadstartError, match="each of the 1 prompts fills"):
        measure.run(
            target=str(target_folder),
            bench=str(tmp_path / "long.jsonl"),
            output=str(tmp_path / "out"),
            device="cpu",
            overrides=SMALL,
        )


def test_a_report_that_cannot_be_written_is_refused_before_the_work(target_folder, prompts, tmp_path, monkeypatch):
    monkeypatch.setattr(measure, "measure", lambda *_: pytest.fail("nothing is measured"))
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError):
        measure.run(target=str(target_folder), bench=str(prompts), output=str(tmp_path / "file"), device="cpu")
    monkeypatch.setattr("headstart.errors.os.access", lambda *_: False)
    with pytest.raises(PermissionError):
        measure.run(target=str(target_folder), bench=str(prompts), output=str(tmp_path), device="cpu")
