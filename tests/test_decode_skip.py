"""The target drafting for itself: its own text whatever part drafts, no layer run twice over a token, nothing held."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
from itertools import cycle

import numpy as np
import pytest
import stubs
import tiny
import torch
from test_decode_exact import (
    FAMILIES,
    WatchedEngine,
    accepted_of,
    case,
    plain,
    requests_of,
    run,
    target_of,
    tokens_of,
)
from test_decode_sampling import (
    DRAWS,
    NEW_TOKENS,
    PROMPT,
    SETTINGS,
    SHARPNESS,
    SMOKE_DRAWS,
    VOCAB,
    assert_distribution,
    processed,
    seeds_from,
)

from headstart.bypass import Bypass
from headstart.decode.drafters.base import Request
from headstart.decode.drafters.layer_skip import EarlyExitDrafter, SkippingDrafter, skipping_drafter
from headstart.decode.drafters.ngram import NgramDrafter
from headstart.decode.drafters.union import UnionDrafter
from headstart.decode.engine import Engine
from headstart.decode.sampling import SamplingSettings, probabilities
from headstart.decode.selfcheck import check_parts
from headstart.decode.skips import FILE, Skips, load_skips, save_skips
from headstart.errors import HeadError, HeadstartError, TargetError
from headstart.target import Target

NEW = 20
SOME = Skips(attention=(1, 3), mlp=(1, 2))
"""A whole layer, an attention and an MLP."""


def tuned(family: str = "llama") -> Target:
    """A target whose later layers say little, as in trained models: so that a part of it is right now and then."""
    target = tiny.target(family, dtype=torch.float64)
    for layer in target.layers[1:]:
        for name, weight in layer.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight", "dense.weight", "dense_4h_to_h.weight")):
                weight.mul_(0.2)
    return target


@functools.lru_cache
def tuned_case(lengths: tuple[int, ...] = (1, 7, 15)) -> tuple[Target, list[list[int]], list[list[int]]]:
    target, reference = tuned(), tuned()
    prompts = stubs.prompts_of(lengths, target.vocab_size)
    return target, prompts, stubs.plain_answers(reference.model, prompts, NEW, end_token_ids=target.end_token_ids)


def drafters(target: Target, length: int = 4) -> list:
    last = target.num_layers - 1
    return [EarlyExitDrafter(target, layer, length) for layer in (1, 2, last)] + [SkippingDrafter(target, SOME, length)]


# -- exactness ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_transformers_and_the_cache_that_of_a_prefill(family):
    target, prompts, answers = case(family, (3, 12, 17), 12)
    for drafter in (EarlyExitDrafter(target, 2, 3), SkippingDrafter(target, SOME, 3)):
        out = run(target, drafter, requests_of(prompts, 12), engine=WatchedEngine, batch_size=2)
        assert tokens_of(out) == answers


@pytest.mark.slow
@pytest.mark.parametrize(("family", "batch_size"), zip(FAMILIES, cycle([1, 2, 7]), strict=False))
def test_every_exit_and_length(family, batch_size):
    target, prompts, answers = case(family)
    for length in (0, 1, 6):
        for drafter in drafters(target, length):
            out = run(target, drafter, requests_of(prompts), engine=WatchedEngine, batch_size=batch_size)
            assert tokens_of(out) == answers


@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_part_that_is_often_right_writes_the_same_text(batch_size):
    """Rows that accept different numbers, join and leave; also those that accept all drafts and draft on."""
    target, prompts, answers = tuned_case()
    for drafter in drafters(target):
        out = run(target, drafter, requests_of(prompts, NEW), engine=WatchedEngine, batch_size=batch_size)
        assert tokens_of(out) == answers
        assert {0, 4} <= {accepted for generation in out for accepted in accepted_of(generation)}
        assert max(step.depth for generation in out for step in generation.steps) == 4


def test_stops_ends_and_positions():
    target = target_of("gpt2")  # 64 positions
    prompts = stubs.prompts_of((3, 40, 62, 63), target.vocab_size)
    answers = [
        plain("gpt2", [prompt], min(40, 64 - len(prompt)), end_token_ids=target.end_token_ids)[0] for prompt in prompts
    ]
    for drafter in drafters(target, 6):
        assert tokens_of(run(target, drafter, requests_of(prompts, 40), batch_size=4, budget=7)) == answers
    target, prompts, answers = tuned_case()
    text = target.tokenizer.decode(answers[2][3:6])
    for drafter in drafters(target):
        (stopped,) = Engine(target, drafter).generate(
            [Request(prompt_ids=prompts[2], max_new_tokens=NEW, stop=(text,))]
        )
        assert stopped.finish_reason == "stop" and stopped.token_ids == answers[2][: len(stopped.token_ids)]


def test_a_union_with_n_grams_verifies_in_full():
    target, prompts, answers = tuned_case()
    drafter = UnionDrafter([EarlyExitDrafter(target, 2), NgramDrafter()])
    assert tokens_of(run(target, drafter, requests_of(prompts, NEW), batch_size=3)) == answers


class Stale(EarlyExitDrafter):
    """The states of the step before, where they have the right shape."""

    before = None

    def propose(self, rows, budget):
        tree = super().propose(rows, budget)
        stale, self.before = self.before, tree.verify_from
        return tree if stale is None or len(stale.states) != len(rows) else dataclasses.replace(tree, verify_from=stale)


class Shifted(EarlyExitDrafter):
    """The last draft's state is that of the draft before it: the pass that reads it is forgotten."""

    def propose(self, rows, budget):
        tree = super().propose(rows, budget)
        states = tree.verify_from.states.clone()
        states[:, -1] = states[:, -2]
        return dataclasses.replace(tree, verify_from=dataclasses.replace(tree.verify_from, states=states))


