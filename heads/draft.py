"""A student: a small language model made of a few of the target's layers, which predicts the next token from the text.

It starts as the target with the other layers left out, by the model's own modules (`AutoModelForCausalLM` over the
target's configuration with fewer layers), and is trained on the target's distribution at every position of the answers:
https://arxiv.org/abs/2310.08461 (distillation for drafting), https://arxiv.org/abs/1910.01108 (layers at even
distances). Like every head it borrows the target's embedding and output rows as arguments, unless it has its own.

    head.states(batch, embedding)       # training: the decoder over whole texts
    student_model(head, target)         # drafting, export: the same weights as a model by itself
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, PreTrainedConfig

from headstart.architecture import empty_model, with_layers
from headstart.borrowed import (
    Embedding,
    OutputHead,
    SelectedRows,
    input_module,
    output_module,
    read_weight,
    weight_of,
    weight_shape,
)
from headstart.data.packing import TokenBatch
from headstart.errors import HeadError
from headstart.heads.base import Alignment, Head, HeadOutput
from headstart.heads.chunked import ChunkedLoss
from headstart.heads.configs import DraftConfig
from headstart.heads.losses import needs_teacher
from headstart.heads.vocab import DraftVocab
from headstart.target import Features, Target, attention_masks, find_decoder, find_layers, layer_kinds

_OF_THIS_MACHINE = ("_name_or_path", "transformers_version", "dtype")
"""What a configuration says that is not about the architecture."""


class DraftHead(Head):
    """The trained part of a student.

    Parameters: `decoder.*`, by the model's own names, without its embedding; `embedding: own` adds `embedding_weight`
    [rows, dim]; `output: own` adds `output_weight` [draft, dim], and `output_bias` [draft] where the target has one.
    """

    config: DraftConfig  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(self, config: DraftConfig, *, hidden_size: int, vocab_size: int, vocab: DraftVocab | None = None):
        super().__init__(config, hidden_size=hidden_size, vocab_size=vocab_size, vocab=vocab)
        architecture = _architecture(config)
        model = empty_model(architecture)
        self._output = OutputHead(model, None)  # for its scale and soft-cap: its weight is empty
        self._kinds, self._windows = layer_kinds(architecture, config.num_layers)
        embedding_shape = weight_shape(weight_of(input_module(model)))
        bias = getattr(output_module(model), "bias", None) is not None
        self.decoder = _without_embedding(model)
        for module in self.decoder.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                setattr(module, name, nn.Parameter(torch.zeros(parameter.shape)))
        own_output, draft = config.output == "own", self.draft_vocab_size
        self.embedding_weight = nn.Parameter(torch.zeros(embedding_shape)) if config.embedding == "own" else None
        self.output_weight = nn.Parameter(torch.zeros(draft, hidden_size)) if own_output else None
        self.output_bias = nn.Parameter(torch.zeros(draft)) if own_output and bias else None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> DraftHead:
        """Casts parameters alone, as loading a model does: rotary frequencies in bf16 turn late positions wrongly."""
        buffers = [
            (module, name, buffer)
            for module in self.decoder.modules()
            for name, buffer in module.named_buffers(recurse=False)
        ]
        super()._apply(fn, recurse)
        device = next(self.decoder.parameters()).device
        for module, name, buffer in buffers:
            setattr(module, name, buffer.to(device))
        return self

    @property
    def num_depths(self) -> int:
        return 1

    @staticmethod
    def axis_names(name: str) -> tuple[str, ...]:
        return {
            "embedding_weight": ("rows of the embedding", "hidden_size"),
            "output_weight": ("draft_vocab_size", "hidden_size"),
            "output_bias": ("draft_vocab_size",),
            "vocab.ids": ("draft_vocab_size",),
        }.get(name, ("size", "width of the state read"))

    @torch.no_grad()
    def initialise(self, target: Target) -> None:
        """The kept layers, the final norm and what else is beside them start as the target's, and so do own rows."""
        assert self.config.layers is not None
        layers, _ = find_layers(self.decoder, self.config.num_layers, "the student")
        for ours, number in zip(layers, self.config.layers, strict=True):
            _copy_parameters(ours, target.layers[number], f"layer {number} of {target.name}")
        inside = {id(parameter) for parameter in layers.parameters()}
        theirs = dict(target.decoder.named_parameters())
        for name, parameter in self.decoder.named_parameters():
            if id(parameter) not in inside:
                parameter.copy_(read_weight(theirs[name]))
        if self.embedding_weight is not None:
            self.embedding_weight.copy_(read_weight(weight_of(input_module(target.model))))
        if self.output_weight is not None:
            rows = target.output.select(self.draft_ids)
            self.output_weight.copy_(rows.weight)
            if self.output_bias is not None and rows.bias is not None:
                self.output_bias.copy_(rows.bias)

    def recompute_activations(self) -> None:
        decoder: Any = self.decoder  # a model of transformers, which does so layer by layer
        decoder.gradient_checkpointing_enable({"use_reentrant": False})

    def forward(self, features: Features, batch: TokenBatch, embedding: Embedding, output: OutputHead) -> HeadOutput:
        """Loss and counts over all supervised tokens of the batch, each predicted from the true text before it; the
        target's features are read for its distribution alone."""
        alignment = Alignment.of_next(batch)
        states = self.states(batch, embedding).flatten(0, 1)[alignment.positions, None]
        weights: dict[str, float] = {**self.config.loss_weights}
        shares_rows = self.output_weight is None
        rows = output.select(self.draft_ids) if shares_rows or needs_teacher(weights) else None
        loss = ChunkedLoss(
            alignment=alignment,
            labels=self.draft_index(batch.input_ids.flatten()[alignment.tokens]),
            project=lambda states, *own: self._project(states, rows, *own),
            teacher_logits=lambda final: rows.logits(final),  # pyright: ignore[reportOptionalMemberAccess]
            final=features.final.flatten(0, 1),
            vocab_size=self.draft_vocab_size,
            loss_weights=weights,
            depth_weights=[1.0],
            teacher_top_k=self.config.teacher_top_k,
        )
        return loss(states, *self._own_output())

    def states(self, batch: TokenBatch, embedding: Embedding) -> Float[Tensor, "batch seq dim"]:
        """The final state at every position of the batch, documents apart: what the output rows read."""
        inputs = embedding.inputs(batch.input_ids, self.embedding_weight).to(next(self.decoder.parameters()).dtype)
        masks = attention_masks(self._kinds, self._windows, *batch.attention(), inputs.dtype)
        read = self.decoder(
            inputs_embeds=inputs, position_ids=batch.position_ids, attention_mask=masks, use_cache=False
        )
        return read.last_hidden_state

    def logits(self, states: Float[Tensor, "*batch dim"], rows: SelectedRows | None) -> Float[Tensor, "*batch vocab"]:
        """Logits over the draft vocabulary from `states`.

        rows: the target's, of `draft_ids` and any others behind them; None for a student with own output rows.
        """
        return self._project(states, rows, *self._own_output())

    def _own_output(self) -> list[nn.Parameter]:
        return [parameter for parameter in (self.output_weight, self.output_bias) if parameter is not None]

    def _project(self, states: Tensor, rows: SelectedRows | None, *own: Tensor) -> Tensor:
        """The one way from states to logits, with the model's own scale and soft-cap."""
        if own:
            return SelectedRows(self._output, own[0], own[1] if len(own) > 1 else None).logits(states)
        assert rows is not None
        return rows.logits(states)


