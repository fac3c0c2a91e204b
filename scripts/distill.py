"""`headstart data distill`: the target answers the prompts of a recipe through the engine, batched, without a drafter.

    headstart data distill --recipe smollm2-medusa.yaml --output distilled/smollm2.jsonl

Needs the target whole on one device. Killed and started again with the same words, it goes on where it stopped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from headstart.data import distill
from headstart.data.distill import Answer, Generate, Question
from headstart.data.sources import SkipReport
from headstart.decode.decode_copy import make_faster
from headstart.decode.drafters.base import NoDraft, Request
from headstart.decode.engine import Engine, Generation
from headstart.decode.sampling import SamplingSettings
from headstart.decode.selfcheck import check_target
from headstart.errors import DataError
from headstart.recipe import Recipe
from headstart.recipe_target import load_recipe_target
from headstart.target import Target


def run(
    recipe: Recipe,
    output: str | Path,
    *,
    limit: int | None = None,
    device: str | None = None,
    dtype: str | None = None,
) -> SkipReport:
    """Load the target and let it answer; limit: the first so many prompts of each source. Prints the counts."""
    target, _ = load_recipe_target(recipe, device=device, dtype=dtype)
    settings = recipe.data.distill
    if settings.max_new_tokens >= target.max_positions:
        raise DataError(
            f"answers of data.distill.max_new_tokens {settings.max_new_tokens} leave no room for a prompt in the "
            f"{target.max_positions} positions of {target.name}; set it to {max(1, target.max_positions // 2)} or so"
        )
    check_target(target)
    make_faster(target)
    return distill.run(
        recipe,
        output,
        tokenizer=target.tokenizer,
        generate=answer_with(target, settings.max_new_tokens, settings.temperature, settings.batch_size),
        limit=limit,
        max_prompt_tokens=target.max_positions - settings.max_new_tokens,
    )


def answer_with(target: Target, max_new_tokens: int, temperature: float, batch_size: int) -> Generate:
    """What `data/distill.py` calls to have questions answered: the engine, plain, finished rows making room."""
    engine = Engine(target, NoDraft(), batch_size=batch_size)

    def generate(questions: Iterator[Question]) -> Iterable[Answer]:
        requests = (
            Request(
                prompt_ids=question.prompt_ids,
                max_new_tokens=max_new_tokens,
                settings=SamplingSettings(temperature=temperature, seed=question.seed),
                request_id=question.request_id,
            )
            for question in questions
        )
        for generation in engine.generate(requests):
            text = answer_text(generation, target.tokenizer)
            yield Answer(generation.request.request_id, text, generation.cut, len(generation.token_ids))

    return generate


def answer_text(generation: Generation, tokenizer: PreTrainedTokenizerBase) -> str:
    """The answer without its end token. Other special tokens stay: they are the target's words, such as `<think>`."""
    token_ids = generation.token_ids[:-1] if generation.finish_reason == "end" else generation.token_ids
    text = str(tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
    return text.rstrip("\ufffd") if generation.cut else text  # a cut can fall inside a character
