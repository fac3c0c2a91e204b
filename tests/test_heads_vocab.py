"""The draft vocabulary: what is in it, in which order, and how it widens while decoding."""

from __future__ import annotations

import pytest
import torch
from head_cases import tiny, vocab_of

from headstart.errors import HeadError
from headstart.heads.configs import MedusaConfig
from headstart.heads.store import build_head
from headstart.heads.vocab import DraftVocab, WidenedVocab

SPECIAL = [256, 257, 258, 259, 260]


def counts(rows: int = 264, **by_token: int) -> torch.Tensor:
    """Counts by name: t65=3 is three times token 65."""
    table = torch.zeros(rows, dtype=torch.long)
    for token, count in by_token.items():
        table[int(token[1:])] = count
    return table


def build(table: torch.Tensor, size: int) -> DraftVocab:
    vocab = DraftVocab.build(table, size, special_ids=SPECIAL, tokenizer_size=261)
    assert vocab is not None
    return vocab


def test_the_most_frequent_ids_and_the_special_ones_are_in():
    vocab = build(counts(t65=5, t66=9, t67=2, t200=7), 8)
    assert vocab.ids.tolist() == [65, 66, 200, *SPECIAL]
    assert build(counts(t65=5, t66=9, t67=2, t200=7), 7).ids.tolist() == [66, 200, *SPECIAL]


def test_ties_and_what_was_never_seen_fill_up_from_the_lowest_id():
    assert build(counts(t9=1, t4=1, t7=1), 7).ids.tolist() == [4, 7, *SPECIAL]
    assert build(counts(t9=1), 9).ids.tolist() == [0, 1, 2, 9, *SPECIAL]


def test_more_asked_for_than_the_data_have():
    """B30: 64 ids from 20 distinct tokens; all, none, negative and fractional sizes."""
    table = counts(**{f"t{3 * index}": index + 1 for index in range(20)})
    vocab = build(table, 64)
    assert len(vocab) == 64 and len(set(vocab.ids.tolist())) == 64
    assert set(range(0, 60, 3)) | set(SPECIAL) <= set(vocab.ids.tolist())
    assert torch.equal(vocab.ids, build(table.clone(), 64).ids)
    assert (vocab.index_of(torch.arange(264)) >= 0).sum() == 64
    assert torch.equal(vocab.index_of(vocab.ids), torch.arange(64))
    assert DraftVocab.build(table, 264, special_ids=SPECIAL, tokenizer_size=261) is None
    for wrong in (0, -1):
        with pytest.raises(HeadError, match=f"draft_vocab_size is {wrong}, expected a whole number from 1 to 261"):
            build(table, wrong)
    for wrong in (0, -1, 4.0, True, "64"):
        with pytest.raises(ValueError, match="draft_vocab_size"):
            MedusaConfig.model_validate({"draft_vocab_size": wrong})


def test_padding_rows_never_enter():
    """B29: 264 output rows, 261 ids in the tokenizer."""
    assert build(counts(), 261).ids.tolist() == list(range(261))
    with pytest.raises(HeadError, match="draft_vocab_size is 262.*264 output rows, 261 ids.*set it to 261"):
        build(counts(), 262)
    with pytest.raises(HeadError, match="300.*264 output rows"):
        build(counts(), 300)
    with pytest.raises(HeadError, match="hold the id 262.*tokenizer of 261"):
        build(counts(t262=4), 64)


def test_a_tokenizer_with_more_ids_than_the_target_has_rows():
    """The `tied` model has 257 rows and a tokenizer of 261: special tokens without a row cannot be drafted."""
    vocab = build(counts(257, t65=2), 10)
    assert vocab.ids.tolist() == [*range(8), 65, 256]
    with pytest.raises(HeadError, match="257"):
        build(counts(257), 258)


def test_too_small_for_the_special_tokens():
    with pytest.raises(HeadError, match="less than the 5 special and end tokens"):
        build(counts(), 4)


def test_coverage_is_the_share_of_supervised_tokens_inside():
    table = counts(t65=6, t66=3, t67=1)
    assert build(table, 7).coverage(table) == pytest.approx(0.9)
    assert torch.isnan(torch.tensor(build(table, 7).coverage(counts())))


def test_what_is_no_vocabulary_is_refused():
    for ids in ([], [3, 2], [1, 1], [-1, 2], [5, 264]):
        with pytest.raises(HeadError, match="ascending, distinct ids from 0 to 263"):
            DraftVocab(ids, 264)


def test_a_head_and_its_vocabulary_must_fit():
    target = tiny.target("llama")
    with pytest.raises(HeadError, match="draft_vocab_size is 64, but none was built"):
        build_head(MedusaConfig(draft_vocab_size=64), target)
    with pytest.raises(HeadError, match="draft_vocab_size is 64, but one of 32 ids was given"):
        build_head(MedusaConfig(draft_vocab_size=64), target, vocab_of(range(32)))
    with pytest.raises(HeadError, match="draft_vocab_size is None, but one of 32"):
        build_head(MedusaConfig(), target, vocab_of(range(32)))
    with pytest.raises(HeadError, match="built for 265 output rows, the target has 264"):
        build_head(MedusaConfig(draft_vocab_size=32), target, vocab_of(range(32), 265))
    assert build_head(MedusaConfig(draft_vocab_size=264), target).draft_ids is None


def test_the_way_back_follows_ids_that_were_loaded():
    vocab = vocab_of([1, 5, 9])
    vocab.load_state_dict(vocab_of([2, 3, 4]).state_dict())
    assert vocab.index_of(torch.tensor([1, 2, 4])).tolist() == [-1, 0, 2]


def test_rows_widen_by_their_own_text_and_see_nothing_of_the_others():
    widened = WidenedVocab(vocab_of(range(10)))
    widened.add_rows(2)
    widened.widen(0, [3, 50, 40, 50])
    widened.widen(1, [40, 60])
    widened.widen(0, [60, 70])
    assert widened.extra_ids == [50, 40, 60, 70]
    assert widened.allowed().tolist() == [[True, True, True, True], [False, True, True, False]]
    widened.add_rows(1)
    assert widened.allowed()[2].tolist() == [False] * 4


def test_ids_that_no_row_has_any_more_are_forgotten():
    widened = WidenedVocab(vocab_of(range(10)))
    widened.add_rows(3)
    for row, ids in enumerate([[50], [60, 70], [70, 80]]):
        widened.widen(row, ids)
    assert widened.select([2, 1]) is True
    assert widened.extra_ids == [60, 70, 80]
    assert widened.allowed().tolist() == [[False, True, True], [True, True, False]]
    assert widened.select([1, 0]) is False
    assert widened.allowed().tolist() == [[True, True, False], [False, True, True]]
    assert widened.select([]) is True and widened.extra_ids == [] and len(widened) == 0
