"""`headstart export` and `headstart import`: heads to and from the layouts of other tools.

    headstart export --head runs/smollm2-eagle3 --format sglang --output exported --check
    headstart export --head runs/smollm2-medusa2 --format merged --output tuned     # a target that learnt with its head
    headstart export --check exported --target HuggingFaceTB/SmolLM2-135M-Instruct
    headstart import EAGLE3-LLaMA3.1-Instruct-8B --target meta-llama/Llama-3.1-8B-Instruct --output heads/eagle3

An export is a folder of its own; the head's run is not touched. Nothing is sent anywhere.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from headstart.atomic import publish, start_folder
from headstart.errors import HeadError
from headstart.eval.trained import Trained, open_trained
from headstart.eval.trees import TREES
from headstart.fingerprint import fingerprint
from headstart.heads.base import Head
from headstart.heads.draft import DraftHead
from headstart.heads.formats import imported_head, read_foreign, with_layers, write_foreign
from headstart.heads.formats.files import TOKEN_MAP
from headstart.heads.formats.lint import check
from headstart.heads.store import ADAPTER, load_head, read_description, save_head
from headstart.loading import parse_dtype
from headstart.target import load_target


def run_export(
    head: str,
    format_name: str,
    output: str,
    *,
    target: str | None = None,
    target_name: str | None = None,
    dtype: str | None = None,
    num_tokens: int = 3,
    checked: bool = False,
    allow_other_target: bool = False,
) -> int:
    """Write the head of a run in another tool's layout; checked: then look at what was written. Returns the status."""
    _refuse_existing(output)
    stored_dtype = None if dtype is None else parse_dtype(dtype)
    trained = open_trained(head, target, device="cpu")
    assert trained.head is not None
    loaded = load_head(trained.head, trained.target, allow_other_target)
    learnt = (trained.head / ADAPTER).is_dir()
    if format_name == "merged":
        if not learnt:
            raise HeadError(
                f"the target of {head} is frozen: there is nothing to merge; any target of its own serves it"
            )
        if checked:
            raise HeadError("a merged target is written by transformers itself, and no check knows more of it")
        return _write_merged(loaded, trained, Path(output), stored_dtype)
    if checked and isinstance(loaded, DraftHead):
        raise HeadError("a student is written by transformers itself, and no check knows more of it; leave out --check")
    folder = write_foreign(
        loaded,
        trained.target,
        output,
        format_name,
        dtype=stored_dtype,
        target_name=target_name or _hub_id(trained.target.name),
        num_tokens=num_tokens,
    )
    files = ", ".join(f"{path.name} ({path.stat().st_size:,} bytes)" for path in sorted(folder.iterdir()))
    print(f"{folder}: {files}")
    if learnt and format_name != "medusa-merged":
        print(f"its target learnt with it: serve the one that `headstart export --head {head} --format merged` writes")
    if (folder / TOKEN_MAP).is_file():
        print(f"SGLang drafts from its vocabulary with --speculative-token-map {folder / TOKEN_MAP}; vLLM from all ids")
    if not checked:
        return 0
    report = check(folder, target=trained.target, head=loaded)
    print(report)
    return 0 if report.ok else 1


def _write_merged(head: Head, trained: Trained, folder: Path, dtype: torch.dtype | None) -> int:
    """The tuned target as a model that transformers and engines load, its adapters merged, with the head in it."""
    assert trained.head is not None
    partial, target = start_folder(folder), trained.target
    model: Any = target.model
    if dtype is not None:
        model.to(dtype)
    model.save_pretrained(partial)
    target.tokenizer.save_pretrained(partial)
    made_for = {**fingerprint(target), "name": folder.name}
    record = read_description(trained.head).get("training")
    save_head(head, partial / "head", fingerprint=made_for, training_record=record)
    if (trained.head / TREES).is_file():
        shutil.copy(trained.head / TREES, partial / "head" / TREES)
    publish(partial, folder)
    print(f"{folder}: the target with its adapters merged, and the head in {folder / 'head'}")
    print(f'try: headstart generate --head {folder} --target {folder} "Explain tides to a child."')
    return 0


def run_check(folder: str, *, target: str | None = None) -> int:
    """Look at a folder that anyone wrote; with a target also at what depends on it. Returns the status."""
    report = check(folder, target=None if target is None else load_target(target, device="cpu"))
    print(report)
    return 0 if report.ok else 1


def run_import(
    folder: str, target: str, output: str, *, layers: Sequence[int] | None = None, dtype: str | None = None
) -> None:
    """Turn a foreign checkpoint into the folder of a head of ours. dtype: of the target, while it is compared."""
    foreign = read_foreign(folder)
    if layers is not None:
        foreign = with_layers(foreign, layers)
    _refuse_existing(output)
    loaded = load_target(target, dtype=dtype or "auto", device="cpu")
    head = imported_head(foreign, loaded)
    source = {"format": foreign.format, "folder": Path(folder).resolve().name, "target": foreign.target_name}
    save_head(head, output, fingerprint=loaded.fingerprint(), training_record={"imported": source})
    count = sum(parameter.numel() for parameter in head.parameters())
    print(f"{output}: a head of type {foreign.type} with {count:,} parameters, from the {foreign.format} layout")
    print(f'try: headstart generate --head {output} --target {target} "Explain tides to a child."')


def _refuse_existing(output: str) -> None:
    """Before anything is loaded."""
    if Path(output).exists():
        raise HeadError(f"{output} exists already and is kept; give another --output")


def _hub_id(name: str) -> str | None:
    """A target's name where it is one on the hub; folders and bundled models have none."""
    return name if re.fullmatch(r"[\w.-]+/[\w.-]+", name) and not Path(name).exists() else None
