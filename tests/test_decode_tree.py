"""Trees and what is derived from them, against walks that a reader can follow."""

from __future__ import annotations

import pytest
import stubs
import tiny
import torch

from headstart.decode.attention import prefill_mask, tree_mask
from headstart.decode.sampling import SamplingSettings, choose
from headstart.decode.tree import TokenTree, Topology, sort_paths
from headstart.decode.verify import verify
from headstart.errors import HeadstartError

GREEDY = SamplingSettings()


def random_parents(generator: torch.Generator, batch: int, nodes: int) -> list[list[int]]:
    """Parents stand before their children; anything else goes."""
    return [
        [-1] + [int(torch.randint(0, node, (1,), generator=generator)) for node in range(1, nodes)]
        for _ in range(batch)
    ]


def walk_up(parents: list[int], node: int) -> list[int]:
    """The node, its parent, ... and the root."""
    found = [node]
    while parents[found[-1]] >= 0:
        found.append(parents[found[-1]])
    return found


def random_valid(generator: torch.Generator, parents: list[list[int]]) -> torch.Tensor:
    """Random padding: a node whose parent is padding is padding too."""
    rows = []
    for tree in parents:
        valid = [True]
        for parent in tree[1:]:
            valid.append(valid[parent] and bool(torch.rand(1, generator=generator) < 0.8))
        rows.append(valid)
    return torch.tensor(rows)


def topologies(count: int = 12):
    """Random batches of trees with their parents as lists, from a root alone to 40 nodes."""
    generator = torch.Generator().manual_seed(1)
    for index in range(count):
        batch, nodes = 1 + index % 3, [1, 2, 3, 5, 9, 16, 17, 40][index % 8]
        parents = random_parents(generator, batch, nodes)
        yield parents, Topology(torch.tensor(parents), random_valid(generator, parents))


def test_ancestors_and_depths_equal_a_walk_up_the_tree():
    for parents, topology in topologies():
        for row, tree in enumerate(parents):
            for node in range(len(tree)):
                up = walk_up(tree, node)
                assert topology.ancestors[row, node].nonzero().flatten().tolist() == sorted(up)
                assert topology.depth[row, node] == len(up) - 1
        depths = [len(walk_up(tree, node)) - 1 for tree in parents for node in range(len(tree))]
        assert topology.max_depth == max(
            depth for depth, valid in zip(depths, topology.valid.flatten().tolist(), strict=True) if valid
        )


@pytest.mark.parametrize("derived_first", [False, True])
def test_padding_hangs_invalid_nodes_below_the_root_and_changes_nothing_else(derived_first):
    for parents, topology in topologies():
        nodes = len(parents[0])
        if derived_first:
            assert topology.ancestors.any()  # padded() then extends the masks instead of deriving them again
        wide = topology.padded(nodes + 3)
        again = Topology(wide.parents, wide.valid)
        assert wide.num_nodes == nodes + 3 and not wide.valid[:, nodes:].any()
        assert torch.equal(wide.valid[:, :nodes], topology.valid)
        assert torch.equal(wide.ancestors, again.ancestors) and torch.equal(wide.depth, again.depth)
        assert torch.equal(wide.ancestors[:, :nodes, :nodes], topology.ancestors)
        assert wide.max_depth == topology.max_depth
        assert topology.padded(nodes) is topology and topology.padded(1) is topology


def test_within_makes_deeper_nodes_invalid_row_by_row():
    for parents, topology in topologies():
        limits = torch.arange(len(parents)) % 3
        kept = topology.within(limits)
        for row, tree in enumerate(parents):
            for node in range(len(tree)):
                shallow = len(walk_up(tree, node)) - 1 <= int(limits[row])
                assert bool(kept.valid[row, node]) == (shallow and bool(topology.valid[row, node]))


def test_one_tree_expands_to_a_batch_with_the_same_masks():
    single = Topology.from_paths(stubs.SPARSE_25)
    wide = single.expand(5)
    again = Topology(wide.parents.clone(), wide.valid.clone())
    for name in ("ancestors", "depth"):
        assert torch.equal(getattr(wide, name), getattr(again, name))
    assert wide.max_depth == again.max_depth == 5 and single.expand(1) is single


