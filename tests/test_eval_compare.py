"""Runs side by side: what differs, what is paired and what is refused, the Pareto front, and the page."""

from __future__ import annotations

import json
import re
from pathlib import Path

import browser
import compare_cases as cases
import pytest

from headstart import cli
from headstart.errors import HeadstartError
from headstart.eval import compare
from headstart.eval.compare import pareto
from headstart.eval.run_records import read_runs

WEAK = [(1,) * 10, (1, 0) * 6 + (1, 1), None, (0, 1) * 7, (1, 1, 0) * 4]
STRONG = [(2,) * 6 + (1,), (2, 0) * 6 + (1,), None, (1, 1) * 5, (2, 1, 0) * 3 + (1,)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> list[Path]:
    folder = tmp_path_factory.mktemp("runs")
    return [
        cases.run_folder(folder / "weak", cases.report(WEAK), "head.loss=lk", num_heads=2),
        cases.run_folder(folder / "strong", cases.report(STRONG, drafter_parameters=70), "train.lr=2e-3", num_heads=3),
        cases.run_folder(
            folder / "eagle3",
            cases.report(STRONG[:2] + WEAK[2:], drafter_parameters=900),
            kind="eagle3",
            layers=[1, 2, 3],
        ),
    ]


@pytest.fixture(scope="module")
def found(runs, tmp_path_factory):
    return compare.run([str(run) for run in runs], output=str(tmp_path_factory.mktemp("out")))


def test_runs_stand_fastest_first_with_their_figures(found):
    names = [run["name"] for run in found["runs"]]
    assert names == ["strong", "eagle3", "weak"] and found["reference"] == "weak"
    weak = found["runs"][2]
    assert weak["head"] == "medusa" and (weak["answers"], weak["looping"]) == (4, 1)
    assert weak["training"] == {
        "steps": 20,
        "tokens": 8000,
        "cpu_seconds": 8.0,
        "device_seconds": 4.5,
        "device": "a CPU",
    }
    assert weak["bytes"] > 1000 and weak["parameters"] == 7
    assert weak["acceptance_length"] == pytest.approx(
        sum(len(s) + sum(s) for s in WEAK if s) / sum(map(len, filter(None, WEAK)))
    )


def test_only_settings_that_differ_are_told(found):
    differing = found["differing"]
    assert differing["head.loss"] == {"strong": "soft-ce", "eagle3": "soft-ce", "weak": "lk"}
    assert differing["train.lr"]["strong"] == 2e-3 and differing["head.type"]["eagle3"] == "eagle3"
    assert differing["head.num_heads"] == {"strong": 3, "weak": 2}, "EAGLE-3 has no such key"
    assert differing["head.layers"] == {"eagle3": [1, 2, 3]} and "head.attention_bias" not in differing
    assert not {"name", "seed", "train.max_steps", "target.name"} & differing.keys()


def test_differences_are_paired_by_answer(found):
    difference = found["differences"]["strong"]
    assert (difference["answers"], difference["looping"]) == (4, 1)
    tau = difference["acceptance_length"]
    by_name = {run["name"]: run for run in found["runs"]}
    assert tau["value"] == pytest.approx(by_name["strong"]["acceptance_length"] - by_name["weak"]["acceptance_length"])
    alone = [run["acceptance_length_interval"] for run in (by_name["strong"], by_name["weak"])]
    assert 0 < tau["interval"][0] <= tau["value"] <= tau["interval"][1]
    assert tau["interval"][1] - tau["interval"][0] < sum(high - low for low, high in alone)
    speedup = difference["speedup"]
    assert speedup["value"] == pytest.approx(by_name["strong"]["speedup"] - by_name["weak"]["speedup"])
    assert found["leaders"]["speedup"]["name"] == "strong" and "weak" in found["leaders"]["speedup"]["behind"]


def test_the_front_has_what_nothing_beats():
    assert pareto([(1, 1), (2, 3), (3, 2), (1, 0.5), (2, 3), (None, 9), (9, None)]) == [0, 1, 4]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"settings": {**cases.SETTINGS, "temperature": 1.0}}, "temperature 1.0 here, 0.0 there"),
        ({"settings": {**cases.SETTINGS, "max_new_tokens": 96}}, "max new tokens 96"),
        ({"environment": {**cases.cases.ENVIRONMENT, "dtype": "bfloat16"}}, "dtype bfloat16"),
        ({"environment": {**cases.cases.ENVIRONMENT, "target": "other"}}, "target other"),
        ("fewer", "other prompts: q4, turn 1, by weak alone"),
        ("rendered", "q0 and 4 more were rendered otherwise"),
    ],
)
def test_other_prompts_and_conditions_are_shown_and_not_paired(changes, told, runs, tmp_path):
    if isinstance(changes, dict):
        made = cases.report(STRONG, **changes)
    else:
        made = cases.report(STRONG[:4] if changes == "fewer" else STRONG)
        if changes == "rendered":
            for row in made["details"]["prompts"]:
                row["prompt"] = "another"
    other = cases.run_folder(tmp_path / "other", made)
    found = compare.run([str(runs[0]), str(other)])
    assert told in found["differences"]["other"]["refused"]
    assert found["leaders"]["speedup"]["not_paired"] == ["weak"]
    assert {run["name"] for run in found["runs"]} == {"weak", "other"}


