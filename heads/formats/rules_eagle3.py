"""Rules of EAGLE-3, in the plain layout and in that of speculators."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import torch

from headstart.heads.formats.eagle3 import IDS
from headstart.heads.formats.rules import Fault, Subject, fault

SPECULATORS_TYPES = ("eagle3", "peagle", "dflash", "dflash2", "dspark")


def draft_vocabulary(subject: Subject) -> Iterator[Fault]:
    if "draft_vocab_size" not in subject.config:
        yield fault("draft_vocab_size", "no such key", "SGLang stops: it reads the key", subject.again)
    elif "lm_head.weight" in subject.tensors:
        rows = len(subject.tensors["lm_head.weight"])
        if subject.config["draft_vocab_size"] != rows:
            yield fault(
                f"draft_vocab_size {rows}, the rows of lm_head.weight",
                subject.config["draft_vocab_size"],
                "loading stops, or logits are read as other tokens",
                subject.set(draft_vocab_size=rows),
            )


def target_vocabulary(subject: Subject) -> Iterator[Fault]:
    members = subject.tensors.get("t2d")
    expected = subject.target.vocab_size if subject.target else None if members is None else len(members)
    found = subject.layer_config.get("vocab_size")
    if expected is not None and found != expected:
        yield fault(
            f"vocab_size {expected}, the target's output rows",
            found,
            "engines size the embedding and the map of ids by it",
            subject.set(vocab_size=expected),
        )


def offsets(subject: Subject) -> Iterator[Fault]:
    found, draft = subject.tensors.get("d2t"), subject.config.get("draft_vocab_size")
    vocab = subject.layer_config.get("vocab_size")
    if found is None:
        if isinstance(draft, int) and draft != vocab:
            yield fault(
                f"d2t for {draft} of {vocab} ids",
                "none",
                "vLLM keeps zeros and takes the drafts for the ids 0 to D-1",
                subject.again,
            )
        return
    if draft == vocab:
        yield fault("no d2t with a whole vocabulary", "one", "vLLM has no table to fill and stops", subject.again)
    ids = torch.arange(len(found)) + found.long()
    inside = len(ids) > 0 and int(ids[0]) >= 0 and isinstance(vocab, int) and int(ids[-1]) < vocab
    if found.dtype != torch.int64:
        yield fault("d2t in int64", found.dtype, "ids are rounded", subject.again)
    if not inside or bool((ids[1:] <= ids[:-1]).any()) or not _agree(ids, subject.tensors.get("t2d")):
        yield fault(
            "offsets: i + d2t[i] ascending, below vocab_size, and the ids of t2d",
            f"d2t {found[:4].tolist()}...",
            "every draft is read as another token; ids where offsets belong are the usual reason",
            subject.again,
        )


def _agree(ids: torch.Tensor, members: torch.Tensor | None) -> bool:
    return members is None or torch.equal(ids, members.bool().nonzero().squeeze(-1))


def membership(subject: Subject) -> Iterator[Fault]:
    found, draft = subject.tensors.get("t2d"), subject.config.get("draft_vocab_size")
    vocab = subject.layer_config.get("vocab_size")
    reduced = isinstance(draft, int) and draft != vocab
    if (found is not None) != reduced:
        yield fault(
            "t2d with a reduced vocabulary, none with a whole one",
            "none" if found is None else "one",
            "training tools that go on from the export refuse it",
            subject.again,
        )
    elif found is not None and (found.dtype != torch.bool or len(found) != vocab or int(found.sum()) != draft):
        yield fault(
            f"t2d of {vocab} booleans, {draft} of them true",
            f"{len(found)} of {found.dtype}, {int(found.sum())} true",
            "training tools that go on from the export select other rows",
            subject.again,
        )


def layer_ids(subject: Subject) -> Iterator[Fault]:
    """HF indices at the top for vLLM; the layer before each of them inside `eagle_config` for SGLang."""
    top, nested = subject.config.get(IDS), (subject.config.get("eagle_config") or {}).get(IDS)
    if not isinstance(top, list) or not top or min(top) < 1 or sorted(set(top)) != top:
        yield fault(
            f"{IDS} at the top: ascending, distinct HF indices from 1 up",
            top,
            "vLLM takes its default layers, or sorts and merges the ids and mixes up the columns of fc",
            subject.again,
        )
        return
    if subject.target is not None and top[-1] > subject.target.num_layers:
        yield fault(f"{IDS} up to {subject.target.num_layers}", top, "the target has no such layer", subject.again)
    elif subject.target is not None and top[-1] == subject.target.num_layers and not subject.is_speculators:
        yield fault(
            f"{IDS} up to {top[-1] - 1}",
            top,
            "SGLang takes a state where a layer begins, and none begins behind the last: the draft gets one too few",
            "train with head.layers below the number of the target's layers, or serve with vLLM alone",
        )
    if not subject.is_speculators and nested != [layer - 1 for layer in top]:
        yield fault(
            f"{[layer - 1 for layer in top]} inside eagle_config, one less than at the top",
            nested,
            "SGLang reads these alone and adds 1: the draft is fed the states of other layers",
            subject.set(**{f"eagle_config.{IDS}": [layer - 1 for layer in top]}),
        )


def fused_width(subject: Subject) -> Iterator[Fault]:
    weight, top = subject.tensors.get("fc.weight"), subject.config.get(IDS)
    hidden = subject.layer_config.get("hidden_size")
    if weight is None or not isinstance(top, list) or not isinstance(hidden, int):
        return
    taps = subject.config.get("num_aux_hidden_states", len(top))
    if weight.shape[1] != len(top) * hidden or taps != len(top):
        yield fault(
            f"fc.weight [{hidden}, {len(top)} * {hidden}] for {len(top)} layers",
            f"{list(weight.shape)}, num_aux_hidden_states {taps}",
            "loading stops, or the states do not fit",
            subject.set(**{IDS: f"{weight.shape[1] // hidden} indices"}),
        )


def norm_flags(subject: Subject) -> Iterator[Fault]:
    tensors = {"fc_norm": "fc_norm.0.weight", "norm_before_fc": "input_norm.weight"}
    for flag, name in tensors.items():
        if bool(subject.config.get(flag, False)) != (name in subject.tensors):
            there = name in subject.tensors
            yield fault(
                f"{flag} {str(there).lower()}, as {name} is {'there' if there else 'missing'}",
                subject.config.get(flag),
                "engines drop the norm, or keep one that was never trained",
                subject.set(**{flag: str(there).lower()}),
            )
    if all(subject.config.get(flag) for flag in tensors):
        yield fault("fc_norm or norm_before_fc", "both", "speculators refuses the file", subject.again)
    if not isinstance(subject.config.get("norm_output"), bool):
        yield fault(
            "norm_output true or false",
            subject.config.get("norm_output"),
            "whether the next step reads the normed state is left to the engine's default",
            subject.again,
        )


def norm_before_residual(subject: Subject) -> Iterator[Fault]:
    found = subject.config.get("norm_before_residual")
    if not isinstance(found, bool):
        yield fault(
            "norm_before_residual true or false",
            found,
            "vLLM takes true where speculators' config.json is silent",
            subject.set(norm_before_residual="what the head was trained with"),
        )
    elif found and not subject.is_speculators:
        yield fault(
            "norm_before_residual false",
            "true",
            "SGLang has no such flag and starts the residual from the state itself",
            "Export with --format speculators and serve with vLLM, or train with head.norm_before_residual=false",
        )


def later_norms(subject: Subject) -> Iterator[Fault]:
    for layer in range(1, int(subject.layer_config.get("num_hidden_layers", 1))):
        ours, theirs = f"layers.{layer}.input_layernorm.weight", f"layers.{layer}.hidden_norm.weight"
        first, second = subject.tensors.get(ours), subject.tensors.get(theirs)
        if subject.is_speculators:
            if second is not None:
                yield fault(f"no {theirs}", "one", "speculators' layer has no place for it", subject.again)
        elif first is None or second is None or not torch.equal(first, second):
            yield fault(
                f"one vector as {ours} and {theirs}",
                "two different ones" if first is not None and second is not None else "one name alone",
                "vLLM reads the first name and SGLang the second; the other stays untrained",
                subject.again,
            )


def biases(subject: Subject) -> Iterator[Fault]:
    names = sorted(name for name in subject.tensors if name.endswith(".bias"))
    if names:
        yield fault("no biases", ", ".join(names), "vLLM drops them without a word", "Train the head without biases")


def draft_width(subject: Subject) -> Iterator[Fault]:
    said, hidden = subject.config.get("target_hidden_size"), subject.layer_config.get("hidden_size")
    width = subject.target.hidden_size if subject.target else said
    if width is not None and said != width and hidden != width:
        yield fault(
            f"target_hidden_size {width}",
            said,
            "the width of the target's states is taken for the draft's own",
            subject.set(target_hidden_size=width),
        )


def speculators_type(subject: Subject) -> Iterator[Fault]:
    found = subject.config.get("speculators_model_type")
    if subject.is_speculators and found not in SPECULATORS_TYPES:
        yield fault(
            f"speculators_model_type, one of {', '.join(SPECULATORS_TYPES)}",
            found,
            "vLLM does not know what to load",
            subject.set(speculators_model_type="eagle3"),
        )


def proposal(subject: Subject) -> Iterator[Fault]:
    if not subject.is_speculators:
        return
    methods = (subject.config.get("speculators_config") or {}).get("proposal_methods") or [{}]
    if not isinstance(methods[0].get("speculative_tokens"), int):
        yield fault(
            "speculators_config.proposal_methods[0].speculative_tokens",
            methods[0].get("speculative_tokens"),
            "vLLM refuses the folder",
            "Export it again with --num-tokens 3",
        )


def verifier_name(subject: Subject) -> Iterator[Fault]:
    if not subject.is_speculators:
        return
    name = ((subject.config.get("speculators_config") or {}).get("verifier") or {}).get("name_or_path")
    if not isinstance(name, str) or not re.fullmatch(r"[\w.-]+/[\w.-]+", name) or Path(name).exists():
        yield fault(
            "speculators_config.verifier.name_or_path, the target's hub id",
            name,
            "`vllm serve DIR` stops; the folder can be served with --speculative-config alone",
            "Export it again with --target-name OWNER/MODEL",
        )