class Elsewhere(EarlyExitDrafter):
    """Keys of drafts are written one place too far."""

    def _run(self, rows, tokens, depth):
        return super()._run(rows, tokens, depth + (depth > 0))


@pytest.mark.parametrize("faulty", [Stale, Shifted, Elsewhere])
def test_planted_faults_change_the_text(faulty):
    target, prompts, answers = tuned_case()
    assert tokens_of(run(target, faulty(target, 3), requests_of(prompts, NEW))) != answers


def test_a_stale_row_of_the_cache_changes_the_text(monkeypatch):
    target, prompts, answers = tuned_case()
    stubs.plant_stale_rows(monkeypatch)
    for drafter in drafters(target):
        assert tokens_of(run(target, drafter, requests_of(prompts, NEW))) != answers


# -- cost --------------------------------------------------------------------------------------------------------------


def test_no_layer_reads_a_token_twice():
    """A step of 4 drafts: five passes of the first two layers over one token, one of the others over five, and logits
    of four single tokens and of the five."""
    target, seen = tuned(), []
    for number, layer in enumerate(target.layers):
        layer.self_attn.register_forward_hook(
            lambda _module, _args, kwargs, _out, number=number: seen.append((number, kwargs["hidden_states"].shape[1])),
            with_kwargs=True,
        )
    target.model.get_output_embeddings().register_forward_hook(
        lambda _module, args, _out: seen.append(("logits", args[0].shape[-2] if args[0].dim() == 3 else 1))
    )
    drafter = EarlyExitDrafter(target, 2, 4)
    engine = Engine(target, drafter)
    engine.cache.grow(1, 64)
    seen.clear()
    list(engine.generate([Request(prompt_ids=[5], max_new_tokens=1)]))  # one step, no prefill
    first = [(0, 1), (1, 1)]
    assert seen == [*(first + [("logits", 1)]) * 4, *first, (2, 5), (3, 5), ("logits", 5)]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_skipped_block_adds_nothing_to_the_residual_stream(family):
    """What is left is a model whose skipped blocks write zeros: here by hooks on every block's output."""
    target = tiny.target(family, dtype=torch.float64)
    ids = torch.arange(20)[None]
    with torch.no_grad():
        with Bypass(SOME.calls(target)):
            skipped = target.model(ids, use_cache=False, output_hidden_states=True)
        whole = target.model(ids, use_cache=False, output_hidden_states=True)
        handles = []
        for kind, layers in (("attn", SOME.attention), ("mlp", SOME.mlp)):
            for layer in layers:
                for name, module in target.layers[layer].named_children():
                    is_attention = "attn" in name or name == "attention"
                    if isinstance(module, torch.nn.LayerNorm) or "norm" in name:
                        continue
                    if (kind == "attn" and is_attention) or (kind == "mlp" and name in ("mlp", "fc2")):
                        handles.append(module.register_forward_hook(zeros))
        assert len(handles) == SOME.num_blocks
        by_hooks = target.model(ids, use_cache=False).logits
    torch.testing.assert_close(skipped.logits, by_hooks)
    assert torch.equal(skipped.hidden_states[2], skipped.hidden_states[1])  # a whole layer
    assert torch.equal(skipped.hidden_states[1], whole.hidden_states[1])
    assert not torch.allclose(skipped.logits, whole.logits)


