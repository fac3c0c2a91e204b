"""Can this model be tree-decoded exactly? Measured with our own cache and attention before it is used, never assumed.

A tree of two branches is run behind a cached prefix, rolled back to its second branch (whose keys have to move), and
decoded on. Every logit is compared with plain, uncached forwards of the untouched model. That finds, among others: MPT
(takes the mask and is silently wrong), Bloom and Falcon with ALiBi (raise), Mamba and linear attention (keep a state
that cannot be rolled back).
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from headstart.decode.attention import IMPLEMENTATION, prefill_mask, tree_mask
from headstart.decode.cache import KVCache
from headstart.decode.tree import Topology
from headstart.errors import TargetError
from headstart.target import Features, Target

# The largest error that is taken for rounding, in standard deviations of the logits: at least FLOOR, or NOISE times
# what one model's own forwards of different batch shapes differ by.
FLOOR = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 0.06, torch.float16: 0.02}
NOISE = 5.0

_BRANCHES = [(0,), (1,), (0, 0), (1, 0), (0, 0, 0), (1, 0, 0)]
"""Two branches of three nodes below the root; the nodes of the second are 2, 4 and 6."""
_SECOND = [0, 2, 4, 6]


@torch.no_grad()
def check_target(target: Target) -> None:
    """Raises TargetError in one sentence where tree decoding with this model is not exact; leaves it unchanged."""
    if target.checked:
        return
    before = target.model.config._attn_implementation or "eager"
    prefix, tree_tokens, next_token = _fixed_tokens(target)
    branches = [[tree_tokens[node] for node in path] for path in ([0, 1, 3, 5], _SECOND)]
    texts = [prefix + branch for branch in branches]
    after = texts[1] + [next_token]
    plain = [_plain_logits(target, [text])[0] for text in texts] + [_plain_logits(target, [after])[0]]
    twice = _plain_logits(target, [texts[0], texts[0][1:] + texts[0][:1]])[0]
    scale = plain[0].std().clamp(min=1e-12)
    noise = float((twice - plain[0]).abs().mean() / scale)
    limit = max(FLOOR[target.dtype], NOISE * noise)
    try:
        target.model.set_attn_implementation(IMPLEMENTATION)
        tree_logits, next_logits = _tree_logits(target, prefix, tree_tokens, next_token)
    except TargetError:
        raise
    except Exception as error:  # whatever a foreign model raises inside a tree forward means the same to the user
        raise TargetError(
            f"{target.name} ({target.model.config.model_type}) cannot be tree-decoded: its forward with a tree mask, "
            f"explicit positions and our cache failed with {type(error).__name__}: {_first_line(error)}"
        ) from error
    finally:
        target.model.set_attn_implementation(before)
    length = len(prefix)
    pairs = [
        ("the first branch of a tree", tree_logits[[0, 1, 3, 5]], plain[0][length:]),
        ("the second branch of a tree", tree_logits[_SECOND], plain[1][length:]),
        ("the token after a roll-back", next_logits, plain[2][-1:]),
    ]
    for what, ours, theirs in pairs:
        found = float((ours - theirs).abs().mean() / scale)
        if not found <= limit:
            raise TargetError(
                f"{target.name} ({target.model.config.model_type}) cannot be tree-decoded exactly: logits of {what} "
                f"differ from a plain forward by {found:.2g} standard deviations, where rounding explains {limit:.2g}; "
                "models whose attention ignores a custom mask or explicit positions are not supported"
            )
    target.checked = True


@torch.no_grad()
def check_parts(target: Target, layer: int) -> None:
    """Raises TargetError where running the first `layer` layers, and later the others from their states, is not the
    same as running all at once: say, because layers read the keys of an earlier one."""
    prefix, tokens, _ = _fixed_tokens(target)
    device = torch.device(target.device)
    cache = KVCache(target.num_layers, slots=1, capacity=len(prefix) + len(tokens))
    cache.join(1)

    def forward(tokens: list[int], offset: int, **part: Any) -> Features:
        cache.begin(0, 1)
        allowed, distance, positions = prefill_mask(offset, len(tokens), 1, device)
        ids, masks = torch.tensor([tokens], device=device), target.masks(allowed, distance)
        return target.forward(ids, positions, masks, cache=cache.as_transformers, **part)

    refused = f"{target.name} ({target.model.config.model_type}) cannot be verified from layer {layer} on"
    other = "take another drafter than its first layers"
    try:
        forward(prefix, 0)
        cache.extend(0, len(prefix))
        whole = forward(tokens, len(prefix)).final
        lower = forward(tokens, len(prefix), layers=[layer], stop=layer)
        parted = forward(tokens, len(prefix), start=(layer, lower.taps[layer])).final
    except TargetError:
        raise
    except Exception as error:  # as in `check_target`
        raise TargetError(
            f"{refused}: running its layers in two parts failed with {type(error).__name__}: {_first_line(error)}; "
            f"{other}"
        ) from error
    theirs, ours = (target.output.logits(states).double() for states in (whole, parted))
    found = float((ours - theirs).abs().mean() / theirs.std().clamp(min=1e-12))
    if not found <= FLOOR[target.dtype]:
        raise TargetError(f"{refused}: its logits then differ by {found:.2g} standard deviations; {other}")


def _fixed_tokens(target: Target) -> tuple[list[int], list[int], int]:
    """A prefix of 9 tokens, 7 tree tokens and one more, spread over the vocabulary; all different if it has 17 ids."""
    vocab = min(target.vocab_size, target.embedding.vocab_size)
    order = [5 * i % 17 for i in range(17)]
    ids = [int((step + 0.5) * vocab / 17) for step in order]
    return ids[:9], ids[9:16], ids[16]


def _plain_logits(target: Target, texts: list[list[int]]) -> Float[Tensor, "rows seq vocab"]:
    return target.model(torch.tensor(texts, device=target.device), use_cache=False).logits.double()


def _tree_logits(
    target: Target, prefix: list[int], tree_tokens: list[int], next_token: int
) -> tuple[Float[Tensor, "nodes vocab"], Float[Tensor, "1 vocab"]]:
    cache = KVCache(target.num_layers, slots=1, capacity=len(prefix) + len(tree_tokens) + 1)
    cache.join(1)

    def forward(tokens: list[int], allowed: Tensor, distance: Tensor, positions: Tensor) -> Tensor:
        cache.begin(0, 1)
        states = target.forward(
            torch.tensor([tokens], device=target.device),
            positions,
            target.masks(allowed, distance),
            cache=cache.as_transformers,
        )
        return target.output.logits(states.final)[0].double()

    device = torch.device(target.device)
    forward(prefix, *prefill_mask(0, len(prefix), 1, device))
    unused = [index for index, layer in enumerate(cache.layers) if not layer.is_initialized]
    if unused:
        raise TargetError(
            f"{target.name} ({target.model.config.model_type}) cannot be tree-decoded: layer {unused[0]} keeps a state "
            "of its own that cannot be rolled back to an accepted prefix"
        )
    cache.extend(0, len(prefix))
    topology = Topology.from_paths(_BRANCHES, device)
    lengths = torch.tensor(cache.lengths, device=device)
    tree_logits = forward(tree_tokens, *tree_mask(topology, lengths, cache.key_length(len(tree_tokens))))
    cache.compact([_SECOND])
    lengths = torch.tensor(cache.lengths, device=device)
    chain = Topology.chain(0, device)
    return tree_logits, forward([next_token], *tree_mask(chain, lengths, cache.key_length(1)))


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0][:200]
