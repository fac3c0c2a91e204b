"""`model.generate(custom_generate=...)`: transformers' own texts, what is refused, and a model left alone."""

from __future__ import annotations

import copy
import sys
from collections import Counter
from pathlib import Path

import hub_cases
import pytest
import tiny
import torch
from eagle_cases import learnt
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LogitsProcessor,
    set_seed,
)
from transformers.generation.streamers import BaseStreamer

from headstart.errors import HeadstartError
from headstart.eval import custom_generate
from headstart.eval.guest import GUESTS
from headstart.scripts.hub_folder import CODE, REQUIREMENTS, write_code


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A published head as it lies on a disk, with its code."""
    folder = tmp_path_factory.mktemp("models")
    run = hub_cases.write_run(folder / "org" / "head", hub_cases.write_target(folder / "tiny"), head=learnt("eagle3"))
    write_code(run, "org/head")
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder):
    return AutoTokenizer.from_pretrained(folder / "tiny", padding_side="left")


@pytest.fixture(scope="module")
def shared(folder):
    return AutoModelForCausalLM.from_pretrained(folder / "tiny", dtype=torch.float64)


@pytest.fixture
def model(shared, folder, monkeypatch):
    """Looked at once by all the tests that leave it alone."""
    monkeypatch.chdir(folder)  # where org/head is a folder, and so no name on the hub
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(folder / "modules"))
    return shared


def both(model, *inputs, **settings) -> list[torch.Tensor]:
    """What transformers writes by itself, and with the head."""
    plain = model.generate(*inputs, **settings)
    return [plain, model.generate(*inputs, **settings, custom_generate="org/head", trust_remote_code=True)]


def prompts() -> dict[str, torch.Tensor]:
    """Prompts of five lengths, padded on the left."""
    rows = hub_cases.prompts()
    longest = max(map(len, rows))
    ids = torch.tensor([[tiny.PAD] * (longest - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_new_tokens": 12},
        {"max_length": 20},
        {"max_new_tokens": 12, "eos_token_id": 99},
        {"max_new_tokens": 12, "eos_token_id": [7, 99, 180], "pad_token_id": 3},
        {"max_new_tokens": 12, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
        {"max_new_tokens": 12, "eos_token_id": 99, "min_new_tokens": 9, "suppress_tokens": [1, 2, 3]},
        {"max_new_tokens": 8, "bad_words_ids": [[99], [5, 6]], "use_cache": True},
        {"generation_config": GenerationConfig(max_new_tokens=6, eos_token_id=99, pad_token_id=0)},
        {"max_new_tokens": 6, "do_sample": True, "top_k": 1, "temperature": 0.7, "num_return_sequences": 2},
    ],
    ids=str,
)
def test_the_texts_are_those_of_transformers(settings, model):
    plain, drafted = both(model, **prompts(), **settings)
    assert torch.equal(plain, drafted)


def test_drafts_are_accepted_on_the_way(model):
    row = torch.tensor([hub_cases.prompts()[0]])
    plain, drafted = both(model, row, max_new_tokens=12)
    assert torch.equal(plain, drafted)
    (guest,) = GUESTS[model].values()
    forwards = Counter()
    guest.target.layers[0].register_forward_pre_hook(lambda *_: forwards.update(["target"]))
    model.generate(row, max_new_tokens=12, custom_generate="org/head", trust_remote_code=True)
    assert 0 < forwards["target"] < 12, "the copy looked at before, in fewer steps than tokens"


def test_a_prompt_without_a_mask_a_processor_and_a_dictionary(model):
    class NoEven(LogitsProcessor):
        def __call__(self, input_ids, scores):
            scores[:, ::2] = -torch.inf
            return scores

    row = torch.tensor([hub_cases.prompts()[0]])
    plain, drafted = both(model, row, max_new_tokens=8, logits_processor=[NoEven()])
    assert torch.equal(plain, drafted) and all(token % 2 for token in plain[0, row.shape[1] :].tolist())
    plain, drafted = both(model, row, max_new_tokens=8, return_dict_in_generate=True)
    assert torch.equal(plain.sequences, drafted.sequences)


def test_stop_strings_end_an_answer(model, tokenizer):
    row = torch.tensor([hub_cases.prompts()[0]])
    answer = model.generate(row, max_new_tokens=12)[0, row.shape[1] :]
    stop = next(text for text in map(tokenizer.decode, answer[3:].tolist()) if text.isascii() and text.isprintable())
    plain, drafted = both(model, row, max_new_tokens=12, stop_strings=[stop], tokenizer=tokenizer)
    assert torch.equal(plain, drafted) and plain.shape[1] < row.shape[1] + 12


def test_a_streamer_gets_the_prompt_and_every_token(model):
    class Kept(BaseStreamer):
        def __init__(self):
            self.values, self.ended = [], False

        def put(self, value):
            self.values.append(value.tolist())

        def end(self):
            self.ended = True

    row = torch.tensor([hub_cases.prompts()[0]])
    ours, theirs = Kept(), Kept()
    plain = model.generate(row, max_new_tokens=8, streamer=theirs)
    drafted = model.generate(row, max_new_tokens=8, streamer=ours, custom_generate="org/head", trust_remote_code=True)
    assert torch.equal(plain, drafted)
    assert ours.values == theirs.values and ours.ended and ours.values[0] == row.tolist()
    with pytest.raises(HeadstartError, match="a streamer takes one answer, not 5"):
        custom_generate.generate_for_transformers(model, "org/head", **prompts(), streamer=Kept())


def test_sampling_follows_the_seed_and_has_the_models_distribution(model):
    row = torch.tensor([hub_cases.prompts()[0]])
    settings = {"do_sample": True, "temperature": 3.0, "top_k": 6, "max_new_tokens": 1, "num_return_sequences": 200}

    def draw(seed: int) -> torch.Tensor:
        set_seed(seed)
        return custom_generate.generate_for_transformers(model, "org/head", inputs=row, **settings)

    first = draw(1)
    assert torch.equal(first, draw(1)) and not torch.equal(first, draw(2))
    logits, ids = (model(row).logits[0, -1] / 3.0).topk(6)
    expected = dict(zip(ids.tolist(), logits.softmax(-1).tolist(), strict=True))
    counts = Counter(first[:, row.shape[1]].tolist())
    assert set(counts) <= set(expected)
    # Pearson's statistic, 5 degrees of freedom: above 20.5 once in a thousand seeds
    assert sum((counts[token] - 200 * p) ** 2 / (200 * p) for token, p in expected.items()) < 20.5


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"num_beams": 4}, "num_beams=4"),
        ({"typical_p": 0.9, "do_sample": True}, "typical_p=0.9"),
        ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens=3"),
        ({"guidance_scale": 1.5, "num_beams": 2}, "num_beams=2, guidance_scale=1.5"),
        ({"output_scores": True}, "output_scores=True"),
        ({"max_time": 3.0}, "max_time=3.0"),
        ({"stopping_criteria": [lambda *_: True]}, "stopping_criteria"),
        ({"prefix_allowed_tokens_fn": lambda *_: [1]}, "prefix_allowed_tokens_fn"),
        ({"inputs_embeds": torch.zeros(1, 3, 64)}, "inputs_embeds"),
        ({"position_ids": torch.arange(3)}, "position_ids"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_not_supported_is_refused_by_name(settings, said, model):
    with pytest.raises(HeadstartError) as caught:
        custom_generate.generate_for_transformers(model, "org/head", **prompts(), **settings)
    assert str(caught.value).startswith(f"headstart does not support {said}; leave that out")


def test_what_is_asked_for_only_when_sampling_is_no_matter_when_it_is_greedy(model):
    settings = GenerationConfig(typical_p=0.9, temperature=0.6, top_p=0.9, max_new_tokens=5, pad_token_id=tiny.PAD)
    plain, drafted = both(model, **prompts(), generation_config=settings)
    assert torch.equal(plain, drafted)


def test_wrong_inputs_are_said(model):
    run = custom_generate.generate_for_transformers
    with pytest.raises(HeadstartError, match="needs input_ids"):
        run(model, "org/head")
    with pytest.raises(HeadstartError, match=r"attention_mask has shape \[1, 2\], input_ids \[1, 3\]"):
        run(model, "org/head", inputs=torch.tensor([[1, 2, 3]]), attention_mask=torch.ones(1, 2))
    with pytest.raises(HeadstartError, match="leaves no room for an answer"):
        run(model, "org/head", inputs=torch.tensor([[1, 2, 3]]), max_length=3)


def test_the_model_stays_as_it_is_and_is_looked_at_anew_when_it_changes(model, folder):
    model = copy.deepcopy(model).train().requires_grad_(True)
    before = model.config._attn_implementation
    row = torch.tensor([hub_cases.prompts()[0]])
    run = custom_generate.generate_for_transformers
    first = run(model, "org/head", inputs=row, max_new_tokens=4)
    assert model.training and model.config._attn_implementation == before
    assert all(parameter.requires_grad for parameter in model.parameters())
    (guest,) = GUESTS[model].values()
    assert torch.equal(run(model, "org/head", inputs=row, max_new_tokens=4), first)
    assert GUESTS[model][Path("org/head")] is guest
    other = tiny.model("llama", dtype=torch.float64, seed=1)
    model.load_state_dict(other.state_dict(), assign=True)
    with pytest.raises(HeadstartError, match="the head was trained on tiny-llama.*weights embedding"):
        run(model, "org/head", inputs=row, max_new_tokens=4)


def test_the_code_says_what_is_missing(folder, monkeypatch):
    code = (folder / "org" / "head" / CODE).read_text()
    assert (folder / "org" / "head" / REQUIREMENTS).read_text().startswith("headstart>=")
    monkeypatch.setitem(sys.modules, "headstart.eval.custom_generate", None)
    with pytest.raises(ImportError, match=r"^org/head drafts with headstart, which is not here \(.*\); pip install"):
        exec(compile(code, "generate.py", "exec"), {"__file__": "generate.py"})


def test_transformers_names_headstart_where_it_is_not_installed(model, folder, monkeypatch):
    import importlib.metadata

    version = importlib.metadata.version

    def without(name: str) -> str:
        if name == "headstart":
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(importlib.metadata, "version", without)
    with pytest.raises(ImportError, match=r"Missing requirements .*\nheadstart>=.* \(installed: None\)"):
        model.generate(torch.tensor([[1]]), custom_generate="org/head", trust_remote_code=True)
