"""`headstart theory`: the table, measured costs, and a page whose script says what the closed forms say."""

from __future__ import annotations

import json
import shutil
import subprocess

import pytest

from headstart import cli
from headstart.decode.closed_form import best_length, expected_accepted, walltime_factor
from headstart.errors import HeadstartError
from headstart.eval import theory


def test_the_table_says_the_classic_figure(capsys):
    assert cli.main(["theory", "--alpha", "0.9", "--k", "5"]) == 0
    asked = next(line for line in capsys.readouterr().out.splitlines() if "asked" in line)
    assert asked.split()[:3] == ["5", "3.69", "4.69"]
    assert cli.main(["theory", "--alpha", "0.5", "--k", "5"]) == 0
    assert "0.97" in next(line for line in capsys.readouterr().out.splitlines() if "asked" in line)


def test_rates_by_depth_and_trees():
    figures = theory.run(rates=[0.8, 0.7, 0.6], tree=[2, 1])
    assert [row["accepted"] for row in figures["lengths"]] == pytest.approx([0.8, 0.8 + 0.56, 0.8 + 0.56 + 0.336])
    assert figures["asked"] == 3
    # two children of the root, the second tried where the first was wrong, each with one child
    first = 0.8 + 0.2 * 0.8
    assert figures["tree"] == {"children": [2, 1], "nodes": 5, "tokens": pytest.approx(1 + first + first * 0.7)}


def test_where_drafts_do_not_pay_it_says_so(capsys):
    assert theory.run(alpha=0.1, cost=0.5)["best"] == 0
    assert "plain decoding is the fastest" in capsys.readouterr().out


MEDUSA = {"draft_seconds": 0.002}
EAGLE = {
    "draft_seconds": {
        "first": 0.004,
        "static_level": {"1": 0.003, "4": 0.004},
        "dynamic_level": {"1": 0.005, "4": 0.006},
    }
}


@pytest.fixture
def head(tmp_path):
    def write(drafting: dict) -> str:
        (tmp_path / "config.json").write_text("{}")
        (tmp_path / "model.safetensors").write_bytes(b"")
        stored = {"device": "cpu", "dtype": "bfloat16", "step_seconds": {"1": 0.02, "2": 0.022, "4": 0.03}, **drafting}
        (tmp_path / "trees.json").write_text(json.dumps(stored))
        return str(tmp_path)

    return write


def test_measured_costs_are_those_of_the_file(head, monkeypatch):
    monkeypatch.setattr(theory, "find_head", lambda path: (None, path))
    costs = theory.measured_costs(head(MEDUSA))
    assert [costs.chain(k) for k in range(4)] == pytest.approx([1, 24 / 20, 32 / 20, 32 / 20])
    assert costs.longest == 3 and "bfloat16" in costs.source
    costs = theory.measured_costs(head(EAGLE))
    assert [costs.chain(k) for k in range(3)] == pytest.approx([1, 26 / 20, 37 / 20])
    with pytest.raises(HeadstartError, match="tune the head again"):
        theory.measured_costs(head({}))


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--alpha", "1.5"], "1.5"),
        (["--alpha", "0.5", "--rates", "0.5"], "--rates"),
        ([], "--alpha"),
        (["--rates", "0.5,x"], "--rates"),
        (["--alpha", "0.5", "--k", "99"], "--k"),
        (["--alpha", "0.5", "--cost", "-1"], "--cost"),
        (["--alpha", "0.5", "--cost", "inf"], "--cost"),
        (["--alpha", "0.5", "--tree", "100,100,100,100"], "101010101 nodes"),
        (["--alpha", "0.5", "--output", "page.txt"], ".html"),
        (["--rates", "0.5", "--tree", "2,2"], "--tree"),
        (["--alpha", "0.5", "--head", "nowhere"], "nowhere"),
        (["--report", "nowhere.json"], "nowhere.json"),
    ],
)
def test_wrong_words_are_named(words, named, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["theory", *words]) != 0
    assert named in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_the_page_needs_no_network(tmp_path):
    theory.run(alpha=0.8, output=str(tmp_path / "page.html"))
    page = (tmp_path / "page.html").read_text()
    assert "$" not in page.replace("${", "") and "://" not in page and "src=" not in page and "@import" not in page


