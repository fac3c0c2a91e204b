"""Building heads, and keeping them: a folder with `head.safetensors` and `config.json`, written whole, read strictly.

    head = build_head(recipe.head, target, vocab)
    save_head(head, "runs/demo/head", fingerprint=target.fingerprint(), training_record={"steps": 200})
    head = load_head("runs/demo/head", target)

Only what the head owns is in the file: the target's embedding and output rows are borrowed, so they can't be.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pydantic
from safetensors import SafetensorError, safe_open
from torch import Tensor

from headstart.errors import HeadError, naming
from headstart.heads.base import Head
from headstart.heads.configs import (
    HEADS,
    DraftConfig,
    Eagle3Config,
    EagleConfig,
    HeadConfig,
    MedusaConfig,
    UnrolledConfig,
)
from headstart.heads.draft import DraftHead, as_student
from headstart.heads.eagle import EagleHead
from headstart.heads.eagle3 import Eagle3Head
from headstart.heads.medusa import MedusaHead
from headstart.heads.published import CONFIG, WEIGHTS, fetch_head, hub_name
from headstart.heads.starting import as_used, settings_of_start, warm_start
from headstart.heads.unrolled import LAST_LAYER, RANDOM
from headstart.heads.vocab import DraftVocab, usable_ids
from headstart.target import Target, check_fingerprint
from headstart.tensor_files import describe_file, fault_of, save_tensors

FORMAT = 1
"""Of the folder; a reader refuses a later one."""
ADAPTER = "adapter"
"""Folder beside the head's files: the PEFT adapter that the target learnt with the head."""
VOCAB_IDS = "vocab.ids"
_CLASSES: dict[type[HeadConfig], type[Head]] = {
    MedusaConfig: MedusaHead,
    EagleConfig: EagleHead,
    Eagle3Config: Eagle3Head,
    DraftConfig: DraftHead,
}


def build_head(
    config: HeadConfig,
    target: Target,
    vocab: DraftVocab | None = None,
    *,
    read_foreign: Callable[[Path, Target], Head] | None = None,
) -> Head:
    """A fresh head in fp32 for this target; `vocab` as `config.draft_vocab_size` asks for (None: the whole one).

    With a path in `config.init` it goes on from the head there, whose dimensions it takes where the configuration
    leaves them open. read_foreign: reads the folder of another tool; None: folders of our own only.
    """
    config, source = _as_built(config, target, read_foreign)
    head = make_head(config, hidden_size=target.hidden_size, vocab_size=target.vocab_size, vocab=vocab)
    head.initialise(target)
    if source is not None:
        warm_start(head, source)
    return head


def refuse_misfit(
    config: HeadConfig, target: Target, *, read_foreign: Callable[[Path, Target], Head] | None = None
) -> None:
    """Raises the HeadError that `build_head` would end in, before anything that takes long."""
    if config.draft_vocab_size is not None:
        usable_ids(config.draft_vocab_size, target.vocab_size, len(target.tokenizer))
    _as_built(config, target, read_foreign)


def _as_built(
    config: HeadConfig, target: Target, read_foreign: Callable[[Path, Target], Head] | None
) -> tuple[HeadConfig, Head | None]:
    """The configuration with nothing left open, and the head to go on from, if any."""
    if isinstance(config, DraftConfig):
        return as_student(config, target), None
    if not isinstance(config, UnrolledConfig):
        return config, None
    source = None
    if config.init not in (LAST_LAYER, RANDOM):
        source = _starting_head(Path(config.init), target, read_foreign)
        config = settings_of_start(config, source)
    return as_used(config, target), source


def _starting_head(path: Path, target: Target, read_foreign: Callable[[Path, Target], Head] | None) -> Head:
    if name := hub_name(str(path)):
        path = fetch_head(name)
    for folder in (path, path / "head"):  # a head, or the run that trained it
        if (folder / WEIGHTS).is_file():
            return load_head(folder, target)
    if read_foreign is None or not path.exists():
        raise HeadError(
            f"head.init is {path}, which holds no trained head; name a run, a head's folder, last-layer or random"
        )
    return read_foreign(path, target)