def test_a_chain_is_the_tree_of_one_chain():
    assert torch.equal(Topology.chain(4).parents, Topology.from_paths(stubs.chain(4)).parents)
    assert Topology.chain(0).parents.tolist() == [[-1]] and Topology.from_paths([]).parents.tolist() == [[-1]]


def test_tree_masks_equal_a_brute_force_over_every_query_and_key():
    generator = torch.Generator().manual_seed(2)
    for parents, topology in topologies(8):
        batch, nodes = topology.parents.shape
        lengths = torch.randint(0, 9, (batch,), generator=generator)
        num_keys = int(lengths.max()) + nodes
        allowed, distance, positions = tree_mask(topology, lengths, num_keys)
        for row, tree in enumerate(parents):
            length = int(lengths[row])
            depth = [len(walk_up(tree, node)) - 1 for node in range(nodes)]
            for node in range(nodes):
                assert positions[row, node] == length + depth[node]
                up = walk_up(tree, node)
                for key in range(num_keys):
                    if key < length:
                        visible, position = True, key
                    else:
                        visible, position = key - length in up, None
                        if key - length < nodes:
                            position = length + depth[key - length]
                    assert bool(allowed[row, node, key]) == visible
                    if position is not None:
                        assert distance[row, node, key] == length + depth[node] - position


def test_prefill_is_the_chain_behind_a_prefix_of_equal_rows():
    for offset, count in [(0, 1), (0, 5), (7, 1), (7, 4)]:
        ours = prefill_mask(offset, count, 2, torch.device("cpu"))
        chain = tree_mask(Topology.chain(count - 1).expand(2), torch.tensor([offset, offset]), offset + count)
        assert all(torch.equal(one, other) for one, other in zip(ours, chain, strict=True))


def test_windows_are_cut_by_position_and_not_by_slot():
    target = tiny.target("hyb", dtype=torch.float64)  # window 16 and full layers
    topology = Topology.from_paths(stubs.SPARSE_25)
    length = torch.tensor([15])
    allowed, distance, positions = tree_mask(topology, length, 15 + topology.num_nodes)
    masks = target.masks(allowed, distance)
    assert isinstance(masks, dict)
    key_position = torch.cat([torch.arange(15), positions[0]])
    for node in range(topology.num_nodes):
        near = positions[0, node] - key_position < 16
        assert torch.equal(masks["sliding_attention"][0, 0, node] == 0, allowed[0, node] & near)
        assert torch.equal(masks["full_attention"][0, 0, node] == 0, allowed[0, node])
    # the deepest node stands at position 20: it sees keys 5.. of the prefix, whatever its slot
    assert (masks["sliding_attention"][0, 0, -1] == 0).nonzero()[0].item() == 5


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        ([(0,), (0, 0), (0, 0, 0), (0, 0, 0, 0)], "[0, 0, 0, 0] has depth 4, but this head drafts depths 1 to 3"),
        ([(0,), (4,)], "[4] asks for a rank outside 0 to 3"),
        ([(0,), (-1,)], "[-1] asks for a rank outside 0 to 3"),
        ([(0,), (1, 0)], "[1, 0] has no parent [1]"),
        ([(0,), (0, 1), (0, 1)], "[0, 1] stands twice"),
        ([(0,), ()], "[] has depth 0"),
    ],
)
def test_trees_that_a_head_cannot_draft_are_refused_naming_the_node(paths, message):
    with pytest.raises(HeadstartError) as caught:
        sort_paths(paths, max_depth=3, max_rank=4)
    assert message in str(caught.value)


def test_order_is_of_no_matter_and_no_node_is_plain_decoding():
    shuffled = [(0, 1), (1,), (0, 0, 2), (0,), (0, 0)]
    assert sort_paths(shuffled, 3, 4) == [(0,), (1,), (0, 0), (0, 1), (0, 0, 2)]
    assert sort_paths([list(path) for path in shuffled], 3, 4) == sort_paths(sorted(shuffled), 3, 4)
    assert sort_paths([], 3, 4) == []


