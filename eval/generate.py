"""`headstart generate`: one answer, streamed as it is drafted and verified, with the acceptance length behind it.

headstart generate --head runs/quickstart "Explain tides to a child."
headstart generate --target bundled:smollm2-135m --drafter ngram "Repeat after me: one, two, three."
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator

from headstart.decode.decode_copy import make_faster
from headstart.decode.drafters.base import NoDraft, Request
from headstart.decode.engine import Engine, Generation
from headstart.decode.sampling import SamplingSettings
from headstart.errors import DataError
from headstart.eval.acceptance import count_steps
from headstart.eval.drafters import plan_drafter
from headstart.eval.tables import number
from headstart.eval.timing import PLAIN
from headstart.eval.trained import find_named, load_named


def run(
    head: str | None,
    prompt: str,
    *,
    drafter: str | None = None,
    target: str | None = None,
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    seed: int = 0,
    device: str | None = None,
    dtype: str | None = None,
    allow_other_target: bool = False,
) -> Generation:
    """Prints the answer to `prompt` on standard output as it comes, and the figures on standard error.

    drafter: its name on the command line; by default the head's, or without a head plain decoding.
    """
    settings = SamplingSettings(temperature=temperature, seed=seed)
    named = find_named(head, target)
    drafter = drafter or ("head" if head else PLAIN)
    plan = None
    if drafter != PLAIN:
        plan = plan_drafter(drafter, named.head, named.recipe.eval.tree, allow_other_target)
        named = find_named(head, target, others=plan.heads)
    trained = load_named(named, device=device, dtype=dtype)
    make_faster(trained.target)
    if plan is None:
        engine = Engine(trained.target, NoDraft(), budget=1)
    else:
        engine = Engine(trained.target, plan.make(trained.target), budget=plan.budget)
    request = Request(
        prompt_ids=trained.renderer.prompt([{"role": "user", "content": prompt}]),
        max_new_tokens=max_new_tokens,
        settings=settings,
    )
    if len(request.prompt_ids) >= trained.target.max_positions:
        raise DataError(
            f"the prompt has {len(request.prompt_ids)} tokens, and {trained.target.name} takes "
            f"{trained.target.max_positions}, answer included; shorten the prompt"
        )
    last = Generation(request)
    started = time.perf_counter()
    for text, generation in stream_text(engine, request):
        print(text, end="", flush=True)
        last = generation
    seconds = time.perf_counter() - started - last.prefill_seconds
    counts = count_steps([last.steps])
    print(
        f"\n[{len(last.token_ids)} tokens, {len(last.token_ids) / max(seconds, 1e-9):.1f} tokens/s, "
        f"acceptance length {number(counts.acceptance_length)} over {counts.steps} steps, "
        f"prefill {last.prefill_seconds:.2f} s apart]",
        file=sys.stderr,
    )
    return last


def stream_text(engine: Engine, request: Request) -> Iterator[tuple[str, Generation]]:
    """Pieces of text as they become certain: a character whose bytes are not all there yet waits for the rest."""
    shown, generation = "", Generation(request)
    decode = engine.target.tokenizer.decode
    for _, generation in engine.stream(request):
        text = str(decode(generation.token_ids, skip_special_tokens=True))
        if not text.endswith("\ufffd"):
            yield text[len(shown) :], generation
            shown = text
    yield str(decode(generation.token_ids, skip_special_tokens=True))[len(shown) :], generation
