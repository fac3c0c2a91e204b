"""`headstart plan`: what training a recipe will take, on GPUs that need not be here, without the target's weights.

    headstart plan --recipe llama8b.yaml
    headstart plan --recipe llama70b.yaml --gpus 8 --memory 80GB
    headstart plan --recipe qwen3-8b-eagle3.yaml --gpus 64 --memory 80GB --tokens 2e9 --output plan.json

A whole training step of the recipe is rehearsed on the target's architecture without a number being computed
(eval/footprint.py), and dealt out over the GPUs (scripts/placements.py). Whatever is assumed beside is printed.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from transformers import AutoConfig, PreTrainedConfig

from headstart.architecture import read_architecture
from headstart.data.feature_codec import INT8, bytes_per_token
from headstart.data.prepare import prepare
from headstart.data.sources import local_files
from headstart.errors import RecipeError, TargetError
from headstart.eval.acceptance import Number
from headstart.eval.figures import refuse_output, write_figures
from headstart.eval.footprint import Footprint, foretell
from headstart.loading import explained, load_tokenizer, locate
from headstart.recipe import Recipe, architecture_path
from headstart.scripts.placements import ASSUMPTIONS, Cluster, Placement, fastest, placements
from headstart.scripts.plan_page import show

H100_PEAK = {"bfloat16": 989e12, "float16": 989e12, "float32": 67e12, "float64": 67e12}
"""Floating-point operations a second of an NVIDIA H100 SXM, dense, from its data sheet."""
INSIDE, BETWEEN = 450e9, 50e9
"""Bytes a second to and from one GPU: NVLink of an H100 SXM within a node, a card of 400 Gb/s between nodes."""
IN_A_NODE = 8
UTILISATION = 0.4
TOKENS = 100_000_000
"""What a pass over the data is assumed to be where nothing says how many tokens it has."""
_UNITS = {"GB": 10**9, "GIB": 2**30, "TB": 10**12, "TIB": 2**40, "MB": 10**6, "MIB": 2**20}


@dataclass(frozen=True, kw_only=True)
class Length:
    """How many tokens training reads, and how that is known."""

    tokens: int
    """In one pass over the training data, and to be kept in a cache."""
    passes: Number
    source: str

    @property
    def total(self) -> Number:
        return self.tokens * self.passes


def run(
    recipe: Recipe,
    *,
    gpus: int = 1,
    memory: str = "80GB",
    tflops: Number | None = None,
    utilisation: Number = UTILISATION,
    bandwidth: str | None = None,
    rows: int | None = None,
    tokens: int | None = None,
    output: str | None = None,
) -> dict[str, Any]:
    """Prints the plan, writes its figures where `output` says, and gives them back.

    memory: of one GPU, such as 80GB or 80GiB. tflops: peak of one GPU in 10^12 operations a second; None: an H100's in
    the recipe's dtypes. bandwidth: between GPUs, such as 450GB, a second. rows, tokens: size of the training data where
    it cannot be counted here. Raises HeadstartError for what cannot be.
    """
    refuse_output(output)
    recipe = settled(recipe)
    cluster, said = _cluster(recipe, gpus, parse_bytes(memory, "--memory"), tflops, utilisation, bandwidth)
    config = read_config(recipe)
    footprint = foretell(recipe, config, kind="cuda")
    length = training_length(recipe, footprint, config, gpus, rows=rows, tokens=tokens)
    found = placements(footprint, cluster, accumulation=recipe.train.accumulation)
    assumptions = [*said, f"tokens: {length.source}", *_of_the_recipe(recipe), *ASSUMPTIONS]
    figures = {
        "recipe": recipe.name,
        "cluster": asdict(cluster),
        "footprint": asdict(footprint),
        "length": {**asdict(length), "total": length.total},
        "placements": [_figures(placement, length) for placement in found],
        "fastest": {name: _name(fastest(found, offline=name == "offline")) for name in ("online", "offline")},
        "cache_bytes": cache_bytes(footprint, config, recipe, length),
        "assumptions": assumptions,
    }
    show(recipe, footprint, cluster, length.total, found, figures, Console(highlight=False, soft_wrap=True))
    write_figures(figures, output)
    return figures


def parse_bytes(text: str, option: str) -> int:
    """`80GB` is 80 * 10^9 bytes, `80GiB` 80 * 2^30."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]+)", text.strip())
    unit = _UNITS.get(match.group(2).upper()) if match else None
    if match is None or unit is None or float(match.group(1)) <= 0:
        raise RecipeError(f"{option} is {text}, expected a size such as 80GB or 80GiB.")
    return round(float(match.group(1)) * unit)


def settled(recipe: Recipe) -> Recipe:
    """The recipe with bfloat16, which every GPU of these days computes in, where it says auto."""
    sections = {
        name: section.model_copy(update={"dtype": "bfloat16"})
        for name, section in (("target", recipe.target), ("train", recipe.train))
        if section.dtype == "auto"
    }
    return recipe.model_copy(update=sections)


def read_config(recipe: Recipe) -> PreTrainedConfig:
    """The target's configuration: the recipe's architecture file, else the config.json of the target itself."""
    path = architecture_path(recipe)
    if path is not None:
        return read_architecture(path)
    section = recipe.target
    source, options = locate(section.name)
    try:
        with explained(section.name):
            config = AutoConfig.from_pretrained(
                source, revision=section.revision, trust_remote_code=section.trust_remote_code, **options
            )
    except TargetError as error:
        raise TargetError(f"{error}; or name its published config.json with --set target.architecture=FILE") from None
    return config.get_text_config()


