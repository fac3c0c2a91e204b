"""Checks a folder for every trap that serving engines are known to fall into without a word.

    report = check("exported", target=target, head=head)
    print(report)

Each rule has a name, and says what it expected, what it found, what an engine would do with it, and what to type.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from headstart.errors import HeadError
from headstart.heads.base import Head
from headstart.heads.formats import READERS, recognise, rules, rules_eagle3, rules_loading, rules_medusa
from headstart.heads.formats.files import read_checkpoint
from headstart.heads.formats.rules import Fault, Subject
from headstart.target import Target

_LAYERS = (rules.head_width, rules.rope_spellings, rules.positions, rules.tie_flag, rules.embedding, rules.special_ids)
_EAGLE3 = (
    *_LAYERS,
    rules_eagle3.draft_vocabulary,
    rules_eagle3.target_vocabulary,
    rules_eagle3.offsets,
    rules_eagle3.membership,
    rules_eagle3.layer_ids,
    rules_eagle3.fused_width,
    rules_eagle3.norm_flags,
    rules_eagle3.norm_before_residual,
    rules_eagle3.later_norms,
    rules_eagle3.biases,
    rules_eagle3.draft_width,
    rules_loading.vllm_loader,
    rules_loading.sglang_loader,
)
_COMMON = (rules.weights_file, rules.stored_dtype, rules.architecture)
_MEDUSA = (rules_medusa.counts, rules_medusa.needed_keys)
_ALL = (rules.finite_values, rules.whole_numbers)

RULES: dict[str, tuple[Callable[[Subject], Iterable[Fault]], ...]] = {
    "medusa": (rules.stored_dtype, *_MEDUSA, rules_medusa.renamed_keys, rules_loading.medusa_loader),
    "medusa-shared": (rules.stored_dtype, *_MEDUSA, rules_medusa.renamed_keys),
    "medusa-merged": _MEDUSA,
    "vllm-medusa": (
        *_COMMON,
        *_MEDUSA,
        rules_medusa.renamed_keys,
        rules_medusa.bias_flag,
        rules_medusa.token_map,
        rules_loading.medusa_loader,
    ),
    "eagle": (
        *_COMMON,
        *_LAYERS,
        rules.fc_bias,
        rules.first_layer_norm,
        rules_loading.vllm_loader,
        rules_loading.sglang_loader,
    ),
    "eagle3": (*_COMMON, *_EAGLE3),
    "speculators": (
        *_COMMON,
        *_EAGLE3,
        rules_eagle3.speculators_type,
        rules_eagle3.proposal,
        rules_eagle3.verifier_name,
    ),
}
"""The rules of each layout; a rule's name is that of its function, with hyphens."""

assert RULES.keys() == READERS.keys()


@dataclass
class Report:
    """What a check found."""

    folder: Path
    layout: str | None
    """A key of READERS; None where no layout was recognised."""
    rules: list[str] = field(default_factory=list)
    """Names of the rules that were looked at."""
    faults: list[Fault] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.faults

    def __str__(self) -> str:
        lines = [f"{fault}" for fault in self.faults]
        what = f"{self.layout} layout" if self.layout else "no known layout"
        verdict = "no fault" if self.ok else f"{len(self.faults)} fault{'s' * (len(self.faults) > 1)}"
        return "\n".join([*lines, f"{self.folder}: {what}, {len(self.rules)} rules, {verdict}"])


def check(folder: str | Path, *, target: Target | None = None, head: Head | None = None) -> Report:
    """Every rule of the folder's layout. Rules that need the target pass without one.

    head: what the folder was written from; its draft logits are compared with those of each engine's twin.
    """
    checkpoint = read_checkpoint(folder)
    try:
        layout = recognise(checkpoint.tensors)
    except HeadError as error:
        fault = Fault("layout", " or ".join(READERS), str(error), "no engine loads it", "export it again")
        return Report(checkpoint.folder, None, ["layout"], [fault])
    report = Report(checkpoint.folder, layout)
    subject = Subject(checkpoint, layout, target, head)
    for rule in (*_ALL, *RULES[layout], rules_loading.draft_logits):
        name = rule.__name__.replace("_", "-")
        report.rules.append(name)
        report.faults += [fault.named(name) for fault in rule(subject)]
    return report
