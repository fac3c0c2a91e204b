"""What a head holds: weights that are not those that were learnt, and a vocabulary that says less than the target."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from headstart.eval.diagnosis.evidence import Evidence, reads_states
from headstart.eval.diagnosis.finding import Finding, NotLookedAt, counts
from headstart.eval.diagnosis.recording import accepted_along
from headstart.eval.diagnosis.trials import Trial, run_trials
from headstart.heads.base import Head
from headstart.heads.store import WEIGHTS, load_head


def head_tensors(evidence: Evidence) -> Iterator[Finding]:
    """The target's output rows in the place of the head's own, and the weights that training kept beside the run."""
    yield from run_trials(evidence, _tensor_trials(evidence))


def _tensor_trials(evidence: Evidence) -> Iterator[Trial]:
    head, target = evidence.head, evidence.target
    run = evidence.named.run
    best = None if run is None else run / "checkpoints" / "best"
    if best is not None and (best / WEIGHTS).is_file():
        kept = load_head(best).state_dict()
        ours = head.state_dict()
        other = [name for name in kept if name in ours and not torch.equal(kept[name], ours[name])]
        if other and kept.keys() == ours.keys():
            yield Trial(
                "head-tensors",
                f"the weights in {best} ({len(other)} of {len(ours)} tensors differ, {other[0]} first)",
                f"cp {best / WEIGHTS} {evidence.folder}/",
                head=lambda head: _load(head, kept),
            )
    own = getattr(head, "output_weight", None)
    if own is not None and reads_states(head):
        rows = target.output.weight_rows(head.draft_ids) * target.output.scale
        yield Trial(
            "head-tensors",
            "the target's output rows in the place of the head's own",
            f"copy {evidence.folder} anew from its training, or train again: output_weight is none that was learnt",
            head=lambda head: _load(head, {"output_weight": rows.expand_as(own)}),
        )


def _load(head: Head, tensors: dict[str, Tensor]) -> None:
    state = head.state_dict()
    head.load_state_dict({**state, **{name: tensor.to(state[name]) for name, tensor in tensors.items()}})


def draft_vocabulary(evidence: Evidence) -> Iterator[Finding]:
    """What the answers say that the head cannot draft, at the rate at which it drafts the rest rightly."""
    head = evidence.head
    if head.vocab is None:
        raise NotLookedAt("the head drafts from the whole vocabulary")
    granted, missed, tokens = [], 0, 0
    for answer, text in zip(evidence.ranks, evidence.texts, strict=True):
        unknown = head.vocab.index_of(torch.tensor(text.answer, device=head.vocab.ids.device)).cpu() < 0
        at = torch.arange(len(unknown))[:, None] + torch.arange(answer.ranks.shape[1])
        undrafted = unknown[at.clamp(max=len(unknown) - 1)] & (at < len(unknown)) & (answer.ranks < 0)
        granted.append(replace(answer, ranks=answer.ranks.masked_fill(undrafted, 0)))
        missed, tokens = missed + int(undrafted[:, 0].sum()), tokens + len(unknown)
    first = torch.cat([answer.ranks[:, 0] for answer in evidence.ranks])
    right = float((first == 0).sum() / (first >= 0).sum().clamp(min=1))
    lost = (accepted_along(granted, evidence.trial_depth).tau - evidence.base.tau) * right
    if missed and counts(lost, evidence.base.tau - 1 + lost):
        share = missed / tokens
        size = len(head.vocab)
        yield Finding(
            "draft-vocabulary",
            lost,
            f"{missed} of {tokens} tokens of the answers ({share:.1%}) are none of the {size} that the head can draft",
            f"train on data like what you serve, with --set head.draft_vocab_size={min(2 * size, head.vocab_size)}",
        )
