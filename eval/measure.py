"""`headstart eval`: acceptance, speedup and identity of a head or of any drafter; writes the report.

headstart eval --head runs/quickstart
headstart eval --target bundled:smollm2-135m --drafters none,ngram --set eval.num_prompts=3
headstart eval --head runs/quickstart --bench spec-bench=question.jsonl --set eval.num_prompts=240

A measurement that was stopped goes on where it was when the same line is given again.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table as RichTable

from headstart.data.progress import Progress
from headstart.decode.decode_copy import make_faster
from headstart.decode.drafters.base import NoDraft
from headstart.decode.drafters.plans import SampledChain, SampledTree
from headstart.decode.sampling import SamplingSettings
from headstart.errors import DataError, refuse_unwritable
from headstart.eval.benchmarks import Benchmark, parse_bench
from headstart.eval.drafters import DrafterPlan, plan_drafters
from headstart.eval.judging import check_identity
from headstart.eval.kept import KeptAnswers, KeptFile, measurement_key
from headstart.eval.prompts import Question, check_questions, choose, load_questions
from headstart.eval.report import build_report, lead, line, write_report
from headstart.eval.summary import summarise
from headstart.eval.tables import Report, headline
from headstart.eval.timing import PLAIN, Contender, Measurement, time_arms
from headstart.eval.tracked import track_report
from headstart.eval.trained import Named, Trained, find_named, load_named
from headstart.recipe_target import load_recipe_tokenizer
from headstart.target import Target
from headstart.train.run_folder import environment

LONGEST_NAME = 100
"""Of a report's folder, where nobody named one."""
TRANSFORMERS_QUESTIONS = 4
"""How many questions `transformers.generate` answers too."""


def run(
    *,
    head: str | None = None,
    target: str | None = None,
    drafters: Sequence[str] | None = None,
    bench: str | None = None,
    split: str | None = None,
    overrides: Sequence[str] = (),
    output: str | None = None,
    device: str | None = None,
    dtype: str | None = None,
    allow_other_target: bool = False,
) -> Report:
    """Measures and writes the report of the first drafter named (default: the head), with the others beside it."""
    benchmark = None
    if bench or split:
        benchmark = parse_bench(bench or "bundled:chats", split)
        overrides = [*overrides, f"eval.prompts=[{benchmark.source.model_dump_json()}]"]
    # what was mistyped shows here, before the target is loaded, and a place that cannot be written before the work
    named = find_named(head, target, overrides=overrides)
    names = list(dict.fromkeys(drafters or (["head"] if head else [PLAIN])))
    drafted = [name for name in names if name != PLAIN]
    plans = plan_drafters(drafted, named.head, named.recipe.eval, allow_other_target)
    others = [folder for plan in next(iter(plans.values())) for folder in plan.heads if folder != named.head]
    if others:
        named = find_named(head, target, overrides=overrides, others=others)
    check_questions(named.recipe)
    questions = _questions(named, benchmark)
    folder = Path(output) if output else _default_folder(named, names, benchmark)
    folder.mkdir(parents=True, exist_ok=True)
    refuse_unwritable(folder)
    trained = load_named(named, device=device, dtype=dtype)
    if 0 in trained.recipe.eval.temperature:
        for plan in next(iter(plans.values())):
            if isinstance(plan.plan, SampledChain | SampledTree):
                print(f"note: at temperature 0 {plan.name} draws nothing; it drafts the likeliest tokens")
    kept = KeptAnswers(folder)
    report = measure(trained, plans, questions, kept)
    if benchmark and benchmark.name:
        report["details"]["settings"]["benchmark"] = benchmark.name
    paths = write_report(report, folder)
    kept.discard()
    if named.run is not None and not named.published:
        track_report(named.run, named.recipe, report, "report" if folder == named.run else folder.name)
    show(report, Console())
    print("\n".join(str(path) for path in paths))
    return report


def _questions(named: Named, benchmark: Benchmark | None) -> list[Question]:
    tokenizer = load_recipe_tokenizer(named.recipe)
    return choose(load_questions(named.recipe, tokenizer, benchmark), named.recipe.eval.num_prompts)


