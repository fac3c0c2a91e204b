"""Checkpoints of other tools: which layout a folder has, what it holds in the words of our heads, and the way back.

    foreign = read_foreign("EAGLE3-LLaMA3.1-Instruct-8B")
    head = imported_head(foreign, target)
    write_foreign(head, target, "exported", "sglang", target_name="meta-llama/Llama-3.1-8B-Instruct")

A layout is recognised by the names and shapes of its tensors. config.json says only what tensors cannot: layer ids,
flags without a tensor, rotary parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from headstart.errors import HeadError, warn
from headstart.heads.base import Head
from headstart.heads.draft import DraftHead, save_student
from headstart.heads.formats import eagle, eagle3, medusa, speculators, vllm_medusa
from headstart.heads.formats.exported import Exported, Source, check_state
from headstart.heads.formats.files import MERGED, read_checkpoint, write_checkpoint
from headstart.heads.formats.foreign import Checkpoint, Foreign
from headstart.heads.formats.importing import imported_head, with_layers
from headstart.target import Target

__all__ = [
    "READERS",
    "WRITERS",
    "Checkpoint",
    "Foreign",
    "imported_head",
    "load_foreign",
    "read_foreign",
    "recognise",
    "with_layers",
    "write_foreign",
]

READERS: dict[str, Callable[[Checkpoint], Foreign]] = {
    "medusa": medusa.read,
    "medusa-shared": medusa.read,
    "medusa-merged": medusa.read,
    "vllm-medusa": vllm_medusa.read,
    "eagle": eagle.read,
    "eagle3": eagle3.read,
    "speculators": speculators.read,
}
"""Layouts by name. `eagle3` is the original's and SGLang's and SpecForge's: their tensors are the same."""

WRITERS: dict[str, dict[str, Callable[[Source], Exported]]] = {
    "sglang": {"eagle": eagle.export_sglang, "eagle3": eagle3.export},
    "speculators": {"eagle3": speculators.export},
    "eagle": {"eagle": eagle.export, "eagle3": eagle3.export},
    "medusa": {"medusa": medusa.export},
    "medusa-merged": {"medusa": medusa.export_merged},
    "vllm-medusa": {"medusa": vllm_medusa.export},
    "transformers": {},  # a student, written whole by transformers itself
}
"""What can be written, by the format's name and the type of the head. An EAGLE-3 folder is one for SGLang, vLLM and the
original alike."""

_OTHERS = {
    "mask_hidden": "a P-EAGLE head",
    "markov_head.markov_w1.weight": "a DSpark head",
    "hidden_norm.weight": "a DFlash head",
    "speculator.emb.0.weight": "an MLP speculator",
    "emb.0.weight": "an MLP speculator",
    "layers.0.self_attn.q_norm.weight": "an EAGLE head with Qwen3's norms of queries and keys",
    "midlayer.self_attn.q_norm.weight": "an EAGLE-3 head with Qwen3's norms of queries and keys",
}
_OTHER_PREFIXES = {"hydra_": "Hydra heads", "draft_model.": "a training checkpoint of SpecForge"}


def recognise(tensors: Mapping[str, Tensor]) -> str:
    """The layout of a checkpoint, a key of READERS, by the names and shapes of its tensors alone."""
    for name, what in _OTHERS.items():
        if name in tensors:
            raise HeadError(f"{name} belongs to {what}, which is not read; give one of {', '.join(READERS)}")
    for prefix, what in _OTHER_PREFIXES.items():
        found = next((name for name in tensors if name.startswith(prefix)), None)
        if found:
            raise HeadError(f"{found} belongs to {what}, which is not read; give one of {', '.join(READERS)}")
    if f"{MERGED}0.0.linear.weight" in tensors:
        return "medusa-merged"
    if "0.0.linear.weight" in tensors:
        return "medusa" if medusa.count(tensors)[2] else "medusa-shared"
    if any(name.removeprefix(vllm_medusa.PREFIX) == "blocks.0.layers.0.weight" for name in tensors):
        return "vllm-medusa"
    if any(name.startswith(eagle3.FIRST) for name in tensors):
        return "eagle3"
    query = tensors.get("layers.0.self_attn.q_proj.weight")
    if "fc.weight" in tensors and query is not None and query.dim() == 2:
        # EAGLE-3's first layer reads embedding and state side by side, EAGLE's reads what fc made of them
        wide = query.shape[1] == 2 * tensors["fc.weight"].shape[0]
        return "speculators" if wide else "eagle"
    names = ", ".join(sorted(tensors)[:3])
    raise HeadError(f"tensors such as {names} belong to no layout that is read; give one of {', '.join(READERS)}")


def read_foreign(folder: str | Path) -> Foreign:
    """What a folder of another tool holds, in the words of our heads. Raises HeadError naming the tensor or the key."""
    checkpoint = read_checkpoint(folder)
    try:
        layout = recognise(checkpoint.tensors)
    except HeadError as error:
        raise HeadError(f"{checkpoint.folder}: {error}") from None
    check_state(checkpoint.tensors, str(checkpoint.folder), "take a checkpoint from before that")
    return READERS[layout](checkpoint)


def load_foreign(folder: str | Path, target: Target) -> Head:
    """The head in a folder of another tool: what training starts from, and what an import saves."""
    return imported_head(read_foreign(folder), target)


def write_foreign(
    head: Head,
    target: Target,
    folder: str | Path,
    format_name: str,
    *,
    dtype: torch.dtype | None = None,
    target_name: str | None = None,
    num_tokens: int = 3,
) -> Path:
    """Writes a head as a new folder of another tool's layout; returns the folder.

    dtype: of the floating tensors, None: as the head has them (of a student: as the target has them). target_name: the
    target's hub id, for the formats that name it. num_tokens: how many tokens an engine is told to draft.
    """
    kind = head.config.type
    if isinstance(head, DraftHead):
        if format_name != "transformers":
            raise HeadError(f"the format {format_name} has no place for a student; give --format transformers")
        if head.vocab is not None:
            warn("a model of transformers has no draft vocabulary: all ids will be drafted, trained or not")
        return save_student(head, target, folder, dtype=dtype)
    writers = WRITERS[format_name]
    if kind not in writers:
        fitting = ", ".join(name for name, by_type in WRITERS.items() if kind in by_type)
        raise HeadError(f"the format {format_name} has no place for {kind} heads; give --format {fitting}")
    dtype = dtype or next(head.parameters()).dtype
    exported = writers[kind](Source(head, target, dtype, target_name, num_tokens))
    check_state(exported.tensors, str(folder))
    if head.vocab is not None and exported.token_map is None and not {"d2t", "token_map"} & exported.tensors.keys():
        warn(f"the {format_name} layout has no draft vocabulary: all ids will be drafted")
    return write_checkpoint(folder, exported.config, exported.tensors, exported.weights, exported.token_map)
