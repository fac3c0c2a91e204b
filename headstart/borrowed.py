"""What a head borrows from the target: its embedding and its output head.

Both are arguments of a head, never attributes: they are not saved, counted or trained with it. These two classes alone
know the model's own scales, and how to read a weight of which this process holds only a shard (ZeRO-3, FSDP2).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.func import functional_call
from transformers import PreTrainedModel

from headstart.errors import TargetError

if TYPE_CHECKING:
    from headstart.target import Target


def input_module(model: PreTrainedModel) -> nn.Module:
    """The embedding as it stands now: a decode copy may have swapped modules since the target was wrapped."""
    return _present(model.get_input_embeddings(), model, "embedding")


def output_module(model: PreTrainedModel) -> nn.Module:
    """The output head's linear layer as it stands now."""
    return _present(model.get_output_embeddings(), model, "output head")


def _present(module: nn.Module | None, model: PreTrainedModel, what: str) -> nn.Module:
    if module is None:
        raise TargetError(
            f"a {model.config.model_type} model without {what} is no target; name a causal language model"
        )
    return module


def weight_of(module: nn.Module) -> Tensor:
    """Its weight, sharded or not."""
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight


def weight_shape(weight: Tensor) -> tuple[int, int]:
    """Rows and columns of a weight as the model defines it, also where ZeRO-3 left an empty tensor in its place."""
    shape = getattr(weight, "ds_shape", weight.shape)
    if len(shape) != 2 or 0 in shape:
        raise TargetError(f"a vocabulary weight has shape {tuple(shape)}, expected [rows, dim]; load the target whole")
    return int(shape[0]), int(shape[1])


def read_weight(weight: Tensor, rows: Int[Tensor, " rows"] | None = None) -> Tensor:
    """The weight, or some of its rows, as an ordinary tensor without gradient; a sharded one is gathered first."""
    if hasattr(weight, "ds_id") and weight.numel() == 0:  # ZeRO-3, outside the forward of the module that owns it
        import deepspeed  # pyright: ignore[reportMissingImports]  (an extra)

        with deepspeed.zero.GatheredParameters([weight]):
            whole = weight.detach()
            return whole.clone() if rows is None else whole.index_select(0, rows)
    whole = weight.detach()
    if isinstance(whole, DTensor):
        whole = whole.full_tensor()
    return whole if rows is None else whole.index_select(0, rows.to(whole.device))


def _call(module: nn.Module, inputs: Tensor) -> Tensor:
    """module(inputs). FSDP2 gathers in the forward of its root only: outside of it, gather here."""
    weight = getattr(module, "weight", None)
    if isinstance(weight, DTensor):
        parameters = {name: read_weight(value) for name, value in module.named_parameters()}
        return functional_call(module, parameters, (inputs,))
    return module(inputs)


class Embedding:
    """The target's token embedding as its first layer receives it, without position embeddings."""

    def __init__(self, model: PreTrainedModel):
        self._model = model
        self.multiplier = _embedding_multiplier(model)
        self.vocab_size = weight_shape(weight_of(input_module(model)))[0]

    def __call__(self, ids: Int[Tensor, "*batch"]) -> Float[Tensor, "*batch dim"]:
        """Vectors of token ids, with the model's own scale; in the dtype of the embedding's weight."""
        vectors = self.inputs(ids)
        return vectors if self.multiplier == 1.0 else vectors * self.multiplier

    embed = __call__

    def inputs(
        self, ids: Int[Tensor, "*batch"], weight: Float[Tensor, "rows dim"] | None = None
    ) -> Float[Tensor, "*batch dim"]:
        """What a decoder takes as `inputs_embeds`, and scales itself. weight: another one in the place of the model's,
        with gradient."""
        # The module, not its weight: Gemma's embedding scales by itself, and ZeRO-3 gathers in its hooks.
        module = input_module(self._model)
        return _call(module, ids) if weight is None else functional_call(module, {"weight": weight}, (ids,))


