"""What a training step holds in memory and multiplies, part by part, foretold from a recipe and an architecture alone.

    footprint = foretell(recipe, read_architecture("config.json"), kind="cuda")
    footprint.activations, footprint.head_flops

The real target, head, TrainModule and optimiser go through a whole step on tensors without numbers
(headstart/rehearsal.py), so whatever they keep is counted as they keep it: there is no formula that could grow stale.
All figures are of one process that holds everything; scripts/placements.py divides them over GPUs.

Every token of the micro-batch is a label of one document as long as `data.max_length`: the most that a step can need.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any

import torch
from tokenizers import Tokenizer, models
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedTokenizerFast

from headstart.borrowed import input_module, output_module
from headstart.data.features import sequence_features
from headstart.data.packing import TokenBatch
from headstart.device_kind import device_kind, pretend
from headstart.errors import HeadError, HeadstartError, TargetError
from headstart.eval.acceptance import Number
from headstart.heads.base import Head
from headstart.heads.chunked import LOGITS
from headstart.heads.configs import DraftConfig, EagleConfig, UnrolledConfig
from headstart.heads.draft import as_student
from headstart.heads.starting import as_used
from headstart.heads.store import make_head
from headstart.heads.vocab import DraftVocab
from headstart.loading import parse_dtype
from headstart.recipe import Recipe
from headstart.rehearsal import Rehearsal
from headstart.target import Features, Target, find_layers
from headstart.train.curriculum import stages
from headstart.train.features import OnlineFeatures
from headstart.train.optimisers import make_optimizer
from headstart.train.train_module import TrainModule

TARGET, HEAD, GRADIENTS, OPTIMIZER = "target", "head", "gradients", "optimizer"
FORWARD, STEP, FEATURES = "target forward", "step", "features"
WORKING = (FORWARD, STEP, FEATURES, LOGITS)
"""Labels of what comes and goes within a step, gradients apart."""


@dataclass(frozen=True, kw_only=True)
class TargetSizes:
    """The target's weights. Bytes, but for `parameters` and `layers`."""

    parameters: int
    layers: int
    weights: int
    borrowed: int
    """Embedding, final norm and output head: all that is loaded where features come from a cache."""
    unit: int
    """The largest thing that is gathered whole where weights are spread: a layer, the embedding or the output head."""
    splittable: int | None
    """What transformers' own plan for tensor parallelism divides; None: it has no plan for this architecture."""
    key_heads: int
    """How many ways attention can be divided at most."""
    state: int
    """One state of one token."""


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """One micro-batch of `tokens` tokens, in bytes and in floating-point operations (a multiplication with its addition
    is two)."""

    target: TargetSizes
    head_parameters: int
    head: int
    gradients: int
    optimizer: int
    """State only: moments and counts."""
    features: int
    """The target's states that the head reads."""
    logits: int
    """What one chunk of the loss makes and forgets: logits, probabilities, the teacher's, gradients."""
    activations: int
    """The most of all else: what the target's layers make and forget, what autograd keeps for the head."""
    working: int
    """The most that features, logits and activations take together at one time; less than their sum."""
    working_offline: int
    """The same where the target is not run."""
    at_once: int
    """The most of all parts together at one time."""
    tokens: int
    taps: int
    """Layers whose states the head reads, besides the final state."""
    target_flops: int
    head_flops: int
    """Forward and backward, averaged over the stages of a curriculum."""


def foretell(recipe: Recipe, config: PreTrainedConfig, *, kind: str) -> Footprint:
    """The footprint of one step of the recipe with a target of this configuration, on a `kind` of device (cpu, cuda).

    The recipe's dtypes must be names, not `auto`. With an accumulation of several micro-batches gradients are there
    from the start. Raises TargetError where the forward of the target cannot be foretold.
    """
    rehearsal = Rehearsal(STEP)
    with rehearsal, pretend(kind), _explained(config):
        with rehearsal.label(TARGET):
            target = _target(recipe, config)
        with rehearsal.label(HEAD):
            head = bare_head(recipe, target)
        source = _Source(target, head.wants, rehearsal)
        module = TrainModule(target, head, parse_dtype(recipe.train.dtype), source).train()
        return _Stage(recipe, rehearsal, module, target, head, source).footprint()


