"""--smoke: any recipe, however large, as a few honest steps on a CPU.

The same code runs with the same head, loss, packing and schedule; only sizes, weights and data are replaced, and each
replacement is said in a sentence. The target keeps its kind: `headstart.target` shrinks the published architecture.
"""

from __future__ import annotations

from typing import Any

from headstart.errors import RecipeError
from headstart.recipe_schema import Recipe

OWN_STARTS = ("last-layer", "random")
"""Values of `head.init` that need no file."""

RANDOM = "random:"
"""What the name of a target with random weights begins with; the name of the model that it is a likeness of follows."""

_BUNDLED_ARCHITECTURES = {"bundled:smollm2-135m": "architectures/smollm2-135m-instruct.json"}

_AT_MOST = {
    "head.rank": 8,
    "head.num_layers": 4,
    "head.draft_vocab_size": 512,
    "data.max_length": 128,
    "data.distill.max_new_tokens": 16,
    "data.distill.batch_size": 2,
    "train.max_steps": 6,
    "train.batch_size": 2,
    "train.accumulation": 2,
    "train.eval_every": 3,
    "train.save_every": 3,
    "logging.every": 1,
    "eval.num_prompts": 3,
    "eval.max_new_tokens": 16,
}
_REPLACED = {
    "target.dtype": "float32",
    "target.adapter": None,
    "target.revision": None,
    "target.trust_remote_code": False,
    "head.layers": None,
    "head.num_attention_heads": None,
    "head.num_kv_heads": None,
    "head.head_dim": None,
    "head.intermediate_size": None,
    "head.max_positions": None,
    "data.features": "online",
    "train.cpu_seconds": None,
    "train.dtype": "float32",
    "train.world_size": "any",
    "eval.batch_size": [1],
    "logging.trackers": [],
}
_TRAIN = [{"source": "bundled:chats", "split": "train", "limit": 48}]
_HELD_OUT = {"sources": [{"source": "bundled:chats", "split": "held_out_topics", "limit": 6}]}


def shrink(recipe: Recipe) -> tuple[Recipe, list[str]]:
    """The recipe for a few steps on CPU and, in sentences, what was replaced. Shrinking twice changes nothing more."""
    values = recipe.model_dump()
    said = [_random_target(values)]
    if [source["source"] for source in values["data"]["train"]] != ["bundled:chats"]:
        names = ", ".join(source["source"] for source in values["data"]["train"])
        said.append(f"data.train: the first {_TRAIN[0]['limit']} conversations of bundled:chats instead of {names}")
    values["data"]["train"], values["data"]["held_out"], values["eval"]["prompts"] = _TRAIN, _HELD_OUT, []
    smaller = []
    for key, most in _AT_MOST.items():
        section, name = _parent(values, key)
        old = section[name]
        if key == "train.max_steps" and old is None or old is not None and old > most:
            section[name] = most
            smaller.append(f"{key} {most}" + (f" (not {old})" if old is not None else ""))
    said.append("smaller: " + ", ".join(smaller) if smaller else "")
    for key, new in _REPLACED.items():
        section, name = _parent(values, key)
        if section[name] != new:
            said.append(f"{key}: {_word(new)} instead of {_word(section[name])}")
            section[name] = new
    if values["head"].get("init") not in (None, *OWN_STARTS):  # a trained head has the sizes of the real target
        said.append(f"head.init: {OWN_STARTS[0]} instead of {values['head']['init']}")
        values["head"]["init"] = OWN_STARTS[0]
    if values["train"]["joint"] is not None and values["train"]["joint"]["rank"] > 8:
        said.append(f"train.joint.rank: 8 instead of {values['train']['joint']['rank']}")
        values["train"]["joint"]["rank"] = 8
    if not values["name"].endswith("-smoke"):
        values["name"] += "-smoke"
    return Recipe.model_validate(values), [sentence for sentence in said if sentence]


def _random_target(values: dict[str, Any]) -> str:
    target = values["target"]
    name = target["name"]
    if name.startswith(RANDOM):
        return ""
    target["architecture"] = target["architecture"] or _BUNDLED_ARCHITECTURES.get(name)
    if target["architecture"] is None:
        raise RecipeError(
            f"--smoke needs `target.architecture`, the published config.json of {name}, to build a small likeness: "
            "add it to the recipe or by --set target.architecture=FILE."
        )
    target["name"] = RANDOM + name
    return f"target: random weights in the architecture of {target['architecture']}, shrunk, instead of {name}"


def _parent(values: dict[str, Any], key: str) -> tuple[dict[str, Any], str]:
    *sections, name = key.split(".")
    for section in sections:
        values = values[section]
    return (values, name) if name in values else ({name: None}, name)  # a key that this kind of head does not have


def _word(value: Any) -> str:
    return "none" if value in (None, []) else ", ".join(map(str, value)) if isinstance(value, list) else str(value)
