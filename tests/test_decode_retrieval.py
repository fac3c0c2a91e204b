"""Datastores against a search through their documents, and the drafter that reads them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import tiny
from test_decode_model import decode, plain, prompts, target

from headstart.data.datastore import (
    MANIFEST,
    SUFFIXES,
    TOKENS,
    Datastore,
    build_datastore,
    load_datastore,
    suffix_array,
    tokenizer_key,
)
from headstart.decode.drafters.base import Request, Rows
from headstart.decode.drafters.retrieval import RetrievalDrafter
from headstart.decode.drafters.union import UnionDrafter
from headstart.errors import DataError

END = 3


def store_of(documents: Sequence[Sequence[int]], separator: int = 300) -> Datastore:
    tokens = np.array([token for one in documents for token in [*one, separator]], np.uint16)
    return Datastore(tokens, suffix_array(tokens), separator)


def random_documents(seed: int, count: int = 12, ids: int = 4) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, ids, rng.integers(1, 30)).tolist() for _ in range(count)]


def searched(
    documents: Sequence[Sequence[int]], text: Sequence[int], most: int, tokens: int
) -> tuple[int, list[list[int]]]:
    """How much of the text's end occurs, and all that follows it in one document, in order."""
    for length in range(min(most, len(text)), 0, -1):
        wanted = list(text[-length:])
        found = [
            list(one[place + length : place + length + tokens])
            for one in documents
            for place in range(len(one) - length + 1)
            if list(one[place : place + length]) == wanted
        ]
        if found:
            return length, sorted(found)
    return 0, []


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
def test_suffixes_are_sorted(dtype):
    tokens = np.random.default_rng(0).integers(0, 3, 200).astype(dtype)
    tokens[::7] += 300  # two bytes
    expected = sorted(range(len(tokens)), key=lambda place: tokens[place:].tolist())
    assert suffix_array(tokens).tolist() == expected


def test_a_look_up_equals_a_search_through_all_documents():
    lengths = Counter()
    for seed in range(4):
        documents = random_documents(seed)
        store, rng = store_of(documents), np.random.default_rng(100 + seed)
        for _ in range(60):
            text = rng.integers(0, 5, rng.integers(1, 9)).tolist()
            start, end, length = store.longest_suffix(text, 6)
            expected = searched(documents, text, 6, 5)
            found = store.continuations(start, end, length, most=10**6, tokens=5) if length else []
            assert (length, sorted(found)) == expected
            lengths[length] += 1
    assert set(lengths) >= {0, 1, 2, 3, 4}


def test_of_many_occurrences_every_continuation_keeps_its_share():
    store = store_of([[1, 2, 5]] * 300 + [[1, 2, 6]] * 100 + [[1, 2]] * 4)
    start, end, length = store.longest_suffix([9, 1, 2], 16)
    assert (end - start, length) == (404, 2)
    counts = Counter(map(tuple, store.continuations(start, end, length, most=40, tokens=3)))
    assert counts.total() == 40 and abs(counts[(5,)] - 30) <= 1 and abs(counts[(6,)] - 10) <= 1


# -- the drafter -------------------------------------------------------------------------------------------------------


def proposed(drafter: RetrievalDrafter, texts: Sequence[Sequence[int]], budget: int) -> list[Counter[tuple[int, ...]]]:
    """Per row the branches of its tree; every one is valid and stands once."""
    rows = Rows(requests=[Request(prompt_ids=ids, max_new_tokens=9) for ids in texts], ids=[list(ids) for ids in texts])
    drafter.start(rows, 0)
    tree = drafter.propose(rows, budget)
    assert tree.num_nodes <= budget and tree.drawn is None
    found = []
    for tokens, parents, valid in zip(
        tree.tokens.tolist(), tree.topology.parents.tolist(), tree.topology.valid.tolist(), strict=True
    ):
        branches: list[tuple[int, ...]] = [()]
        for node in range(1, len(tokens)):
            branches.append((*branches[parents[node]], tokens[node]))
        found.append(Counter(branch for branch, there in zip(branches[1:], valid[1:], strict=True) if there))
    return found