def measure(
    trained: Trained,
    plans: Mapping[int, Sequence[DrafterPlan]],
    questions: Sequence[Question],
    kept: KeptAnswers | None = None,
) -> Report:
    """The report of the first plan (of plain decoding alone, if there is none), at the first number of rows and the
    first temperature; the other drafters, temperatures and numbers of rows are lines in its details.

    plans: the same drafters for every number of rows that are decoded at a time. kept: where answers are kept until
    the report is written; None: nowhere.
    """
    recipe, target = trained.recipe, trained.target
    make_faster(target)
    first_rows, *more_rows = plans
    first_temperature, *more_temperatures = map(float, recipe.eval.temperature)

    def reports(rows: int, temperatures: Sequence[float]) -> list[dict[str, Report]]:
        contenders = {plan.name: Contender(plan.make(target), plan.budget) for plan in plans[rows]}
        found = []
        for temperature in temperatures:
            key = measurement_key(trained, plans[rows], questions, temperature, rows)
            file = None if kept is None else kept.open(key)
            measured = _decode(trained, contenders, questions, temperature, rows, file)
            checked = rows == first_rows and temperature == 0
            found.append(
                {
                    plan.name: _report(trained, plan, contenders[plan.name], measured, temperature, rows, checked)
                    for plan in plans[rows]
                }
                or {PLAIN: _report(trained, None, Contender(NoDraft(), 1), measured, temperature, rows, False)}
            )
        return found

    by_temperature = reports(first_rows, [first_temperature, *more_temperatures])
    by_rows = [by_temperature[0], *(reports(rows, [first_temperature])[0] for rows in more_rows)]
    _, report = next(iter(by_temperature[0].items()))
    labels = ["temperature " + f"{one:g}" for one in (first_temperature, *more_temperatures)]
    report["details"]["drafters"] = [line(_without_path(name), one) for name, one in by_temperature[0].items()]
    report["details"]["temperatures"] = _lines(labels, by_temperature)
    report["details"]["batches"] = _lines([f"{rows} at a time" for rows in plans], by_rows)
    return report


def _lines(labels: Sequence[str], reports: Sequence[dict[str, Report]]) -> list[dict[str, Any]]:
    """A line for each drafter under each label; the label alone says it where there is one drafter."""
    return [
        line(label if len(each) == 1 else f"{_without_path(name)}, {label}", each[name])
        for name in reports[0]
        for label, each in zip(labels, reports, strict=True)
    ]


