"""The target: a frozen causal language model, and the few things that heads and decoding ask of it.

    target = load_target("bundled:smollm2-135m", dtype="float32")
    features = target.forward(ids, positions, target.masks(allowed, distance), layers=[2, 15, 27])
    logits = target.output.logits(features.final)

Nothing here changes the model: its code, its weights and its output distribution stay as they are.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import (
    Cache,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from headstart.architecture import compare_architecture
from headstart.borrowed import Embedding, OutputHead, check_borrowed, output_module, weight_of, weight_shape
from headstart.bypass import Bypass, unchanged
from headstart.errors import TargetError
from headstart.fingerprint import check_fingerprint, fingerprint
from headstart.loading import load_model, load_tokenizer, parse_device, parse_dtype
from headstart.quantised_linear import BITS, quantise_layers

__all__ = ["Embedding", "Features", "OutputHead", "Target", "check_fingerprint", "load_target", "load_tokenizer"]

FINAL_NORM_NAMES = ("norm ln_f final_layernorm final_layer_norm norm_f final_norm layer_norm embedding_norm").split()
UNLIMITED_POSITIONS = 2**31 - 1


@dataclass(frozen=True)
class Features:
    """What one forward of the target gives.

    final: after the final norm, what the output head reads. In Hugging Face's numbering this is HF[num_layers] too.
    taps: HF[k] by k. HF[0] is what the first layer reads, HF[k] what the k-th layer wrote: the residual stream, before
    the final norm.
    """

    final: Float[Tensor, "batch seq dim"]
    taps: dict[int, Float[Tensor, "batch seq dim"]]


class Target:
    """A frozen causal language model with its tokenizer.

    vocab_size: rows of the output weight (not the length of the tokenizer). max_positions: the longest text in tokens.
    end_token_ids: every id that the generation settings, the configuration or the tokenizer call the end.
    layers: the decoder layers. layer_windows: the sliding window of each in tokens, None for full attention; a query
    at position p sees keys at positions above p - window.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, name: str):
        model.eval().requires_grad_(False)
        self.model, self.tokenizer, self.name = model, tokenizer, name
        self.config = model.config.get_text_config()
        self.decoder = find_decoder(model)
        self.layers, final_norm = find_layers(self.decoder, self.config.num_hidden_layers, name)
        self.embedding = Embedding(model)
        self.output = OutputHead(model, final_norm)
        self.hidden_size = int(self.config.hidden_size)
        output_width = weight_shape(weight_of(output_module(model)))[1]
        if output_width != self.hidden_size:
            raise TargetError(
                f"{name} has an output head of width {output_width} on a hidden size of {self.hidden_size}, which "
                "heads cannot borrow; use a target where they are equal"
            )
        self.num_layers = len(self.layers)
        self.vocab_size = self.output.vocab_size
        self.max_positions = _max_positions(self.config)
        self.end_token_ids = _end_token_ids(model, tokenizer, self.vocab_size)
        self._layer_kinds, self.layer_windows = layer_kinds(self.config, self.num_layers)
        self.swapped: frozenset[str] = frozenset()  # what decode/decode_copy.py replaced by faster modules
        self.checked = False  # set once decode/selfcheck.py has found it exact
        self._run_layers = self.layers  # where hooks go, if states have to be hooked
        self._selects_states = "hidden_states" in (getattr(self.decoder, "_can_record_outputs", None) or {})
        self._parameters = inspect.signature(self.decoder.forward).parameters
        self.group = 1  # so many processes hold it together; set by train/tensor_parallel.py
        self._fingerprint: dict[str, Any] | None = None

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def running_layers(self) -> nn.ModuleList:
        """The layers that a forward calls; `layers` gives those with their weights, which are not always the same."""
        return self._run_layers

    def fingerprint(self) -> dict[str, Any]:
        """What identifies this target; see headstart.fingerprint. Worked out once: it reads weights, which the first
        call of all processes together gathers where they are sharded."""
        if self._fingerprint is None:
            self._fingerprint = fingerprint(self)
        return self._fingerprint

    def masks(
        self, allowed: Bool[Tensor, "batch query key"], distance: Int[Tensor, "batch query key"]
    ) -> Float[Tensor, "batch 1 query key"] | dict[str, Float[Tensor, "batch 1 query key"]]:
        """What this architecture takes as attention_mask: additive, in the model's dtype. See `attention_masks`."""
        unknown = sorted(set(self._layer_kinds) - {"full_attention", "sliding_attention"})
        if unknown:
            kinds = ", ".join(unknown)
            raise TargetError(
                f"{self.name} has layers of kind {kinds}, in which a tree of drafts cannot be verified and rolled "
                "back; use a target with full or sliding-window attention"
            )
        return attention_masks(self._layer_kinds, self.layer_windows, allowed, distance, self.dtype)

    def forward(
        self,
        input_ids: Int[Tensor, "batch seq"],
        position_ids: Int[Tensor, "batch seq"],
        attention_mask: Tensor | dict[str, Tensor] | None,
        cache: Cache | None = None,
        layers: Sequence[int] = (),
        *,
        start: tuple[int, Float[Tensor, "batch seq dim"]] | None = None,
        stop: int | None = None,
    ) -> Features:
        """One forward of the decoder, without logits. The caller sets no_grad or inference_mode.

        attention_mask: from `masks`; None is plain causal attention. cache: filled in place. layers: which HF[k].
        start: (k, HF[k] of these very tokens) leaves out the k layers that came before it. stop: the layers behind
        HF[stop] are left out, and `final` is the final norm of HF[stop].
        """
        first, last = start[0] if start else 0, self.num_layers if stop is None else stop
        wrong = [k for k in layers if not first <= k <= last]
        if wrong:
            raise TargetError(f"layer {wrong[0]} was asked for, {self.name} has HF[{first}] to HF[{last}] here")
        arguments = self._arguments(position_ids=position_ids, attention_mask=attention_mask, cache=cache)
        taps = sorted({k for k in layers if k < self.num_layers})
        with Bypass(self._left_out(start, last)):
            if self._selects_states:
                selection = {"output_hidden_states": taps} if taps else {}
                output = self.decoder(input_ids=input_ids, **arguments, **selection)
                states = {k: output.hidden_states[k] for k in taps}
            else:
                with _TapHooks(self._run_layers, taps) as states:
                    output = self.decoder(input_ids=input_ids, **arguments)
        if self.num_layers in layers:
            states[self.num_layers] = output.last_hidden_state
        return Features(output.last_hidden_state, states)

    def _left_out(self, start: tuple[int, Tensor] | None, last: int) -> list[tuple[nn.Module, Callable[..., Tensor]]]:
        """The layers that are not run, and what their calls give instead."""
        layers = list(self._run_layers)
        left_out: list[tuple[nn.Module, Callable[..., Tensor]]] = [(layer, unchanged) for layer in layers[last:]]
        if start is not None:
            first, states = start
            left_out += [(layer, unchanged) for layer in layers[: first - 1]]
            left_out.append((layers[first - 1], lambda *_, **__: states))
        return left_out

    def _arguments(self, *, cache: Cache | None, **values: Any) -> dict[str, Any]:
        """The decoder's keyword arguments; one that it would not take is refused, not dropped."""
        # `past_key_values` was renamed `cache` within transformers 5
        values["cache" if "cache" in self._parameters else "past_key_values"] = cache
        missing = sorted(set(values) - set(self._parameters))
        if missing:
            raise TargetError(
                f"{self.name} ({self.config.model_type}) takes no {missing[0]}, without which a tree of drafts cannot "
                "be verified; use another target"
            )
        return {**values, "use_cache": cache is not None}


