"""Rules that re-read a folder with the twins of the engines: every parameter once, nothing left over, same logits."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from headstart.heads.base import Head
from headstart.heads.eagle import EagleHead
from headstart.heads.formats.eagle import with_scales
from headstart.heads.formats.exported import Source
from headstart.heads.formats.medusa import full_state
from headstart.heads.formats.medusa_twin import MedusaTwin
from headstart.heads.formats.rules import Fault, Subject, fault, whole_numbers
from headstart.heads.formats.twins import Eagle3Twin, EagleTwin, Engine
from headstart.heads.medusa import MedusaHead
from headstart.heads.unrolled import UnrolledHead
from headstart.target import Features

Twin = Eagle3Twin | EagleTwin | MedusaTwin

TOLERANCE = 1e-5
"""Of draft logits in fp32, relative to the largest."""
_LENGTH = 6


def vllm_loader(subject: Subject) -> Iterator[Fault]:
    yield from _loader(subject, "vllm", "vLLM keeps missing parameters as they were initialised, and says nothing")


def sglang_loader(subject: Subject) -> Iterator[Fault]:
    yield from _loader(subject, "sglang", "SGLang passes over what does not fit, and says nothing")


def medusa_loader(subject: Subject) -> Iterator[Fault]:
    yield from _loader(subject, "vllm", "vLLM (to 0.32.0) drops unknown names, and says nothing")


def _loader(subject: Subject, engine: Engine, consequence: str) -> Iterator[Fault]:
    if engine not in engines(subject):
        return
    try:
        faults = make_twin(subject, engine).loaded.faults
    except (KeyError, TypeError, AttributeError) as error:
        faults = [f"config.json lacks {error}"]
    for found in faults:
        yield fault("every parameter filled once, nothing left over", found, consequence, subject.again)


def draft_logits(subject: Subject) -> Iterator[Fault]:
    """Only with the head that the folder was written from."""
    if subject.head is None or subject.target is None:
        return
    for engine in engines(subject):
        try:
            twin = make_twin(subject, engine)
        except (KeyError, TypeError, AttributeError):
            continue  # the rules of loading say it
        if twin.loaded.faults:
            continue
        difference = largest_difference(twin, _as_stored(subject), _output_rows(subject))
        if not difference <= TOLERANCE:
            yield fault(
                f"{engine}'s draft logits within {TOLERANCE:g} of the head's",
                f"{difference:.2g}",
                "the served draft is another function than the trained one",
                subject.again,
            )


def engines(subject: Subject) -> tuple[Engine, ...]:
    """Which engines read the layout as it stands; none where sizes are no numbers."""
    if any(whole_numbers(subject)):
        return ()
    if subject.layout == "eagle":
        return ("sglang",) if subject.config.get("architectures") == ["LlamaForCausalLMEagle"] else ("vllm",)
    if subject.layout == "eagle3" or (subject.layout == "speculators" and not subject.is_speculators):
        return ("vllm", "sglang")
    return () if subject.layout in ("medusa-merged", "medusa-shared") else ("vllm",)


def make_twin(subject: Subject, engine: Engine) -> Twin:
    """The engine's own module, filled from the folder, in fp32."""
    tensors = {name: t.float() if t.is_floating_point() else t for name, t in subject.tensors.items()}
    if subject.layout in ("medusa", "vllm-medusa"):
        return MedusaTwin(subject.config, tensors)
    if subject.layout == "eagle":
        rows = (
            None if subject.target is None else subject.target.output.weight_rows().to("cpu", _dtype(subject)).float()
        )
        return EagleTwin(subject.config, tensors, engine, rows)
    return Eagle3Twin(subject.config, tensors, engine)


def _as_stored(subject: Subject) -> Head:
    """The head with the rounding of the folder's dtype, in fp32."""
    assert subject.head is not None
    head = copy.deepcopy(subject.head)
    dtype = _dtype(subject)
    if isinstance(head, EagleHead) and dtype != torch.float32:  # an export rounds after its scales went into fc
        head.fc.weight.data = with_scales(head)
        head.embedding_scale = head.feature_scale = 1.0
    return head.to("cpu", dtype).float().eval()


def _output_rows(subject: Subject) -> Float[Tensor, "*heads draft dim"]:
    """What turns a state of the head into draft logits, with the rounding of the folder's dtype, in fp32."""
    assert subject.head is not None and subject.target is not None
    source = Source(subject.head, subject.target, _dtype(subject), None)
    state = full_state(source) if isinstance(subject.head, MedusaHead) else source.state()
    own = state.get("output_weight")
    return (source.borrowed_rows() if own is None else own).float()


def _dtype(subject: Subject) -> torch.dtype:
    return next(tensor.dtype for tensor in subject.tensors.values() if tensor.is_floating_point())


@torch.no_grad()
def largest_difference(twin: Twin, head: Head, rows: Float[Tensor, "*heads draft dim"]) -> float:
    """Of the draft logits over random inputs: of every Medusa head, of two steps in a row for the EAGLE family."""
    generator = torch.Generator().manual_seed(0)

    def draw() -> Tensor:
        return torch.randn(1, _LENGTH, head.hidden_size, generator=generator)

    if isinstance(twin, MedusaTwin):
        assert isinstance(head, MedusaHead)
        final = draw()
        states = head.draft_hidden(final)
        ours = states @ rows.mT if rows.dim() == 2 else torch.einsum("...hd,hvd->...hv", states, rows)
        return _distance(twin.logits(final), ours)
    assert isinstance(head, UnrolledHead)
    # ascending with a gap: a rotary embedding that ignored positions would show
    positions = (torch.arange(_LENGTH) + (torch.arange(_LENGTH) > 2) * 5)[None]
    taps = {layer: draw() for layer in {*head.wants, *(twin.taps if isinstance(twin, Eagle3Twin) else ())}}
    final = draw()
    ours = head.fuse(Features(final, taps))
    theirs = twin.fuse(taps) if isinstance(twin, Eagle3Twin) else final
    differences = []
    for step in range(2):
        embeds = draw()
        stepped = head.step(embeds, ours, positions + step, _causal)
        logits, theirs = twin.step(embeds, theirs, positions + step)
        if isinstance(twin, EagleTwin) and head.draft_ids is not None:  # served over all ids
            logits = logits[..., head.draft_ids]
        differences.append(_distance(logits, stepped.output @ rows.mT))
        ours = stepped.carried
    return float(torch.tensor(differences).max())  # a NaN is the largest, which to Python's max it is not


def _distance(theirs: Tensor, ours: Tensor) -> float:
    if theirs.shape != ours.shape:
        return float("inf")
    return float((theirs - ours).abs().max() / ours.abs().max().clamp(min=1.0))


def _causal(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