def make_head(config: HeadConfig, *, hidden_size: int, vocab_size: int, vocab: DraftVocab | None) -> Head:
    """A head of the kind of its configuration, not yet initialised."""
    kind = _CLASSES[type(config)]
    return kind(config, hidden_size=hidden_size, vocab_size=vocab_size, vocab=vocab)


def save_head(
    head: Head,
    folder: str | Path,
    *,
    fingerprint: Mapping[str, Any],
    training_record: Mapping[str, Any] | None = None,
    state: Mapping[str, Tensor] | None = None,
) -> Path:
    """Writes `folder` (replacing it) under another name first, so that it is there whole or not at all.

    fingerprint: of the target, checked by `load_head`. training_record: what a reader may want to know (steps, tokens,
    coverage of the draft vocabulary, ...). state: the head's state dict where only the caller can gather it (sharded
    training); None: the head's own. Returns the folder.
    """
    folder = Path(folder)
    tensors = {
        name: tensor.detach().to("cpu", copy=True).contiguous()
        for name, tensor in (head.state_dict() if state is None else state).items()
    }
    empty = [name for name, tensor in tensors.items() if not tensor.numel()]
    if empty:
        raise HeadError(f"{empty[0]} of the head has no numbers: it is sharded; gather the head before it is saved")
    _check_tensors(head, {name: tuple(tensor.shape) for name, tensor in tensors.items()}, "the state to be saved")
    description = {
        "format": FORMAT,
        "head": head.config.model_dump(mode="json"),
        "hidden_size": head.hidden_size,
        "vocab_size": head.vocab_size,
        "num_parameters": sum(parameter.numel() for parameter in head.parameters()),
        "target": _without_path(fingerprint),
        "training": dict(training_record or {}),
    }
    folder.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        fresh.chmod(0o755)
        save_tensors(tensors, fresh / WEIGHTS)
        description["weights"] = describe_file(fresh / WEIGHTS)
        with naming(folder):
            (fresh / CONFIG).write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")
            for file in (fresh / WEIGHTS, fresh / CONFIG):
                _flush(file)
            _replace(fresh, folder)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise
    return folder


def load_head(folder: str | Path, target: Target | None = None, allow_other_target: bool = False) -> Head:
    """The head in `folder`, on the CPU, in evaluation mode and in the dtype in which it was saved, bit for bit.

    Every tensor of the head must be in the file once and nothing else may be, and the file must be the one that was
    saved, by its SHA-256 (heads saved without one are taken as they are). With a target, its sizes must be those
    that the head was trained for, and its fingerprint too (`allow_other_target`: only warned of). Raises HeadError, or
    TargetError for another target.
    """
    folder = Path(folder)
    description = read_description(folder)
    config = _read_config(folder, description)
    hidden_size, vocab_size = description["hidden_size"], description["vocab_size"]
    if target is not None:
        for name, stored, current in [
            ("vocab_size", vocab_size, target.vocab_size),
            ("hidden_size", hidden_size, target.hidden_size),
        ]:
            if stored != current:
                raise HeadError(
                    f"{folder / CONFIG}: this head was trained for {name} {stored}, the target {target.name} has "
                    f"{current}; use the head with its own target"
                )
        check_fingerprint(description["target"], target, allow_other_target)
    tensors = _read_tensors(folder / WEIGHTS)
    ids = tensors.get(VOCAB_IDS)
    vocab = None if ids is None else DraftVocab(ids, vocab_size)
    head = make_head(config, hidden_size=hidden_size, vocab_size=vocab_size, vocab=vocab)
    _check_tensors(head, {name: tuple(tensor.shape) for name, tensor in tensors.items()}, str(folder / WEIGHTS))
    _refuse_damaged(folder, description.get("weights"))
    head.load_state_dict(tensors, strict=True, assign=True)
    return head.eval()


def _refuse_damaged(folder: Path, written: Any) -> None:
    try:
        fault = None if written is None else fault_of(folder / WEIGHTS, written)
    except (KeyError, TypeError):
        fault = f"`weights` of {CONFIG} is {written!r}, expected bytes and sha256"
    if fault is not None:
        raise HeadError(
            f"{folder} is damaged ({fault}); copy the head's whole folder again or train again, or, where the weights "
            f"were changed on purpose, take `weights` out of its {CONFIG}"
        )


