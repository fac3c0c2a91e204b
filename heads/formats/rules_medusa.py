"""Rules of the Medusa layouts."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from headstart.heads.formats import medusa
from headstart.heads.formats.files import MERGED
from headstart.heads.formats.rules import Fault, Subject, fault

_COUNTS = {"medusa_num_heads", "medusa_num_layers", "num_heads", "num_hidden_layers"}


def counts(subject: Subject) -> Iterator[Fault]:
    """Published files say other counts than they hold, and loaders then drop heads or stop."""
    if subject.layout == "vllm-medusa":
        names = [name.removeprefix("medusa_heads.").split(".") for name in subject.tensors if "blocks." in name]
        heads, layers = len({name[1] for name in names}), len({name[3] for name in names})
        keys = ("num_heads", "num_hidden_layers")
    else:
        heads, layers, _ = medusa.count(name.removeprefix(MERGED) for name in subject.tensors)
        keys = ("medusa_num_heads", "medusa_num_layers")
    for key, held in zip(keys, (heads, layers), strict=True):
        if subject.config.get(key) != held:
            yield fault(
                f"{key} {held}, as the weights hold",
                subject.config.get(key),
                "a loader builds another number of heads; those without weights draft noise",
                subject.set(**{key: held}),
            )


def needed_keys(subject: Subject) -> Iterator[Fault]:
    """What a reader cannot know from the tensors."""
    wanted = {
        "medusa": ("model_type", "hidden_size", "vocab_size", "original_lm_head"),
        "medusa-shared": ("model_type", "hidden_size", "vocab_size", "original_lm_head", "version"),
        "vllm-medusa": ("model_type", "hidden_size", "vocab_size", "original_lm_head", "truncated_vocab_size"),
    }.get(subject.layout, ())
    missing = [key for key in wanted if subject.config.get(key) is None]
    if missing:
        yield fault(
            ", ".join(wanted),
            f"no {', no '.join(missing)}",
            "a loader cannot tell which of the two Medusa layouts this is, and drafts with other output rows",
            subject.again,
        )


def renamed_keys(subject: Subject) -> Iterator[Fault]:
    """vLLM takes every key with `num` and `heads`, or `num` and `layers`, for one of the two counts."""
    for key in subject.config:
        if "num" in key and ("heads" in key or "layers" in key) and key not in _COUNTS:
            yield fault(
                "no other key with `num` and `heads` or `layers`",
                key,
                "vLLM reads it as the number of heads or of blocks",
                f"Remove {key} from {subject.checkpoint.folder / 'config.json'}",
            )


def bias_flag(subject: Subject) -> Iterator[Fault]:
    biased = any(name.endswith(".bias") for name in subject.tensors)
    if bool(subject.config.get("medusa_fc_bias", False)) != biased:
        yield fault(
            f"medusa_fc_bias {str(biased).lower()}",
            subject.config.get("medusa_fc_bias"),
            "vLLM drops the biases, or adds some that were never trained",
            subject.set(medusa_fc_bias=str(biased).lower()),
        )


def token_map(subject: Subject) -> Iterator[Fault]:
    found = subject.tensors.get("token_map")
    vocab, draft = subject.config.get("vocab_size"), subject.config.get("truncated_vocab_size")
    reduced = isinstance(vocab, int) and isinstance(draft, int) and draft < vocab
    if reduced and found is None:
        yield fault(f"token_map of {draft} target ids", "none", "vLLM stops", subject.again)
    elif found is not None and not (found.dtype == torch.int64 and _distinct_ids(found, vocab or 0)):
        yield fault(
            "token_map: distinct target ids in int64, not offsets",
            f"{found.dtype} {found[:4].tolist()}...",
            "every draft is read as another token",
            subject.again,
        )


def _distinct_ids(ids: torch.Tensor, vocab_size: int) -> bool:
    return len(ids.unique()) == len(ids) and 0 <= int(ids.min()) and int(ids.max()) < vocab_size
