"""The KV cache against lists of tokens, and our attention against the formula."""

from __future__ import annotations

import pytest
import torch

from headstart.decode.attention import tree_attention
from headstart.decode.cache import KVCache

HEADS, DIM = 2, 3


def states(tokens: list[list[int]], dim: int = DIM) -> torch.Tensor:
    """[batch, heads, tokens, dim]: every entry of a token's state is its id."""
    return torch.tensor(tokens, dtype=torch.float64)[:, None, :, None].expand(-1, HEADS, -1, dim).clone()


def write(cache: KVCache, first: int, tokens: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    cache.begin(first, len(tokens))
    for layer in range(cache.num_layers):
        # values and odd layers are told apart by an offset; values are wider than keys
        keys, values = cache.write(layer, states(tokens) + 100 * layer, states(tokens, DIM + 1) + 100 * layer + 0.5)
    return keys, values


def content(cache: KVCache, row: int) -> list[int]:
    """The row's tokens; asserts that keys and values of all layers and heads agree on them."""
    expected = None
    for layer in range(cache.num_layers):
        keys, values = cache.read(layer, row)
        found = (keys[0, :, 0] - 100 * layer).tolist()
        assert torch.equal(keys, states([found])[0] + 100 * layer)
        assert torch.equal(values, states([found], DIM + 1)[0] + 100 * layer + 0.5)
        assert expected is None or found == expected
        expected = found
    return [int(token) for token in expected]


def test_rows_of_different_lengths_keep_their_accepted_paths():
    """Random trees, paths, joins and leaves, against lists."""
    generator = torch.Generator().manual_seed(0)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=generator))

    cache = KVCache(num_layers=2, slots=0, capacity=0)
    rows: list[list[int]] = []
    token = iter(range(1, 100_000))
    for _ in range(60):
        if len(rows) < 4 and number(0, 2):
            joining = number(1, 3)
            cache.grow(len(rows) + joining, max(map(len, rows), default=0) + 20)
            cache.join(joining)
            prompts = [[next(token) for _ in range(4)] for _ in range(joining)]
            write(cache, len(rows), prompts)
            for index, prompt in enumerate(prompts):
                kept = number(0, 5)
                cache.extend(len(rows) + index, kept)
                prompts[index] = prompt[:kept]
            rows += prompts
        if not rows:
            continue
        nodes = number(1, 6)
        trees = [[next(token) for _ in range(nodes)] for _ in rows]
        cache.grow(cache.slots, max(map(len, rows)) + nodes)
        keys, _ = write(cache, 0, trees)
        assert keys.shape[2] == cache.key_length(nodes) == max(map(len, rows)) + nodes
        paths = [[0, *[node for node in range(1, nodes) if number(0, 2)]] for _ in rows]
        cache.compact(paths)
        for row, path in enumerate(paths):
            rows[row] += [trees[row][node] for node in path]
        assert [content(cache, row) for row in range(len(rows))] == rows
        if number(0, 4) == 0:
            keep = [row for row in torch.randperm(len(rows), generator=generator).tolist() if number(0, 3)]
            cache.select(torch.tensor(keep, dtype=torch.long))
            rows = [rows[row] for row in keep]
            assert [content(cache, row) for row in range(len(rows))] == rows


def test_layers_of_other_shapes_have_their_own_storage():
    cache = KVCache(num_layers=2, slots=1, capacity=4)
    cache.join(1)
    cache.begin(0, 1)
    cache.write(0, torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4))
    cache.write(1, torch.full((1, 1, 3, 8), 2.0), torch.full((1, 1, 3, 8), 2.0))
    cache.compact([[0, 2]])
    assert cache.read(0, 0)[0].shape == (2, 2, 4) and cache.read(1, 0)[1].shape == (1, 2, 8)
    assert (cache.read(0, 0)[0] == 1).all() and (cache.read(1, 0)[1] == 2).all()
    assert cache.num_bytes() == 2 * 2 * 4 * 4 * (2 * 4 + 1 * 8)


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("kind", ["additive", "boolean", "none"])
def test_attention_equals_the_formula(groups, softcap, kind):
    generator = torch.Generator().manual_seed(0)
    batch, kv_heads, queries, keys, dim = 2, 2, 3, 7, 4

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    query, key = normal(batch, kv_heads * groups, queries, dim), normal(batch, kv_heads, keys, dim)
    value = normal(batch, kv_heads, keys, dim + 1)
    allowed = torch.rand(batch, 1, queries, keys, generator=generator) < 0.6
    allowed[..., 0] = True
    if kind == "none":  # causal, the last query at the last key
        allowed = (torch.arange(keys) <= torch.arange(queries)[:, None] + keys - queries).expand(batch, 1, -1, -1)
    mask = {
        "additive": torch.zeros(allowed.shape, dtype=torch.float64).masked_fill(
            ~allowed, torch.finfo(torch.float64).min
        ),
        "boolean": allowed,
        "none": None,
    }[kind]
    module = torch.nn.Identity().eval()
    out, _ = tree_attention(module, query, key, value, mask, scaling=0.3, softcap=softcap)

    scores = query @ key.repeat_interleave(groups, 1).transpose(2, 3) * 0.3
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    weights = scores.masked_fill(~allowed, -torch.inf).softmax(-1)
    expected = (weights @ value.repeat_interleave(groups, 1)).transpose(1, 2)
    assert out.shape == (batch, queries, kv_heads * groups, dim + 1)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-14)
