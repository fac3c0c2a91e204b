"""A smaller model as drafter: the target's text whatever it drafts, its distribution when it draws, acceptance as
computed, and a cache that is cut back to the text."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import numpy as np
import pytest
import stubs
import tiny
import torch
from test_decode_sampling import (
    DRAWS,
    NEW_TOKENS,
    PROMPT,
    SETTINGS,
    SMOKE_DRAWS,
    assert_distribution,
    conditionals,
    seeds_from,
    small_model,
    small_target,
)

from headstart.decode.drafters.base import Request
from headstart.decode.drafters.model import ModelDrafter, check_same_tokens
from headstart.decode.engine import Engine
from headstart.decode.sampling import SamplingSettings, probabilities
from headstart.errors import HeadstartError
from headstart.target import Target

LENGTHS = (1, 2, 3, 7, 12, 16, 20, 32)
NEW = 24
GREEDY, WARMISH = SamplingSettings(), SamplingSettings(temperature=0.8, seed=4)


@functools.lru_cache
def target() -> Target:
    return tiny.target("llama", dtype=torch.float64)


@functools.lru_cache
def other(**changes) -> Target:
    """A model of another shape with the same tokens."""
    shape = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    return tiny.target("llama", dtype=torch.float64, seed=5, **{**shape, **changes})


@functools.lru_cache
def prompts() -> list[list[int]]:
    return stubs.prompts_of(LENGTHS, target().vocab_size)


@functools.lru_cache
def plain() -> list[list[int]]:
    model = tiny.model("llama", dtype=torch.float64)
    return stubs.plain_answers(model, prompts(), NEW, end_token_ids=target().end_token_ids)


def decode(drafter, batch_size: int = 3, settings: SamplingSettings = GREEDY, **more) -> list:
    requests = [
        Request(prompt_ids=prompt, max_new_tokens=NEW, settings=settings, request_id=number)
        for number, prompt in enumerate(prompts())
    ]
    done = Engine(target(), drafter, batch_size=batch_size, **more).generate(requests)
    return sorted(done, key=lambda one: one.request.request_id)


@pytest.mark.parametrize("batch_size", [1, 3, 8])
@pytest.mark.parametrize("length", [0, 1, 4])
def test_the_text_is_the_targets_own(length, batch_size):
    done = decode(ModelDrafter(other(), target(), length), batch_size, prefill_chunk=5)
    assert [one.token_ids for one in done] == plain()


def test_a_copy_of_the_target_is_always_right():
    """Also where rows wait for each other, and every draft was accepted: one token more is read before the next."""
    copy = tiny.target("llama", dtype=torch.float64)
    for batch_size in (1, 3):
        for one in decode(ModelDrafter(copy, target(), 4), batch_size):
            assert one.token_ids == plain()[one.request.request_id]
            assert all(step.accepted == step.depth for step in one.steps if not step.cut)
            assert max(step.depth for step in one.steps) == 4


class Forgetful(ModelDrafter):
    """Reads the whole text anew for every proposal: what a cache that is cut back rightly equals."""

    def propose(self, rows, budget):
        self._read, self._sure = [[] for _ in rows.ids], [0] * len(rows)
        self._cache.lengths = [0] * len(rows)
        return super().propose(rows, budget)


@pytest.mark.parametrize("settings", [GREEDY, WARMISH], ids=["greedy", "warm"])
def test_the_cache_is_cut_back_to_the_text(settings):
    """Step by step, in any batch, as many drafts are accepted as by a drafter that remembers nothing."""
    records = []
    for drafter, batch_size in [(ModelDrafter, 1), (ModelDrafter, 3), (Forgetful, 1), (Forgetful, 8)]:
        done = decode(drafter(stubs.half_right(), target(), 4), batch_size, settings)
        records.append([[(step.depth, step.accepted) for step in one.steps] for one in done])
    assert records[0] == records[1] == records[2] == records[3]
    accepted = [count for steps in records[0] for _, count in steps]
    assert 0.2 < np.mean(accepted) < 3.5 and {0, 4} <= set(accepted), "drafts are right and wrong"


# -- sampling ----------------------------------------------------------------------------------------------------------


def draft_model(seed: int, scale: float) -> Target:
    """Twelve tokens too: the target's weights with noise."""
    model = small_model()
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.data += scale * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return Target(model, tiny.tokenizer(), name="a draft model")