def attention_masks(
    kinds: Sequence[str],
    windows: Sequence[int | None],
    allowed: Bool[Tensor, "batch query key"],
    distance: Int[Tensor, "batch query key"],
    dtype: torch.dtype,
) -> Float[Tensor, "batch 1 query key"] | dict[str, Float[Tensor, "batch 1 query key"]]:
    """The attention_mask of a decoder with layers of these kinds and windows.

    allowed: which keys a query may see before any window. distance: the query's position minus the key's.
    A dict by kind of layer where kinds are mixed, a plain tensor otherwise. A query that may see no key at all sees
    those at distance 0: a row of minus infinities would be NaN, and would spread through the cache. Where all is seen
    on a CPU, the mask is one zero expanded, which attention leaves out.
    """
    masks = {}
    for kind, window in dict(zip(kinds, windows, strict=True)).items():
        seen = allowed if window is None else allowed & (distance < window)
        seen = seen | (~seen.any(-1, keepdim=True) & (distance == 0))
        masks[kind] = _additive(seen, dtype)[:, None]
    return masks if len(masks) > 1 else next(iter(masks.values()))


def _additive(seen: Bool[Tensor, "batch query key"], dtype: torch.dtype) -> Float[Tensor, "batch query key"]:
    """0 where a query sees a key, else the lowest number."""
    if seen.device.type == "cpu" and bool(seen.all()):  # on a GPU the question would wait for the device
        return torch.zeros(1, dtype=dtype).expand(seen.shape)
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, torch.finfo(dtype).min)