def test_the_heaviest_nodes_of_the_trie_are_drafted():
    """Against counts of every prefix of every continuation: no node left out is heavier than one that is drafted."""
    for seed in range(6):
        documents, rng = random_documents(seed, count=20), np.random.default_rng(seed)
        drafter = RetrievalDrafter(store_of(documents), [END], num_nodes=9, length=4, max_ngram=3)
        texts = [rng.integers(0, 4, 6).tolist() for _ in range(8)]
        for text, branches in zip(texts, proposed(drafter, texts, 64), strict=True):
            _, found = searched(documents, text, 3, 4)
            ended = [one[: one.index(END) + 1] if END in one else one for one in found]
            weights = Counter(tuple(one[:depth]) for one in ended for depth in range(1, len(one) + 1))
            assert set(branches) <= set(weights) and set(branches.values()) <= {1}
            assert len(branches) == min(8, len(weights))
            left = [weights[branch] for branch in weights if branch not in branches]
            assert min((weights[branch] for branch in branches), default=0) >= max(left, default=0)
            assert all(END not in branch[:-1] for branch in branches)


def test_a_budget_bounds_the_tree_and_the_same_text_has_the_same_tree():
    documents = random_documents(3, count=20)
    drafter = RetrievalDrafter(store_of(documents), [], num_nodes=16)
    texts = [[0, 1], [2], [9]]
    for budget in (1, 2, 5):
        for branches in proposed(drafter, texts, budget):
            assert len(branches) <= budget - 1
    assert proposed(drafter, texts, 16) == proposed(drafter, texts, 16)
    assert not proposed(drafter, texts, 16)[2], "no match, no drafts"


@pytest.mark.parametrize("batch_size", [1, 3])
def test_the_text_is_the_targets_own(batch_size):
    """A datastore of the target's own answers, some of them spoilt; alone and with another drafter."""
    own = [[*prompt, *answer] for prompt, answer in zip(prompts(), plain(), strict=True)]
    documents = [ids if number % 3 else ids[:-6] + ids[:9] for number, ids in enumerate(own)]
    drafter = RetrievalDrafter(store_of(documents), target().end_token_ids)
    done = decode(drafter, batch_size)
    assert [one.token_ids for one in done] == plain()
    steps = [step for one in done for step in one.steps if not step.cut]
    assert sum(step.accepted for step in steps) > len(steps)
    both = decode(UnionDrafter([drafter, RetrievalDrafter(store_of(random_documents(0)), [])]), batch_size)
    assert [one.token_ids for one in both] == plain()


# -- on disk -----------------------------------------------------------------------------------------------------------


def write_files(folder) -> list[str]:
    chats = folder / "chats.jsonl"
    rows = [
        {"messages": [{"role": "user", "content": "one?"}, {"role": "assistant", "content": "two three"}]},
        {"messages": [{"role": "user", "content": "no answer"}]},
        {"messages": [{"role": "user", "content": "two?"}, {"role": "assistant", "content": "two three four"}]},
    ]
    chats.write_text("".join(json.dumps(row) + "\n" for row in rows))
    manual = folder / "manual.txt"
    manual.write_text("two threes make six")
    return [str(chats), str(manual)]


def test_files_become_a_datastore_of_their_tokens(tmp_path):
    tokenizer = tiny.tokenizer()
    reports = build_datastore(tmp_path / "store", write_files(tmp_path), tokenizer)
    assert sorted((report.rows, report.kept) for report in reports.values()) == [(1, 1), (3, 2)]
    store = load_datastore(tmp_path / "store", tokenizer)
    assert isinstance(store.tokens, np.memmap) and store.separator >= len(tokenizer)
    start, end, length = store.longest_suffix(tokenizer("?? two three")["input_ids"], 16)
    assert (end - start, length) == (2, len(" two three")) or end - start == 3
    followers = store.continuations(*store.longest_suffix(tokenizer("two three")["input_ids"], 16), most=9, tokens=2)
    assert sorted(followers) == sorted([[tiny.TURN_END, ord("\n")], [ord(" "), ord("f")], [ord("s"), ord(" ")]])
    manifest = (tmp_path / "store" / MANIFEST).read_text()
    assert str(tmp_path) not in manifest and json.loads(manifest)["documents"] == 3