def test_speeds_of_other_devices_are_not_paired_but_acceptance_is(runs, tmp_path):
    made = cases.report(STRONG, environment={**cases.cases.ENVIRONMENT, "device": "another"})
    difference = compare.run([str(runs[0]), str(cases.run_folder(tmp_path / "other", made))])["differences"]["other"]
    assert difference["speedup"] is None and "device another" in difference["speedup_refused"]
    assert difference["acceptance_length"]["interval"][0] > 0


def test_a_further_turn_on_another_answer_is_left_out(runs, tmp_path):
    made = cases.report(STRONG)
    made["details"]["prompts"][0] |= {"turn": 2, "prompt": "follows on another answer"}
    other, mine = cases.run_folder(tmp_path / "other", made), cases.report(WEAK)
    mine["details"]["prompts"][0]["turn"] = 2
    difference = compare.run([str(cases.run_folder(tmp_path / "mine", mine)), str(other)])["differences"]["other"]
    assert (difference["answers"], difference["other_context"]) == (3, 1)


def test_a_report_alone_will_do(runs, tmp_path):
    cases.write_report(cases.report(WEAK), tmp_path / "ngram")
    found = compare.run([str(runs[1]), str(tmp_path / "ngram")])
    ngram = next(run for run in found["runs"] if run["name"] == "ngram")
    assert ngram["training"] is None and ngram["bytes"] is None and "ngram" not in str(found["differing"])


def test_what_cannot_be_compared_yet_says_what_to_type(runs, tmp_path):
    unmeasured = cases.run_folder(tmp_path / "unmeasured", None)
    half = tmp_path / "half"
    half.mkdir()
    (half / "recipe.yaml").write_text((unmeasured / "recipe.yaml").read_text())
    old = cases.report(WEAK)
    for row in old["details"]["prompts"]:
        del row["prompt"]
    older = cases.run_folder(tmp_path / "older", old)
    (tmp_path / "empty").mkdir()
    paths = [runs[0], unmeasured, half, older, tmp_path / "empty", tmp_path / "gone"]
    with pytest.raises(HeadstartError) as error:
        read_runs(paths)
    said = str(error.value).splitlines()
    assert len(said) == 5
    assert said[0].endswith(f"headstart eval --head {unmeasured}")
    assert f"headstart train --recipe {half / 'recipe.yaml'} --name half" in said[1] and said[1].endswith("--resume")
    assert "another version (no prompt)" in said[2] and "is no run" in said[3] and "there is no run" in said[4]
    with pytest.raises(HeadstartError, match="no report of question yet"):
        read_runs(runs, "question")
    with pytest.raises(HeadstartError, match="named twice"):
        read_runs([runs[0], runs[0] / "head"])


