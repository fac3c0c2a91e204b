"""The schema of a recipe: one class per section, each key with its range and what it trades. Free of torch.

Sections stand in the order of a recipe: target, head, data, train, eval, logging, export. `headstart.recipe` loads
files into these classes; a `Recipe` made in Python is checked alike.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from headstart.heads.configs import Config, DraftConfig, Eagle3Config, EagleConfig, MedusaConfig, Number
from headstart.recipe_yaml import YesOrNo, write_yaml

Dtype = Literal["auto", "float64", "float32", "bfloat16", "float16"]

HeadSection = Annotated[MedusaConfig | EagleConfig | Eagle3Config | DraftConfig, Field(discriminator="type")]
"""One class per head; `type` chooses it, and its keys are checked by it alone."""


def _no_yes_or_no(value: Any) -> Any:
    if isinstance(value, YesOrNo):
        raise ValueError(f"`{value}` is text in some YAML and a truth value in other: write true or false, or quote it")
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _no_yes_or_no(item)
    return value


def _one_or_more(value: Any) -> Any:
    return [value] if isinstance(value, int | float) and not isinstance(value, bool) else value


class TargetSection(Config):
    """The frozen language model that heads are trained for."""

    name: str = Field(min_length=1)
    """Hub id, local folder, or `bundled:smollm2-135m`, which needs no hub. (`random:NAME` is what --smoke puts here:
    the architecture shrunk, with random weights and the bundled tokenizer.)"""

    architecture: str | None = None
    """Published configuration of the model as a JSON file, beside the recipe or in the packaged `recipes/`: what
    --smoke shrinks and what the real model is compared with."""

    dtype: Dtype = "auto"
    """Precision of the target's weights, in training and in decoding. auto: bfloat16 where the device has instructions
    for it, else float32; a run's own recipe says which it was."""

    placement: Literal["replicate", "shard", "tensor_parallel"] = "replicate"
    """`replicate` keeps the whole target on every device; `shard` spreads it and gathers layer by layer, for targets
    that fit no single device; `tensor_parallel` splits every matrix among the processes of a group, which read the same
    rows. The launch must be in a mode that does so; docs/scale.md says which, and how to choose."""

    tensor_parallel_size: int | None = Field(default=None, ge=1)
    """Processes in a group of `tensor_parallel`, a divisor of the number of key heads; null: all of a node."""

    quantization: Literal["none", "int8", "int4"] = "none"
    """Smaller frozen weights within the layers: a half, or about a quarter, of bfloat16. The head then learns, and
    decoding is exact for, the quantised target. Such weights are held whole: for `placement: replicate` only."""

    adapter: str | None = Field(default=None, min_length=1)
    """A PEFT adapter (folder or hub id) that is merged into the weights when the target is loaded: the target is then
    the fine-tuned model. What `train.joint` trained is found beside its head and need not be named."""

    revision: str | None = None
    """Branch, tag or commit on the hub; null: the default branch."""

    trust_remote_code: bool = False
    """Run Python code that comes with the model. Only for repositories whose code you have read."""


class Source(Config):
    """One place that conversations come from."""

    source: str = Field(min_length=1)
    """Hub data set, local file or folder (.jsonl, .json, .parquet), or `bundled:chats`."""

    split: str = "train"
    """Which split of it. `bundled:chats` has train, held_out_kinds and held_out_topics."""

    subset: str | None = None
    """Configuration of a hub data set that has several, such as `main`."""

    format: Literal["auto", "messages", "sharegpt", "alpaca", "prompt-response", "text", "ids"] = "auto"
    """How a row is laid out; `auto` looks at the first rows and says what it found."""

    limit: int | None = Field(default=None, ge=1)
    """Read so many rows, from the top; null: all."""

    non_alternating: Literal["skip", "merge"] = "skip"
    """Two turns of one speaker in a row: leave the conversation out (counted), or join the turns into one."""


