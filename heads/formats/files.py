"""Reads and writes the folders of foreign checkpoints. A pickle is read as tensors alone: no code in it ever runs."""

from __future__ import annotations

import json
import os
import pickle
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from headstart.errors import HeadError
from headstart.heads.formats.foreign import Checkpoint
from headstart.tensor_files import save_tensors

WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "medusa_lm_head.safetensors",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "medusa_lm_head.pt",
)
"""Where weights may lie, in this order: safetensors before pickles."""

TOKEN_MAP = "speculative_token_map.pt"
"""Target ids that an EAGLE-1 head drafts, for SGLang's `--speculative-token-map`."""
MERGED = "medusa_head."
_OF_MERGED = (MERGED, "model.embed_tokens.", "lm_head.")


def read_checkpoint(folder: str | Path) -> Checkpoint:
    """config.json and every tensor of a folder; of a merged Medusa-2 model its heads and vocabulary weights alone."""
    folder = Path(folder)
    config = read_json(folder / "config.json")
    found = [folder / name for name in WEIGHT_FILES if (folder / name).is_file()]
    if not found:
        raise HeadError(f"{folder} holds no weights, expected one of {', '.join(WEIGHT_FILES)}; copy them there")
    tensors: dict[str, Tensor] = {}
    for path in _parts(found[0]):
        part = _read_safetensors(path) if path.suffix == ".safetensors" else _read_pickle(path)
        if tensors.keys() & part.keys():
            raise HeadError(f"{path} repeats {min(tensors.keys() & part.keys())}; copy the checkpoint again")
        tensors.update(part)
    if any(name.startswith(MERGED) for name in tensors):
        tensors = {name: tensor for name, tensor in tensors.items() if name.startswith(_OF_MERGED)}
    return Checkpoint(folder, config, tensors)


def read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise HeadError(f"{path.parent} holds no {path.name}; name the folder of a checkpoint") from None
    except ValueError as error:
        raise HeadError(f"{path} is no JSON ({error}); copy the checkpoint again") from None
    if not isinstance(values, dict):
        raise HeadError(f"{path} holds {values!r}, expected an object; copy the checkpoint again")
    return values


def _parts(path: Path) -> list[Path]:
    """The files that an index names, or the one file itself."""
    if not path.name.endswith(".index.json"):
        return [path]
    names = read_json(path).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise HeadError(f"{path} has no weight_map; copy the checkpoint again")
    return [path.parent / Path(str(name)).name for name in sorted(set(names.values()))]


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            names = list(file.keys())
            if any(name.startswith(MERGED) for name in names):
                names = [name for name in names if name.startswith(_OF_MERGED)]
            return {name: file.get_tensor(name) for name in names}
    except (FileNotFoundError, SafetensorError) as error:
        raise HeadError(f"{path} cannot be read ({error}); copy the checkpoint again") from None


def _read_pickle(path: Path) -> dict[str, Tensor]:
    """Tensors of a file of torch.save; mapped, so that a merged model costs no memory for what is not wanted."""
    try:
        values = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path) or None)
    except FileNotFoundError as error:
        raise HeadError(f"{path} cannot be read ({error.strerror}); copy the checkpoint again") from None
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise HeadError(
            f"{path} is no file of tensors alone ({str(error).splitlines()[0]}), and nothing else in a pickle is "
            "opened; save its tensors as safetensors"
        ) from None
    if not isinstance(values, dict) or not all(isinstance(value, Tensor) for value in values.values()):
        raise HeadError(f"{path} holds other things than tensors by name; save its tensors as safetensors")
    return {str(name): tensor for name, tensor in values.items()}


def write_checkpoint(
    folder: str | Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    weights: str = WEIGHT_FILES[0],
    token_map: list[int] | None = None,
) -> Path:
    """Writes a new folder with config.json and one safetensors file, whole or not at all; returns it.

    token_map: target ids, for a file of their own as SGLang loads it.
    """
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise HeadError(f"{folder} exists already and is kept; give another --output")
    folder.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    fresh.chmod(0o755)
    # clone: rows of one stacked parameter share its storage, which safetensors refuses
    owned = {name: tensor.detach().to("cpu").contiguous().clone() for name, tensor in tensors.items()}
    save_tensors(owned, fresh / weights, {"format": "pt"})
    if token_map is not None:
        torch.save(token_map, fresh / TOKEN_MAP)
    (fresh / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    os.replace(fresh, folder)
    return folder