def test_folders_give_their_texts_and_their_conversations(tmp_path):
    mixed = tmp_path / "mixed"
    mixed.mkdir()
    write_files(mixed)
    (mixed / "NOTES.TXT").write_text("two threes")
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts/one.txt").write_text("año 🙂 " * 3)
    files = [str(mixed), str(tmp_path / "texts"), str(mixed)]
    reports = build_datastore(tmp_path / "store", files, tiny.tokenizer())
    assert sorted((Path(name).name, one.kept) for name, one in reports.items()) == [
        ("NOTES.TXT", 1),
        ("chats.jsonl", 2),
        ("manual.txt", 1),
        ("one.txt", 1),
    ]
    (tmp_path / "folder.txt").mkdir()
    (tmp_path / "notes.md").write_text("# two")
    (tmp_path / "latin.txt").write_bytes("año".encode("latin-1"))
    for name, told in [("folder.txt", "expected a name ending in .txt, .jsonl"), ("latin.txt", "not UTF-8.*iconv")]:
        with pytest.raises(DataError, match=told):
            build_datastore(tmp_path / "other", [str(tmp_path / name)], tiny.tokenizer())
    with pytest.raises(DataError, match="notes.md is of no known kind"):
        build_datastore(tmp_path / "other", [str(tmp_path / "notes.md")], tiny.tokenizer())
    assert not (tmp_path / "other").exists()


def test_a_store_of_another_tokenizer_or_of_nothing_is_refused(tmp_path):
    tokenizer, files = tiny.tokenizer(), write_files(tmp_path)
    with pytest.raises(DataError, match="There is no datastore in .*nowhere"):
        load_datastore(tmp_path / "nowhere", tokenizer)
    folder = tmp_path / "store"
    build_datastore(folder, files, tokenizer)
    with pytest.raises(DataError, match="holds something already"):
        build_datastore(folder, files, tokenizer)
    stranger = tiny.tokenizer()
    stranger.add_tokens(["<|new|>"])
    assert tokenizer_key(stranger) != tokenizer_key(tokenizer) == tokenizer_key(tiny.tokenizer(template=None))
    with pytest.raises(DataError, match="another tokenizer"):
        load_datastore(folder, stranger)
    empty = tmp_path / "empty.txt"
    empty.write_text("")
    with pytest.raises(DataError, match="No text for a datastore was found in .*empty.txt"):
        build_datastore(tmp_path / "other", [str(empty)], tokenizer)
    assert not (tmp_path / "other").exists()
    with pytest.raises(DataError, match="There is no file"):
        build_datastore(tmp_path / "other", [str(tmp_path / "gone.txt")], tokenizer)
    manifest = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps({**manifest, "format": 9}))
    with pytest.raises(DataError, match="has format 9"):
        load_datastore(folder, tokenizer)
    (folder / MANIFEST).write_text(json.dumps(manifest))
    (folder / SUFFIXES).write_bytes((folder / SUFFIXES).read_bytes()[:-40])
    with pytest.raises(DataError, match="is damaged"):
        load_datastore(folder, tokenizer)


@pytest.mark.parametrize("name", [TOKENS, SUFFIXES])
def test_a_flipped_bit_of_a_datastore_is_named(tmp_path, name):
    """Its length is right, and what it says is not: an entry would point beyond the text."""
    folder = tmp_path / "store"
    build_datastore(folder, write_files(tmp_path), tiny.tokenizer())
    load_datastore(folder, tiny.tokenizer())
    content = bytearray((folder / name).read_bytes())
    content[-2] ^= 64
    (folder / name).write_bytes(content)
    with pytest.raises(DataError, match=f"store is damaged .the bytes of {name} are not those that were .*; build it"):
        load_datastore(folder, tiny.tokenizer())
