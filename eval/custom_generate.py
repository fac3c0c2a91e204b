"""What `model.generate(..., custom_generate="ORG/NAME", trust_remote_code=True)` runs: in front of our engine.

The `custom_generate/generate.py` of a published head calls `generate_for_transformers` and nothing else. The texts are
those of `model.generate` without it: greedy the same tokens, sampled the same distribution. The model itself stays as
it is: decoded is a copy of its modules over the same weights, checked once for exactness and kept for later calls. What
transformers can do and this cannot is refused by name, never left out in silence.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.utils import GenerateDecoderOnlyOutput

from headstart.decode.drafters.base import Request
from headstart.decode.sampling import SamplingSettings
from headstart.errors import HeadstartError
from headstart.eval.guest import Guest, guest_of
from headstart.heads.published import fetch_head, hub_name
from headstart.target import Target

DEFAULT_NEW_TOKENS = 20
"""Of transformers, where nothing says how long an answer may be."""
HUB_ARGUMENTS = ("revision", "cache_dir", "token", "local_files_only", "force_download", "proxies", "repo_type")
"""Say where transformers takes this code from; `generate` hands them on to it all the same."""
TAKEN = (
    "max_length max_new_tokens min_length min_new_tokens stop_strings do_sample num_return_sequences "
    "return_dict_in_generate temperature top_k top_p min_p repetition_penalty no_repeat_ngram_size bad_words_ids "
    "suppress_tokens pad_token_id eos_token_id"
).split()
"""Settings of transformers that are heeded."""
WITHOUT_EFFECT = (
    "bos_token_id decoder_start_token_id use_cache cache_implementation cache_config max_cache_len compile_config "
    "disable_compile prefill_chunk_size early_stopping length_penalty renormalize_logits transformers_version "
    "low_memory num_assistant_tokens num_assistant_tokens_schedule assistant_confidence_threshold "
    "assistant_lookbehind target_lookbehind"
).split()
"""Settings that change no token here: of transformers' cache, its compiler, its beams and its assistants."""
ONLY_SAMPLING = ("top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")
"""Refused where tokens are drawn; transformers itself ignores them where they are not."""


@torch.no_grad()
def generate_for_transformers(
    model: PreTrainedModel,
    head: str,
    *,
    code: str | None = None,
    inputs: Tensor | None = None,
    input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    generation_config: GenerationConfig | None = None,
    logits_processor: Sequence[Any] | None = None,
    streamer: Any = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    **arguments: Any,
) -> Int[Tensor, "rows length"] | GenerateDecoderOnlyOutput:
    """Prompts and answers as `model.generate` returns them: padded on the right, [rows, longest].

    head: run, folder or hub name. code: `__file__` of the calling code, which names the commit that it came with.
    logits_processor: functions of text and logits that remember nothing. tokenizer: where the model does not say where
    its own is. Raises HeadstartError for what is not supported, and for a model that the head was not trained for.
    """
    hub = {name: arguments.pop(name) for name in HUB_ARGUMENTS if name in arguments}
    prompts = inputs if inputs is not None else input_ids
    if prompts is None or prompts.dim() != 2 or not prompts.numel():
        raise HeadstartError("this generation needs input_ids of shape [rows, length]; pass those of a tokenizer")
    default_length = _nothing_says_how_long(model, generation_config, arguments)
    prepare: Any = model._prepare_generation_config  # a model is a module, whose attributes may be tensors to a checker
    config, others = prepare(generation_config, **arguments)
    refuse_unsupported(config, others)
    guest = guest_of(model, _folder(head, code, hub), tokenizer)
    requests = _requests(config, guest.target, prompts, attention_mask, logits_processor or (), default_length)
    answers = _decode(guest, config, requests, prompts, streamer)
    sequences = _padded(prompts, answers, config)
    if config.return_dict_in_generate:
        return GenerateDecoderOnlyOutput(sequences=sequences)  # pyright: ignore[reportArgumentType]  (a LongTensor)
    return sequences


def refuse_unsupported(config: GenerationConfig, others: dict[str, Any]) -> None:
    """Raises HeadstartError naming all that is set and would have to change the text, but would not. others: the
    arguments of `generate` that are no settings."""
    neutral = GenerationConfig._get_default_generation_params()
    known = {*TAKEN, *WITHOUT_EFFECT, *(() if config.do_sample else ONLY_SAMPLING)}
    settings = {name: value for name, value in vars(config).items() if name in _SETTINGS and name not in known}
    wrong = [
        f"{name}={value!r}" for name, value in settings.items() if value not in (None, False, 0, neutral.get(name))
    ]
    wrong += [name for name, value in others.items() if name not in settings and _is_given(value)]
    if wrong:
        raise HeadstartError(
            f"headstart does not support {', '.join(wrong)}; leave that out, or leave out custom_generate"
        )


_SETTINGS = frozenset(name for name in vars(GenerationConfig()) if not name.startswith("_"))


def _is_given(value: Any) -> bool:
    """An empty list of criteria is none."""
    return value is not None and value is not False and not (isinstance(value, list | tuple) and not value)


def _nothing_says_how_long(model: PreTrainedModel, given: GenerationConfig | None, arguments: dict[str, Any]) -> bool:
    places = [arguments.get("max_length"), model.generation_config and model.generation_config.max_length]
    return all(place is None for place in [*places, given and given.max_length])