MODELS = {"near": (0, 0.05), "far": (1, 1.0)}


seed_of = seeds_from(301, MODELS)


def assert_sampled(name: str, setting: str, draws: int) -> None:
    drafter = ModelDrafter(draft_model(*MODELS[name]), small_target(), 3)
    tests = len(MODELS) * len(SETTINGS)
    assert_distribution(drafter, setting, draws, seed_of(name, setting), tests=tests, accepted=(0, 3))


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", MODELS)
def test_three_tokens_have_the_targets_joint_distribution(name, setting):
    assert_sampled(name, setting, DRAWS)


@pytest.mark.parametrize(("name", "setting"), [("near", "top-p"), ("far", "warm"), ("far", "min-p")])
def test_a_smaller_sample_has_the_targets_joint_distribution(name, setting):
    assert_sampled(name, setting, SMOKE_DRAWS)


def test_the_first_draft_is_accepted_as_often_as_the_distributions_overlap():
    """1 - TV(p, q), and with the models' own distributions under the same settings."""
    for setting in ("warm", "top-k"):
        model = draft_model(2, 0.3)
        with torch.no_grad():
            logits = model.model(torch.tensor([PROMPT]), use_cache=False).logits[0, -1]
        q = probabilities(logits[None], SamplingSettings(**SETTINGS[setting]))[0].numpy()
        p = conditionals(setting)[()]
        overlap = float(np.minimum(p, q).sum())
        requests = [
            Request(
                prompt_ids=PROMPT, max_new_tokens=NEW_TOKENS, settings=SamplingSettings(**SETTINGS[setting], seed=seed)
            )
            for seed in range(4000)
        ]
        engine = Engine(small_target(), ModelDrafter(model, small_target(), 1), batch_size=2048, budget=8)
        first = [one.steps[0].accepted for one in engine.generate(requests)]
        assert np.mean(first) == pytest.approx(overlap, abs=0.03)
        assert 0.02 < overlap < 0.99


# -- tokens ------------------------------------------------------------------------------------------------------------


def test_padded_vocabularies_are_cropped():
    """More output rows than tokens, on either side: what only one of the two has is never drafted."""
    wide = other(vocab_size=target().vocab_size + 24)
    with torch.no_grad():
        wide.model.get_output_embeddings().weight[-24:] = 9.0  # the likeliest of all, and none of the target's
    for model in (wide, other(vocab_size=target().vocab_size - 4)):
        done = decode(ModelDrafter(model, target(), 3))
        assert [one.token_ids for one in done] == plain()


def test_another_tokenizer_is_refused_with_the_reason():
    stranger = tiny.target("llama", dtype=torch.float64)
    stranger.name = "stranger"
    vocab = dict(stranger.tokenizer.get_vocab())
    first, second = sorted(vocab)[:2]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    stranger.tokenizer = SimpleNamespace(get_vocab=lambda: vocab)
    with pytest.raises(HeadstartError, match="stranger cannot draft for .*tokenizer"):
        check_same_tokens(stranger, target())
    stranger.tokenizer = SimpleNamespace(get_vocab=lambda: {"some": 0, "others": 1})
    with pytest.raises(HeadstartError, match="0% of their tokens"):
        check_same_tokens(stranger, target())


def test_a_text_beyond_the_models_positions_is_decoded_plainly():
    short = other(max_position_embeddings=24)
    done = decode(ModelDrafter(short, target(), 4))
    assert [one.token_ids for one in done] == plain()
    for one in done:
        for step in one.steps:
            assert step.context_length + 1 + step.depth <= 24 or step.depth == 0