class HeldOutSection(Config):
    """Conversations that are never trained on: losses, trees and reports are measured on them."""

    fraction: Number | None = Field(default=None, gt=0, lt=1)
    """Share of the training conversations to hold out, chosen by their prompts, so the same in every run."""

    sources: list[Source] = []
    """Sources of their own instead, which say more: whole kinds or topics that training never saw."""

    @model_validator(mode="after")
    def _check_together(self) -> HeldOutSection:
        if (self.fraction is None) == (not self.sources):
            raise ValueError("expected either `fraction`, such as 0.01, or `sources`, and not both")
        return self


class ChatSection(Config):
    """How conversations become text. Preparing, distilling, training and decoding all use the same values."""

    arguments: Annotated[dict[str, Any], AfterValidator(_no_yes_or_no)] = {}
    """Arguments of the chat template, such as `{enable_thinking: false}`."""

    system: str | None = None
    """System turn for conversations that have none; null: whatever the template does. Draft for the prompts that you
    serve: a head trained with another system turn is accepted less."""

    supervise: Literal["all", "last"] = "all"
    """Learn from every turn of the assistant, or from the last one only (for templates that drop earlier reasoning)."""


class DistillSection(Config):
    """How the target answers the prompts itself; heads learn best from the target's own words."""

    max_new_tokens: int = Field(default=512, ge=1)
    """Longest answer; longer ones are cut and marked as cut."""

    temperature: Number = Field(default=0.0, ge=0)
    """0 is greedy: the text that greedy decoding will draft for. Sampling gives more variety."""

    batch_size: int = Field(default=16, ge=1)
    """Conversations answered at once; finished ones make room. More is faster until memory is full."""


class DataSection(Config):
    """What is learnt from."""

    train: list[Source] = Field(min_length=1)
    """Sources of the training conversations, joined in this order and shuffled by `seed`."""

    held_out: HeldOutSection = HeldOutSection(fraction=0.01)
    """What is kept away from training."""

    chat: ChatSection = ChatSection()
    """Template, system turn and which turns count."""

    max_length: int = Field(default=2048, ge=8)
    """Longest sequence in tokens; longer conversations are cut. Memory grows with it."""

    packing: bool = True
    """Fill sequences with several conversations, kept apart exactly. false: pad, which wastes time on short ones."""

    streaming: bool = False
    """Read and render the training conversations while training, each process its own, instead of all beforehand: for
    sets that fit in no memory. Needs `train.max_steps`, since nobody knows how many rows there are."""

    buffer: int = Field(default=4096, ge=1)
    """With `streaming`: rows that each process holds, which are shuffled and packed among themselves. More mix better;
    the first so many rows also choose the draft vocabulary."""

    features: Literal["online", "offline", "hybrid"] = "online"
    """`online` runs the target in every step. `offline` reads its states from a cache on disk, which `headstart data
    features` writes beforehand, and loads none of its layers: the fastest where several heads learn from the same data.
    `hybrid` runs it where the cache lacks a row, adds what it gives, and reads that ever after."""

    feature_cache: str | None = None
    """Folder of that cache; null: `features/NAME` with the name of the recipe. A token takes 2 bytes times the hidden
    size in bfloat16 for the final state and for each layer that the head reads, half of that in int8."""

    distill: DistillSection = DistillSection()
    """Settings of `headstart data distill`."""


class JointSection(Config):
    """Medusa-2: in a second stage the target learns with its heads, through LoRA adapters. What is shipped is head and
    adapters; decoding is exact for the target with the adapters in it."""

    start: Number = Field(default=0.4, ge=0, lt=1)
    """Share of the steps in which the heads learn alone; untrained heads would only disturb the target."""

    lr: Number = Field(default=1e-4, gt=0)
    """Highest learning rate of the adapters, which rises and falls within the second stage. A tenth of the heads'."""

    warmup: Number = Field(default=0.05, ge=0, lt=1)
    """Share of the second stage in which that rate rises."""

    base_loss: Literal["kl", "hard-ce"] = "kl"
    """What holds the target: `kl`, that to its own original distribution (self-distillation: the adapters off), or
    `hard-ce`, the text, which also teaches it the data."""

    head_weight: Number = Field(default=0.2, gt=0)
    """Weight of the heads' loss in what the adapters learn, beside 1 for the target's own. More gains acceptance and
    moves the target further."""

    rank: int = Field(default=32, ge=1)
    """Rank of the adapters."""

    alpha: Number = Field(default=16, gt=0)
    """Scale of the adapters, times 1/rank."""

    dropout: Number = Field(default=0.05, ge=0, lt=1)
    """Share of the adapters' inputs that is dropped in training."""

    modules: Literal["all-linear"] | list[str] = "all-linear"
    """Which linear layers within the decoder layers are adapted, by the last part of their names: `[q_proj, v_proj]`.
    Embedding and output head, tied or not, stay as they are: the heads borrow them."""


