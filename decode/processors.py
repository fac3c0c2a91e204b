"""What changes a token's chances by the text before it: penalties, forbidden and forced tokens.

All are transformers' own processors in transformers' own order, built once for a row and applied at every node that
verification visits, to the node's logits with the text that the node's ancestors spell. So a drafted answer is
processed as a plain one, each token counted once however many trees it stood in. Temperature and what cuts a
distribution follow in `decode.sampling`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import (
    ForcedEOSTokenLogitsProcessor,
    LogitsProcessor,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from headstart.decode.sampling import SamplingSettings


class CountPenalty(LogitsProcessor):
    """Takes `frequency` times its count in the answer, and `presence` if it is there at all, off a token's logit.

    The penalties of OpenAI's interface and of the serving engines; transformers has none of them.
    """

    def __init__(self, prompt_length: int, frequency: float, presence: float):
        self.prompt_length, self.frequency, self.presence = prompt_length, frequency, presence

    def __call__(
        self, input_ids: Int[Tensor, "rows seq"], scores: Float[Tensor, "rows vocab"]
    ) -> Float[Tensor, "rows vocab"]:
        answer = input_ids[:, self.prompt_length :]
        counts = torch.zeros_like(scores).scatter_add_(1, answer, torch.ones_like(answer, dtype=scores.dtype))
        return scores - self.frequency * counts - self.presence * (counts > 0)


@dataclass(frozen=True)
class Text:
    """One row's text so far, and what its processors make of logits behind it."""

    ids: Sequence[int]
    """Prompt and answer, the root of the next tree last."""
    processors: LogitsProcessorList

    def process(self, logits: Float[Tensor, "vocab"], after: Sequence[int] = ()) -> Float[Tensor, "vocab"]:
        """Logits in at least fp32, as transformers processes them; `after`: tokens between the text and them."""
        if not len(self.processors):
            return logits
        ids = torch.tensor([[*self.ids, *after]], device=logits.device)
        wide = logits[None].to(torch.promote_types(logits.dtype, torch.float32))
        return self.processors(cast(torch.LongTensor, ids), cast(torch.FloatTensor, wide))[0]


def text_processors(
    settings: SamplingSettings, *, prompt_length: int, max_new_tokens: int, end_token_ids: Sequence[int]
) -> LogitsProcessorList:
    """The processors that these settings ask for; empty for most. Those about end tokens, where the target has any."""
    processors, ends = LogitsProcessorList(), list(end_token_ids)
    if settings.repetition_penalty != 1:
        processors.append(RepetitionPenaltyLogitsProcessor(float(settings.repetition_penalty)))
    if settings.frequency_penalty or settings.presence_penalty:
        processors.append(CountPenalty(prompt_length, settings.frequency_penalty, settings.presence_penalty))
    if settings.no_repeat_ngram_size:
        processors.append(NoRepeatNGramLogitsProcessor(settings.no_repeat_ngram_size))
    if settings.bad_words_ids:
        words = [list(word) for word in settings.bad_words_ids]
        processors.append(NoBadWordsLogitsProcessor(words, ends or None))
    if settings.min_new_tokens and ends:
        processors.append(MinNewTokensLengthLogitsProcessor(prompt_length, settings.min_new_tokens, ends))
    if settings.force_end and ends:
        processors.append(ForcedEOSTokenLogitsProcessor(prompt_length + max_new_tokens, ends))
    if settings.suppress_tokens:
        processors.append(SuppressTokensLogitsProcessor(list(settings.suppress_tokens)))
    processors.extend(settings.processors)
    return processors
