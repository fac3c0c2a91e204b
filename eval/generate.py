"""`headstart generate`: one answer, streamed as it is drafted and verified, with the acceptance length behind it.

headstart generate --head runs/quickstart "Explain tides to a child."
headstart generate --target bundled:smollm2-135m --drafter ngram "Repeat after me: one, two, three."
"""

from __future__ import annotations

import sys

from headstart.decode.sampling import SamplingSettings
from headstart.eval.accelerated import Answer, load_drafter
from headstart.eval.tables import number
from headstart.eval.timing import PLAIN


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
) -> Answer:
    """Prints the answer to `prompt` on standard output as it comes, and the figures on standard error.

    drafter: its name on the command line; by default the head's, or without a head plain decoding.
    """
    settings = SamplingSettings(temperature=temperature, seed=seed)
    accelerated = load_drafter(
        drafter or ("head" if head else PLAIN),
        target,
        head=head,
        device=device,
        dtype=dtype,
        allow_other_target=allow_other_target,
    )
    stream = accelerated.stream(prompt, max_new_tokens=max_new_tokens, settings=settings)
    for piece in stream:
        print(piece, end="", flush=True)
    answer = stream.answer
    print(
        f"\n[{len(answer.token_ids)} tokens, {len(answer.token_ids) / max(answer.seconds, 1e-9):.1f} tokens/s, "
        f"acceptance length {number(answer.acceptance_length)} over {answer.counts.steps} steps, "
        f"prefill {answer.generation.prefill_seconds:.2f} s apart]",
        file=sys.stderr,
    )
    return answer
