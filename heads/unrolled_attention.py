"""The attention of unrolled training: what step k may see, for all positions at once.

Step 0 is causal attention within a document. While drafting, a chain that starts at position j has the target's
features up to j, so keys of step 0, and one key of its own for every step after that. So the query of step k at
position j sees

    the keys of step 0 at positions <= j of its document, and the keys of steps 1..k at its own position j,

under a single softmax (training-time test, EAGLE-3, https://arxiv.org/abs/2503.01840, figure 6; HASS,
https://arxiv.org/abs/2408.15766).

Letters in shapes: batch, heads, kv_heads, seq, width (of one head), later (steps after the first, the query's own
included).
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from headstart.data.packing import TokenBatch

Query = Float[Tensor, "batch heads seq width"]
Key = Float[Tensor, "batch kv_heads seq width"]


class UnrolledAttention:
    """`Attend` of one forward in training: call it for every layer, step after step; it keeps the keys of all steps."""

    def __init__(self, batch: TokenBatch):
        self._allowed = batch.attention()[0]
        self._seen: dict[int, list[tuple[Key, Key]]] = {}

    def __call__(self, layer: int, query: Query, key: Key, value: Key) -> Query:
        seen = self._seen.setdefault(layer, [])
        seen.append((key, value))
        (first_key, first_value), *later = seen
        return eager_attention(query, first_key, first_value, later, self._allowed)


def eager_attention(
    query: Query,
    key: Key,
    value: Key,
    later: list[tuple[Key, Key]],
    allowed: Bool[Tensor, "batch seq seq"],
) -> Query:
    """The definition, in plain PyTorch.

    key, value: of step 0. later: (key, value) of steps 1..k, the query's own last. allowed: which keys of step 0 each
    position may see.
    """
    group = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(group, dim=1) for tensor in (key, value))
    later = [(k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)) for k, v in later]
    scale = query.shape[-1] ** -0.5
    scores = (query @ key.transpose(-1, -2) * scale).masked_fill(~allowed[:, None], -torch.inf)
    own = [(query * k).sum(-1, keepdim=True) * scale for k, _ in later]
    weights = torch.cat([scores, *own], dim=-1).softmax(-1, dtype=torch.promote_types(query.dtype, torch.float32))
    weights = weights.to(query.dtype)
    length = key.shape[2]
    gathered = weights[..., :length] @ value
    for step, (_, v) in enumerate(later):
        gathered = gathered + weights[..., length + step, None] * v
    return gathered