def zeros(_module, _args, output):
    if isinstance(output, tuple):
        return (torch.zeros_like(output[0]), *output[1:])
    return torch.zeros_like(output)


def test_nothing_is_held_beside_the_target():
    target, prompts, _ = tuned_case()
    plain_engine = Engine(target, NgramDrafter())
    list(plain_engine.generate(requests_of(prompts, 4)))
    for drafter in drafters(target):
        engine = Engine(target, drafter)
        list(engine.generate(requests_of(prompts, 4)))
        assert drafter.num_parameters() == drafter.num_bytes() == 0
        assert engine.cache.num_bytes() == plain_engine.cache.num_bytes()
        assert not any("forward" in vars(module) for module in target.model.modules())


# -- sampling ----------------------------------------------------------------------------------------------------------


@functools.lru_cache
def deep_target() -> Target:
    """Twelve tokens and three layers, the later ones saying less."""
    sizes = {"num_hidden_layers": 3, "hidden_size": 16, "head_dim": 8, "intermediate_size": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    target = tiny.target("llama", seed=2, dtype=torch.float64, vocab_size=VOCAB, **sizes, **heads)
    with torch.no_grad():
        target.model.get_output_embeddings().weight.mul_(SHARPNESS)
        for layer in target.layers[1:]:
            layer.self_attn.o_proj.weight.mul_(0.4)
            layer.mlp.down_proj.weight.mul_(0.4)
    return target


def joint_of(target: Target, setting: str) -> np.ndarray:
    """Probability of every three tokens by plain forwards of the target, [VOCAB ** 3]."""
    shares = np.ones(1)
    for length in range(NEW_TOKENS):
        answers = list(itertools.product(range(VOCAB), repeat=length))
        with torch.no_grad():
            logits = target.model(torch.tensor([PROMPT + answer for answer in answers]), use_cache=False).logits
        after = [processed(row, **SETTINGS[setting]) for row in logits[:, -1].numpy()]
        shares = (shares[:, None] * np.stack(after)).reshape(-1)
    return shares


CHAINS = {
    "early exit": lambda target: EarlyExitDrafter(target, 1, 3),
    "skipped blocks": lambda target: SkippingDrafter(target, Skips(attention=(1, 2), mlp=(0, 1)), 3),
}


seed_of = seeds_from(501, CHAINS)


def assert_sampled(name: str, setting: str, draws: int) -> None:
    target, tests = deep_target(), len(CHAINS) * len(SETTINGS)
    own = {"target": target, "shares": joint_of(target, setting)}
    assert_distribution(CHAINS[name](target), setting, draws, seed_of(name, setting), tests=tests, **own)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "setting"), zip(cycle(CHAINS), SETTINGS, strict=False))
def test_three_tokens_have_the_targets_joint_distribution(name, setting):
    assert_sampled(name, setting, DRAWS)


@pytest.mark.parametrize(
    ("name", "setting"), [("early exit", "warm"), ("early exit", "top-p"), ("skipped blocks", "cool")]
)
def test_a_smaller_sample_has_the_targets_joint_distribution(name, setting):
    assert_sampled(name, setting, SMOKE_DRAWS)