def _folder(head: str, code: str | None, hub: dict[str, Any]) -> Path:
    """The head's folder, of the same commit as the code that calls where both come from the hub."""
    commit = Path(code).parent.parent.name if code else ""
    if hub_name(f"{head}@main") and re.fullmatch(r"[0-9a-f]{40}", commit):
        head = f"{head}@{commit}"
    name = hub_name(head)
    if name is None:
        return Path(head)
    wanted = {key: hub[key] for key in ("token", "cache_dir", "local_files_only") if hub.get(key) is not None}
    return fetch_head(name, **wanted)


# -- from transformers' settings to requests, and back ---------------------------------------------------------------


def _requests(
    config: GenerationConfig,
    target: Target,
    prompts: Tensor,
    mask: Tensor | None,
    processors: Sequence[Any],
    default_length: bool,
) -> list[Request]:
    """One for every answer that is returned, in its order."""
    target.end_token_ids = tuple(sorted(end for end in _ids(config.eos_token_id) if 0 <= end < target.vocab_size))
    length = prompts.shape[1]
    longest = _new_tokens(config, length, default_length)
    shortest = config.min_new_tokens if config.min_new_tokens is not None else max(0, config.min_length - length)
    stop = (config.stop_strings,) if isinstance(config.stop_strings, str) else tuple(config.stop_strings or ())
    answers = config.num_return_sequences or 1
    seeds = [0] * (len(prompts) * answers)
    if config.do_sample:  # torch.manual_seed decides, as it does in transformers
        seeds = torch.randint(0, 2**63 - 1, (len(seeds),)).tolist()
    return [
        Request(
            prompt_ids=row,
            max_new_tokens=longest,
            settings=_sampling(config, seeds[number * answers + copy_], shortest, processors),
            stop=stop,
            request_id=number * answers + copy_,
        )
        for number, row in enumerate(_unpadded(prompts, mask, config))
        for copy_ in range(answers)
    ]


def _sampling(config: GenerationConfig, seed: int, shortest: int, processors: Sequence[Any]) -> SamplingSettings:
    drawn = {}
    if config.do_sample:
        drawn = {
            "temperature": float(1.0 if config.temperature is None else config.temperature),
            "top_k": int(config.top_k or 0),
            "top_p": float(1.0 if config.top_p is None else config.top_p),
            "min_p": float(config.min_p or 0.0),
        }
    return SamplingSettings(
        **drawn,
        seed=seed,
        repetition_penalty=float(config.repetition_penalty or 1.0),
        no_repeat_ngram_size=int(config.no_repeat_ngram_size or 0),
        min_new_tokens=shortest,
        bad_words_ids=tuple(tuple(word) for word in config.bad_words_ids or ()),
        suppress_tokens=tuple(config.suppress_tokens or ()),
        processors=tuple(processors),
    )


def _new_tokens(config: GenerationConfig, length: int, default_length: bool) -> int:
    if config.max_new_tokens is not None:
        longest = config.max_new_tokens
    else:
        longest = DEFAULT_NEW_TOKENS if default_length else config.max_length - length
    if longest <= 0:
        raise HeadstartError(
            f"a prompt of {length} tokens leaves no room for an answer: max_new_tokens={config.max_new_tokens}, "
            f"max_length={config.max_length}; raise max_new_tokens"
        )
    return longest


def _unpadded(prompts: Tensor, mask: Tensor | None, config: GenerationConfig) -> list[list[int]]:
    """The tokens of each row that are no padding; without a mask, padding is guessed as transformers guesses it."""
    if mask is None:
        padding = config.pad_token_id
        known = padding is not None and padding not in _ids(config.eos_token_id)
        mask = prompts != padding if known else torch.ones_like(prompts)
    if mask.shape != prompts.shape:
        raise HeadstartError(
            f"attention_mask has shape {list(mask.shape)}, input_ids {list(prompts.shape)}; pass both of one tokenizer"
        )
    return [row[kept.bool()].tolist() for row, kept in zip(prompts, mask, strict=True)]


def _decode(
    guest: Guest, config: GenerationConfig, requests: list[Request], prompts: Tensor, streamer: Any
) -> list[list[int]]:
    """The new tokens of every request; a streamer is told each as soon as it is certain."""
    engine = guest.engine(len(requests))
    if streamer is None:
        found = {generation.request.request_id: generation.token_ids for generation in engine.generate(requests)}
        return [found[request.request_id] for request in requests]
    if len(requests) > 1:
        raise HeadstartError(f"a streamer takes one answer, not {len(requests)}; pass one prompt")
    streamer.put(prompts.cpu())
    tokens: list[int] = []
    for new, _ in engine.stream(requests[0]):
        tokens += new
        for token in new:
            streamer.put(torch.tensor([token]))
    streamer.end()
    return [tokens]


def _padded(prompts: Tensor, answers: list[list[int]], config: GenerationConfig) -> Int[Tensor, "rows length"]:
    ends = _ids(config.eos_token_id)
    padding = config.pad_token_id if config.pad_token_id is not None else (ends[0] if ends else 0)
    longest = max(map(len, answers))
    rows = torch.tensor([answer + [padding] * (longest - len(answer)) for answer in answers], device=prompts.device)
    return torch.cat([prompts.repeat_interleave(len(answers) // len(prompts), dim=0), rows.to(prompts.dtype)], dim=1)


def _ids(ids: int | Sequence[int] | Tensor | None) -> list[int]:
    if ids is None:
        return []
    if isinstance(ids, Tensor):
        return ids.flatten().tolist()
    return [ids] if isinstance(ids, int) else list(ids)
