"""The losses of draft heads: what each minimises, in the slow readable form, and the fast form that trains.

Letters: p is the target's distribution over the draft vocabulary (renormalised there), q the head's, z the head's
logits, y the token that the text has. Every slow form is plain PyTorch that autograd differentiates; the fast form,
`loss_and_gradient`, gives the same value together with its gradient by z in closed form, for one chunk of logits
(`heads/chunked.py` calls it). With u = q * dL/dq, element by element, the gradient of any loss of q is

    dL/dz = u - q * sum(u)

so a loss has to state its value and its u only, and mixtures add their u.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

# ---------------------------------------------------------------------------------------------------------------------
# The slow forms. draft_logits and teacher_log_probs: [rows, vocab]; labels: index of y in the draft vocabulary.
# ---------------------------------------------------------------------------------------------------------------------

Logits = Float[Tensor, "rows vocab"]
Labels = Int[Tensor, "rows"]
PerRow = Float[Tensor, "rows"]


def hard_ce(draft_logits: Logits, teacher_log_probs: Logits, labels: Labels) -> PerRow:
    """-log q(y): cross-entropy with the text. Medusa-1, https://arxiv.org/abs/2401.10774, eq. 1."""
    return -draft_logits.log_softmax(-1).gather(-1, labels[:, None])[:, 0]


def soft_ce(draft_logits: Logits, teacher_log_probs: Logits, labels: Labels) -> PerRow:
    """-sum p log q: cross-entropy with the target's distribution. Hinton et al., https://arxiv.org/abs/1503.02531."""
    return -(teacher_log_probs.exp() * draft_logits.log_softmax(-1)).sum(-1)


def kl(draft_logits: Logits, teacher_log_probs: Logits, labels: Labels) -> PerRow:
    """KL(p || q) = sum p (log p - log q): soft-ce less the entropy of p, so zero when q = p; the gradient is soft-ce's.
    DistillSpec, https://arxiv.org/abs/2310.08461."""
    p = teacher_log_probs.exp()
    return torch.xlogy(p, p).sum(-1) + soft_ce(draft_logits, teacher_log_probs, labels)


def reverse_kl(draft_logits: Logits, teacher_log_probs: Logits, labels: Labels) -> PerRow:
    """KL(q || p) = sum q (log q - log p): seeks one mode of p. MiniLLM, https://arxiv.org/abs/2306.08543."""
    log_q = draft_logits.log_softmax(-1)
    return (log_q.exp() * (log_q - teacher_log_probs)).sum(-1)


def tv(draft_logits: Logits, teacher_log_probs: Logits, labels: Labels) -> PerRow:
    """1/2 sum |p - q| = 1 - sum min(p, q): one less the acceptance of a sampled draft.
    Leviathan et al., https://arxiv.org/abs/2211.17192, theorem 3.5; as a loss, DistillSpec."""
    return (teacher_log_probs.exp() - draft_logits.softmax(-1)).abs().sum(-1) / 2


def lk(draft_logits: Logits, teacher_log_probs: Logits, labels: Labels) -> PerRow:
    """-log sum min(p, q): the likelihood that a sampled draft is accepted, the acceptance being that of `tv`. Its
    gradient is tv's divided by the acceptance, so rows that are hardly ever accepted still pull."""
    return -torch.minimum(teacher_log_probs.exp(), draft_logits.softmax(-1)).sum(-1).log()


REFERENCE_LOSSES = {"hard-ce": hard_ce, "soft-ce": soft_ce, "kl": kl, "reverse-kl": reverse_kl, "tv": tv, "lk": lk}


def reference_loss(
    weights: Mapping[str, float], draft_logits: Logits, teacher_log_probs: Logits, labels: Labels
) -> PerRow:
    """The mixture `{name: weight}` per row, in its slow form."""
    terms = [
        weight * REFERENCE_LOSSES[name](draft_logits, teacher_log_probs, labels) for name, weight in weights.items()
    ]
    return torch.stack(terms).sum(0)


# ---------------------------------------------------------------------------------------------------------------------
# The fast form.
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Teacher:
    """The target's distribution at each row of a chunk, over the draft vocabulary."""

    log_probs: Float[Tensor, "rows kept"]
    ids: Int[Tensor, "rows kept"] | None
    """Draft indices of the kept tokens where only the likeliest were kept, None where all were."""

    @classmethod
    def from_logits(cls, logits: Logits, top_k: int | None = None) -> Teacher:
        """Softmax in at least fp32, over all of `logits` or over each row's `top_k` largest."""
        if top_k is None or top_k >= logits.shape[-1]:
            return cls(log_softmax(logits), None)
        largest, ids = logits.topk(top_k, dim=-1)
        return cls(log_softmax(largest), ids)

    def dense(self, vocab: int) -> tuple[Logits, Logits]:
        """log p and p over the whole draft vocabulary: -inf and 0 for what was not kept."""
        if self.ids is None:
            return self.log_probs, self.log_probs.exp()
        full = self.log_probs.new_full((len(self.log_probs), vocab), -torch.inf)
        full.scatter_(-1, self.ids, self.log_probs)
        return full, full.exp()