STUB = """
const elements = {};
const made = () => ({ listeners: [], children: [], addEventListener(name, run) { this.listeners.push(run); },
  appendChild(child) { this.children.push(child); return child; } });
globalThis.document = { getElementById: id => elements[id] ??= made(), createElement: made };
"""


def line_of(name: str, **changed: float | None) -> dict:
    figures = {"alpha": 0.7, "mean_depth": 3.0, "draft_cost": 0.1, "acceptance_length": 2.08, "speedup": 1.4}
    return {"name": name, **figures, **changed}


@pytest.fixture
def report(tmp_path):
    def write(*lines: dict) -> str:
        (tmp_path / "report.json").write_text(json.dumps({"details": {"drafters": lines}}))
        return str(tmp_path / "report.json")

    return write


def test_a_report_stands_beside_the_forms(report, capsys):
    path = report(line_of("model:small"), line_of("ngram", alpha=0.3, draft_cost=0.0), line_of("none", alpha=None))
    figures = theory.run(report=path, length=3, cost=0.1)
    student, ngram = figures["measured"]
    assert student["free"] == pytest.approx(2.08 / 1.3) and ngram["free"] == pytest.approx(2.08)
    assert figures["lengths"][2]["accepted"] == pytest.approx(0.7 + 0.49 + 0.343)
    shown = capsys.readouterr().out
    assert "model:small" in shown and "ngram" in shown and "none" not in shown


@pytest.mark.parametrize("lines", [[], [line_of("ngram", speedup=None)], [{"name": "ngram"}]])
def test_a_report_without_measured_drafters_is_refused(lines, report):
    with pytest.raises(HeadstartError, match="report.json"):
        theory.run(report=report(*lines), alpha=0.5)


@pytest.mark.skipif(shutil.which("node") is None, reason="no node, so the page's script is not run")
def test_the_page_draws_a_report(tmp_path):
    drawn = [theory.Measured(name, 0.7, 3.0, 0.1, 2.08, 1.4, 1.6) for name in ("<b>", "model:small")]
    script = theory.to_html(0.7, 3, theory.paper_costs(0.1), drawn).split("<script>")[1].split("</script>")[0]
    asks = "console.log(JSON.stringify([elements.plot.innerHTML, elements.points.children.length, "
    asks += "elements.points.children[1].children.map(cell => cell.textContent)]));"
    (tmp_path / "page.js").write_text(STUB + script + asks)
    done = subprocess.run(["node", str(tmp_path / "page.js")], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    plot, lines, cells = json.loads(done.stdout)
    assert plot.count('class="dot"') == 2 == plot.count('class="ring"') and "NaN" not in plot and "<b>" not in plot
    assert lines == 3 and cells == ["1 <b>", "0.70", "3.00", "0.100", "2.08", "1.40", "1.60"]


@pytest.mark.skipif(shutil.which("node") is None, reason="no node, so the page's script is not run")
@pytest.mark.parametrize(("alpha", "length", "cost"), [(0.8, 4, 0.1), (0.5, 5, 0.05), (0.3, 2, 0.6), (1.0, 12, 0.0)])
def test_the_script_of_the_page_computes_what_the_closed_forms_do(alpha, length, cost, tmp_path):
    """The page is loaded with other values, then the sliders are moved to these."""
    page = theory.to_html(0.9, 3, theory.paper_costs(0.02))
    script = page.split("<script>")[1].split("</script>")[0]
    moves = "".join(
        f'elements["{name}"].value = {value};' for name, value in [("alpha", alpha), ("length", length), ("cost", cost)]
    )
    asks = "for (const run of elements.alpha.listeners) run();" + (
        'const shown = ["tokens", "accepted", "speedup", "best"].map(id => String(elements[id].textContent));'
        "console.log(JSON.stringify([...shown, elements.plot.innerHTML]));"
    )
    (tmp_path / "page.js").write_text(STUB + script + moves + asks)
    done = subprocess.run(["node", str(tmp_path / "page.js")], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    tokens, accepted, speedup, best, plot = json.loads(done.stdout)
    rates = [alpha] * length
    assert (tokens, accepted) == (f"{1 + expected_accepted(rates):.2f}", f"{expected_accepted(rates):.2f}")
    assert speedup == f"{walltime_factor(rates, 1 + length * cost):.2f}×"
    assert int(best) == best_length([alpha] * theory.LENGTHS, lambda k: 1 + k * cost)
    assert plot.count("<path") == 1 and "NaN" not in plot
