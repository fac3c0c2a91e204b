"""A small world in which heads learn in seconds: a tiny target that has learnt to count letters with a stride, chats
that are its own answers, and runs of real training on them.

    world = make_world(folder)                        # the target's folder and its chats; a few CPU seconds
    run = world.train("eagle3")                       # runs/eagle3, by the training script
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import tiny
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from headstart.data.packing import collate
from headstart.data.rendering import ChatRenderer, Row
from headstart.heads.base import Head
from headstart.heads.configs import EagleConfig, MedusaConfig
from headstart.heads.store import build_head
from headstart.recipe import ChatSection
from headstart.target import Features, Target, load_target
from headstart.tensor_files import describe_file
from headstart.train import eagle, medusa

LETTERS = "abcdefghijklmnopqrstuvwxyz"
STRIDES = range(1, 6)
LENGTH = 20
LAYERS = 6
SYSTEM = "LOUD"
"""With this system turn the target answers in capital letters, which a head that was trained without it never met."""

Chat = list[dict[str, str]]


def chat(start: int, stride: int, length: int = LENGTH) -> Chat:
    """`<letter><stride>`, answered by `length` letters, each so many further on than the one before."""
    answer = "".join(LETTERS[(start + stride * place) % 26] for place in range(length))
    return [{"role": "user", "content": f"{LETTERS[start]}{stride}"}, {"role": "assistant", "content": answer}]


CHATS = [chat(start, stride) for start in range(26) for stride in STRIDES]


@dataclass(frozen=True)
class World:
    """The folder of the target, and beside it `train.jsonl` and `held_out.jsonl`."""

    folder: Path

    @property
    def target(self) -> Path:
        return self.folder / "target"

    def train(self, kind: str, *settings: str, name: str | None = None, data: str = "train.jsonl") -> Path:
        """A run of the training script; returns its folder. data: a file of conversations in the world's folder."""
        plain = {
            "eagle3": ["head={type: eagle3, layers: [1, 3, 5], unrolled_steps: 3, fc_norm: true}"],
            "eagle": ["head={type: eagle, unrolled_steps: 2, noise: 0.0}"],
            "medusa": ["head={type: medusa, num_heads: 3}"],
        }[kind]
        changes = [
            *("target.dtype=float32", "target.architecture=null", f'target.name="{self.target}"'),
            *(f'data.train=[{{source: "{self.folder / data}"}}]', "data.packing=false", "data.max_length=64"),
            f'data.held_out={{sources: [{{source: "{self.folder / "held_out.jsonl"}"}}]}}',
            *("eval.prompts=[]", "eval.tree=4", "eval.num_prompts=8", "eval.max_new_tokens=24"),
            *("train.cpu_seconds=null", "train.max_steps=80", "train.eval_every=null", "train.save_every=null"),
            *("train.dtype=float32", "train.lr=1e-2", "train.batch_size=8", "train.accumulation=1"),
            "train.feature_memory=0.1",
        ]
        words = [word for setting in [*plain, *changes, *settings] for word in ("--set", setting)]
        name = name or kind
        script = medusa if kind == "medusa" else eagle
        script.main(["--recipe", "quickstart.yaml", "--output", str(self.folder), "--name", name, *words])
        return self.folder / name

    def write(self, name: str, chats: Sequence[Chat]) -> str:
        """A file of conversations in the world's folder; returns its name."""
        (self.folder / name).write_text("\n".join(json.dumps({"messages": one}) for one in chats) + "\n")
        return name


def make_world(folder: Path) -> World:
    """Teaches a tiny target to count, and writes it and its answers."""
    world = World(folder)
    tokenizer, model = tiny.tokenizer(), tiny.model("llama", num_hidden_layers=LAYERS, initializer_range=0.1)
    renderer = ChatRenderer(tokenizer, ChatSection())
    with_system = ChatRenderer(tokenizer, ChatSection(system=SYSTEM))
    prompts = [[one.prompt(chat[:1]) for chat in CHATS] for one in (renderer, with_system)]
    words = [chat[1]["content"] for chat in CHATS]
    answers = [[[*text.encode(), tiny.TURN_END] for text in texts] for texts in (words, [one.upper() for one in words])]
    model.requires_grad_(True).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    draw = random.Random(0)
    for step in range(110):
        optimizer.zero_grad()
        chosen, heads, tails = draw.sample(range(len(CHATS)), 16), prompts[step % 2], answers[step % 2]
        ids = torch.tensor([heads[number] + tails[number] for number in chosen])
        labels = ids.clone()
        labels[:, : len(heads[0])] = -100
        model(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
    model.generation_config.eos_token_id = tiny.TURN_END
    model.eval().save_pretrained(world.target)
    tokenizer.save_pretrained(world.target)
    order = random.Random(1).sample(CHATS, len(CHATS))
    world.write("train.jsonl", order[:-24])
    world.write("held_out.jsonl", order[-24:])
    return world


def chats_behind_dots(dots: int, count: int = 24) -> list[Chat]:
    """The same questions behind so many dots: long prompts to one who has learnt to read over them."""
    asked = random.Random(2).sample(CHATS, count)
    return [[{"role": "user", "content": "." * dots + one[0]["content"]}, one[1]] for one in asked]


def teach_dots(world: World, folder: Path, dots: int) -> Path:
    """A target in `folder` that answers both the plain questions and those behind dots."""
    target = load_target(str(world.target), dtype="float32")
    renderer = ChatRenderer(target.tokenizer, ChatSection())
    model = target.model.requires_grad_(True).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    draw = random.Random(0)
    for step in range(60):
        optimizer.zero_grad()
        rows = draw.sample(chats_behind_dots(dots, len(CHATS)) if step % 3 else CHATS, 8)
        prompts = [renderer.prompt(one[:1]) for one in rows]
        ids = torch.tensor([p + [*r[1]["content"].encode(), tiny.TURN_END] for p, r in zip(prompts, rows, strict=True)])
        labels = ids.clone()
        labels[:, : len(prompts[0])] = -100
        model(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
    model.eval().save_pretrained(folder)
    target.tokenizer.save_pretrained(folder)
    return folder


def teach(
    target: Target,
    config: MedusaConfig | EagleConfig,
    world: World,
    change: Callable[[Features], Features],
    steps: int = 60,
) -> Head:
    """A head that is trained on what `change` makes of the features: what another tool might have done."""
    tokenizer = target.tokenizer
    renderer = ChatRenderer(tokenizer, ChatSection())
    rows = []
    for number, line in enumerate((world.folder / "train.jsonl").read_text().splitlines()):
        messages = json.loads(line)["messages"]
        prompt = renderer.prompt(messages[:1])
        answer = [*messages[1]["content"].encode(), tiny.TURN_END]
        rows.append(Row(f"row-{number}", prompt + answer, [False] * len(prompt) + [True] * len(answer)))
    used = len(rows) if isinstance(config, MedusaConfig) else 32  # a head that unrolls takes several times as long
    batch = collate(rows, [[number] for number in range(used)])
    with torch.no_grad():
        states = change(target.forward(batch.input_ids, batch.position_ids, target.masks(*batch.attention())))
    torch.manual_seed(0)
    head = build_head(config, target)
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        found = head(states, batch, target.embedding, target.output)
        (found.loss_sum / found.token_count).backward()
        optimizer.step()
    return head.eval()


def change_tensors(path: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """The head's weights as they would be if they had been trained so: their checksum goes with them."""
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})
    config = path.with_name("config.json")
    described = json.loads(config.read_text())
    if "weights" in described:
        config.write_text(json.dumps({**described, "weights": describe_file(path)}))
