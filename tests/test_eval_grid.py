"""Grids: every combination through the schema, all faults at once, names of what differs, equal terms."""

from __future__ import annotations

import pytest

from headstart.errors import RecipeError
from headstart.eval.grid import combinations
from headstart.recipe import load_recipe

MEDUSA, EAGLE = "smollm2-medusa.yaml", "smollm2-eagle.yaml"


def refused(*words: object) -> str:
    with pytest.raises(RecipeError) as error:
        combinations(*words)  # pyright: ignore[reportArgumentType]
    return str(error.value)


def test_every_combination_is_a_run_named_by_what_differs():
    found = combinations([MEDUSA], ["head.num_heads=3,4", "head.loss=lk,{soft-ce: 0.9, tv: 0.1}"], ["train.lr=2e-3"])
    assert [one.name for one in found] == [
        "num_heads-3_loss-lk",
        "num_heads-3_loss-soft-ce-0.9-tv-0.1",
        "num_heads-4_loss-lk",
        "num_heads-4_loss-soft-ce-0.9-tv-0.1",
    ]
    last = found[-1]
    assert last.recipe.name == last.name and last.recipe.train.lr == 2e-3 and last.recipe.head.loss["tv"] == 0.1
    assert last.differs == {"head.num_heads": "4", "head.loss": "{soft-ce: 0.9, tv: 0.1}"}
    assert load_recipe(last.source, last.settings).head == last.recipe.head, "what training is given says the same"
    assert {one.budget for one in found} == {("train.cpu_seconds", 1200)}


def test_several_recipes_have_grids_of_their_own_and_one_value_names_nothing():
    grids = ["smollm2-medusa:head.num_heads=2,3", "head.loss=lk", "train.lr=1e-3,2e-3"]
    found = combinations([MEDUSA, EAGLE], grids)
    assert len(found) == 6 and {one.recipe.head.loss for one in found} == {"lk"}
    assert found[0].name == "smollm2-medusa_num_heads-2_lr-1e-3"
    assert found[-1].differs == {"recipe": "smollm2-eagle", "train.lr": "2e-3"}


def test_keys_that_end_alike_are_told_apart_and_long_names_are_cut():
    (first, *_) = combinations(
        [MEDUSA], ["head.dropout=0.1,0.2", "train.dtype=auto,bfloat16", "target.dtype=auto,float32"]
    )
    assert first.name == "dropout-0.1_train.dtype-auto_target.dtype-auto"
    system = "a system turn that is far too long for a name, and says nothing that a shorter one would not say as well"
    found = combinations([MEDUSA], [f'data.chat.system="{system}","{system}."'])
    assert len({one.name for one in found}) == 2 and all(len(one.name) <= 100 for one in found)


def test_all_faults_are_told_at_once():
    said = refused([MEDUSA], ["head.num_heads=3,99,x", "head.loss=soft-ce,klx", "train.lrr=3"])
    assert said.startswith("4 faults")
    assert "--grid head.num_heads=99: head.num_heads: found 99, expected at most 16" in said
    assert "did you mean `train.lr`?" in said and "(`kl`?)" in said and "'x'" in said
    said = refused([MEDUSA], ["head.loss=", "eagle:head.loss=lk", "name=a,b", "head.num_heads=3,3", "train.lr"])
    assert said.startswith("5 faults") and "the names of yours: smollm2-medusa" in said


@pytest.mark.parametrize(
    ("recipes", "grids", "settings", "told"),
    [
        ([MEDUSA], ["head.loss_decay=1,1.0"], [], "one and the same run"),
        ([MEDUSA], ["head.num_heads=3,4", "head.num_heads=5"], [], "given twice"),
        ([MEDUSA], ["data.chat.system=a b,a-b"], [], "both be called system-a-b"),
        ([MEDUSA], [f"seed={','.join(map(str, range(201)))}"], [], "200 runs at most"),
        ([MEDUSA, EAGLE], ["head.num_heads=3,4"], [], "smollm2-eagle: --grid head.num_heads=3"),
        ([MEDUSA, EAGLE], ["head.num_heads=3,4"], [], "as NAME:KEY=.."),
        ([MEDUSA, EAGLE], ["smollm2-medusa:train.max_steps=9"], [], "budget"),
        ([MEDUSA, "quickstart.yaml"], [], [], "differ in data.train"),
        ([MEDUSA, MEDUSA.removesuffix(".yaml")], [], [], "one name"),
    ],
)
def test_what_cannot_be_compared_is_refused(recipes, grids, settings, told):
    assert told in refused(recipes, grids, settings)


def test_a_budget_may_itself_be_what_is_swept():
    found = combinations([MEDUSA], ["train.cpu_seconds=60,120"])
    assert [one.budget for one in found] == [("train.cpu_seconds", 60), ("train.cpu_seconds", 120)]
