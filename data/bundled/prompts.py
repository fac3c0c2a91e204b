"""Composes the bundled prompts: every topic of `topics_*.yaml` in every kind of task of `kinds.yaml`.

    python -m headstart.data.bundled        # the counts of every split, and one prompt of each kind

Nothing here is random: which phrasing meets which topic follows from a hash of their names, so the same files give the
same prompts on every machine, and a new topic or kind leaves the prompts of the others as they are.
"""

import hashlib
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

FOLDER = files("headstart.data.bundled")
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times faster where PyYAML was built with it

SPLITS = ("train", "held_out_kinds", "held_out_topics")
HELD_OUT_KINDS = frozenset({"how-to", "pros-and-cons"})
HELD_OUT_TOPICS = frozenset({"bees", "bicycles", "bread", "museums", "rivers", "sleep"})


def split_of(row: dict[str, Any]) -> str:
    """The split of a row by its `kind` and `topic`; a held-out kind of a held-out topic counts as a held-out kind."""
    if row["kind"] in HELD_OUT_KINDS:
        return "held_out_kinds"
    return "held_out_topics" if row["topic"] in HELD_OUT_TOPICS else "train"


@cache
def kinds() -> dict[str, dict[str, Any]]:
    """Kind name -> its `variants`, `phrasings` and, where it has some, `choices`."""
    return yaml.load(FOLDER.joinpath("kinds.yaml").read_text(encoding="utf-8"), _LOADER)


@cache
def topics() -> dict[str, dict[str, Any]]:
    """Topic name -> its contents, from all the topic files in the order of their names."""
    found: dict[str, dict[str, Any]] = {}
    for path in sorted(FOLDER.iterdir(), key=lambda path: path.name):
        if path.name.startswith("topics_") and path.name.endswith(".yaml"):
            found.update(yaml.load(path.read_text(encoding="utf-8"), _LOADER))
    return found


@cache
def all_prompts() -> tuple[dict[str, Any], ...]:
    """Every prompt: `row_id` ("explain/bees/1"), `kind`, `topic`, and `messages`, which are user turns only.

    A row of two user turns is answered in sequence. The order is that of a hash of the row id, so that the first n
    prompts are a fair sample of all kinds and topics, whatever n.
    """
    rows = [row for kind in kinds() for topic in topics() for row in _rows_of(kind, topic)]
    return tuple(sorted(rows, key=lambda row: _hash(row["row_id"])))


@cache
def further_wordings() -> tuple[dict[str, Any], ...]:
    """The contents of `all_prompts` in every other phrasing of their kind ("explain/bees/1/4"), in the same kind of
    order: several times as many, for training on more answers than come with the package."""
    known = {_texts(row) for row in all_prompts()}
    rows: dict[tuple[str, ...], dict[str, Any]] = {}
    for kind in kinds():
        for topic in topics():
            for variant in range(kinds()[kind]["variants"]):
                for number in range(len(kinds()[kind]["phrasings"])):
                    row = _row(kind, topic, variant, number)
                    rows.setdefault(_texts(row), row | {"row_id": f"{row['row_id']}/{number + 1}"})
    return tuple(sorted((rows[texts] for texts in rows.keys() - known), key=lambda row: _hash(row["row_id"])))


def _rows_of(kind: str, topic: str) -> Iterator[dict[str, Any]]:
    first = _hash(f"{kind}/{topic}")
    for variant in range(kinds()[kind]["variants"]):
        yield _row(kind, topic, variant, (first + variant) % len(kinds()[kind]["phrasings"]))


def _row(kind: str, topic: str, variant: int, number: int) -> dict[str, Any]:
    """The prompt of the phrasing of this number."""
    phrasings = kinds()[kind]["phrasings"]
    phrasing = phrasings[number]
    slots = _slots(topics()[topic], variant)
    for name, words in kinds()[kind].get("choices", {}).items():
        slots[name] = words[(_hash(f"{kind}/{topic}") // len(phrasings) + variant) % len(words)]
    turns = [phrasing] if isinstance(phrasing, str) else phrasing
    messages = [{"role": "user", "content": turn.format_map(slots)} for turn in turns]
    return {"row_id": f"{kind}/{topic}/{variant + 1}", "kind": kind, "topic": topic, "messages": messages}


def _texts(row: dict[str, Any]) -> tuple[str, ...]:
    return tuple(message["content"] for message in row["messages"])


def _slots(topic: dict[str, Any], variant: int) -> dict[str, str]:
    """What the phrasings of a `variant` may name: a list gives its entry of that number, starting over at its end."""

    def pick(name: str, offset: int = 0) -> Any:
        return topic[name][(variant + offset) % len(topic[name])]

    plain = ("why", "task", "ideas", "wrong", "code", "sum", "say", "mail", "hero", "speakers", "choice")
    slots = {name: pick(name) for name in plain}
    slots |= {"about": topic["about"], "wrong_2": pick("wrong", 1), "say_2": pick("say", 1)}
    # Three fresh terms for each variant: neighbours in the list are related, which define and quiz build upon.
    terms = [topic["terms"][(3 * variant + offset) % len(topic["terms"])] for offset in range(3)]
    slots |= {"term": terms[0], "term_2": terms[1], "term_3": terms[2]}
    slots["this"], slots["that"] = pick("pairs")
    passage = pick("passages")
    slots |= {"passage": passage["text"], "question": passage["question"], "items": f"the {passage['items']}"}
    groups = pick("sort")
    slots["groups"] = " and ".join(groups["into"])
    slots["members"] = ", ".join(groups["items"])
    return slots


def _hash(text: str) -> int:
    """Python's own hash() differs from run to run."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