def log_softmax(logits: Float[Tensor, "*batch vocab"]) -> Float[Tensor, "*batch vocab"]:
    """In at least fp32: products may be in bf16, exponentials and their sums are not."""
    return torch.log_softmax(logits, -1, dtype=torch.promote_types(logits.dtype, torch.float32))


def needs_teacher(weights: Mapping[str, float]) -> bool:
    """Whether the mixture looks at the target's distribution at all."""
    return set(weights) != {"hard-ce"}


def loss_and_gradient(
    weights: Mapping[str, float],
    log_q: Float[Tensor, "rows heads vocab"],
    teacher: Teacher | None,
    labels: Int[Tensor, "rows"],
) -> tuple[Float[Tensor, "rows heads"], Float[Tensor, "rows heads vocab"]]:
    """The mixture per row and head, and its gradient by the draft logits whose log-softmax is `log_q`.

    The gradient may stand in the memory of `log_q`, which is used up.

    All heads of a row predict the same token, so they share its teacher and its label. `teacher` may be None where
    `needs_teacher` says so. The cross-entropies touch only the entries of p that are kept and never build log p for the
    whole vocabulary; the others cost a few passes over [rows, heads, vocab].
    """
    value = log_q.new_zeros(log_q.shape[:2])
    pulls: list[
        tuple[Tensor | None, Tensor]
    ] = []  # what the cross-entropies pull towards: u = -amount at these indices
    hard, soft = weights.get("hard-ce", 0.0), weights.get("soft-ce", 0.0) + weights.get("kl", 0.0)
    if hard:
        ids, ones = labels[:, None], log_q.new_ones((len(labels), 1))
        value += hard * _cross_entropy(log_q, ids, ones)
        pulls.append((ids, hard * ones))
    if soft:
        assert teacher is not None
        p = teacher.log_probs.exp()
        value += soft * _cross_entropy(log_q, teacher.ids, p)
        value += weights.get("kl", 0.0) * torch.xlogy(p, p).sum(-1, keepdim=True)
        pulls.append((teacher.ids, soft * p))

    dense = {name: weight for name, weight in weights.items() if name in _DENSE_LOSSES}
    if dense:
        assert teacher is not None
        q = log_q.exp()
        log_p, p = (tensor[:, None] for tensor in teacher.dense(q.shape[-1]))
        u = torch.zeros_like(q)
        for name, weight in dense.items():
            part, part_u = _DENSE_LOSSES[name](log_q, q, log_p, p)
            value += weight * part
            u += part_u.mul_(weight)
        # -sum(u): the cross-entropies' amounts sum to their weights, because p sums to one
        gradient = u.add_(q.mul_((hard + soft) - u.sum(-1, keepdim=True)))
    else:
        gradient = log_q.exp_()
        if hard + soft != 1:  # a pass over all logits, for nothing in the usual case
            gradient *= hard + soft
    for ids, amount in pulls:
        if ids is None:
            gradient -= amount[:, None]
        else:
            ids, amount = (tensor[:, None].expand(-1, gradient.shape[1], -1) for tensor in (ids, amount))
            gradient.scatter_add_(-1, ids, -amount)
    return value, gradient


def _cross_entropy(log_q: Tensor, ids: Tensor | None, p: Tensor) -> Float[Tensor, "rows heads"]:
    if ids is None:
        return -torch.einsum("rhv,rv->rh", log_q, p)
    return -(log_q.gather(-1, ids[:, None].expand(-1, log_q.shape[1], -1)) * p[:, None]).sum(-1)


def _reverse_kl(log_q: Tensor, q: Tensor, log_p: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    ratio = log_q - log_p
    return (q * ratio).sum(-1), q * (ratio + 1)


def _tv(log_q: Tensor, q: Tensor, log_p: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    difference = q - p
    return difference.abs().sum(-1) / 2, difference.sign_().mul_(q).div_(2)


def _lk(log_q: Tensor, q: Tensor, log_p: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    smaller = torch.minimum(q, p)
    acceptance = smaller.sum(-1, keepdim=True)
    return -acceptance.log().squeeze(-1), (q < p).to(q.dtype).mul_(q).div_(-acceptance)


_DENSE_LOSSES = {"reverse-kl": _reverse_kl, "tv": _tv, "lk": _lk}
"""Value and u of the losses that look at every entry of q."""


def label_ranks(log_q: Float[Tensor, "rows heads vocab"], labels: Int[Tensor, "rows"]) -> Float[Tensor, "rows heads"]:
    """How many tokens the head prefers to the label: 0 where the label is its first choice.

    A token with the same logit counts a half, and a half is rounded against the head: a head that says nothing has no
    hits, and the ties of bf16 flatter nobody.
    """
    at_label = log_q.gather(-1, labels[:, None, None].expand(-1, log_q.shape[1], 1))
    larger_less_smaller = (log_q - at_label).sign_().sum(-1)
    return ((larger_less_smaller + log_q.shape[-1] - 1) / 2).ceil()
