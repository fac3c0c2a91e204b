"""A model that the caller goes on using, as a target of ours: modules of our own over its weights, looked at once.

guest = guest_of(model, folder_of_a_head, tokenizer)
guest.engine(rows=1).generate(requests)
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from headstart.decode.engine import Engine
from headstart.decode.selfcheck import check_target
from headstart.errors import HeadstartError
from headstart.eval.drafters import plan_drafter
from headstart.eval.trained import Named, find_named
from headstart.heads.store import read_description
from headstart.loading import load_tokenizer
from headstart.target import Target, check_fingerprint


@dataclass
class Guest:
    """A model of the caller's as a target of ours, and the engine that decodes it."""

    target: Target
    named: Named
    weights: tuple[int, ...]
    """Where its weights lie: another place means that it was moved or changed, and is looked at anew."""
    engines: dict[int, Engine] = field(default_factory=dict)
    """By rows decoded at a time; the last one only, for each holds a cache of keys and values and a head."""

    def engine(self, rows: int) -> Engine:
        if rows not in self.engines:
            self.engines.clear()
            plan = plan_drafter("head", self.named.head, self.named.recipe.eval.tree, rows=rows)
            drafter = plan.make(self.target)
            self.engines[rows] = Engine(self.target, drafter, batch_size=rows, budget=plan.budget)
        return self.engines[rows]


GUESTS: WeakKeyDictionary[PreTrainedModel, dict[Path, Guest]] = WeakKeyDictionary()
"""By model and folder of the head; forgotten with the model."""


def guest_of(model: PreTrainedModel, folder: Path, tokenizer: PreTrainedTokenizerBase | None) -> Guest:
    """The guest of this model and head; made and checked on the first call, and again where the weights have moved.

    folder: of a run or a head. tokenizer: None loads the one that the model's name leads to. Raises HeadstartError.
    """
    known = GUESTS.setdefault(model, {})
    weights = tuple(parameter.data_ptr() for parameter in model.parameters())
    guest = known.get(folder)
    if guest is None or guest.weights != weights:
        devices = {parameter.device for parameter in model.parameters()}
        if len(devices) > 1:
            raise HeadstartError(
                f"the model is spread over {', '.join(sorted(map(str, devices)))}; load it whole onto one device"
            )
        name = model.name_or_path or type(model).__name__
        named = find_named(folder, name)
        target = Target(_over_its_weights(model), tokenizer or load_tokenizer(name), name=name)
        check_target(target)
        _refuse_other_model(target, named)
        guest = known[folder] = Guest(target, named, weights)
    return guest


def _refuse_other_model(target: Target, named: Named) -> None:
    """TargetError where the head was trained for another one. Where answers end is the caller's to say, call by call,
    and is no part of the comparison."""
    assert named.head is not None
    stored = read_description(named.head)["target"]
    ends = stored.get("tokenizer", {}).get("model_end")
    target.end_token_ids = target.end_token_ids if ends is None else tuple(ends)
    check_fingerprint(stored, target)


def _over_its_weights(model: PreTrainedModel) -> PreTrainedModel:
    """Modules of our own over the same numbers: what we switch in them does not show in the caller's model."""
    shared: dict[int, Any] = {
        id(parameter): nn.Parameter(parameter.detach(), requires_grad=False) for parameter in model.parameters()
    }
    return copy.deepcopy(model, shared | {id(buffer): buffer for buffer in model.buffers()})