def as_student(config: DraftConfig, target: Target) -> DraftConfig:
    """The configuration with the kept layers and the student's architecture written out."""
    if config.architecture is not None:
        raise HeadError("head.architecture is worked out from the target's configuration; leave it null")
    if target.config.model_type not in CONFIG_MAPPING:
        raise HeadError(
            f"{target.name} ({target.config.model_type}) brings its own code, of which no student can be made; train a "
            "medusa, eagle or eagle3 head"
        )
    kept, last = config.layers or even_layers(target.num_layers, config.num_layers), target.num_layers - 1
    if len(kept) > target.num_layers or kept[-1] > last:
        asked = f"layer {kept[-1]}" if config.layers else f"{config.num_layers} layers"
        raise HeadError(f"the head asks for {asked}, {target.name} has layers 0 to {last}; keep fewer of them")
    architecture = json.loads(with_layers(target.config, kept).to_json_string(use_diff=False))
    architecture = {name: value for name, value in architecture.items() if name not in _OF_THIS_MACHINE}
    if "own" in (config.embedding, config.output):
        architecture["tie_word_embeddings"] = False
    return config.model_copy(update={"layers": kept, "architecture": architecture})


def even_layers(num_layers: int, count: int) -> list[int]:
    """`count` of the layers at even distances, the first and the last among them; of one, the first."""
    return [round(place * (num_layers - 1) / max(1, count - 1)) for place in range(count)]