class TrainSection(Config):
    """How long and how hard. The length is `max_steps` if given, else `cpu_seconds` if given, else `epochs`."""

    epochs: int = Field(default=1, ge=1)
    """Passes over the training conversations."""

    max_steps: int | None = Field(default=None, ge=1)
    """Optimiser steps, over as many passes as that takes; null: as long as the other two say."""

    cpu_seconds: Number | None = Field(default=None, gt=0)
    """Budget in seconds of process time, all threads together. Turned once, by 20 steps that are then taken back, into
    `max_steps`, which the schedule, the stop and a resumed run use."""

    optimizer: Literal["adamw", "muon"] = "adamw"
    """What turns gradients into steps. `muon` orthogonalises the update of every matrix and leaves output rows, gains
    and biases to AdamW: it learns more from a token, and costs much more a step where batches are small."""

    lr: Number = Field(default=1e-3, gt=0)
    """Highest learning rate. Heads are small and start as the identity: they bear far more than the target would."""

    batch_size: int = Field(default=2, ge=1)
    """Sequences in a micro-batch on each device. Memory grows with it."""

    accumulation: int = Field(default=1, ge=1)
    """Micro-batches in one optimiser step. Many small steps beat few large ones while conversations are few."""

    feature_memory: Number = Field(default=0.0, ge=0)
    """GiB of the target's states that each process keeps, so that later epochs skip the target's forward, which is most
    of a step. A token takes 2 bytes times the hidden size in bfloat16, for each state that the head reads. 0: none."""

    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """How the learning rate falls after the warm-up."""

    warmup: Number = Field(default=0.03, ge=0, lt=1)
    """Share of the steps in which the learning rate rises."""

    weight_decay: Number = Field(default=0.0, ge=0)
    """Decoupled decay of the weight matrices."""

    clip: Number | None = Field(default=0.5, gt=0)
    """Largest norm of the whole gradient; null: never clipped."""

    dtype: Dtype = "auto"
    """Precision of the forward pass, auto as for the target; the head's weights and the optimiser stay in float32."""

    activation_checkpointing: bool = False
    """Work the inner activations of the head out again in the backward pass instead of keeping them: less memory for
    long sequences, unrolled steps and students, about a third more time. (The frozen target keeps none.)"""

    joint: JointSection | None = None
    """Medusa-2, a second stage in which the target learns too; null: the target stays frozen."""

    eval_every: int | None = Field(default=500, ge=1)
    """Optimiser steps between two looks at the held-out conversations; null: at the end only."""

    save_every: int | None = Field(default=500, ge=1)
    """Optimiser steps between two checkpoints; null: at the end only. What a kill can cost."""

    keep: int = Field(default=3, ge=1)
    """How many checkpoints stay on disk, newest first; the best one stays besides."""

    timeout: Number = Field(default=900.0, gt=0)
    """Seconds that a process waits for the others of its launch before it gives up. One that dies is noticed at once;
    this is for one that hangs, or whose machine is gone."""

    world_size: Literal["any"] | Annotated[int, Field(ge=1)] = "any"
    """Number of processes that this recipe is meant for; a launch with another number is refused. any: no check."""


