"""Drafted sampling has the target's distribution: joint frequencies of the first three tokens against enumeration.

A model with twelve tokens is enumerated exactly: 1 + 12 + 144 forwards of an untouched copy, and logits processing
written anew here. 200 000 answers per drafter and setting go through the engine; one G-test each, none of which may
reject at a family level of 0.001 (Holm). Planted faults must be rejected at p < 1e-6.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import math
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import tiny
import torch
from scipy import stats

from headstart.decode import engine as engine_module
from headstart.decode.drafters.base import Drafter, NoDraft, Request, Rows
from headstart.decode.drafters.ngram import NgramDrafter
from headstart.decode.engine import Engine
from headstart.decode.sampling import SamplingSettings, choose, draw, probabilities
from headstart.decode.tree import Path, TokenTree, Topology
from headstart.decode.verify import Verified
from headstart.errors import HeadstartError
from headstart.target import Target

VOCAB = 12
PROMPT = (6, 5, 0, 1, 2, 0, 5, 0)
NEW_TOKENS = 3
DRAWS = 200_000
SMOKE_DRAWS = 6_000
FAULT_DRAWS = 50_000
FAMILY_LEVEL = 1e-3
FAULT_LEVEL = 1e-6
SHARPNESS = 1.5

SETTINGS = {
    "warm": {"temperature": 1.0},
    "cool": {"temperature": 0.7},
    "top-k": {"temperature": 1.0, "top_k": 4},
    "top-p": {"temperature": 0.7, "top_p": 0.9},
    "min-p": {"temperature": 1.0, "min_p": 0.1},
}


def small_model(vocab: int = VOCAB):
    model = tiny.model(
        "llama",
        seed=2,
        dtype=torch.float64,
        vocab_size=vocab,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        intermediate_size=16,
    )
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(SHARPNESS)
    return model


@functools.lru_cache
def small_target() -> Target:
    return Target(small_model(), tiny.tokenizer(), name="twelve tokens")


# -- the exact distribution --------------------------------------------------------------------------------------------


@functools.lru_cache
def logits_after() -> dict[tuple[int, ...], np.ndarray]:
    """The target's logits after PROMPT and every answer of up to two tokens, by plain forwards of a second instance."""
    model, table = small_model(), {}
    for length in range(NEW_TOKENS):
        answers = list(itertools.product(range(VOCAB), repeat=length))
        ids = torch.tensor([PROMPT + answer for answer in answers])
        with torch.no_grad():
            last = model(ids, use_cache=False).logits[:, -1].numpy()
        table.update(zip(answers, last, strict=True))
    return table