def training_length(
    recipe: Recipe,
    footprint: Footprint,
    config: PreTrainedConfig,
    gpus: int,
    *,
    rows: int | None,
    tokens: int | None,
) -> Length:
    """As told, as counted, as the recipe's number of steps says, or assumed; `source` says which."""
    train = recipe.train
    if tokens is not None:
        length = Length(tokens=tokens, passes=train.epochs, source=f"{tokens:,} a pass, as given")
    elif rows is not None:
        length = Length(
            tokens=rows * recipe.data.max_length,
            passes=train.epochs,
            source=f"{rows:,} rows, each as long as data.max_length ({recipe.data.max_length}): an upper limit",
        )
    else:
        counted = _counted(recipe, config)
        source = f"{counted:,} a pass, counted" if counted else f"{TOKENS:,} a pass, assumed; --tokens or --rows says"
        length = Length(tokens=counted or TOKENS, passes=train.epochs, source=source)
    if train.max_steps is None:
        return length
    read = train.max_steps * train.accumulation * gpus * footprint.tokens
    return Length(
        tokens=length.tokens,
        passes=read / length.tokens,
        source=f"{length.source}; {read:,} in train.max_steps {train.max_steps:,} of full sequences on {gpus} GPUs",
    )


def _counted(recipe: Recipe, config: PreTrainedConfig) -> int | None:
    """Tokens of the training rows, where data and tokenizer lie here; None: they do not."""
    sources = [*recipe.data.train, *recipe.data.held_out.sources]
    if not all(source.source.startswith("bundled:") or local_files(source) for source in sources):
        return None
    try:
        tokenizer = load_tokenizer(
            recipe.target.name,
            trust_remote_code=recipe.target.trust_remote_code,
            revision=recipe.target.revision,
        )
    except TargetError:
        return None
    return sum(prepare(recipe, tokenizer, vocab_size=int(config.vocab_size)).train.lengths())


def cache_bytes(footprint: Footprint, config: PreTrainedConfig, recipe: Recipe, length: Length) -> dict[str, int]:
    """What the features of one pass take on the disk, by how they are stored."""
    names = dict.fromkeys((recipe.target.dtype, INT8))
    return {name: length.tokens * bytes_per_token(footprint.taps, int(config.hidden_size), name) for name in names}


def _cluster(
    recipe: Recipe, gpus: int, memory: int, tflops: Number | None, utilisation: Number, bandwidth: str | None
) -> tuple[Cluster, list[str]]:
    """The GPUs, and in sentences what was assumed of them."""
    if not 0 < utilisation <= 1:
        raise RecipeError(
            f"--utilisation is {utilisation:g}, expected a share above 0, up to 1, such as {UTILISATION}."
        )
    if tflops is not None and not tflops > 0:
        raise RecipeError(f"--tflops is {tflops:g}, expected a number above 0, such as 989.")
    peaks = [tflops * 1e12 if tflops else H100_PEAK[dtype] for dtype in (recipe.target.dtype, recipe.train.dtype)]
    given = "as given" if tflops else "an NVIDIA H100 SXM's, dense (--tflops)"
    rates = dict.fromkeys(
        f"{peak / 1e12:g} TFLOP/s in {dtype}"
        for peak, dtype in zip(peaks, (recipe.target.dtype, recipe.train.dtype), strict=True)
    )
    said = [f"peak: {' and '.join(rates)}, {given}, of which {utilisation:.0%} are reached (--utilisation)"]
    if bandwidth is not None:
        rate, why = float(parse_bytes(bandwidth, "--bandwidth")), "as given"
    elif gpus > IN_A_NODE:
        rate, why = BETWEEN, "one 400 Gb/s card for each GPU between nodes (--bandwidth)"
    else:
        rate, why = INSIDE, "NVLink within one node of H100s (--bandwidth)"
    if gpus > 1:
        said.append(f"traffic: {rate / 1e9:g} GB/s to and from each GPU, {why}")
    cluster = Cluster(
        gpus=gpus,
        memory=memory,
        target_flops=peaks[0],
        head_flops=peaks[1],
        utilisation=utilisation,
        bandwidth=rate,
    )
    return cluster, said


def _of_the_recipe(recipe: Recipe) -> list[str]:
    """What the plan takes the recipe to mean."""
    said = [
        f"a micro-batch is {recipe.train.batch_size} x {recipe.data.max_length} tokens without padding, every token a "
        "label: prompts cost less"
    ]
    if recipe.train.feature_memory:
        said.append(f"train.feature_memory comes on top: {recipe.train.feature_memory:g} GiB a process")
    if recipe.train.joint is not None:
        said.append(
            "train.joint is left aside: the second stage also holds the adapters with their optimiser, and the "
            "activations of the whole target"
        )
    if recipe.train.cpu_seconds is not None and recipe.train.max_steps is None:
        said.append(
            f"train.cpu_seconds ({recipe.train.cpu_seconds:g}) is left aside; the hours are those of the epochs"
        )
    return said


def _figures(placement: Placement, length: Length) -> dict[str, Any]:
    speed = placement.tokens_per_second
    return {
        **asdict(placement),
        "fits": placement.fits,
        "tokens_per_second": speed,
        "hours": length.total / speed / 3600,
    }


def _name(placement: Placement | None) -> str | None:
    return None if placement is None else placement.name