class EvalSection(Config):
    """How acceptance and speedup are measured."""

    num_prompts: int = Field(default=80, ge=1)
    """How many prompts are decoded, as many of every group of tasks as of every other, and always the same ones. More
    give narrower intervals."""

    max_new_tokens: int = Field(default=256, ge=1)
    """Longest answer in tokens."""

    temperature: Annotated[list[Annotated[Number, Field(ge=0)]], BeforeValidator(_one_or_more)] = Field(
        default=[0.0], min_length=1
    )
    """Each of these is measured; 0 is greedy. A number alone is a list of one."""

    batch_size: Annotated[list[Annotated[int, Field(ge=1)]], BeforeValidator(_one_or_more)] = Field(
        default=[1], min_length=1
    )
    """Prompts decoded at once; each of these is measured, the first in full, and `headstart tune` finds trees for each.
    A number alone is a list of one. Speculative decoding gains most at 1, where the device waits for memory."""

    tree: Literal["auto"] | Annotated[int, Field(ge=1)] = "auto"
    """Nodes of the drafted tree, root included; auto: the size tuned for this head on this device."""

    identity_prompts: int | None = Field(default=8, ge=0)
    """On how many prompts the drafted text is compared with plain decoding in float32 and with a control arm, which is
    slow; null: on all. Of a float32 target, every text that parts is looked at besides."""

    prompts: list[Source] = []
    """Where the prompts come from; empty: the held-out conversations."""


class LoggingSection(Config):
    """Who is told. `metrics.jsonl` in the run folder is always written."""

    trackers: list[Literal["wandb", "tensorboard", "trackio"]] = []
    """Trackers besides; one that is missing, slow or not reached never stops a run: docs/tracking.md."""

    project: str = "headstart"
    """Name of the project in the tracker."""

    every: int = Field(default=10, ge=1)
    """Optimiser steps between two lines of the metrics."""


class ExportSection(Config):
    """Where the head goes when it is published."""

    repo: str | None = None
    """Hub repository, ORG/NAME; null: asked for when exporting."""

    private: bool = True
    """Only its owners see the repository."""

    license: str | None = Field(default=None, pattern=r"^[a-z0-9][a-z0-9.-]*$")
    """The head's licence as the hub spells it, such as apache-2.0; null: the card names none. A head learns from its
    target's outputs: mind the target's own terms."""


class Recipe(Config):
    """A whole run: what is trained, on what, how, and how it is measured."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of the run and of its folder under `runs/`."""

    seed: int = Field(default=0, ge=0, lt=2**32)
    """Everything random follows from it: initial weights, order of the data, sampling."""

    target: TargetSection
    """The frozen model."""

    head: HeadSection
    """What drafts for it; `type` chooses the head and its keys."""

    data: DataSection
    """What is learnt from."""

    train: TrainSection = TrainSection()
    """How long and how hard."""

    eval: EvalSection = EvalSection()
    """How it is measured."""

    logging: LoggingSection = LoggingSection()
    """Who is told."""

    export: ExportSection = ExportSection()
    """Where it goes."""

    @model_validator(mode="after")
    def _check_streaming(self) -> Recipe:
        if self.data.streaming and self.train.max_steps is None:
            raise ValueError("`data.streaming` needs `train.max_steps`, since nobody knows how many rows there are")
        if self.data.streaming and self.data.features == "offline":
            raise ValueError("`data.streaming` reads rows that no cache holds: set `data.features` to online or hybrid")
        return self

    @model_validator(mode="after")
    def _check_joint(self) -> Recipe:
        target, train = self.target, self.train
        if target.adapter is not None and self.data.features == "offline":
            raise ValueError("`target.adapter` changes layers, and `data.features: offline` loads none: use hybrid")
        if train.joint is None:
            return self
        wrong = {
            "a head of another type than medusa": self.head.type != "medusa",
            "`data.features: offline`, which loads no layers": self.data.features == "offline",
            f"`target.placement: {target.placement}`": target.placement != "replicate",
            f"`target.quantization: {target.quantization}`": target.quantization != "none",
            "`target.adapter`, which is best merged and saved before": target.adapter is not None,
            "`train.optimizer: muon`": train.optimizer != "adamw",
        }
        if found := [what for what, is_so in wrong.items() if is_so]:
            raise ValueError(f"`train.joint` trains the target too, and cannot do so with {' and '.join(found)}")
        return self

    def to_yaml(self) -> str:
        """Every key with its value, defaults included: the effective recipe, which `load_recipe` reads back alike."""
        return write_yaml(self.model_dump())
