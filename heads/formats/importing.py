"""Makes a head of ours from what a foreign checkpoint holds, once the target is there to compare with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pydantic

from headstart.borrowed import input_module, weight_of
from headstart.errors import HeadError
from headstart.heads.base import Head
from headstart.heads.configs import HEADS, UnrolledConfig
from headstart.heads.formats.foreign import Foreign, equal_rounded
from headstart.heads.starting import as_used
from headstart.heads.store import make_head
from headstart.heads.vocab import DraftVocab
from headstart.target import Target


def imported_head(foreign: Foreign, target: Target) -> Head:
    """The head, bit for bit in the stored dtype, in evaluation mode. Raises HeadError where the target is another."""
    for name, found, wanted in (
        ("hidden_size", foreign.hidden_size, target.hidden_size),
        ("vocab_size", foreign.vocab_size or target.vocab_size, target.vocab_size),
    ):
        if found != wanted:
            raise HeadError(
                f"the checkpoint is for a target of {name} {found}, {target.name} has {wanted}; give the target that "
                "it was trained for"
            )
    ids = foreign.state.get("vocab.ids")
    _compare_borrowed(foreign, target)
    settings = dict(foreign.settings)
    if foreign.type == "eagle3" and settings["layers"] is None:
        settings["layers"] = published_layers(target)
    try:
        config = HEADS[foreign.type].model_validate({"type": foreign.type, **settings})
    except pydantic.ValidationError as error:
        fault = error.errors()[0]
        key = ".".join(map(str, fault["loc"])) or "the checkpoint"
        raise HeadError(f"{key}: {fault['msg']}, found {fault['input']!r}; our heads do not have it") from None
    if isinstance(config, UnrolledConfig):
        config = as_used(config, target)
    vocab = None if ids is None else DraftVocab(ids, target.vocab_size)
    head = make_head(config, hidden_size=target.hidden_size, vocab_size=target.vocab_size, vocab=vocab)
    head.load_state_dict(foreign.state, strict=True, assign=True)
    return head.eval()


def with_layers(foreign: Foreign, layers: Sequence[int]) -> Foreign:
    """The same, reading other HF[k] than its config.json says, or does not say."""
    if foreign.type != "eagle3":
        raise HeadError(f"a {foreign.type} head reads no layers; leave --layers out")
    taps = foreign.state["fc.weight"].shape[1] // foreign.hidden_size
    if len(layers) != taps or sorted({*layers}) != list(layers):
        raise HeadError(f"--layers is {list(layers)}, expected {taps} ascending indices of hidden_states")
    return replace(foreign, settings={**foreign.settings, "layers": list(layers)})


def published_layers(target: Target) -> list[int]:
    """What every tool means where a checkpoint is silent: HF[2], HF[N // 2], HF[N - 3]."""
    layers = [2, target.num_layers // 2, target.num_layers - 3]
    if sorted(set(layers)) != layers:
        raise HeadError(
            f"the checkpoint does not say which layers it reads, and the usual {layers} of the {target.num_layers} "
            "layers of the target are not three in ascending order; add --layers"
        )
    return layers


def _compare_borrowed(foreign: Foreign, target: Target) -> None:
    """Copies of the target's tensors in the checkpoint must be the target's: ours are borrowed from it."""
    rows = foreign.state.get("vocab.ids")
    for what, found in foreign.borrowed.items():
        if what == "embedding":
            wanted = weight_of(input_module(target.model)).detach()
        else:
            wanted = target.output.weight_rows(rows)
        if not equal_rounded(found, wanted):  # a target loaded in fp32 from bf16 files is still the same
            raise HeadError(
                f"the {what} in the checkpoint is not that of {target.name}, and our heads use their target's; give "
                "the target that it was trained with, for a merged model the checkpoint's own folder"
            )