def test_padded_tokens_are_never_taken_for_drafts():
    """The id 0 is real text: padding must not match a target that writes 0 (it did in Medusa's own code)."""
    tree = TokenTree(torch.tensor([[7, 3]]), Topology.chain(1)).padded(4)
    logits = torch.zeros(1, 4, 10)
    logits[..., 0] = 1.0
    (verdict,) = verify(tree, logits, [GREEDY], torch.empty(1, 0))
    assert verdict.path == [0] and verdict.tokens == [0] and verdict.accepted == 0


def reference_walk(tokens, parents, valid, picks) -> tuple[list[int], list[int]]:
    """Follows the target's picks, one per node, down the tree: (path, emitted)."""
    path, emitted = [0], []
    while True:
        emitted.append(picks[path[-1]])
        below = [n for n in range(len(tokens)) if parents[n] == path[-1] and valid[n] and tokens[n] == emitted[-1]]
        if not below:
            return path, emitted
        path.append(below[0])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_verification_is_a_walk_from_the_root(temperature):
    generator = torch.Generator().manual_seed(3)
    setting = SamplingSettings(temperature=temperature)
    longest = 0
    for parents, topology in topologies(40):
        batch, nodes = topology.parents.shape
        tokens = torch.randint(0, 3, (batch, nodes), generator=generator)
        logits = torch.randn(batch, nodes, 3, generator=generator, dtype=torch.float64)
        uniforms = torch.rand(batch, int(topology.depth.max()) + 1, generator=generator, dtype=torch.float64)
        verdicts = verify(TokenTree(tokens, topology), logits, [setting] * batch, uniforms)
        for row, verdict in enumerate(verdicts):
            picks = choose(logits[row], [setting] * nodes, uniforms[row, topology.depth[row]]).tolist()
            walked = reference_walk(tokens[row].tolist(), parents[row], topology.valid[row].tolist(), picks)
            assert (verdict.path, verdict.tokens) == walked
            longest = max(longest, verdict.accepted)
    assert longest >= 3


def test_greedy_and_sampled_rows_share_a_batch():
    generator = torch.Generator().manual_seed(4)
    topology = Topology.from_paths(stubs.full_tree(3, 2)).expand(2)
    tokens = torch.tensor([[0] + [path[-1] for path in stubs.full_tree(3, 2)]] * 2)
    logits = torch.randn(2, 13, 3, generator=generator, dtype=torch.float64)
    uniforms = torch.rand(2, 3, generator=generator, dtype=torch.float64)
    settings = [GREEDY, SamplingSettings(temperature=1.0)]
    both = verify(TokenTree(tokens, topology), logits, settings, uniforms)
    for row in range(2):
        one = TokenTree(tokens[row : row + 1], Topology.from_paths(stubs.full_tree(3, 2)))
        alone = verify(one, logits[row : row + 1], settings[row : row + 1], uniforms[row : row + 1])
        assert both[row] == alone[0] and both[row].accepted == 2


def test_permuting_siblings_does_not_change_what_is_emitted():
    generator = torch.Generator().manual_seed(5)
    for _ in range(30):
        paths = stubs.full_tree(3, 3)
        vocab = 5
        logits_of = {path: torch.randn(vocab, generator=generator) for path in [(), *paths]}
        token_of = {path: path[-1] for path in paths}  # siblings differ
        emitted = set()
        for _ in range(4):
            order = {path: torch.randperm(len(paths), generator=generator)[0].item() for path in paths}
            mixed = sorted(paths, key=lambda path: (len(path), order[path]))
            tree = TokenTree(torch.tensor([[0] + [token_of[path] for path in mixed]]), Topology.from_paths(mixed))
            logits = torch.stack([logits_of[path] for path in [(), *mixed]])[None]
            (verdict,) = verify(tree, logits, [GREEDY], torch.empty(1, 0))
            emitted.add(tuple(verdict.tokens))
        assert len(emitted) == 1
