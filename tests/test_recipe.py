"""Recipes: what is accepted, what is refused and how it is said, --set, --smoke, and the recipes that are shipped."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from headstart.errors import RecipeError
from headstart.heads.configs import HEADS, DraftConfig, Eagle3Config, EagleConfig, MedusaConfig
from headstart.recipe import (
    PACKAGED,
    architecture_path,
    find_packaged,
    find_recipe,
    load_recipe,
    override,
    smoke,
)
from headstart.recipe_yaml import read_yaml, write_yaml

SHIPPED = sorted(path.name for path in PACKAGED.glob("*.yaml"))
SMALL = """\
name: small
target: {name: a/model}
head: {type: medusa}
data: {train: [{source: rows.jsonl}]}
"""


@pytest.fixture
def in_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def load(text: str, *overrides: str, smoke: bool = False):
    Path("small.yaml").write_text(text)
    return load_recipe("small.yaml", overrides, smoke)


def faults(text: str, *overrides: str) -> list[str]:
    """The lines of the refusal, the header left out."""
    with pytest.raises(RecipeError) as refusal:
        load(text, *overrides)
    assert refusal.value.exit_status == 2
    lines = str(refusal.value).splitlines()
    return [line.strip() for line in lines[1:]] or lines


# --- B78: YAML 1.1 numbers


@pytest.mark.parametrize("text", ["2e-5", "2.0e-5", "'2e-5'", '"2e-5"', "2E-5", "0.00002", "+2.e-05"])
def test_every_spelling_of_a_float_is_that_float(in_folder, text):
    by_file, by_set = load(SMALL + f"train: {{lr: {text}}}"), load(SMALL, f"train.lr={text}")
    assert by_file.train.lr == by_set.train.lr == 2e-5
    assert isinstance(by_file.train.lr, float)


@pytest.mark.parametrize(
    ("key", "text", "wanted"),
    [
        ("train.lr", "1_000", "a number; write 1000"),
        ("train.lr", "yes", "a number"),
        ("train.lr", "true", "a number"),
        ("train.lr", "1:30", "a number"),
        ("train.lr", ".nan", "a finite number"),
        ("train.lr", "1e999", "a finite number"),
        ("train.lr", "", "a number"),
        ("train.batch_size", "3.0", "a whole number; write 3"),
        ("train.batch_size", "1e3", "a whole number; write 1000"),
        ("train.batch_size", "010", "a whole number"),
        ("train.batch_size", "0x10", "a whole number"),
        ("train.batch_size", "'3'", "a whole number; write 3 without quotes"),
        ("train.batch_size", "true", "a whole number"),
        ("head.num_heads", "3.0", "a whole number; write 3"),
        ("data.packing", '"true"', "true or false; write true without quotes"),
        ("data.packing", "yes", "true or false; write true without quotes"),
        ("data.packing", "1", "true or false"),
        ("name", "7", "text; put it in quotes"),
    ],
)
def test_a_value_of_another_type_is_refused_with_path_value_and_wanted_type(in_folder, key, text, wanted):
    section, _, name = key.rpartition(".")
    if section:
        document = re.sub(rf"(?m)^{section}:.*\n", "", SMALL) + f"{section}:\n  {name}: {text}\n"
        document += {"data": "  train: [{source: rows.jsonl}]\n", "head": "  type: medusa\n"}.get(section, "")
    else:
        document = SMALL.replace("name: small", f"name: {text}")
    (from_file,) = faults(document)
    assert re.match(rf"small.yaml:\d+: {re.escape(key)}: found ", from_file) and f"expected {wanted}" in from_file
    (from_set,) = faults(SMALL, f"{key}={text}")
    assert from_set == f"--set {key}={text}" + from_file[from_file.index(f": {key}:") :]
    value = text.strip("'\"").lower()
    shown = {"": "nothing (null)", "1e999": "inf", ".nan": "nan", "1e3": "1000.0"}.get(value, value)
    assert str(shown) in from_file


def test_an_unquoted_yes_in_template_arguments_is_refused(in_folder):
    text = SMALL.replace("data: {", "data: {chat: {arguments: {enable_thinking: no}}, ")
    (fault,) = faults(text)
    assert "data.chat.arguments" in fault and "`no`" in fault
    assert load(text.replace("no}", "false}")).data.chat.arguments == {"enable_thinking": False}
    assert load(text.replace("no}", "'no'}")).data.chat.arguments == {"enable_thinking": "no"}


# --- B79: keys


def test_misspelt_and_misplaced_keys_are_all_named_at_once_with_the_nearest(in_folder):
    found = faults(
        SMALL + "training: {learnig_rate: 1.0e-4}\nlearning_rate: 1.0e-4\nnum-heads: 3\nzzz: 1\n",
        "train.warm_up=0.1",
        "train.nonsense=1",
    )
    assert found == [
        "small.yaml:5: training: unknown key at the top level; did you mean `train`?",
        "small.yaml:5: training.learnig_rate: unknown key in `train`; did you mean `train.lr`?",
        "small.yaml:6: learning_rate: unknown key at the top level; did you mean `train.lr` or `train.joint.lr`?",
        "small.yaml:7: num-heads: unknown key at the top level; did you mean `head.num_heads`?",
        "small.yaml:8: zzz: unknown key at the top level; known: data, eval, export, head, logging, name, seed, "
        "target, train",
        "--set train.warm_up=0.1: train.warm_up: unknown key in `train`; did you mean `train.warmup`?",
        "--set train.nonsense=1: train.nonsense: unknown key in `train`; known: accumulation, "
        "activation_checkpointing, batch_size, clip, cpu_seconds, dtype, epochs, eval_every, feature_memory, joint, "
        "keep, lr, max_steps, optimizer, save_every, schedule, timeout, warmup, weight_decay, world_size",
    ]


def test_a_key_given_twice_is_refused_with_both_lines(in_folder):
    (fault,) = faults(SMALL + "train:\n  lr: 1e-3\n  epochs: 2\n  lr: 1e-4\n")
    assert fault == "small.yaml:8: train.lr: the key `lr` stands here twice (first on line 6); keep one"
    (fault,) = faults(SMALL + "seed: 1\nseed: 1\n")
    assert "seed" in fault and "twice" in fault


def test_faults_of_every_kind_come_in_one_report_in_the_order_of_the_file(in_folder):
    found = faults(
        "name: small\n"
        "target: {name: a, placement: sharded}\n"
        "head:\n  type: medusa\n  output: lowrank\n  loss: {soft-cee: 1.0, tv: 0}\n"
        "data:\n  train: [{sorce: x}]\n  max_length: 4\n"
        "train: {epochs: 0, world_size: some}\n"
    )
    assert [line.split(": ")[1] for line in found] == [
        "target.placement",
        "head.output",
        "head.loss.soft-cee",
        "head.loss.tv",
        "data.train.0.source",
        "data.train.0.sorce",
        "data.max_length",
        "train.epochs",
        "train.world_size",
    ]
    assert found[1].endswith("found the text 'lowrank', expected shared, own or low-rank (`low-rank`?)")
    assert found[7] == "small.yaml:10: train.epochs: found 0, expected at least 1"
    assert found[8].endswith("expected any or a whole number")


def test_an_empty_recipe_is_told_what_it_lacks(in_folder):
    found = faults("{}\n")
    assert [line.split(": ")[1] for line in found] == ["name", "target", "head", "data"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "found nothing"),
        ("- 1\n", "a single value or a list"),
        ("a: [1", "small.yaml:1: not readable as YAML"),
        ("a: 1\n---\nb: 2\n", "small.yaml:2: not readable as YAML"),
        ("a: &x 1\nb: *x\n", "small.yaml:1: not readable as YAML: anchors"),
        ("a: !!python/object:os.system x\n", "tags"),
        ("a: \x00", "not readable as YAML"),
        ("a: " + "[" * 5000, "not readable as YAML"),
    ],
)
def test_what_is_no_recipe_at_all_is_one_sentence(in_folder, text, said):
    (fault,) = faults(text)
    assert said in fault


def test_a_section_that_is_none_says_its_keys(in_folder):
    (fault,) = faults(SMALL + "logging:\n")
    assert fault == (
        "small.yaml:5: logging: found nothing (null), expected a section with keys such as `trackers`, `project`, "
        "`every`"
    )


def test_settings_that_exclude_each_other(in_folder):
    assert "needs `rank`" in faults(SMALL.replace("medusa}", "medusa, output: low-rank}"))[0]
    assert "`rank` goes with" in faults(SMALL.replace("medusa}", "medusa, rank: 3}"))[0]
    both = "data: {held_out: {fraction: 0.1, sources: [{source: a}]}, "
    assert "and not both" in faults(SMALL.replace("data: {", both))[0]


# --- one section, several heads


def head(text: str) -> str:
    return SMALL.replace("{type: medusa}", text)


def test_type_chooses_the_head_and_its_keys(in_folder):
    kinds = {"medusa": MedusaConfig, "eagle": EagleConfig, "eagle3": Eagle3Config, "draft": DraftConfig}
    assert kinds == HEADS
    for name, kind in kinds.items():
        recipe = load(head(f"{{type: {name}}}"))
        assert type(recipe.head) is kind and type(load(SMALL, f"head={{type: {name}}}").head) is kind
        Path("effective.yaml").write_text(recipe.to_yaml())
        assert load_recipe("effective.yaml") == recipe


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{type: meduza}", "head.type: found the text 'meduza', expected medusa, eagle, eagle3 or draft (`medusa`?)"),
        ("{type: hydra}", "head.type: found the text 'hydra', expected medusa, eagle, eagle3 or draft"),
        ("{type: 3}", "head.type: found 3, expected medusa, eagle, eagle3 or draft"),
        ("{}", "head.type: this key is missing (Which head this is); expected medusa, eagle, eagle3 or draft"),
        ("{num_heads: 3}", "head.type: this key is missing (Which head this is); expected medusa, eagle, "),
        ("eagle", "head: found the text 'eagle', expected a section with keys such as `type`, "),
        ("{type: eagle3, num_heads: 3}", "head.num_heads: a key of `type: medusa`, not of `type: eagle3`; remove it"),
        ("{type: eagle, fc_norm: true}", "head.fc_norm: a key of `type: eagle3`, not of `type: eagle`; remove it"),
        (
            "{type: medusa, unrolled_steps: 3}",
            "head.unrolled_steps: a key of `type: eagle` or `type: eagle3`, not of `type: medusa`; remove it",
        ),
        ("{type: eagle3, fc_nrm: true}", "head.fc_nrm: unknown key in `head`; did you mean `head.fc_norm`?"),
        (
            "{type: eagle3, ttt_length: 7}",
            "head.ttt_length: unknown key in `head`; did you mean `head.unrolled_steps`?",
        ),
        ("{type: eagle3, fc_norm: 1}", "head.fc_norm: found 1, expected true or false"),
        (
            "{type: eagle3, unrolled_steps: two}",
            "head.unrolled_steps: found the text 'two', expected a whole number or a list",
        ),
        ("{type: eagle3, unrolled_steps: 0}", "head.unrolled_steps: found 0, expected at least 1"),
        (
            "{type: eagle3, unrolled_steps: [{until: 1.0, steps: 0}]}",
            "head.unrolled_steps.0.steps: found 0, expected at least 1",
        ),
        (
            "{type: eagle3, unrolled_steps: [{until: 1.0, step: 1, steps: 2}]}",
            "head.unrolled_steps.0.step: unknown key in `head.unrolled_steps.0`; did you mean "
            "`head.unrolled_steps.steps`?",
        ),
        ("{type: eagle3, unrolled_steps: [{until: 0.3, steps: 1}]}", "head.unrolled_steps: "),
        ("{type: eagle, draft_vocab_size: 4.0}", "head.draft_vocab_size: found 4.0, expected a whole number"),
    ],
)
def test_the_faults_of_a_head_are_those_of_its_type(in_folder, text, said):
    found = faults(head(text))
    assert len(found) == 1 and found[0].startswith(f"small.yaml:3: {said}"), found


def test_a_curriculum_is_set_from_the_command_line(in_folder):
    curriculum = "head.unrolled_steps=[{until: 0.25, steps: 1}, {until: 1, steps: 3}]"
    made = load(SMALL, "head={type: eagle3}", curriculum)
    assert isinstance(made.head, Eagle3Config)
    assert [made.head.steps_at(share) for share in (0.0, 0.2, 0.25, 0.9, 1.0)] == [1, 1, 3, 3, 3]


@pytest.mark.parametrize("size", [0, -1])
def test_a_draft_vocabulary_of_nothing_is_refused_by_its_name(in_folder, size):
    (fault,) = faults(head(f"{{type: eagle3, draft_vocab_size: {size}}}"))
    assert fault == f"small.yaml:3: head.draft_vocab_size: found {size}, expected at least 1"


# --- --set


def test_set_reaches_every_depth_and_makes_sections(in_folder):
    recipe = load(
        SMALL,
        "seed=3",
        "eval.temperature=[0, 0.7]",
        "data.train.0.limit=5",
        "data.chat.arguments={enable_thinking: false}",
        "head.loss={soft-ce: 0.9, tv: 1e-1}",
        "train.clip=",
    )
    assert recipe.seed == 3 and recipe.eval.temperature == [0.0, 0.7] and recipe.data.train[0].limit == 5
    assert recipe.data.chat.arguments == {"enable_thinking": False} and recipe.train.clip is None
    assert recipe.head.loss_weights == {"soft-ce": 0.9, "tv": 0.1}
    assert load(SMALL, "eval.temperature=0.7").eval.temperature == [0.7]


def test_set_mends_a_fault_of_the_file(in_folder):
    assert load(SMALL + "train: {lr: fast}\n", "train.lr=1e-4").train.lr == 1e-4


def test_faults_of_set_carry_the_setting(in_folder):
    found = faults(SMALL, "data.train.1.split=x", "trian", "train.lr.x=1", "train.lr=[")
    assert [line.partition(": ")[0] for line in found] == [
        "--set data.train.1.split=x",
        "--set trian",
        "--set train.lr=[",
        "--set train.lr.x=1",
    ]
    assert "the list has 1 entries" in found[0] and "KEY=VALUE" in found[1]


def test_override_checks_like_the_file(in_folder):
    recipe = override(load(SMALL), ["eval.num_prompts=3"])
    assert recipe.eval.num_prompts == 3
    with pytest.raises(RecipeError, match="--set eval.num_promts=3: eval.num_promts: .*`eval.num_prompts`"):
        override(recipe, ["eval.num_promts=3"])


# --- finding, architectures, writing


def test_packaged_recipes_are_found_by_name_from_anywhere(in_folder):
    assert find_recipe("llama70b.yaml") == find_recipe("llama70b") == PACKAGED / "llama70b.yaml"
    assert find_packaged("two-cpu.yaml", "accelerate") == PACKAGED / "accelerate" / "two-cpu.yaml"
    Path("llama70b.yaml").write_text(SMALL)
    assert load_recipe("llama70b.yaml").name == "small", "a file of one's own goes first"


def test_a_recipe_that_is_nowhere_names_the_nearest(in_folder):
    with pytest.raises(RecipeError, match="no file at lama70b.yaml.*did you mean llama70b.yaml"):
        find_recipe("lama70b.yaml")
    with pytest.raises(RecipeError, match="a folder at .*packaged: .*quickstart.yaml"):
        find_recipe(in_folder)
    Path("binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RecipeError, match="binary.yaml cannot be read .not text in UTF-8"):
        load_recipe("binary.yaml")


def test_an_architecture_stands_beside_the_recipe_or_is_packaged(in_folder, monkeypatch):
    (in_folder / "mine" / "architectures").mkdir(parents=True)
    own = in_folder / "mine" / "architectures" / "qwen3-8b.json"
    own.write_text((PACKAGED / "architectures" / "qwen3-8b.json").read_text())
    text = SMALL.replace("{name: a/model}", "{name: a/model, architecture: architectures/qwen3-8b.json}")
    (in_folder / "mine" / "recipe.yaml").write_text(text)
    recipe = load_recipe("mine/recipe.yaml")
    assert architecture_path(recipe) == Path("mine/architectures/qwen3-8b.json"), "its own goes first"
    Path("effective.yaml").write_text(recipe.to_yaml())
    assert load_recipe("effective.yaml") == recipe
    assert architecture_path(load(text)) == PACKAGED / "architectures" / "qwen3-8b.json"
    (fault,) = faults(text.replace("qwen3-8b", "qwen4"))
    assert fault.startswith("small.yaml:2: target.architecture: no file architectures/qwen4.json; packaged: ")


def test_writing_and_reading_give_the_same_values():
    odd = {"a": "2e-5", "b": "yes", "c": "1_000", "d": 1e-05, "e": 1.0, "f": "010", "g": "null", "h": "true", "i": ""}
    odd |= {"j": [{"k": None, "l": []}], "m": {}, "n": "it's: #", "o": 1e22, "p": "zwei\nZeilen", "q": "ünï", "r": "3"}
    document = read_yaml(write_yaml(odd), "odd.yaml")
    assert document.values == odd and not document.faults
    assert [type(document.values[key]) for key in odd] == [type(value) for value in odd.values()]


# --- the shipped recipes


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_recipes_load_and_round_trip(name, in_folder):
    recipe = load_recipe(name)
    Path("effective.yaml").write_text(recipe.to_yaml())
    assert load_recipe("effective.yaml") == recipe
    assert recipe.name == name.removesuffix(".yaml")
    assert architecture_path(recipe) is not None


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_recipes_read_as_documents(name):
    text = (PACKAGED / name).read_text()
    header = text[: text.index("\n\n")]
    assert all(line.startswith("#") for line in header.splitlines())
    for word in ("# For ", "# Hardware ", "# Launch ", "# Expect "):
        assert word in header, f"the header of {name} lacks {word.strip('# ')}"
    assert "accelerate launch" in header and f"--recipe {name}" in header
    sections = [key for key in yaml.safe_load(text) if key not in ("name", "seed")]
    assert sections == [s for s in ("target", "head", "data", "train", "eval", "logging", "export") if s in sections]
    assert max(map(len, text.splitlines())) <= 120


@pytest.mark.parametrize("name", SHIPPED)
def test_smoke_keeps_the_kind_and_replaces_the_size(name, in_folder):
    recipe = load_recipe(name)
    small, said = smoke(recipe)
    assert small == load_recipe(name, smoke=True)
    assert small.target.name == f"random:{recipe.target.name}" and small.target.dtype == "float32"
    assert small.target.architecture == recipe.target.architecture
    assert small.name == f"{recipe.name}-smoke" and small.train.max_steps == 6 and small.train.world_size == "any"
    smaller = {"draft_vocab_size", "rank", "layers"}
    assert small.head.model_dump(exclude=smaller) == recipe.head.model_dump(exclude=smaller)
    assert small.data.chat == recipe.data.chat and small.data.packing == recipe.data.packing
    assert {source.source for source in small.data.train} == {"bundled:chats"} and small.logging.trackers == []
    assert said[0].startswith("target: random weights") and recipe.target.name in said[0]
    assert smoke(small) == (small, []), "shrinking twice changes nothing more"
    Path("effective.yaml").write_text(small.to_yaml())
    assert load_recipe("effective.yaml") == small


def test_smoke_says_what_it_replaces_and_keeps_what_is_smaller(in_folder):
    recipe = load_recipe("llama70b.yaml", ["train.max_steps=2", "head.draft_vocab_size=null", "data.features=offline"])
    small, said = smoke(recipe)
    assert small.target.placement == "shard", "that is the launch's: train/modes.py"
    assert small.train.max_steps == 2 and small.head.draft_vocab_size is None and small.data.features == "online"
    for sentence in (
        "data.features: online instead of offline",
        "logging.trackers: none instead of wandb",
        "train.world_size: any instead of 8",
    ):
        assert sentence in said
    sized = ["head.init=runs/other/head", "head.intermediate_size=999", "head.layers=[2, 5, 70]"]
    small, said = smoke(load_recipe("llama70b-eagle3.yaml", sized))
    assert isinstance(small.head, Eagle3Config)
    assert (small.head.init, small.head.intermediate_size, small.head.layers) == ("last-layer", None, None)
    assert "head.init: last-layer instead of runs/other/head" in said
    assert "head.layers: none instead of 2, 5, 70" in said
    with pytest.raises(RecipeError, match="--smoke needs `target.architecture`"):
        smoke(load(SMALL))
    assert load(SMALL.replace("a/model", "bundled:smollm2-135m"), smoke=True).target.architecture


def test_recipes_and_heads_made_in_python_are_checked_alike():
    assert MedusaConfig.model_validate({"loss_decay": "8e-1"}).loss_decay == 0.8
    for wrong in ({"num_heads": 3.0}, {"loss": {}}, {"loss": "sft-ce"}, {"heads": 3}, {"rank": 3}):
        with pytest.raises(ValidationError):
            MedusaConfig.model_validate(wrong)
    with pytest.raises(TypeError):
        MedusaConfig(4)  # pyright: ignore[reportCallIssue]  (keyword-only)
