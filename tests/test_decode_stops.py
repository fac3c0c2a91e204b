"""Stop strings against the plain rule: the first token with which the whole text, decoded anew, holds one."""

from __future__ import annotations

import random

import pytest
import tiny

from headstart.decode.stops import stopped_at

TOKENIZER = tiny.tokenizer()
NO_TEXT = 284
"""A row of a padded vocabulary: no tokenizer knows it, and it decodes to nothing."""


def text_of(token_ids: list[int]) -> str:
    return str(TOKENIZER.decode(token_ids, skip_special_tokens=False))


def by_the_whole_text(answer: list[int], stop: tuple[str, ...]) -> int | None:
    for count in range(1, len(answer) + 1):
        text = text_of(answer[:count])
        if any(one in text for one in stop):
            return count
    return None


def in_steps(answer: list[int], stop: tuple[str, ...], length: int) -> int | None:
    """As decoding asks: after every step, with the tokens of that step."""
    for start in range(0, len(answer), length):
        found = stopped_at(text_of, answer[:start], answer[start : start + length], stop)
        if found is not None:
            return start + found
    return None


@pytest.mark.parametrize(
    ("answer", "stop"),
    [
        # the piece that is looked at begins within the character of the bytes 195 181, which is no stop
        ([93, 40, 52, 88, 195, 181, 264, 243, 81, 4, 120, 73, 73, 51, 4, 79, 212, 34, 143, 251], "\ufffd\ufffd"),
        ([97, *[NO_TEXT] * 40, 98, 99], "ab"),  # tokens without text between
        ([*"né…".encode(), 1, 2], "é…"),
        ([104, 105], "nowhere"),
    ],
)
@pytest.mark.parametrize("length", [1, 2, 5])
def test_what_a_piece_of_a_text_hides(answer, stop, length):
    assert in_steps(answer, (stop,), length) == by_the_whole_text(answer, (stop,))


def test_random_bytes_and_random_stops():
    rng, found = random.Random(0), 0
    for _ in range(400):
        answer = [rng.choice([rng.randrange(256), rng.choice(list("é…🙂".encode())), NO_TEXT]) for _ in range(40)]
        text = text_of(answer)
        start = rng.randrange(len(text))
        stop = (text[start : start + rng.randint(1, 3)], "never written")
        expected = by_the_whole_text(answer, stop)
        assert in_steps(answer, stop, rng.choice([1, 3, 6])) == expected
        found += expected is not None and expected > 20
    assert found > 50


def test_only_the_end_of_a_long_text_is_decoded():
    sizes = []

    def decode(token_ids: list[int]) -> str:
        sizes.append(len(token_ids))
        return text_of(token_ids)

    assert stopped_at(decode, [97] * 5000, [98, 99], ("stop",)) is None
    assert max(sizes) < 20