@torch.no_grad()
def student_model(head: DraftHead, target: Target, *, whole: bool = True) -> Target:
    """The student as a language model by itself, in the target's dtype and on its device.

    What it borrows it shares with the target. whole: with output rows for every token, those of the target where the
    student has none of its own; False: with its own rows alone, in the order of `draft_ids`.
    """
    model: Any = empty_model(_architecture(head.config))
    state = {
        name: tensor.to(target.device, _dtype(tensor, target)) for name, tensor in head.decoder.state_dict().items()
    }
    _without_embedding(model).load_state_dict(state, strict=True, assign=True)
    embedding = input_module(target.model)
    if head.embedding_weight is not None:
        embedding = copy.deepcopy(embedding)
        embedding.weight = nn.Parameter(head.embedding_weight.detach().to(target.device, target.dtype))
    model.set_input_embeddings(embedding)
    model.set_output_embeddings(
        output_module(target.model) if head.output_weight is None else _rows(head, target, whole)
    )
    model.generation_config = copy.deepcopy(target.model.generation_config)
    return Target(model.to(target.device), target.tokenizer, name=f"the student of {target.name}")


def save_student(head: DraftHead, target: Target, folder: str | Path, *, dtype: torch.dtype | None = None) -> Path:
    """Writes the student as a folder that transformers and serving engines load: model, borrowed weights and tokenizer.

    dtype: None is the target's. Such a folder knows no draft vocabulary: an engine drafts from all tokens, also those
    that were not trained.
    """
    model: Any = student_model(head, target).model
    if dtype not in (None, target.dtype):
        model = copy.deepcopy(model).to(dtype)  # what is shared stays as it is
    model.save_pretrained(folder)
    target.tokenizer.save_pretrained(folder)
    return Path(folder)


def _rows(head: DraftHead, target: Target, whole: bool) -> nn.Linear:
    """An output layer with the student's own rows, in the places of the target's or alone."""
    own = [parameter.detach().to(target.device, target.dtype) for parameter in head._own_output()]
    if whole and head.draft_ids is not None:
        places, theirs = head.draft_ids.to(target.device), target.output.select()
        whole_rows = [theirs.weight] if theirs.bias is None else [theirs.weight, theirs.bias]
        own = [rows.index_copy(0, places, some) for rows, some in zip(whole_rows, own, strict=True)]
    layer = nn.Linear(own[0].shape[1], own[0].shape[0], bias=len(own) > 1, device="meta")
    for name, rows in zip(("weight", "bias"), own, strict=False):
        setattr(layer, name, nn.Parameter(rows))
    return layer


def _dtype(tensor: Tensor, target: Target) -> torch.dtype:
    return target.dtype if tensor.is_floating_point() else tensor.dtype


def _architecture(config: DraftConfig) -> PreTrainedConfig:
    assert config.architecture is not None, "build_head writes it out"
    kind = str(config.architecture.get("model_type"))
    if kind not in CONFIG_MAPPING:
        raise HeadError(
            f"this transformers knows no model of type {kind!r}, which the student is; upgrade transformers"
        )
    return CONFIG_MAPPING[kind].from_dict(config.architecture)


def _without_embedding(model: Any) -> nn.Module:
    """The model's decoder; embeddings are handed to it, or put into the model again."""
    model.set_input_embeddings(nn.Identity())
    return find_decoder(model)


def _copy_parameters(ours: nn.Module, theirs: nn.Module, what: str) -> None:
    source = dict(theirs.named_parameters())
    own = dict(ours.named_parameters())
    other = sorted(own.keys() ^ source.keys()) or [name for name in own if own[name].shape != source[name].shape]
    if other:
        raise HeadError(f"{what} differs from the student's in {other[0]}, so it cannot be kept; choose other layers")
    for name, parameter in own.items():
        parameter.copy_(read_weight(source[name]))