class _TapHooks:
    """Keeps HF[k] = what layer k reads, for decoders that cannot select hidden states themselves."""

    def __init__(self, layers: nn.ModuleList, taps: Sequence[int]):
        self._layers, self._taps = layers, taps
        self.states: dict[int, Tensor] = {}

    def __enter__(self) -> dict[int, Tensor]:
        self._handles = [
            self._layers[k].register_forward_pre_hook(self._keeper(k), with_kwargs=True) for k in self._taps
        ]
        return self.states

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _keeper(self, k: int):
        def keep(_module: nn.Module, args: tuple, kwargs: dict) -> None:
            self.states[k] = args[0] if args else kwargs["hidden_states"]

        return keep


def find_decoder(model: PreTrainedModel) -> nn.Module:
    """The model without its output head."""
    decoder = model.get_decoder()
    # Llama 4's class names a prefix that it has not, and is then its own decoder
    return decoder if decoder is not model else getattr(model, "model", model)


def find_layers(decoder: nn.Module, num_layers: int, name: str) -> tuple[nn.ModuleList, nn.Module | None]:
    """The list of decoder layers, and the final norm beside it (None: not found)."""
    for owner in decoder.modules():
        for child in owner.children():
            if isinstance(child, nn.ModuleList) and len(child) == num_layers:
                norms = [getattr(owner, norm) for norm in FINAL_NORM_NAMES if getattr(owner, norm, None) is not None]
                return child, (norms[0] if norms else None)
    raise TargetError(f"{name}: no list of {num_layers} decoder layers was found in {type(decoder).__name__}")


def _max_positions(config: transformers.PreTrainedConfig) -> int:
    for name in ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"):
        value = getattr(config, name, None)
        if value:
            return int(value)
    return UNLIMITED_POSITIONS


def _end_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> tuple[int, ...]:
    """All ids that anyone calls the end, in ascending order; ids without an output row can never be drawn."""
    sources = (model.generation_config, model.config.get_text_config(), model.config, tokenizer)
    found: set[int] = set()
    for source in sources:
        value = getattr(source, "eos_token_id", None)
        found.update(value if isinstance(value, list | tuple) else [] if value is None else [value])
    return tuple(sorted(int(token) for token in found if 0 <= token < vocab_size))


def layer_kinds(
    config: transformers.PreTrainedConfig, num_layers: int
) -> tuple[tuple[str, ...], tuple[int | None, ...]]:
    """The kind of attention of each layer, in the words of `config.layer_types`, and its window."""
    kinds, window = _kinds(config, num_layers), getattr(config, "sliding_window", None)
    windows = (int(window) if kind == "sliding_attention" and window else None for kind in kinds)
    return tuple(kinds), tuple(windows)


def _kinds(config: transformers.PreTrainedConfig, num_layers: int) -> list[str]:
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or getattr(config, "attention_layers", None)  # GPT-Neo: global, local
    if kinds is None:
        all_sliding = window is not None and getattr(config, "use_sliding_window", True)
        return ["sliding_attention" if all_sliding else "full_attention"] * num_layers
    return ["full_attention" if kind == "global" else str(kind) for kind in kinds[:num_layers]]


def load_target(
    name: str,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device | None = None,
    trust_remote_code: bool = False,
    revision: str | None = None,
    architecture: str | Path | None = None,
    quantization: str = "none",
    adapter: str | Path | None = None,
) -> Target:
    """Loads a frozen target: a hub id, a folder, a GGUF file or bundled:smollm2-135m.

    dtype: auto is bfloat16 where the device has instructions for it, else float32. device: None is the first GPU, or
    else the CPU. architecture: a published config.json that it must agree with. quantization: int8 or int4 for the
    linear layers; the target is then the quantised model. adapter: a PEFT adapter, merged before that.
    Whatever goes wrong is one TargetError. The embedding and output head that heads borrow are checked against the
    model's own forward, which costs one forward of eight tokens.
    """
    name, found_device = str(name), parse_device(device)
    found_dtype = parse_dtype(dtype, found_device)
    remote = {"trust_remote_code": trust_remote_code, "revision": revision}
    tokenizer = load_tokenizer(name, **remote)
    target = Target(load_model(name, dtype=found_dtype, device=found_device, **remote), tokenizer, name=name)
    if architecture is not None:
        compare_architecture(architecture, target)
    if adapter is not None:
        from headstart.adapters import merge_adapter  # PEFT takes a second to import

        merge_adapter(target, adapter)
    if bits := BITS[quantization]:
        quantise_layers(target, bits)
    check_borrowed(target)
    return target