def processed(
    logits: np.ndarray, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> np.ndarray:
    """Temperature, top-k, top-p and min-p by their definitions, one after the other, token by token."""
    scaled = np.exp((logits - logits.max()) / temperature)
    order = sorted(range(len(logits)), key=lambda token: -scaled[token])
    if top_k:
        scaled[order[top_k:]] = 0
    if top_p < 1:
        shares, mass = scaled / scaled.sum(), 0.0
        for token in order:
            if mass >= top_p:
                scaled[token] = 0
            mass += shares[token]
    scaled[scaled < min_p * scaled.max()] = 0
    return scaled / scaled.sum()


@functools.lru_cache
def conditionals(setting: str) -> dict[tuple[int, ...], np.ndarray]:
    return {answer: processed(logits, **SETTINGS[setting]) for answer, logits in logits_after().items()}


@functools.lru_cache
def joint(setting: str) -> np.ndarray:
    """Probability of every three tokens, [VOCAB ** 3]."""
    after = conditionals(setting)
    cells = itertools.product(range(VOCAB), repeat=NEW_TOKENS)
    return np.array([math.prod(after[cell[:place]][cell[place]] for place in range(NEW_TOKENS)) for cell in cells])


def g_test(counts: np.ndarray, expected_shares: np.ndarray) -> float:
    """p-value of the G-test with Williams' correction; cells with an expected count under 5 are pooled into one.

    Tokens that the settings rule out have probability zero: one of them drawn once is p = 0.
    """
    if counts[expected_shares == 0].any():
        return 0.0
    total = counts.sum()
    expected = expected_shares * total
    rare = expected < 5
    observed = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    if expected[-1] == 0:
        observed, expected = observed[:-1], expected[:-1]
    freedom = len(expected) - 1
    present = observed > 0
    g = 2 * float((observed[present] * np.log(observed[present] / expected[present])).sum())
    williams = 1 + (float((total / expected).sum()) - 1) / (6 * total * freedom)
    return float(stats.chi2.sf(g / williams, freedom))


# -- the drafters ------------------------------------------------------------------------------------------------------

PATHS: list[Path] = [(0,), (1,), (0, 0)]
Pick = Callable[[np.ndarray, int, int], int]
"""(the target's unprocessed logits at a node, position in the answer, rank among siblings) -> drafted token."""


class TreeDrafter(NoDraft):
    """Deterministic drafts over PATHS that depend on the text so far only, looked up after the first time."""

    def __init__(self, pick: Pick, name: str):
        super().__init__()
        self.pick, self.name = pick, name
        self._shape = Topology.from_paths(PATHS)
        self._drafts: dict[tuple[int, ...], list[int]] = {}

    def propose(self, rows: Rows, budget: int) -> TokenTree:
        tokens = [self._draft(tuple(ids[len(PROMPT) :])) for ids in rows.ids]
        return TokenTree(torch.tensor(tokens), self._shape.expand(len(rows)))

    def _draft(self, answer: tuple[int, ...]) -> list[int]:
        if answer not in self._drafts:
            by_path = {(): 0}
            for path in PATHS:
                context = answer + tuple(by_path[path[:depth]] for depth in range(1, len(path)))
                logits = logits_after().get(context, np.zeros(VOCAB))  # past the enumerated ones any draft will do
                by_path[path] = self.pick(logits, len(context), path[-1])
            self._drafts[answer] = list(by_path.values())
        return self._drafts[answer]


def likeliest(logits: np.ndarray, position: int, rank: int) -> int:
    return int(np.argsort(-logits)[rank])


def unlikeliest(logits: np.ndarray, position: int, rank: int) -> int:
    return int(np.argsort(logits)[rank])


def alternating(logits: np.ndarray, position: int, rank: int) -> int:
    return (likeliest if (position + rank) % 2 else unlikeliest)(logits, position, rank)


def arbitrary(logits: np.ndarray, position: int, rank: int) -> int:
    """Any token; siblings may be equal."""
    return zlib.crc32(logits.tobytes() + bytes([position, rank])) % VOCAB


DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "none": NoDraft,
    "oracle": lambda: TreeDrafter(likeliest, "oracle"),
    "anti-oracle": lambda: TreeDrafter(unlikeliest, "anti-oracle"),
    "mixed": lambda: TreeDrafter(alternating, "mixed"),
    "random": lambda: TreeDrafter(arbitrary, "random"),
    "ngram": lambda: NgramDrafter(length=3),
}