def test_runs_of_one_name_are_told_apart(runs, tmp_path):
    cases.write_report(cases.report(WEAK), tmp_path / "a" / "same")
    cases.write_report(cases.report(WEAK), tmp_path / "b" / "same")
    assert [one.name for one in read_runs([tmp_path / "a" / "same", tmp_path / "b" / "same"])] == ["a/same", "b/same"]


def test_the_verb_prints_and_writes(runs, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    words = ["compare", *map(str, runs), "--against", str(runs[1]), "--output", str(tmp_path / "out")]
    assert cli.main(words) == 0
    said = capsys.readouterr().out
    assert "Against strong" in said and "highest speedup: 1.67 by 1 strong" in said and "head.num_heads" in said
    stored = json.loads((tmp_path / "out/comparison.json").read_text())
    assert stored["reference"] == "strong" and str(tmp_path) not in json.dumps(stored)
    markdown = (tmp_path / "out/comparison.md").read_text()
    assert "| 1 strong | 1.67 [" in markdown and "## What differs in their recipes" in markdown
    page = (tmp_path / "out/comparison.html").read_text()
    assert page.count("<svg") == 4 and "<script" not in page and not re.search(r"(src|href)=", page)
    assert cli.main(["compare", *map(str, runs), "--against", "elsewhere"]) == 1
    assert "none of the runs: weak, strong, eagle3" in capsys.readouterr().err
    assert cli.main(["compare", str(runs[0])]) == 1 and "two or more" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(browser.CHROMIUM is None, reason="no chromium here; Debian: apt-get install chromium")
def test_the_page_in_a_browser(runs, tmp_path):
    many = [
        cases.run_folder(tmp_path / f"a_run_with_a_rather_long_name_loss-{n}", cases.report(WEAK)) for n in range(9)
    ]
    compare.run([str(run) for run in [*runs, *many]], output=str(tmp_path / "out"))
    for width, dark in ((390, True), (390, False), (1280, False)):
        with browser.opened(tmp_path / "out/comparison.html", width=width, dark=dark) as page:
            assert page.evaluate("document.documentElement.scrollWidth") <= width, "nothing hangs over the edge"
            figures = page.evaluate(_FIGURES)
            assert len(figures) == 4 and all(wide > 300 and tall > 100 and marks > 3 for wide, tall, marks in figures)
            assert width > 390 or page.evaluate(_SMALLEST_TEXT) >= 10, "readable on a phone"
            paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
            assert (sum(map(int, re.findall(r"\d+", paper))) < 200) == dark
            assert not page.faults


@pytest.mark.slow
@pytest.mark.skipif(browser.CHROMIUM is None, reason="no chromium here; Debian: apt-get install chromium")
def test_the_browser_would_tell(tmp_path):
    bad = tmp_path / "bad.html"
    bad.write_text('<div style="width:900px">x</div><img src="http://localhost:9/x.png"><script>missing()</script>')
    with browser.opened(bad, width=390) as page:
        assert page.evaluate("document.documentElement.scrollWidth") > 390
        page.evaluate("1")
        assert any("Uncaught" in fault for fault in page.faults) and any("localhost" in fault for fault in page.faults)


_FIGURES = """[...document.querySelectorAll("figure svg")].map(svg => { const box = svg.getBoundingClientRect();
  return [box.width, box.height, svg.querySelectorAll("rect, circle, line, polyline").length]; })"""
# in pixels as drawn: an SVG's text is scaled with it
_SMALLEST_TEXT = """Math.min(...[...document.querySelectorAll("svg text, td, p, li")].map(one => {
  const svg = one.closest("svg"), size = parseFloat(getComputedStyle(one).fontSize);
  return svg ? size * svg.getBoundingClientRect().width / svg.viewBox.baseVal.width : size; }))"""
