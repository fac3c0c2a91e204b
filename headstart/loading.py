"""Loads a causal language model and its tokenizer from the hub, a folder or a GGUF file, and explains what fails."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from headstart import bundled
from headstart.errors import TargetError
from headstart.hub import look_for_hub

DTYPES = {name: getattr(torch, name) for name in ("bfloat16", "float16", "float32", "float64")}

# Parts of the messages of transformers and huggingface_hub -> what to tell the user.
_EXPLANATIONS = {
    "trust_remote_code": "it brings its own code; read that code, then set target.trust_remote_code: true",
    "couldn't connect": "no copy is cached, and the hub cannot be reached or HF_HUB_OFFLINE is set; "
    "connect, or name a folder that holds the model",
    "gated repo": "it is gated; accept its terms on its hub page, then `hf auth login`",
    "not a valid model identifier": "there is no such model on the hub; check the spelling, or `hf auth login`",
    "not a valid git identifier": "it has no such revision; look at its branches and tags on the hub",
    "Unrecognized configuration class": "it is no causal language model; name a decoder-only model",
    "does not recognize this architecture": "this transformers does not know its model_type; upgrade transformers",
    "Unrecognized model": "its folder holds no config.json with a model_type; name the folder of the model's files",
    "not a valid JSON file": "its config.json is not valid JSON; copy the model's files again",
    "no file named": "its folder holds no weights (model.safetensors); copy the model's files again",
    "ignore_mismatched_sizes": "its weights do not have the shapes that its config.json says; copy its files again",
    "deserializing header": "its weights file is cut short; copy the model's files again",
    "backend tokenizer": "no tokenizer files lie beside the model (tokenizer.json); copy them into its folder",
}


def load_model(
    name: str,
    *,
    dtype: torch.dtype,
    device: torch.device,
    trust_remote_code: bool = False,
    revision: str | None = None,
) -> PreTrainedModel:
    """The model with all its weights from the checkpoint; a checkpoint that lacks some is refused."""
    source, options = locate(name)
    with explained(name):
        options |= {"trust_remote_code": trust_remote_code, "revision": revision}
        config = AutoConfig.from_pretrained(source, **options)
        if config.is_encoder_decoder:
            raise TargetError(f"{name} is an encoder-decoder model; name a decoder-only causal language model")
        if "gguf_file" in options and hasattr(transformers, "GgufConfig"):  # newer versions would keep weights packed
            options["quantization_config"] = transformers.GgufConfig(dequantize=True)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source, config=config, dtype=dtype, output_loading_info=True, **options
        )
        model, report = loaded
        # transformers fills what is missing with random numbers and goes on
        missing = sorted(report["missing_keys"])
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise TargetError(f"{name} lacks the weights {missing[0]}{more}; name a complete causal language model")
        if "gguf_file" in options:
            model = _without_quantizer(model)
        return model.to(device)


def _without_quantizer(model: Any) -> Any:
    """A GGUF file's weights come dequantised, in a model that still calls itself quantised and refuses to be saved."""
    config = model.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    plain = AutoModelForCausalLM.from_config(config, dtype=model.dtype)
    plain.load_state_dict(model.state_dict())
    plain.generation_config = model.generation_config
    return plain


def load_tokenizer(
    name: str, *, trust_remote_code: bool = False, revision: str | None = None
) -> PreTrainedTokenizerBase:
    """The tokenizer of a hub id, a folder, a GGUF file or a bundled target."""
    source, options = locate(name)
    with explained(name):
        return AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code, revision=revision, **options)


def parse_dtype(dtype: str | torch.dtype, device: torch.device | None = None) -> torch.dtype:
    """A floating dtype from its name; "auto" is the smaller one that the device has instructions for."""
    if dtype == "auto":
        return torch.bfloat16 if _computes_bfloat16(device or parse_device(None)) else torch.float32
    found = DTYPES.get(str(dtype).removeprefix("torch."))
    if found is None:
        raise TargetError(f"dtype {dtype!r} is unknown; expected auto or one of {', '.join(DTYPES)}")
    return found


def _computes_bfloat16(device: torch.device) -> bool:
    """Whether matrices in bfloat16 are multiplied at least as fast as in float32. Without AVX-512, a CPU widens them
    number by number, which is ten times slower for more than a few rows."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type == "cpu":
        return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return True


def parse_device(device: str | torch.device | None) -> torch.device:
    """A device that is here, from its name; None is the first GPU, or else the CPU."""
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    try:
        found = torch.device(device or ("cuda" if num_gpus else "cpu"))
    except RuntimeError:
        raise TargetError(f"device {str(device)!r} is unknown; expected cpu, cuda or cuda:0") from None
    if found.type == "cuda" and (found.index or 0) >= num_gpus:
        here = f"PyTorch sees {num_gpus} GPUs here" if num_gpus else "PyTorch sees no GPU here"
        raise TargetError(f"device {device} was asked for, and {here}; name another one, such as cpu")
    return found


@contextmanager
def explained(name: str, *, check: str = "target.name and target.dtype") -> Iterator[None]:
    """Turns whatever goes wrong while loading into one sentence; from_pretrained raises almost any exception. check:
    what to look at where nothing is known of the cause."""
    try:
        yield
    except TargetError:
        raise
    except Exception as error:
        text = str(error)
        for part, reason in _EXPLANATIONS.items():
            if part.lower() in text.lower():
                raise TargetError(f"{name} could not be loaded: {reason}") from error
        first_line = (text.strip() or type(error).__name__).splitlines()[0].rstrip(".")
        raise TargetError(f"{name} could not be loaded ({first_line}); check {check}") from error


def locate(name: str) -> tuple[str, dict[str, Any]]:
    """What from_pretrained is given: a folder or a hub id, and further arguments."""
    if name.startswith(bundled.PREFIX):
        return str(bundled.folder(name)), {}
    path = Path(name).expanduser()
    if path.suffix == ".gguf" and path.is_file():
        return str(path.parent), {"gguf_file": path.name}
    if path.is_dir():
        return str(path), {}
    if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name) or path.suffix == ".gguf":
        raise TargetError(f"there is no folder {name}; name a folder that holds a model, a hub id, or {bundled.NAME}")
    look_for_hub()
    return name, {}