@pytest.mark.parametrize("setting", SETTINGS)
def test_the_first_draft_is_accepted_as_often_as_the_distributions_overlap(setting):
    target, settings = deep_target(), SETTINGS[setting]
    with torch.no_grad():
        states = target.model(torch.tensor([PROMPT]), use_cache=False, output_hidden_states=True)
        early = target.output.logits(states.hidden_states[1][0, -1:], norm=True)
        q = probabilities(early, SamplingSettings(**settings))[0].numpy()
        p = probabilities(states.logits[0, -1:], SamplingSettings(**settings))[0].numpy()
    overlap = float(np.minimum(p, q).sum())
    requests = [
        Request(prompt_ids=PROMPT, max_new_tokens=2, settings=SamplingSettings(**settings, seed=seed))
        for seed in range(4000)
    ]
    engine = Engine(target, EarlyExitDrafter(target, 1, 1), batch_size=2000, budget=8)
    first = [one.steps[0].accepted for one in engine.generate(requests)]
    assert np.mean(first) == pytest.approx(overlap, abs=0.03)
    assert 0.02 < overlap < 0.98


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_wrong_exits_and_lengths_are_refused():
    target = target_of("llama")
    for layer in (0, 4, -1):
        with pytest.raises(HeadstartError, match=f"has 4 layers and cannot draft with the first {layer}; give 1 to 3"):
            EarlyExitDrafter(target, layer)
    with pytest.raises(HeadstartError, match="a chain of -1 drafts"):
        SkippingDrafter(target, SOME, -1)
    with pytest.raises(HeadError, match=r"mlp \[4\] are no layers of tiny-llama, expected numbers from 0 to 3"):
        SkippingDrafter(target, Skips(mlp=(4,)))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_can_be_run_in_two_parts(family):
    target = tiny.target(family)
    for layer in (1, 3):
        check_parts(target, layer)


@pytest.mark.parametrize("raises", [False, True])
def test_layers_that_read_more_than_the_states_before_them_are_refused(raises):
    target, kept = tiny.target("llama"), {}

    def keep(_module, _args, kwargs, _output):
        kept["states"] = kwargs["hidden_states"]

    def add(_module, _args, output):
        if raises and "states" not in kept:
            raise KeyError("states")
        return output + kept.pop("states", 0.0)

    target.layers[0].self_attn.register_forward_hook(keep, with_kwargs=True)
    target.layers[3].register_forward_hook(add)
    check_parts(tiny.target("llama"), 2)
    with pytest.raises(
        TargetError, match=r"tiny-llama \(llama\) cannot be verified from layer 2 on: .*drafter"
    ) as found:
        EarlyExitDrafter(target, 2)
    assert "\n" not in str(found.value) and ("KeyError" in str(found.value)) == raises


def test_layers_without_blocks_of_a_known_name_are_refused():
    target = tiny.target("llama")
    layer = target.layers[2]
    layer.mixer = layer.mlp
    del layer.mlp
    with pytest.raises(TargetError, match=r"layer 2 of tiny-llama \(llama\) has no block of a known name \(mlp, "):
        SkippingDrafter(target, SOME)


# -- the folder --------------------------------------------------------------------------------------------------------


def test_skips_are_kept_in_a_folder(tmp_path):
    target = target_of("llama")
    folder = save_skips(SOME, tmp_path / "skips", target, length=3, search={"agreement": 0.5})
    assert load_skips(folder, target) == (SOME, 3)
    drafter = skipping_drafter(folder, target)
    assert drafter.skips == SOME and drafter.length == 3 and skipping_drafter(folder, target, 2).length == 2
    assert [path.name for path in folder.iterdir()] == [FILE]


def test_another_target_is_refused(tmp_path):
    folder = save_skips(SOME, tmp_path, target_of("llama"), length=3)
    other = tiny.target("llama", dtype=torch.float64, seed=1)
    with pytest.raises(TargetError, match="the skipped blocks were found for tiny-llama, and tiny-llama differs"):
        skipping_drafter(folder, other)
    with pytest.warns(UserWarning, match="the skipped blocks were found for"):
        skipping_drafter(folder, other, allow_other_target=True)
    with pytest.raises(TargetError, match="another shape"):
        skipping_drafter(folder, tiny.target("llama", num_hidden_layers=2), allow_other_target=True)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"format": 2}, "format 2, this version reads 1"),
        ({"skips": {"attention": [9], "mlp": []}}, r"attention \[9\] are no layers"),
        ({"skips": {"attention": [2, 1], "mlp": []}}, "ascending order"),
        ({"skips": {"attention": "x", "mlp": []}}, "no file of skipped blocks"),
        ({"length": None}, "no file of skipped blocks"),
        (None, "holds no skipped blocks"),
    ],
)
def test_a_broken_folder_is_one_sentence(tmp_path, change, reason):
    target = target_of("llama")
    path = save_skips(SOME, tmp_path, target, length=3) / FILE
    if change is None:
        path.unlink()
    else:
        path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(HeadError, match=reason) as found:
        load_skips(tmp_path, target)
    assert "\n" not in str(found.value)
