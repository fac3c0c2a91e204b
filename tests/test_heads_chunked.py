"""The loss in chunks: the same in any chunk, in little memory, with one teacher for all heads."""

from __future__ import annotations

import pytest
import torch
from head_cases import collate, features, forward, head_for, loss_and_gradients, row, tiny, vocab_of
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from headstart.borrowed import OutputHead
from headstart.heads.chunked import ChunkedLoss
from headstart.heads.losses import reference_loss


class LargestTensor(TorchDispatchMode):
    """Counts the bytes of the largest tensor that any operation makes (views of older memory count as well)."""

    def __init__(self, skip: tuple[torch.Tensor, ...] = ()):
        super().__init__()
        self.largest, self.shape, self.skip = 0, (), {tensor.data_ptr() for tensor in skip}

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        result = function(*arguments, **(keywords or {}))
        for made in tree_leaves(result):
            if isinstance(made, torch.Tensor) and made.data_ptr() not in self.skip:
                size = made.untyped_storage().nbytes()
                if size > self.largest:
                    self.largest, self.shape = size, tuple(made.shape)
        return result


@pytest.fixture(scope="module")
def target():
    return tiny.target("llama", dtype=torch.float64)


def chunks_of(size: int, count: int) -> list[slice]:
    return [slice(start, start + size) for start in range(0, count, size)]


@pytest.mark.parametrize("output", ["shared", "own", "low-rank"])
def test_the_size_of_the_chunks_does_not_matter(target, output, monkeypatch):
    head = head_for(
        target, vocab_of(range(0, 264, 2)), num_heads=3, output=output, rank=4 if output == "low-rank" else None
    )
    batch = collate([row(40, range(3, 40), 1), row(17, range(5, 9), 2)], [[0], [1]])
    whole = loss_and_gradients(head, target, batch)
    hits = forward(head, target, batch).hits
    for size in (1, 7, 40):
        monkeypatch.setattr(ChunkedLoss, "chunks", lambda work, size=size: chunks_of(size, len(work.labels)))
        assert torch.equal(forward(head, target, batch).hits, hits)
        torch.testing.assert_close(loss_and_gradients(head, target, batch), whole, rtol=1e-10, atol=1e-10)


def test_no_logits_of_all_positions_are_ever_made():
    """B53: vocabulary 32768, hidden 16, length 512, a tenth supervised, draft vocabulary 256: below 7 MB, same loss."""
    target = tiny.target("llama", hidden_size=16, head_dim=4, vocab_size=32768, max_position_embeddings=512)
    head = head_for(target, vocab_of(range(256), 32768), num_heads=4)
    batch = collate([row(512, range(460, 511), vocab=256)], [[0]])
    states = features(target, batch)
    weight = target.output.weight_rows()  # 2 MB of the target's, that is there anyway
    with LargestTensor(skip=(weight,)) as watch:
        output = forward(head, target, batch, states)
        output.loss_sum.backward()
    assert watch.largest < 7e6, watch.shape
    drafts = head.draft_logits(states.final, target.output)[0]
    teacher = target.output.logits(states.final)[0, :, :256].log_softmax(-1)
    naive = torch.zeros((), dtype=torch.float64)
    for depth in range(4):
        labels, scored = batch.labels_at(2 + depth)
        at = scored[0].nonzero().squeeze(-1)
        losses = reference_loss({"soft-ce": 1.0}, drafts[at, depth], teacher[at + 1 + depth], labels[0, at])
        naive += 0.8**depth * losses.double().sum()
    torch.testing.assert_close(output.loss_sum.double(), naive, rtol=1e-6, atol=0)


def test_with_the_whole_vocabulary_memory_grows_with_the_chunk_only():
    target = tiny.target("llama", hidden_size=16, head_dim=4, vocab_size=4096, max_position_embeddings=2048)
    head = head_for(target, num_heads=4)
    sizes = []
    for length in (640, 1024, 2048):
        batch = collate([row(length, range(4, length))], [[0]])
        states = features(target, batch)
        with LargestTensor() as watch:
            forward(head, target, batch, states).loss_sum.backward()
        sizes.append(watch.largest)
        assert watch.largest < length * 4096 * 4  # not even one head's logits
    assert sizes[0] == sizes[1] == sizes[2]


def test_the_target_is_asked_once_per_token_whatever_the_number_of_heads(target, monkeypatch):
    batch = collate([row(40, range(10, 40))], [[0]])
    asked = []
    plain = ChunkedLoss.__call__

    def counting(work: ChunkedLoss, *arguments):
        logits = work.teacher_logits
        object.__setattr__(work, "teacher_logits", lambda final: (asked.append(len(final)), logits(final))[1])
        return plain(work, *arguments)

    monkeypatch.setattr(ChunkedLoss, "__call__", counting)
    for heads in (1, 5):
        asked.clear()
        forward(head_for(target, num_heads=heads), target, batch)
        assert sum(asked) == 30
    asked.clear()
    forward(head_for(target, num_heads=2, loss="hard-ce"), target, batch)
    assert asked == []


def test_own_output_without_a_teacher_borrows_nothing(target, monkeypatch):
    head = head_for(target, num_heads=2, output="own", loss="hard-ce")
    monkeypatch.setattr(OutputHead, "select", lambda *_: pytest.fail("the target's output rows were read"))
    forward(head, target, collate([row(9, range(4, 9))], [[0]])).loss_sum.backward()


def test_bf16_autocast_over_fp32_parameters_is_near_the_exact_loss(target):
    """The trainer's precision: products in bf16, softmax and sums in fp32, gradients in the parameters' fp32."""
    batch = collate([row(40, range(4, 40))], [[0]])
    exact_head = head_for(target, num_heads=3, shake=0.02)
    exact, _, exact_gradients = loss_and_gradients(exact_head, target, batch)
    rounded_target = tiny.target("llama", dtype=torch.bfloat16)
    head = head_for(target, num_heads=3, shake=0.02).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, _, gradients = loss_and_gradients(head, rounded_target, batch)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), exact, rtol=0.03, atol=0)
    for name, gradient in gradients.items():
        assert gradient.dtype == torch.float32
        similarity = torch.cosine_similarity(gradient.double().flatten(), exact_gradients[name].flatten(), dim=0)
        assert similarity > 0.98, name


def test_nothing_is_kept_for_a_backward_that_will_not_come(target):
    head = head_for(target, num_heads=2)
    batch = collate([row(12, range(4, 12))], [[0]])
    with torch.no_grad():
        silent = forward(head, target, batch)
    assert not silent.loss_sum.requires_grad
    torch.testing.assert_close(silent.loss_sum, forward(head, target, batch).loss_sum.detach())