def _decode(
    trained: Trained,
    contenders: dict[str, Contender],
    questions: Sequence[Question],
    temperature: float,
    rows: int,
    kept: KeptFile | None,
) -> Measurement:
    settings = trained.recipe.eval
    before = kept.groups if kept else {}
    coming = [question for number, question in enumerate(questions) if number // rows not in before]
    if kept and len(coming) < len(questions):
        print(f"{len(questions) - len(coming)} of {len(questions)} prompts were measured before: {kept.path}")
    total = sum(len(question.turns) for question in coming)
    with Progress("decoding", total, unit="answers", extra="tokens") as progress:
        measured = time_arms(
            trained.target,
            contenders,
            questions,
            trained.renderer,
            max_new_tokens=settings.max_new_tokens,
            settings=SamplingSettings(temperature=temperature, seed=trained.recipe.seed),
            batch_size=rows,
            transformers_questions=TRANSFORMERS_QUESTIONS,
            kept=kept,
            progress=lambda tokens: progress.add(1, tokens),
        )
    if not measured.answers:
        raise DataError(
            f"each of the {len(questions)} prompts fills the {trained.target.max_positions} positions of "
            f"{trained.target.name} and leaves no room for an answer; give shorter prompts with --bench"
        )
    return measured


def _report(
    trained: Trained,
    plan: DrafterPlan | None,
    contender: Contender,
    measured: Measurement,
    temperature: float,
    rows: int,
    check: bool,
) -> Report:
    """check: whether identity is checked beyond comparing the texts as they were measured."""
    recipe, name = trained.recipe, plan.name if plan else PLAIN
    checked = check_identity(trained, plan, measured) if plan and check else None
    return build_report(
        summarise(measured, name),
        title=f"{recipe.name if trained.run else _without_path(trained.target.name)}: {_without_path(name)}",
        drafter_parameters=contender.drafter.num_parameters(),
        forecast=plan.forecast if plan else {},
        environment=_environment(trained.target),
        settings={
            "drafter": _without_path(name),
            "nodes_at_most": contender.budget,
            "tree": plan.tree if plan else None,
            "temperature": temperature,
            "max_new_tokens": recipe.eval.max_new_tokens,
            "batch_size": rows,
            "questions": len({answer.question.question_id for answer in measured.answers}),
            "prompts": [f"{_without_path(source.source)} ({source.split})" for source in recipe.eval.prompts]
            or "held out in training",
            "template_arguments": recipe.data.chat.arguments,
            "system": recipe.data.chat.system,
            "prefill": "apart from all rates",
            "warm_up": "discarded",
        },
        identity=checked,
        notes=[
            *trained.notes,
            *(_tuned_elsewhere(plan, trained.target) if plan else ()),
            *(
                [f"{measured.earlier} of these answers were measured before the run was stopped"]
                * (measured.earlier > 0)
            ),
        ],
    )


def _tuned_elsewhere(plan: DrafterPlan, target: Target) -> list[str]:
    here = (str(target.device), str(target.dtype).removeprefix("torch."))
    if plan.tuned_on in (None, here):
        return []
    return [
        f"the tree was tuned on {', '.join(plan.tuned_on)}, this is {', '.join(here)}; `headstart tune` finds its own"
    ]


def show(report: Report, console: Console) -> None:
    """The headline and the gates, on a terminal."""
    console.print(f"[bold]{report['details']['title']}[/bold]")
    console.print(lead(report), style="dim")
    table = RichTable(box=None, show_header=False)
    for row in headline(report).rows:
        table.add_row(*row)
    console.print(table)
    for gate in report["details"]["gates"]:
        style = {True: "green", False: "red", None: "yellow"}[gate["passed"]]
        word = {True: "holds", False: "FAILS", None: "note"}[gate["passed"]]
        console.print(f"[{style}]{word}[/{style}] {gate['name']}: {gate['text']}")


def _environment(target: Target) -> dict[str, Any]:
    """What the figures depend on besides the recipe; no paths."""
    facts = environment(())
    on_first_device = torch.device(target.device).type == "cuda" or not torch.cuda.is_available()
    kept = {key: facts[key] for key in ("date", "commit", "headstart", "python", "packages", "cores", "threads")}
    return {
        "target": _without_path(target.name),
        "dtype": str(target.dtype).removeprefix("torch."),
        "device": facts["device"] if on_first_device else str(target.device),
        "faster_modules": sorted(target.swapped),
        **kept,
    }


def _without_path(name: str) -> str:
    """Local paths by their last part alone, also behind `head:` and in a union: a report may be passed on."""
    parts = [part.rpartition(":") for part in name.split("+")]
    return "+".join(
        kind + colon + (Path(place).name if Path(place).is_absolute() else place) for kind, colon, place in parts
    )


def _default_folder(named: Named, names: Sequence[str], benchmark: Benchmark | None) -> Path:
    """The run's folder; a folder in it for other prompts; without a run here, a folder of its own under runs/."""
    bench = benchmark and (benchmark.name or Path(benchmark.source.source).stem)
    if named.run is not None and not named.published:
        return named.run / f"bench-{bench}" if bench else named.run
    first = str(named.published) if named.published else Path(named.recipe.target.name).name
    words = [first, *names, *([bench] if bench else [])]
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", "-".join(words))
    if len(name) > LONGEST_NAME:  # of many drafters; told apart by all of them
        name = f"{name[: LONGEST_NAME - 9]}-{sha256(name.encode()).hexdigest()[:8]}"
    return Path("runs") / name