def whole_batch(recipe: Recipe) -> TokenBatch:
    """A micro-batch without padding: sequences of one document, every token a label."""
    shape = (recipe.train.batch_size, recipe.data.max_length)
    places = torch.arange(shape[1]).repeat(shape[0], 1)
    ids = torch.zeros(shape, dtype=torch.long)
    return TokenBatch(ids, torch.ones(shape, dtype=torch.bool), places, torch.zeros_like(ids))


def bare_head(recipe: Recipe, target: Target) -> Head:
    """A head of the recipe's kind with the target's dimensions and none of its weights."""
    config, size = recipe.head, recipe.head.draft_vocab_size
    if isinstance(config, EagleConfig):  # scales are measured on weights, and change no shape
        config = config.model_copy(update={"embedding_scale": 1.0, "feature_scale": 1.0})
    if isinstance(config, UnrolledConfig):
        config = as_used(config, target)
    elif isinstance(config, DraftConfig):
        config = as_student(config, target)
    if size is not None and size > target.vocab_size:
        raise HeadError(
            f"head.draft_vocab_size is {size}, the target has {target.vocab_size} output rows; lower it, or set null"
        )
    whole = size in (None, target.vocab_size)
    vocab = None if whole else DraftVocab(torch.arange(size), target.vocab_size)
    return make_head(config, hidden_size=target.hidden_size, vocab_size=target.vocab_size, vocab=vocab)


def bare_target(recipe: Recipe, config: PreTrainedConfig) -> Target:
    """A target of this configuration with fresh weights in the recipe's dtype, and a tokenizer that knows nothing."""
    model: Any = AutoModelForCausalLM.from_config(config, dtype=parse_dtype(recipe.target.dtype))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))
    return Target(model, tokenizer, name=recipe.target.name)


def _target(recipe: Recipe, config: PreTrainedConfig) -> Target:
    try:
        return bare_target(recipe, config)
    except HeadstartError:
        raise
    except Exception as error:  # configurations are wrong in many ways, and each model fails in its own
        raise TargetError(
            f"no {config.model_type} can be made of the architecture of {recipe.target.name} "
            f"({(str(error).strip() or type(error).__name__).splitlines()[0]}); copy the published config.json"
        ) from error


@contextmanager
def _explained(config: PreTrainedConfig) -> Iterator[None]:
    try:
        yield
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise TargetError(
            f"the forward of {config.model_type} depends on numbers that a plan has not ({error.func}), as routed "
            "experts do; plan with a dense architecture of the same size"
        ) from error


class _Source(OnlineFeatures):
    """The target's forward, under a label of its own; once `given` is set, those features instead."""

    given: Features | None = None

    def __init__(self, target: Target, wants: tuple[int, ...], rehearsal: Rehearsal):
        super().__init__(target, wants)
        self.rehearsal = rehearsal

    def __call__(self, batch: TokenBatch, *, keep: bool = True) -> Features:
        if self.given is not None:
            return self.given
        on_cpu = device_kind(batch.input_ids.device) == "cpu"
        with self.rehearsal.label(FORWARD):
            found = super().__call__(batch) if on_cpu else sequence_features(self.target, batch, self.wants)
        self.rehearsal.relabel([found.final, *found.taps.values()], FEATURES)
        return found


