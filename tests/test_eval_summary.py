"""Figures, gates and pages of a report, from made-up answers whose figures are known."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from headstart.decode.drafters.plans import DynamicTree, SampledChain, SampledTree, StaticTree, chain_paths
from headstart.decode.engine import StepRecord
from headstart.errors import HeadError, HeadstartError, RecipeError
from headstart.eval.charts import columns, dots, horizontal_bars, stacked_bars
from headstart.eval.drafters import plan_drafter
from headstart.eval.gates import gates
from headstart.eval.latency import percentiles
from headstart.eval.prompts import Question
from headstart.eval.report import HEADLINE, build_report, to_html, to_markdown, write_report
from headstart.eval.summary import summarise, token_rates
from headstart.eval.tables import headline
from headstart.eval.timing import PLAIN, Answer, Measurement, Timed
from headstart.eval.transformers_arm import Generated
from headstart.eval.trees import choose_plan, choose_tree

ENVIRONMENT = {"target": "t", "dtype": "float32", "device": "a <fast> CPU", "threads": 1, "date": "d", "commit": None}
SETTINGS = {"batch_size": 1, "temperature": 0.0}
MEMORY = {"cache_bytes": 1, "mask_bytes": 2, "drafter_bytes": 3, "total_bytes": 6, "gpu_peak_bytes": None}


def timed(ids, accepted, *, draft=0.0, verify=0.1, prefill=1.0, depth=0, last_cut=False):
    """An answer whose steps accepted these drafts, each at the same cost."""
    steps = [
        StepRecord(depth + 1, depth, one, one + 1, last_cut and place == len(accepted) - 1, draft, verify, 0.0, 9, 1)
        for place, one in enumerate(accepted)
    ]
    return Timed(ids, "end", steps, prefill, len(steps) * (draft + verify))


def answer(group, *, kind="explain", ids=None, drafted_ids=None, transformers=None, accepted=(1,) * 10):
    """20 tokens: plain in 20 steps of 0.1 s, drafted in `accepted` steps of 0.12 s."""
    ids = list(range(20)) if ids is None else ids
    question = Question(f"q{group}", kind, kind, "kind held out", ((),), (1,))
    arms = {
        PLAIN: timed(ids, (0,) * len(ids)),
        "medusa": timed(drafted_ids or ids, accepted, draft=0.02, depth=2),
    }
    return Answer(question, 0, group, [1, 2, 3], arms, transformers)


def measurement(*answers):
    return Measurement(list(answers), {PLAIN: MEMORY, "medusa": MEMORY})


def report_of(run, **options):
    options = {"drafter_parameters": 7, "forecast": {}, "environment": ENVIRONMENT, "settings": SETTINGS} | options
    return build_report(summarise(run, "medusa"), title="A <title>", **options)


def test_pooled_rates_and_means_of_rates_are_told_apart():
    rates = token_rates([100, 10], [10, 0.5])
    assert rates["pooled"] == pytest.approx(10.48, abs=0.01)
    assert rates["mean"] == pytest.approx(15)


def test_headline_figures():
    figures = summarise(measurement(*[answer(group) for group in range(4)]), "medusa")
    assert figures["plain_tokens_per_second"] == pytest.approx(10)
    assert figures["drafted_tokens_per_second"] == pytest.approx(20 / 1.2)
    assert figures["speedup"] == pytest.approx(2 / 1.2)
    assert figures["speedup_interval"] == pytest.approx((2 / 1.2, 2 / 1.2))
    assert figures["acceptance_length"] == 2 and figures["acceptance_length_interval"] == (2, 2)
    assert (figures["identical_outputs"], figures["compared_outputs"]) == (4, 4)
    assert figures["time_to_first_token"]["plain"]["p50"] == pytest.approx(1.1)
    assert figures["inter_chunk_latency"]["drafted"]["p95"] == pytest.approx(0.12)
    assert figures["transformers_generate_tokens_per_second"] is None
    steps = figures["details"]["seconds_per_step"]
    assert steps["drafted"] == pytest.approx({"draft": 0.02, "verify": 0.1, "host": 0, "other": 0, "all": 0.12})
    assert steps["break_even_acceptance_length"] == pytest.approx(1.2)


def test_answers_that_loop_stand_apart():
    looping = answer(9, ids=[1, 2] * 20, accepted=(2,) * 14)
    figures = summarise(measurement(answer(0), answer(1), looping), "medusa")
    alone = summarise(measurement(answer(0), answer(1)), "medusa")
    for key in ("speedup", "acceptance_length", "plain_tokens_per_second", "time_to_first_token"):
        assert figures[key] == alone[key]
    assert figures["details"]["answers"]["looping"] == 1
    (row,) = figures["details"]["looping"]
    assert row["acceptance_length"] == 3 and figures["compared_outputs"] == 3


def test_cut_steps_are_in_the_time_but_not_in_the_acceptance():
    one = answer(0)
    one.arms["medusa"] = timed(list(range(20)), (1,) * 9 + (0,), draft=0.02, depth=2, last_cut=True)
    figures = summarise(measurement(one), "medusa")
    assert figures["acceptance_length"] == 2
    assert figures["details"]["acceptance"]["cut_steps"] == 1
    assert figures["speedup"] == pytest.approx(2 / 1.2), "all 20 tokens and all 10 steps count"


def test_tables_by_kind_and_depth():
    run = measurement(answer(0), answer(1, kind="code", accepted=(2, 0) * 5), answer(2))
    details = summarise(run, "medusa")["details"]
    assert [(row["name"], row["answers"]) for row in details["by_kind"]] == [("explain", 2), ("code", 1)]
    assert [row["depth"] for row in details["per_depth"]] == [1, 2]
    first, second = details["per_depth"]
    assert (first["tested"], first["accepted"]) == (30, 25) and (second["tested"], second["accepted"]) == (25, 5)
    assert details["over_prompts"]["acceptance_length"] == {"mean": 2.0, "median": 2.0}


def test_waits_are_those_of_a_request_and_tokens_of_the_first_emission_are_not_waited_for():
    one = answer(0, accepted=(1, 3, 0, 1))
    waits = summarise(measurement(one), "medusa")["details"]["latency"]
    assert waits["request_latency"]["plain"]["p50"] == pytest.approx(1 + 20 * 0.1)
    assert waits["request_latency"]["drafted"]["p99"] == pytest.approx(1 + 4 * 0.12)
    assert waits["time_per_output_token"]["plain"]["p50"] == pytest.approx(0.1)
    assert waits["time_per_output_token"]["drafted"]["p50"] == pytest.approx(3 * 0.12 / 18)
    assert waits["time_to_first_token"]["drafted"]["p90"] == pytest.approx(1.12)
    batched = [replace(step, rows=4) for step in one.arms["medusa"].steps]
    one.arms["medusa"] = replace(one.arms["medusa"], steps=batched, seconds=0.12)
    waits = summarise(measurement(one), "medusa")["details"]["latency"]
    assert waits["request_latency"]["drafted"]["p50"] == pytest.approx(1.48), "no share of the batch, its own wait"


def test_acceptance_against_the_length_of_the_context():
    """Steps count where they happen; cut ones in the time alone; intervals where two questions come."""
    run = measurement(answer(0, accepted=(1, 1, 0, 0)), answer(1, accepted=(1, 1, 0, 2)))
    for one in run.answers:
        for arm, timed_answer in one.arms.items():
            lengths = (100, 127, 128, 700) if arm == "medusa" else (100, 127, 128, *[700] * 17)
            steps = [replace(s, context_length=length) for s, length in zip(timed_answer.steps, lengths, strict=True)]
            steps[-1] = replace(steps[-1], cut=arm == "medusa")
            one.arms[arm] = replace(timed_answer, steps=steps)
    short, middle, long = summarise(run, "medusa")["details"]["by_context"]
    assert [row["name"] for row in (short, middle, long)] == [
        "0 to 127",
        "128 to 255",
        "512 to 1023",
    ]
    assert short["acceptance_length"] == 2 and short["acceptance_length_interval"] == (2, 2) and short["steps"] == 4
    assert short["speedup"] == pytest.approx(2 / 1.2) and middle["speedup"] == pytest.approx(1 / 1.2)
    assert middle["acceptance_length"] == 1 and long["acceptance_length"] is None, "both of its steps are cut"
    assert long["answers"] == 2 and long["drafted_tokens_per_second"] == pytest.approx(4 / 0.24)
    report = report_of(run)
    assert "By context length" in to_markdown(report) and "by tokens of context" in to_html(report)


def test_transformers_is_compared_on_the_same_answers():
    figures = summarise(measurement(answer(0, transformers=Generated([7] * 20, 19, 3.8)), answer(1)), "medusa")
    assert figures["transformers_generate_tokens_per_second"] == pytest.approx(5)
    assert figures["details"]["transformers_generate"]["plain_over_transformers"] == pytest.approx(2)
    assert figures["details"]["transformers_generate"]["answers"] == 1


def test_texts_that_part_are_said_and_rates_stay_per_token():
    parted = answer(0, drafted_ids=[*range(15), 99, 98, 97, 96, 95])
    report = report_of(measurement(parted, answer(1)))
    assert (report["identical_outputs"], report["compared_outputs"]) == (1, 2)
    (gate,) = [gate for gate in report["details"]["gates"] if gate["name"] == "texts"]
    assert gate["passed"] is None and "compared per token" in gate["text"]
    assert report["details"]["prompts"][0]["first_difference"] == 15


def full(passed):
    divergences = [] if passed else [{"prompt": 0, "position": 1, "gap": 3.0, "allowed": False}]
    return {"dtype": "float32", "compared": 2, "identical": 2 - len(divergences), "divergences": divergences}


def test_a_failed_identity_takes_the_speedup_out():
    for passed in (True, False):
        identity = {"full_precision": full(passed), "half_precision": None, "passed": passed}
        report = report_of(measurement(answer(0), answer(1)), identity=identity)
        assert (report["speedup"] is not None) == passed
        assert ("FAILS" in to_markdown(report)) != passed
        tables = [row["speedup"] for name in ("by_kind", "by_context", "prompts") for row in report["details"][name]]
        assert tables and all((speedup is not None) == passed for speedup in tables)


def test_a_speedup_above_the_acceptance_length_is_not_believed():
    run = measurement(answer(0), answer(1))
    run.answers = [
        replace(one, arms={**one.arms, "medusa": replace(one.arms["medusa"], seconds=0.1)}) for one in run.answers
    ]
    found = {gate["name"]: gate["passed"] for gate in gates(summarise(run, "medusa"), None, [])}
    assert found["speedup within acceptance length"] is False
    assert found["time accounted for"] is False and found["texts"] is True and found["identity"] is None


def test_a_report_has_its_keys_in_order_and_every_text_is_escaped(tmp_path):
    report = report_of(measurement(answer(0, kind="a<b>|c"), answer(1)), notes=["another template"])
    assert tuple(report) == (*HEADLINE, "details")
    written = write_report(report, tmp_path / "runs" / "demo")
    assert [path.name for path in written] == ["report.json", "report.md", "report.html"]
    assert json.loads(written[0].read_text())["speedup"] == report["speedup"]
    page = to_html(report)
    assert "a&lt;b&gt;|c" in page and "<b>|c" not in page and "a &lt;fast&gt; CPU" in page
    assert "a<b>\\|c" in to_markdown(report)
    assert "another template" in page
    assert len(headline(report).rows) >= 10


def test_nothing_measured_is_na_not_nan():
    report = report_of(measurement())
    assert report["speedup"] is None and report["acceptance_length_interval"] is None
    json.dumps(report, allow_nan=False)
    assert "n/a" in to_markdown(report) and ">nan<" not in to_html(report)
    assert set(percentiles([]).values()) == {None}


def test_plots_are_svg_with_every_value():
    plots = [
        horizontal_bars("t", [("a & b", 1.5), ("none", None)], intervals=[(1.2, 1.8), None], reference=1.0),
        columns("t", ["1", "2"], [("x", [0.5, None]), ("y", [1.0, 0.0])]),
        dots("t", [0.9, 1.4, 1.2], reference=1.0),
        stacked_bars("t", [("plain", [0, 20, 1, 0]), ("drafted", [2, 22, 1, 1])], ("a", "b", "c", "d"), "ms"),
    ]
    for plot in plots:
        assert plot.startswith("<figure>") and plot.count("<svg") == 1 == plot.count("</svg>")
        assert 'viewBox="0 0 360' in plot and "nan" not in plot
    assert "a &amp; b" in plots[0] and "n/a" in plots[0] and plots[2].count("<circle") == 3


def test_the_tree_of_a_size_is_the_tuned_one_or_the_next_smaller(tmp_path):
    trees = {"choices": {"3": [[0], [1]], "5": [[0], [1], [0, 0], [1, 0]]}, "best": 5}
    trees |= {"device": "cpu", "dtype": "bfloat16"}
    trees["forecast"] = {"acceptance_length": 1.4, "speedup": 1.2}
    (tmp_path / "trees.json").write_text(json.dumps(trees))
    best = [(0,), (1,), (0, 0), (1, 0)]
    tuned_on = ("cpu", "bfloat16")
    assert choose_tree(tmp_path, "auto") == (best, trees["forecast"], tuned_on)
    assert choose_tree(tmp_path, 5) == (best, trees["forecast"], tuned_on)
    assert choose_tree(tmp_path, 4) == ([(0,), (1,)], {}, tuned_on)
    trees["forecasts"] = {"3": {"acceptance_length": 1.3, "speedup": 1.15}, "5": trees["forecast"]}
    (tmp_path / "trees.json").write_text(json.dumps(trees))
    assert choose_tree(tmp_path, 4)[1] == trees["forecasts"]["3"]
    (tmp_path / "trees.json").write_text(json.dumps(trees)[:60])
    with pytest.raises(HeadError, match="no file of trees"):
        choose_tree(tmp_path, "auto")
    (tmp_path / "trees.json").write_text(json.dumps(trees | {"forecasts": [1]}))
    with pytest.raises(HeadError, match="no file of trees"):
        choose_tree(tmp_path, "auto")
    (tmp_path / "trees.json").write_text("{}")
    with pytest.raises(HeadError, match="headstart tune"):
        choose_tree(tmp_path, "auto")


def write_description(folder, head):
    described = {"format": 1, "head": head, "hidden_size": 8, "vocab_size": 9, "target": {}}
    (folder / "config.json").write_text(json.dumps(described))


def test_a_plan_is_named_behind_the_head(tmp_path):
    write_description(
        tmp_path, {"type": "eagle3", "unrolled_steps": [{"until": 0.5, "steps": 1}, {"until": 1.0, "steps": 4}]}
    )
    trees = {"choices": {"3": [[0], [1]], "5": [[0], [1], [0, 0], [1, 0]]}, "best": 3, "device": "cpu"}
    trees |= {"dtype": "float32", "forecasts": {"3": {"speedup": 1.2}, "5": {"speedup": 1.1}}}
    dynamic = {"4": {"depth": 2, "width": 2, "num_nodes": 4}, "8": {"depth": 3, "width": 4, "num_nodes": 8}}
    trees["dynamic"] = {"choices": dynamic, "best": 8, "forecasts": {"8": {"speedup": 1.4}}}
    trees["plan"] = "dynamic"
    (tmp_path / "trees.json").write_text(json.dumps(trees))
    named = {
        name: plan_drafter(name, tmp_path, "auto") for name in ("head", "head@tree", "head@tree5", "head@dynamic4")
    }
    best = DynamicTree(depth=3, width=4, num_nodes=8)
    assert named["head"].plan == best and named["head"].forecast == {"speedup": 1.4} and named["head"].budget == 8
    assert named["head"].tree == {"depth": 3, "width": 4, "num_nodes": 8, "stop_below": 0.0}
    assert named["head@tree"].tree == [(0,), (1,)] and named["head@tree"].forecast == {"speedup": 1.2}
    assert named["head@tree5"].tree == [(0,), (1,), (0, 0), (1, 0)] and named["head@tree5"].budget == 5
    assert named["head@dynamic4"].plan == DynamicTree(depth=2, width=2, num_nodes=4)
    assert plan_drafter("head", tmp_path, 5).tree == named["head@tree5"].tree, "eval.tree means a static tree"
    assert plan_drafter("head@chain3", tmp_path, "auto").tree == chain_paths(3)
    assert plan_drafter("head@chain", tmp_path, "auto").tree == chain_paths(4), "as deep as it was trained"
    assert plan_drafter(f"head@drawn2:{tmp_path}", None, "auto").plan == SampledChain(length=2)
    sampled = plan_drafter("head@sampled5", tmp_path, "auto")
    assert sampled.plan == SampledTree(paths=[(0,), (1,), (0, 0), (1, 0)]) and sampled.forecast == {}
    assert sampled.depths == [1, 3, 5] and sampled.tuned_on == ("cpu", "float32")
    assert plan_drafter("head@sampled", tmp_path, "auto").budget == 3, "of the best size"
    wrong = [("head@tree4", "3, 5 nodes"), ("head@sampled4", "3, 5 nodes"), ("head@dynamic5", "4, 8 nodes")]
    for name, told in [*wrong, ("head@tree1", "drafts nothing")]:
        with pytest.raises(HeadstartError, match=told):
            plan_drafter(name, tmp_path, "auto")
    del trees["plan"]
    (tmp_path / "trees.json").write_text(json.dumps(trees))
    assert isinstance(plan_drafter("head", tmp_path, "auto").plan, StaticTree)
    trees["dynamic"] = {**trees["dynamic"], "choices": {"4": {"depth": "deep"}}}
    (tmp_path / "trees.json").write_text(json.dumps(trees))
    with pytest.raises(HeadError, match="no file of trees"):
        choose_plan(tmp_path, "dynamic", "auto")


@pytest.mark.parametrize(("head", "depth"), [({"type": "medusa", "num_heads": 2}, 2), ({"type": "eagle"}, 3)])
def test_without_tuning_there_are_chains_and_plain_dynamic_trees(tmp_path, head, depth):
    write_description(tmp_path, head)
    assert choose_plan(tmp_path, None, "auto") == (StaticTree(paths=chain_paths(depth)), {}, None)
    assert choose_plan(tmp_path, "dynamic", 4)[0] == DynamicTree(depth=3, width=4, num_nodes=4)
    for name in ("head@", "head@chian3", "chain3", "head@chain-1", "Head"):
        with pytest.raises(RecipeError, match="is not known; expected "):
            plan_drafter(name, tmp_path, "auto")
    for name in ("head@chain0", "head@drawn0", "head@dynamic1", "head@sampled1"):
        with pytest.raises(RecipeError, match="drafts nothing"):
            plan_drafter(name, tmp_path, "auto")
    with pytest.raises(HeadError, match="no trees were tuned"):
        plan_drafter("head@tree16", tmp_path, "auto")
    with pytest.raises(HeadError, match="no trees were tuned"):
        plan_drafter("head@sampled16", tmp_path, "auto")


def test_an_ngram_drafter_stays_within_the_asked_size():
    assert plan_drafter("ngram", None, 4).budget == 4
    assert plan_drafter("ngram", None, "auto").budget == 9