def read_description(folder: str | Path) -> dict[str, Any]:
    """What `config.json` of a saved head says: `head`, sizes, `target` (the fingerprint) and `training`."""
    path = Path(folder) / CONFIG
    try:
        description = json.loads(path.read_text(encoding="utf-8"))
        missing = [key for key in ("format", "head", "hidden_size", "vocab_size", "target") if key not in description]
    except FileNotFoundError:
        raise HeadError(
            f"{folder} holds no trained head ({CONFIG} is missing); name a folder written by training"
        ) from None
    except (ValueError, TypeError) as error:
        raise HeadError(f"{path} is no description of a head ({error}); restore it or train again") from None
    if missing and "architectures" in description:
        raise HeadError(
            f"{folder} is a checkpoint for {description['architectures']}, no head of ours; make one of it: "
            f"headstart import {folder} --target TARGET --output DIR"
        )
    if missing:
        raise HeadError(f"{path} lacks {missing[0]}; restore it or train again")
    wrong = [key for key in ("head", "target") if not isinstance(description[key], dict)]
    if wrong:
        found = description[wrong[0]]
        raise HeadError(f"{path}: {wrong[0]} is {found!r}, expected an object; restore it or train again")
    if description["format"] != FORMAT:
        raise HeadError(f"{path} has format {description['format']}, this version reads {FORMAT}; update headstart")
    return description


def _read_config(folder: Path, description: dict[str, Any]) -> HeadConfig:
    kind = description["head"].get("type")
    if kind not in HEADS:
        raise HeadError(
            f"{folder / CONFIG}: head type {kind!r} is not known, expected {' or '.join(HEADS)}; update headstart"
        )
    try:
        return HEADS[kind].model_validate(description["head"])
    except pydantic.ValidationError as error:
        fault = error.errors()[0]
        key = ".".join(map(str, ("head", *fault["loc"])))
        raise HeadError(
            f"{folder / CONFIG}: {key}: {fault['msg']}, found {fault['input']!r}; restore the file"
        ) from None


def _read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a mapping)
    except (FileNotFoundError, SafetensorError) as error:
        raise HeadError(f"{path} cannot be read ({error}); copy the head's whole folder again or train again") from None


def _check_tensors(head: Head, found: Mapping[str, tuple[int, ...]], where: str) -> None:
    """Every tensor of the head once, with its shape, and nothing else."""
    expected = {name: tuple(tensor.shape) for name, tensor in head.state_dict().items()}
    for name in expected.keys() & found.keys():
        for axis, wanted, held in zip(head.axis_names(name), expected[name], found[name], strict=False):
            if wanted != held:
                raise HeadError(
                    f"{where}: {name} was made with {axis} {held}, the configuration says {axis} {wanted} (shapes "
                    f"{list(found[name])} and {list(expected[name])}); restore the head's own {CONFIG}"
                )
        if len(expected[name]) != len(found[name]):
            raise HeadError(
                f"{where}: {name} has shape {list(found[name])}, expected {list(expected[name])}; train again"
            )
    missing, extra = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
    if missing or extra:
        faults = [f"lacks {', '.join(missing)}"] * bool(missing) + [f"holds {', '.join(extra)} too"] * bool(extra)
        raise HeadError(f"{where} {' and '.join(faults)}, against its {CONFIG}; restore the head's own files")


def _without_path(fingerprint: Mapping[str, Any]) -> dict[str, Any]:
    """A target that was loaded from a folder is named by its last part: no path goes out with a head."""
    kept = dict(fingerprint)
    if os.path.isabs(str(kept.get("name", ""))):
        kept["name"] = Path(kept["name"]).name
    return kept


def _flush(file: Path) -> None:
    with open(file, "rb") as handle:
        os.fsync(handle.fileno())


def _replace(fresh: Path, folder: Path) -> None:
    """Puts `fresh` in the place of `folder`; a folder that was there is moved aside first, then removed."""
    if not folder.exists():
        fresh.rename(folder)
        return
    aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    folder.rename(aside / "old")
    fresh.rename(folder)
    shutil.rmtree(aside)