@contextlib.contextmanager
def no_garbage_collection():
    """Batches of thousands of rows are many objects: the collector would walk over all of torch again and again."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def with_seed(settings: SamplingSettings, seed: int) -> SamplingSettings:
    """`dataclasses.replace`, without checking all the other settings again."""
    copied = object.__new__(SamplingSettings)
    copied.__dict__.update(vars(settings), seed=seed)
    return copied


@dataclass
class Sample:
    counts: np.ndarray
    """How often each three tokens came, [VOCAB ** 3]."""
    steps: int
    accepted: int


def sample(drafter: Drafter, setting: str, draws: int, first_seed: int, target: Target | None = None) -> Sample:
    """`draws` answers of three tokens, each with a seed of its own. target: another one than `small_target`."""
    base = SamplingSettings(**SETTINGS[setting])
    requests = (
        Request(prompt_ids=PROMPT, max_new_tokens=NEW_TOKENS, settings=with_seed(base, seed))
        for seed in range(first_seed, first_seed + draws)
    )
    engine = Engine(target or small_target(), drafter, batch_size=4096, budget=8)
    cells, steps, accepted = [], 0, 0
    with no_garbage_collection():
        for generation in engine.generate(requests):
            one, two, three = generation.token_ids
            cells.append((one * VOCAB + two) * VOCAB + three)
            steps += len(generation.steps)
            accepted += sum(step.accepted for step in generation.steps)
    assert len(cells) == draws
    return Sample(np.bincount(cells, minlength=VOCAB**NEW_TOKENS), steps, accepted)


def seeds_from(first: int, names: Iterable[str]) -> Callable[[str, str], int]:
    """Where the seeds of every name and setting start, from so many millions on: no two cells share any, for with
    shared seeds they would share their answers."""
    cells = [(name, setting) for name in names for setting in SETTINGS]
    return lambda name, setting: (first + cells.index((name, setting))) * 1_000_000


seed_of = seeds_from(1, DRAFTERS)


def test_the_settings_do_remove_mass():
    after = conditionals("warm")
    shares = joint("warm")
    assert len(shares) == VOCAB**3 and shares.sum() == pytest.approx(1)
    assert 0.35 < float(np.mean([p.max() for p in after.values()])) < 0.8  # sharpened, not decided
    for setting in ("top-k", "top-p", "min-p"):
        kept = [(after[answer][p > 0].sum(), (p > 0).sum()) for answer, p in conditionals(setting).items()]
        assert np.mean([mass for mass, _ in kept]) < 0.95 and np.mean([count for _, count in kept]) < 6
        assert joint(setting).sum() == pytest.approx(1) and (joint(setting) == 0).sum() > VOCAB**3 / 2
    assert np.abs(joint("cool") - shares).sum() > 0.1


def assert_distribution(
    drafter: Drafter,
    setting: str,
    draws: int,
    first_seed: int,
    *,
    tests: int,
    accepted: tuple[float, float] = (0.05, 2),
    target: Target | None = None,
    shares: np.ndarray | None = None,
) -> None:
    """Whole answers have the target's joint distribution, by one of so many `tests` of a family.

    accepted: between what bounds the accepted drafts of a step lie. target, shares: another target than `small_target`,
    and its distribution. Holm rejects something if and only if the smallest p-value is below level / number of tests.
    """
    found = sample(drafter, setting, draws, first_seed, target)
    p = g_test(found.counts, joint(setting) if shares is None else shares)
    assert p > FAMILY_LEVEL / tests, (drafter.name, setting, p)
    assert accepted[0] <= found.accepted / found.steps <= accepted[1], (drafter.name, setting, found.accepted)


ACCEPTED = {"none": (0, 0), "anti-oracle": (0, 2), "oracle": (0.5, 2)}
TESTS = len(DRAFTERS) * len(SETTINGS)


def assert_sampled(name: str, setting: str, draws: int) -> None:
    bounds = ACCEPTED.get(name, (0.02, 2))
    assert_distribution(DRAFTERS[name](), setting, draws, seed_of(name, setting), tests=TESTS, accepted=bounds)


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_three_tokens_have_the_targets_joint_distribution(drafter, setting):
    assert_sampled(drafter, setting, DRAWS)


@pytest.mark.parametrize(
    ("drafter", "setting"),
    [("none", "warm"), ("oracle", "top-p"), ("anti-oracle", "cool"), ("mixed", "top-k"), ("random", "min-p")]
    + [("ngram", "top-p")],
)
def test_a_smaller_sample_has_the_targets_joint_distribution(drafter, setting):
    assert_sampled(drafter, setting, SMOKE_DRAWS)


# -- planted faults ----------------------------------------------------------------------------------------------------


def walk_all(tree: TokenTree, picks: Sequence[Sequence[int]], on_mismatch=None) -> list[Verified]:
    """The right walk, given the token that the target draws at every node; `on_mismatch(row, node)` may replace the
    token that leaves a tree at a node with children."""
    tokens, parents = tree.tokens.tolist(), tree.topology.parents.tolist()
    valid = tree.topology.valid.tolist()
    verdicts = []
    for row, drawn in enumerate(picks):
        children: dict[int, dict[int, int]] = {}
        for node in range(1, len(tokens[row])):
            if valid[row][node]:
                children.setdefault(parents[row][node], {}).setdefault(tokens[row][node], node)
        path, emitted = [0], []
        while True:
            below = children.get(path[-1], {})
            token = drawn[path[-1]]
            if token not in below and below and on_mismatch:
                token = on_mismatch(row, path[-1])
                emitted.append(token)
                break
            emitted.append(token)
            if token not in below:
                break
            path.append(below[token])
        verdicts.append(Verified(path, emitted))
    return verdicts


def draws_at_all_nodes(tree: TokenTree, logits, settings, uniforms) -> list[list[int]]:
    batch, nodes = tree.tokens.shape
    by_depth = uniforms.gather(1, tree.topology.depth.clamp(max=uniforms.shape[1] - 1))
    flat = choose(logits.flatten(0, 1), [setting for setting in settings for _ in range(nodes)], by_depth.flatten())
    return flat.view(batch, nodes).tolist()


def no_fault(tree, logits, settings, uniforms, **_):
    return walk_all(tree, draws_at_all_nodes(tree, logits, settings, uniforms))


def bonus_from_raw_logits(tree, logits, settings, uniforms, **_):
    """EAGLE-1: after a wholly accepted path the last token came from unprocessed logits."""
    picks = draws_at_all_nodes(tree, logits, settings, uniforms)
    raw = draws_at_all_nodes(tree, logits, [SamplingSettings(temperature=1.0)] * len(settings), uniforms)
    parents = tree.topology.parents.tolist()
    for row, above in enumerate(parents):
        for node in range(1, len(above)):
            if node not in above:
                picks[row][node] = raw[row][node]
    return walk_all(tree, picks)


_noise = torch.Generator()


def fresh_uniforms(like: torch.Tensor) -> torch.Tensor:
    return torch.rand(like.shape, generator=_noise, dtype=torch.float64)


def fresh_draw_after_a_mismatch(tree, logits, settings, uniforms, **_):
    """The draw that told the mismatch is thrown away, and the token drawn again from the whole distribution."""
    again = draws_at_all_nodes(tree, logits, settings, fresh_uniforms(uniforms))
    picks = draws_at_all_nodes(tree, logits, settings, uniforms)
    return walk_all(tree, picks, on_mismatch=lambda row, node: again[row][node])


def independent_draws_per_path(tree, logits, settings, uniforms, **_):
    """Medusa's and REST's nucleus rule: every leaf path draws for itself, and the longest match wins."""
    best: list[Verified] | None = None
    parents = tree.topology.parents[0].tolist()
    for leaf in [node for node in range(len(parents)) if node not in parents]:
        alone = torch.zeros(len(parents), dtype=torch.bool)
        node = leaf
        while node >= 0:
            alone[node] = True
            node = parents[node]
        path_only = TokenTree(tree.tokens, Topology(tree.topology.parents, tree.topology.valid & alone))
        picks = draws_at_all_nodes(tree, logits, settings, fresh_uniforms(uniforms))
        found = walk_all(path_only, picks)
        if best is None:
            best = found
        else:
            best = [new if new.accepted > old.accepted else old for new, old in zip(found, best, strict=True)]
    return best


def stale_random_numbers(self: Engine, tree: TokenTree) -> torch.Tensor:
    """Sequoia: every step begins again at the first random numbers."""
    return torch.tensor([(stream + [0.0] * 8)[: tree.topology.max_depth + 1] for stream in self._uniforms])


FAULTS = {
    "bonus": (bonus_from_raw_logits, "oracle", "cool"),
    "bonus-top-p": (bonus_from_raw_logits, "oracle", "top-p"),
    "fresh-draw": (fresh_draw_after_a_mismatch, "oracle", "warm"),
    "per-path": (independent_draws_per_path, "oracle", "warm"),
    "per-path-random": (independent_draws_per_path, "random", "cool"),
    "stale-plain": (stale_random_numbers, "none", "warm"),
    "stale-mixed": (stale_random_numbers, "mixed", "top-k"),
}


def faulty_sample(fault: Callable, drafter: str, setting: str, draws: int, monkeypatch: pytest.MonkeyPatch) -> float:
    _noise.manual_seed(0)
    if fault is stale_random_numbers:
        monkeypatch.setattr(Engine, "_next_uniforms", fault)
    else:
        monkeypatch.setattr(engine_module, "verify", fault)
    found = sample(DRAFTERS[drafter](), setting, draws, seed_of(drafter, setting))
    return g_test(found.counts, joint(setting))


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_are_rejected(name, monkeypatch):
    assert faulty_sample(*FAULTS[name], FAULT_DRAWS, monkeypatch) < FAULT_LEVEL


@pytest.mark.parametrize("name", ["bonus", "fresh-draw", "per-path", "stale-plain"])
def test_planted_faults_are_rejected_by_a_smaller_sample_too(name, monkeypatch):
    assert faulty_sample(*FAULTS[name], 2 * SMOKE_DRAWS, monkeypatch) < FAULT_LEVEL


def test_the_faults_differ_from_a_right_walk_by_nothing_else(monkeypatch):
    assert faulty_sample(no_fault, "oracle", "cool", SMOKE_DRAWS, monkeypatch) > FAMILY_LEVEL


# -- seeds -------------------------------------------------------------------------------------------------------------


def seeded_requests(count: int, new_tokens: int = 8) -> list[Request]:
    """Seeds 0.., all settings in turn, greedy among them."""
    kinds = [*SETTINGS.values(), {"temperature": 0.0}, {"temperature": 0.7, "top_k": 6, "top_p": 0.8, "min_p": 0.05}]
    return [
        Request(
            prompt_ids=PROMPT,
            max_new_tokens=new_tokens,
            settings=SamplingSettings(**kinds[index % len(kinds)], seed=index),
            request_id=index,
        )
        for index in range(count)
    ]


def answers(drafter: Drafter, requests: Sequence[Request], batch_size: int) -> list[list[int]]:
    found = Engine(small_target(), drafter, batch_size=batch_size, budget=8).generate(requests)
    return [one.token_ids for one in sorted(found, key=lambda generation: generation.request.request_id)]


def test_a_seed_gives_the_same_text_in_any_batch_and_with_any_drafter():
    requests = seeded_requests(140)
    plain = answers(NoDraft(), requests, 140)
    assert len(set(map(tuple, plain))) > 75
    for name, make in DRAFTERS.items():
        for batch_size in (140, 17):
            assert answers(make(), requests, batch_size) == plain, (name, batch_size)
    assert answers(DRAFTERS["oracle"](), requests[::-1][:12], 1) == plain[-12:]
    longer = answers(NoDraft(), seeded_requests(140, 12), 64)
    assert [answer[:8] for answer in longer] == plain


@pytest.mark.slow
def test_many_seeds_give_the_same_text_with_any_drafter():
    requests = seeded_requests(8_000)
    with no_garbage_collection():
        plain = answers(NoDraft(), requests, 4096)
        for name, make in DRAFTERS.items():
            assert answers(make(), requests, 4096) == plain, name


def test_temperatures_from_none_to_some():
    (greedy,) = answers(NoDraft(), [Request(prompt_ids=PROMPT, max_new_tokens=8, request_id=0)], 1)
    warm = set()
    for seed in range(6):
        for temperature, texts in [(0.0, None), (1e-6, None), (5e-324, None), (0.7, warm)]:
            settings = SamplingSettings(temperature=temperature, seed=seed)
            request = Request(prompt_ids=PROMPT, max_new_tokens=8, settings=settings, request_id=0)
            plain = answers(NoDraft(), [request], 1)
            assert answers(DRAFTERS["mixed"](), [request], 1) == answers(NoDraft(), [request], 1) == plain
            if texts is None:
                assert plain == [greedy]
            else:
                texts.add(tuple(plain[0]))
    assert len(warm) > 3


def test_streams_of_neighbouring_seeds_are_uniform_and_independent():
    numbers = torch.stack([SamplingSettings(seed=seed).uniforms(3) for seed in range(20_000)]).numpy()
    assert numbers.min() >= 0 and numbers.max() < 1
    for place in range(3):
        assert stats.kstest(numbers[:, place], "uniform").pvalue > 1e-3
    pairs = {
        "next token": (numbers[:, 0], numbers[:, 1]),
        "next seed": (numbers[:-1, 0], numbers[1:, 0]),
        "both": (numbers[:-1, 0], numbers[1:, 1]),
    }
    for name, (one, other) in pairs.items():
        table = np.histogram2d(one, other, bins=10)[0]
        assert stats.chi2_contingency(table).pvalue > 1e-3, name
    assert torch.equal(SamplingSettings(seed=3).uniforms(9)[:4], SamplingSettings(seed=3).uniforms(4))


# -- from logits to a token --------------------------------------------------------------------------------------------


def test_probabilities_follow_the_definitions():
    generator = torch.Generator().manual_seed(0)
    for setting in [
        *SETTINGS.values(),
        {"temperature": 2.0, "top_k": 50},
        {"temperature": 0.7, "top_k": 6, "top_p": 0.8, "min_p": 0.05},
        {"temperature": 1.3, "top_p": 1e-9},
    ]:
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            logits = (3 * torch.randn(20, 30, generator=generator)).to(dtype)
            ours = probabilities(logits, SamplingSettings(**setting))
            assert ours.dtype == torch.float64
            if dtype == torch.bfloat16:  # ties, of which each definition keeps its own
                assert torch.allclose(ours.sum(-1), torch.ones(20, dtype=torch.float64))
                continue
            for row, theirs in zip(logits.double().numpy(), ours.numpy(), strict=True):
                np.testing.assert_allclose(theirs, processed(row, **setting), atol=1e-12)


def test_what_has_no_probability_is_never_drawn():
    probs = torch.tensor([[0.0, 0.0, 0.3, 0.0, 0.7, 0.0]], dtype=torch.float64)
    largest = 1 - 2.0**-53
    for uniform, token in [(0.0, 2), (0.29, 2), (0.3, 4), (0.5, 4), (largest, 4)]:
        assert draw(probs, torch.tensor([uniform], dtype=torch.float64)).tolist() == [token]
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(500, 40, generator=generator, dtype=torch.float64).bfloat16()
    settings = SamplingSettings(temperature=0.7, top_k=5, top_p=0.9)
    probs = probabilities(logits, settings)
    assert (probs == 0).sum() > 500 * 34
    for uniform in (0.0, 5e-324, largest):
        uniforms = torch.full((500,), uniform, dtype=torch.float64)
        tokens = choose(logits, [settings] * 500, uniforms)
        assert (probs.gather(1, tokens[:, None]) > 0).all()


def test_frequencies_are_the_probabilities():
    """Inverting at evenly spread numbers gives every token its share."""
    probs = torch.tensor([[0.05, 0.0, 0.25, 0.6, 0.1]], dtype=torch.float64)
    uniforms = (torch.arange(10_000, dtype=torch.float64) + 0.5) / 10_000
    counts = torch.bincount(draw(probs.expand(10_000, -1), uniforms), minlength=5)
    assert (counts - probs[0] * 10_000).abs().max() <= 1


def test_a_drafted_argmax_leaves_the_frequencies_alone():
    """p = (0.7, 0.3) and a drafter that always drafts token 1: it is written, and accepted, 30% of the time."""
    target = Target(small_model(vocab=2), tiny.tokenizer(), name="two tokens")

    class TwoTokens:
        def logits(self, hidden, rows=None, *, norm=False):
            return torch.tensor([0.7, 0.3], dtype=hidden.dtype).log().expand(*hidden.shape[:-1], 2)

    class AlwaysOne(NoDraft):
        def propose(self, rows: Rows, budget: int) -> TokenTree:
            return TokenTree(torch.ones(len(rows), 2, dtype=torch.long), Topology.chain(1).expand(len(rows)))

    target.output = TwoTokens()
    engine = Engine(target, AlwaysOne(), batch_size=5000)
    requests = [
        Request(prompt_ids=[0], max_new_tokens=1, settings=SamplingSettings(temperature=1.0, seed=seed))
        for seed in range(20_000)
    ]
    with no_garbage_collection():
        out = list(engine.generate(requests))
    ones = np.mean([generation.token_ids[0] for generation in out])
    accepted = np.mean([generation.steps[0].accepted for generation in out])
    assert ones == pytest.approx(0.300, abs=0.012) and accepted == ones


@pytest.mark.parametrize(
    "wrong",
    [{"temperature": -0.1}, {"temperature": float("nan")}, {"temperature": float("inf")}, {"seed": -1}]
    + [{"seed": 2**63}, {"top_k": -1}, {"top_p": 0.0}, {"min_p": 1.5}],
)
def test_settings_out_of_range_are_refused_with_their_range(wrong):
    with pytest.raises(HeadstartError, match=rf"{next(iter(wrong))}=.* is out of range; give a "):
        SamplingSettings(**wrong)