@dataclass
class _Stage:
    """Everything of a step, on stage."""

    recipe: Recipe
    rehearsal: Rehearsal
    module: TrainModule
    target: Target
    head: Head
    source: _Source

    def footprint(self) -> Footprint:
        rehearsal, ledger = self.rehearsal, self.rehearsal.ledger
        optimizer = make_optimizer(self.recipe.train, self.head)
        self._leave_gradients()
        optimizer.step()  # makes its state
        rehearsal.relabel(list(optimizer.state.values()), OPTIMIZER)
        optimizer.zero_grad(set_to_none=True)
        batch = whole_batch(self.recipe)

        self.head.set_share(_longest(self.recipe))
        self._take_step(batch)
        optimizer.step()
        bytes_of = {label: ledger.most(label) for label in (GRADIENTS, OPTIMIZER, FEATURES, LOGITS)}
        most = {
            "activations": ledger.most(FORWARD, STEP),
            "working": ledger.most(*WORKING),
            "at_once": ledger.most(TARGET, HEAD, GRADIENTS, OPTIMIZER, *WORKING),
        }
        target_flops = rehearsal.flops[FORWARD]

        with torch.no_grad():
            self.source.given = _stored(self.target, self.head, batch)
        rehearsal.relabel([self.source.given.final, *self.source.given.taps.values()], FEATURES)
        self._take_step(batch)
        offline = ledger.most(*WORKING)
        head_flops, begin = 0.0, 0.0
        for stage in stages(self.head.config):
            self.head.set_share(begin)
            before = self._head_flops()
            self._take_step(batch)
            head_flops += (stage.until - begin) * (self._head_flops() - before)
            begin = stage.until
        return Footprint(
            target=target_sizes(self.target),
            head_parameters=sum(parameter.numel() for parameter in self.head.parameters()),
            head=weight_bytes(self.head),
            **bytes_of,
            **most,
            working_offline=offline,
            tokens=batch.num_tokens,
            taps=len(self.head.wants),
            target_flops=target_flops,
            head_flops=round(head_flops),
        )

    def _head_flops(self) -> int:
        return self.rehearsal.flops[STEP] + self.rehearsal.flops[LOGITS]

    def _take_step(self, batch: TokenBatch) -> None:
        """Forward and backward of one micro-batch, counted from its start."""
        self.head.zero_grad(set_to_none=True)
        if self.recipe.train.accumulation > 1:
            self._leave_gradients()
        self.rehearsal.ledger.restart()
        self.module(batch).loss_sum.backward()
        self.rehearsal.relabel([parameter.grad for parameter in self.head.parameters()], GRADIENTS)

    def _leave_gradients(self) -> None:
        """As an earlier micro-batch does."""
        with self.rehearsal.label(GRADIENTS):
            for parameter in self.head.parameters():
                parameter.grad = torch.empty_like(parameter)


def _longest(recipe: Recipe) -> Number:
    """A share of the training that lies in the stage with the most unrolled steps."""
    found = stages(recipe.head)
    longest = max(range(len(found)), key=lambda number: found[number].steps)
    return 0.0 if longest == 0 else found[longest - 1].until


def _stored(target: Target, head: Head, batch: TokenBatch) -> Features:
    """Features as they come out of a cache."""
    shape = (*batch.input_ids.shape, target.hidden_size)
    return Features(
        torch.zeros(shape, dtype=target.dtype), {k: torch.zeros(shape, dtype=target.dtype) for k in head.wants}
    )


def target_sizes(target: Target) -> TargetSizes:
    """What the target's weights take, whole and in the pieces that placements deal out."""
    model, config = target.model, target.config
    layers, norm = find_layers(target.decoder, target.num_layers, target.name)
    ends = [input_module(model), output_module(model)]
    heads = int(config.num_attention_heads)
    return TargetSizes(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        layers=target.num_layers,
        weights=weight_bytes(model),
        borrowed=weight_bytes(*ends, *([] if norm is None else [norm])),
        unit=max(weight_bytes(module) for module in [*layers, *ends]),
        splittable=_splittable(model),
        key_heads=int(getattr(config, "num_key_value_heads", None) or heads),
        state=target.hidden_size * target.dtype.itemsize,
    )


def weight_bytes(*modules: nn.Module) -> int:
    """Of their parameters; one that is shared counts once."""
    parameters: dict[int, Tensor] = {id(one): one for module in modules for one in module.parameters()}
    return sum(parameter.nbytes for parameter in parameters.values())


def _splittable(model: Any) -> int | None:
    """Bytes of the parameters that the model's tensor-parallel plan divides."""
    plan = {name: style for name, style in (getattr(model, "tp_plan", None) or {}).items() if "replicated" not in style}
    if not plan:
        return None
    divided = [
        parameter
        for name, parameter in model.named_parameters()
        if any(fnmatch(name.rpartition(".")[0], pattern) or fnmatch(name, pattern) for pattern in plan)
    ]
    return sum(parameter.nbytes for parameter in divided)