class OutputHead:
    """The target's output head: final states to logits, with bias, logit scale and soft-cap as the model has them."""

    def __init__(self, model: PreTrainedModel, final_norm: nn.Module | None):
        self._model = model
        self._final_norm = final_norm
        self.scale = _logit_scale(model.config.get_text_config())
        self.soft_cap: float | None = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
        self.vocab_size = weight_shape(weight_of(output_module(model)))[0]

    def logits(
        self, hidden: Float[Tensor, "*batch dim"], rows: Int[Tensor, " rows"] | None = None, *, norm: bool = False
    ) -> Float[Tensor, "*batch vocab"]:
        """Logits over the vocabulary (all rows of the weight), or over the target ids `rows`, in that order.

        hidden: after the final norm; before it if `norm` (the norm is then applied first).
        The result has the weight's dtype (under autocast, autocast's).
        """
        if norm:
            hidden = self.normalise(hidden)
        if rows is not None:
            return self.select(rows).logits(hidden)
        module = output_module(self._model)
        return self._finish(_call(module, _match(hidden, weight_of(module))))

    def select(self, rows: Int[Tensor, " rows"] | None = None) -> SelectedRows:
        """The weights of some output rows (None: all), gathered once, for a loop over chunks of positions."""
        bias = getattr(output_module(self._model), "bias", None)
        return SelectedRows(self, self.weight_rows(rows), None if bias is None else read_weight(bias, rows))

    def weight_rows(self, rows: Int[Tensor, " rows"] | None = None) -> Float[Tensor, "rows dim"]:
        """Rows of the output weight by target id, in that order, without gradient; None: the whole weight."""
        return read_weight(weight_of(output_module(self._model)), rows)

    def normalise(self, hidden: Float[Tensor, "*batch dim"]) -> Float[Tensor, "*batch dim"]:
        """The model's final norm."""
        if self._final_norm is None:
            kind = self._model.config.model_type
            raise TargetError(
                f"no final norm was found in this {kind} model, which this head needs; use another target"
            )
        return self._final_norm(hidden)

    def _finish(self, logits: Float[Tensor, "*batch vocab"]) -> Float[Tensor, "*batch vocab"]:
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.soft_cap is not None:
            logits = self.soft_cap * torch.tanh(logits / self.soft_cap)
        return logits


class SelectedRows:
    """Some rows of an output head, held as plain tensors: what OutputHead.logits(hidden, rows) computes."""

    def __init__(self, head: OutputHead, weight: Float[Tensor, "rows dim"], bias: Float[Tensor, " rows"] | None):
        self._head, self.weight, self.bias = head, weight, bias

    def logits(self, hidden: Float[Tensor, "*batch dim"]) -> Float[Tensor, "*batch rows"]:
        """Logits over the selected rows; `hidden` is after the final norm."""
        return self._head._finish(nn.functional.linear(_match(hidden, self.weight), self.weight, self.bias))


def _match(hidden: Tensor, weight: Tensor) -> Tensor:
    """A head trained in fp32 meets a bf16 target: round what enters, unless autocast does it."""
    return hidden if torch.is_autocast_enabled(hidden.device.type) else hidden.to(weight.dtype)


def _embedding_multiplier(model: PreTrainedModel) -> float:
    """What the model's forward, not its embedding module, multiplies embeddings with."""
    config = model.config.get_text_config()
    if hasattr(input_module(model), "embed_scale"):  # Gemma, MiniCPM: the module scales by itself
        return 1.0
    if getattr(config, "mup_enabled", False):  # AFMoE
        return float(config.hidden_size**0.5)
    for name in ("embedding_multiplier", "scale_emb"):  # Granite, HyperCLOVA X, Falcon-H1; MiniCPM's own code
        if getattr(config, name, None) is not None:
            return float(getattr(config, name))
    return 1.0


def _logit_scale(config) -> float:
    """What logits are multiplied with before the soft-cap. One name divides in one family and multiplies in another."""
    for name in ("logit_scale", "lm_head_multiplier", "output_multiplier"):  # Cohere; Falcon-H1; Muse
        if getattr(config, name, None) is not None:
            return float(getattr(config, name))
    scaling = getattr(config, "logits_scaling", None)
    if scaling is not None:  # Granite and MiniCPM3 divide
        return float(scaling) if config.model_type.startswith("hyperclovax") else 1.0 / float(scaling)
    if getattr(config, "dim_model_base", None) is not None:  # MiniCPM's own code
        return config.dim_model_base / config.hidden_size
    return 1.0


@torch.no_grad()
def check_borrowed(target: Target) -> None:
    """Refuses a target whose embedding or logits are not what this file computes; one forward of 2 x 4 tokens.

    Families put scales in many places under many names, and a wrong one would only show as bad drafts.
    """
    model = target.model
    ids = torch.arange(8, device=target.device).view(2, 4) * (target.embedding.vocab_size // 8)
    seen: dict[str, Tensor] = {}
    hooks = [
        target.decoder.register_forward_hook(lambda _m, _a, out: seen.update(final=out.last_hidden_state)),
        target.layers[0].register_forward_pre_hook(
            lambda _m, args, kwargs: seen.update(first=args[0] if args else kwargs["hidden_states"]), with_kwargs=True
        ),
    ]
    try:
        logits = model(input_ids=ids, use_cache=False).logits
    finally:
        for hook in hooks:
            hook.remove()
    _compare("logits", target, target.output.logits(seen["final"]), logits, scale=logits)
    # position embeddings, where there are any, are the same in both rows
    ours, theirs = target.embedding(ids), seen["first"]
    _compare("embeddings", target, ours[0] - ours[1], theirs[0] - theirs[1], scale=theirs)


def _compare(what: str, target: Target, ours: Tensor, theirs: Tensor, *, scale: Tensor) -> None:
    tolerance = 4 * torch.finfo(target.dtype).eps * scale.abs().max()
    if not (ours - theirs).abs().max() <= tolerance:
        raise TargetError(
            f"{target.name} ({target.config.model_type}) computes its {what} in a way that headstart does not know; "
            "use a target of another family"
        )
