"""One attention function for plain and for drafted decoding, and the masks of a tree behind a cached prefix.

transformers' own masked SDPA copies the keys and values for every group of query heads when more than one token is
verified, and not for one: t(n)/t(1) would grow with the context for no good reason. Here the query heads of a group are
folded into query rows instead, and nothing is copied. Plain decoding goes through the same function.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import AttentionInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask

from headstart.decode.tree import Topology

IMPLEMENTATION = "headstart_tree"


def tree_attention(
    module: torch.nn.Module,
    query: Float[Tensor, "batch heads queries dim"],
    key: Float[Tensor, "batch kv_heads keys dim"],
    value: Float[Tensor, "batch kv_heads keys value_dim"],
    attention_mask: Float[Tensor, "batch 1 queries keys"] | Bool[Tensor, "batch 1 queries keys"] | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    **kwargs,
) -> tuple[Float[Tensor, "batch queries heads value_dim"], None]:
    """Attention under an explicit mask; without one it is causal, the last query seeing the last key.

    A mask that is one number along the keys (an expanded tensor) changes no softmax and is left out. `softcap` (of
    Gemma 2) bounds the scores by softcap * tanh(scores / softcap) before the mask.
    """
    batch, heads, queries, dim = query.shape
    kv_heads, keys = key.shape[1], key.shape[2]
    groups = heads // kv_heads
    folded = query.reshape(batch, kv_heads, groups * queries, dim)
    mask = attention_mask
    if mask is None and queries > 1:
        mask = torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril(keys - queries)[None, None]
    if mask is not None:
        mask = None if mask.stride(-1) == 0 else _folded(mask, groups)[..., :keys]
    if softcap is None:
        out = F.scaled_dot_product_attention(folded, key, value, attn_mask=mask, dropout_p=dropout, scale=scaling)
    else:
        scores = torch.tanh(folded @ key.transpose(2, 3) * (scaling or dim**-0.5) / softcap) * softcap
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
        wide = torch.promote_types(scores.dtype, torch.float32)
        weights = F.dropout(scores.to(wide).softmax(-1).to(query.dtype), dropout, training=module.training)
        out = weights @ value
    return out.reshape(batch, heads, queries, value.shape[-1]).transpose(1, 2).contiguous(), None


def _folded(
    mask: Float[Tensor, "batch 1 queries keys"] | Bool[Tensor, "batch 1 queries keys"], groups: int
) -> Float[Tensor, "batch 1 rows keys"] | Bool[Tensor, "batch 1 rows keys"]:
    """The mask once per query head of a group; all layers of a forward get the same mask, so it remembers this."""
    if groups == 1:
        return mask
    known: dict[int, Tensor] | None = getattr(mask, "folded", None)
    if known is None:
        known = mask.folded = {}  # pyright: ignore[reportAttributeAccessIssue]  (tensors take attributes)
    if groups not in known:
        known[groups] = mask.repeat(1, 1, groups, 1)
    return known[groups]


AttentionInterface.register(IMPLEMENTATION, tree_attention)
# Masks are always made by us; this entry serves plain forwards of the same model (transformers' generate, say).
ALL_MASK_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, sdpa_mask)


def tree_mask(
    topology: Topology, lengths: Int[Tensor, "batch"], num_keys: int
) -> tuple[Bool[Tensor, "batch nodes keys"], Int[Tensor, "batch nodes keys"], Int[Tensor, "batch nodes"]]:
    """Which keys every node may see, how far away they are, and the nodes' positions.

    Keys 0..length-1 of a row are its committed prefix, the next `nodes` ones the tree. A node sees the prefix, its
    ancestors and itself; padding sees the same, and is never read. The distance (query position minus key position) is
    what sliding windows are cut by: positions, not slots.
    """
    batch, nodes = topology.parents.shape
    device = lengths.device
    positions = lengths[:, None] + topology.depth
    slots = torch.arange(num_keys, device=device)
    in_prefix = slots < lengths[:, None]
    node_of_slot = slots - lengths[:, None]
    in_tree = (node_of_slot >= 0) & (node_of_slot < nodes)
    node_of_slot = node_of_slot.clamp(0, nodes - 1)
    seen = topology.ancestors.gather(2, node_of_slot[:, None].expand(batch, nodes, num_keys))
    allowed = in_prefix[:, None] | (in_tree[:, None] & seen)
    key_positions = torch.where(in_tree, positions.gather(1, node_of_slot), slots)
    return allowed, positions[:, :, None] - key_positions[:, None], positions


def prefill_mask(
    offset: int, num_tokens: int, batch: int, device: torch.device
) -> tuple[Bool[Tensor, "batch nodes keys"], Int[Tensor, "batch nodes keys"], Int[Tensor, "batch nodes"]]:
    """The causal case of `tree_mask` for `num_tokens` prompt tokens behind `offset` cached ones, equal in all rows."""
    positions = torch.arange(offset, offset + num_tokens, device=device)
    distance = (positions[:, None] - torch.arange(offset + num_tokens, device=device)).expand(batch, -1, -1)
    return distance >= 0, distance, positions.expand(batch, -1)
