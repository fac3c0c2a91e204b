"""Students: the target with layers left out, trained on what they draft, kept as strictly as any head."""

from __future__ import annotations

import json

import pytest
import torch
import train_cases as cases
from head_cases import collate, features, forward, head_for, loss_and_gradients, pad, row, tiny, vocab_of
from safetensors.torch import load_file, save_file
from test_train_resume import run_stopped_at, same_bits
from transformers import AutoModelForCausalLM, AutoTokenizer

from headstart.data.packing import TokenBatch
from headstart.errors import HeadError, HeadstartError
from headstart.heads.base import Alignment
from headstart.heads.configs import DraftConfig
from headstart.heads.draft import even_layers, save_student, student_model
from headstart.heads.formats import write_foreign
from headstart.heads.losses import reference_loss
from headstart.heads.store import build_head, load_head, refuse_misfit, save_head
from headstart.target import load_target
from headstart.train.train_module import TrainModule

F64 = torch.float64


@pytest.fixture(scope="module")
def target():
    return tiny.target("llama", dtype=F64)


def two_documents() -> TokenBatch:
    rows = [row(12, range(3, 12), seed=1, vocab=250), row(9, [2, 3, 7], seed=2, vocab=250)]
    return pad(collate(rows, [[0, 1], [1]]), 24)


# -- the start ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", tiny.TREE_FAMILIES)
def test_a_student_of_all_layers_is_the_target(family):
    model = tiny.target(family)
    head = build_head(DraftConfig(num_layers=model.num_layers), model).eval()
    batch = two_documents()
    with torch.no_grad():
        states = head.states(batch, model.embedding)
        expected = features(model, batch).final
    real = batch.document_ids >= 0
    assert torch.equal(states[real], expected[real])
    assert torch.equal(head.logits(states[real], model.output.select()), model.output.logits(expected[real]))


@pytest.mark.parametrize("family", ["llama", "gemma2", "hyb", "gpt2", "olmoe"])
def test_a_student_of_some_layers_is_the_model_without_the_others(family):
    """Surgery on a second instance: its list of layers is cut, kinds of attention with them."""
    model, kept = tiny.target(family), [1, 2]
    head = build_head(DraftConfig(num_layers=2, layers=kept), model).eval()
    cut = tiny.model(family)
    owner, name = (cut.transformer, "h") if family == "gpt2" else (cut.model, "layers")
    setattr(owner, name, torch.nn.ModuleList(getattr(owner, name)[layer] for layer in kept))
    cut.config.num_hidden_layers = 2
    if getattr(cut.config, "layer_types", None):
        cut.config.layer_types = [cut.config.layer_types[layer] for layer in kept]
    ids = torch.tensor([row(40, [], vocab=250).input_ids])
    with torch.no_grad():
        expected = cut(ids, use_cache=False).logits
        states = head.states(collate([row(40, [], vocab=250)], [[0]]), model.embedding)
    torch.testing.assert_close(head.logits(states, model.output.select()), expected, rtol=1e-5, atol=1e-4)
    assert head.config.architecture is not None and head.config.layers == kept


def test_layers_are_evenly_spaced():
    assert even_layers(30, 1) == [0] and even_layers(30, 2) == [0, 29] and even_layers(30, 4) == [0, 10, 19, 29]
    for count in range(1, 31):
        kept = even_layers(30, count)
        assert len(set(kept)) == count and kept == sorted(kept)
    assert even_layers(30, 30) == list(range(30))


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"num_layers": 5}, "the head asks for 5 layers, tiny-llama has layers 0 to 3"),
        ({"num_layers": 2, "layers": [0, 4]}, "the head asks for layer 4, tiny-llama has layers 0 to 3"),
        ({"architecture": {"model_type": "llama"}}, "architecture is worked out"),
    ],
)
def test_what_the_target_has_not_is_refused_before_anything_is_built(target, settings, sentence):
    with pytest.raises(HeadError, match=sentence):
        refuse_misfit(DraftConfig(**settings), target)


def test_layers_and_their_number_must_agree():
    with pytest.raises(ValueError, match="`layers` names 3 layers and `num_layers` is 2; make them agree"):
        DraftConfig(layers=[0, 1, 2])
    with pytest.raises(ValueError, match="must ascend"):
        DraftConfig(layers=[1, 0])


def test_a_target_with_code_of_its_own_is_refused():
    own = tiny.target("llama")
    own.config.model_type = "stranger"
    with pytest.raises(HeadError, match=r"tiny-llama \(stranger\) brings its own code"):
        build_head(DraftConfig(), own)


# -- the loss ----------------------------------------------------------------------------------------------------------


def naive(head, target, batch) -> torch.Tensor:
    """The loss, document by document and token by token, each text read by the student as a model by itself."""
    model = student_model(head, target)
    ids = torch.arange(target.vocab_size) if head.draft_ids is None else head.draft_ids
    known, total = ids.tolist(), torch.zeros((), dtype=F64)
    for line in range(len(batch.input_ids)):
        for document in range(int(batch.document_ids[line].max()) + 1):
            place = batch.document_ids[line] == document
            text, labels = batch.input_ids[line, place], batch.supervised[line, place]
            with torch.no_grad():
                drafted = model.model(text[None]).logits[0][:, ids]
                taught = target.model(text[None]).logits[0][:, ids].log_softmax(-1)
            for position in range(1, len(text)):
                if labels[position] and int(text[position]) in known:
                    label = torch.tensor([known.index(int(text[position]))])
                    at = slice(position - 1, position)
                    total += reference_loss(head.config.loss_weights, drafted[at], taught[at], label)[0]
    return total


@pytest.mark.parametrize("family", ["llama", "gemma2", "gptj"])
@pytest.mark.parametrize("embedding", ["shared", "own"])
@pytest.mark.parametrize("output", ["shared", "own"])
@pytest.mark.parametrize("small", [False, True])
def test_the_loss_is_that_of_the_model_by_itself(family, embedding, output, small):
    """Training and drafting are the same numbers: packed documents with padding against plain transformers."""
    model = tiny.target(family, dtype=F64)
    vocab = vocab_of(range(0, 264, 3)) if small else None
    head = head_for(
        model, vocab, kind="draft", num_layers=2, embedding=embedding, output=output, loss={"soft-ce": 0.7, "lk": 0.3}
    )
    batch = two_documents()
    found = forward(head, model, batch)
    torch.testing.assert_close(found.loss_sum, naive(head, model, batch), rtol=1e-7, atol=1e-7)  # norms are in fp32
    assert found.scored.tolist() == [int(batch.labels_at(1)[1].sum())]


@pytest.mark.parametrize("embedding", ["shared", "own"])
@pytest.mark.parametrize("output", ["shared", "own"])
def test_the_gradient_is_that_of_the_loss(target, embedding, output):
    head = head_for(target, vocab_of(range(0, 264, 3)), kind="draft", embedding=embedding, output=output)
    batch = two_documents()
    _, _, found = loss_and_gradients(head, target, batch)
    head.zero_grad()
    assert head.draft_ids is not None
    ids, total = head.draft_ids, torch.zeros((), dtype=F64)
    labels, scored = batch.labels_at(1)
    taught = target.output.logits(features(target, batch).final)[..., ids].log_softmax(-1)
    rows = target.output.weight_rows(ids) if head.output_weight is None else head.output_weight
    drafted = torch.nn.functional.linear(head.states(batch, target.embedding), rows)
    for line, position in scored.nonzero().tolist():
        label = (ids == labels[line, position]).nonzero()[:, 0]
        if len(label):
            at = (line, slice(position, position + 1))
            total = total + reference_loss({"soft-ce": 1.0}, drafted[at], taught[at], label)[0]
    total.backward()
    assert found.keys() == {name for name, _ in head.named_parameters()}
    for name, parameter in head.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-6, atol=1e-6)
        assert parameter.grad is not None and bool(parameter.grad.any()), name


def test_every_supervised_token_is_predicted_from_the_position_before_it(target):
    """Ten tokens, reply at 5..8: positions 4..7, the first the last of the prompt; never the first token of a text."""
    alignment = Alignment.of_next(collate([row(10, range(5, 9))], [[0]]))
    assert alignment.positions.tolist() == alignment.teachers.tolist() == [4, 5, 6, 7]
    assert alignment.tokens.tolist() == [5, 6, 7, 8] and alignment.rows.flatten().tolist() == [0, 1, 2, 3]
    packed = collate([row(4, range(4), 1), row(3, range(3), 2)], [[0, 1]])
    assert Alignment.of_next(packed).tokens.tolist() == [1, 2, 3, 5, 6]


def test_no_state_sees_the_future_another_document_or_padding(target):
    head = head_for(target, kind="draft").eval()
    batch = two_documents()
    before = head.states(batch, target.embedding)
    for line, place in [(0, 7), (0, 12), (0, 23), (1, 4)]:
        changed = TokenBatch(batch.input_ids.clone(), batch.supervised, batch.position_ids, batch.document_ids)
        changed.input_ids[line, place] = (changed.input_ids[line, place] + 1) % 250
        after = head.states(changed, target.embedding)
        moved = ((after - before).abs().sum(-1) > 1e-9).nonzero().tolist()
        same = [j for j in range(place, 24) if batch.document_ids[line, j] == batch.document_ids[line, place]]
        reached = [[line, j] for j in same] if batch.document_ids[line, place] >= 0 else [[line, place]]
        assert moved == reached


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
def test_a_student_learns_and_the_target_stays_as_it_is(compute):
    model = tiny.target("llama")
    before = {name: tensor.clone() for name, tensor in model.model.state_dict().items()}
    head = build_head(DraftConfig(num_layers=2, output="own", embedding="own", loss="kl"), model)
    module = TrainModule(model, head, compute).train()
    optimizer = torch.optim.AdamW(head.parameters(), lr=3e-3)
    losses = []
    for _ in range(12):
        optimizer.zero_grad()
        output = module(two_documents())
        output.loss_sum.backward()
        optimizer.step()
        losses.append(float(output.loss_sum.detach()))
    assert losses[-1] < 0.3 * losses[0]
    assert all(torch.equal(before[name], tensor) for name, tensor in model.model.state_dict().items())


# -- keeping -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("embedding", ["shared", "own"])
@pytest.mark.parametrize("output", ["shared", "own"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_student_comes_back_bit_for_bit(tmp_path, embedding, output, dtype):
    model = tiny.target("phi")  # biases everywhere, of the output rows too
    head = head_for(model, vocab_of(range(0, 128, 2)), kind="draft", embedding=embedding, output=output).to(dtype)
    folder = save_head(head, tmp_path / "head", fingerprint=model.fingerprint())
    loaded = load_head(folder, model)
    assert loaded.config == head.config and loaded.state_dict().keys() == head.state_dict().keys()
    for name, tensor in head.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor) and loaded.state_dict()[name].dtype == tensor.dtype
    names = {name.partition(".")[0] for name in load_file(folder / "head.safetensors")}
    own = {"embedding_weight"} if embedding == "own" else set()
    own |= {"output_weight", "output_bias"} if output == "own" else set()
    assert names == {"decoder", "vocab"} | own, "nothing that is borrowed"
    assert "_name_or_path" not in (folder / "config.json").read_text()
    batch = two_documents()
    with torch.no_grad():
        before = head.eval().states(batch, model.embedding)
        assert torch.equal(loaded.states(batch, model.embedding), before)


def test_nothing_missing_nothing_left_over_and_no_other_target(target, tmp_path):
    model = tiny.target("llama")
    folder = save_head(head_for(model, kind="draft"), tmp_path / "head", fingerprint=model.fingerprint())
    with pytest.raises(HeadstartError, match="weights"):
        load_head(folder, tiny.target("llama", seed=1))
    whole = load_file(folder / "head.safetensors")
    save_file({**whole, "decoder.layers.2.extra": torch.zeros(2)}, folder / "head.safetensors")
    with pytest.raises(HeadError, match=r"holds decoder\.layers\.2\.extra too"):
        load_head(folder)
    save_file(
        {name: tensor for name, tensor in whole.items() if name != "decoder.norm.weight"}, folder / "head.safetensors"
    )
    with pytest.raises(HeadError, match=r"lacks decoder\.norm\.weight"):
        load_head(folder)
    save_file(whole, folder / "head.safetensors")
    described = json.loads((folder / "config.json").read_text())
    described["head"]["architecture"]["intermediate_size"] = 80
    (folder / "config.json").write_text(json.dumps(described))
    with pytest.raises(HeadError, match="width of the state read|size"):
        load_head(folder)
    described["head"]["architecture"]["model_type"] = "unheard-of"
    (folder / "config.json").write_text(json.dumps(described))
    with pytest.raises(HeadError, match="knows no model of type 'unheard-of'"):
        load_head(folder)


STUDENT = (
    "head={type: draft, num_layers: 2, output: own}",
    "train.lr=1e-3",
    "train.save_every=5",
    "train.eval_every=4",
)


def test_resumed_from_the_middle_equals_straight(tmp_path):
    recipe = cases.recipe(*STUDENT)
    cases.training(tmp_path / "straight", recipe).finish()
    run_stopped_at(tmp_path / "resumed", recipe, 5)
    cases.training(tmp_path / "resumed", recipe, resume=True).finish()
    same_bits(tmp_path / "straight", tmp_path / "resumed")


@pytest.mark.parametrize("family", ["llama", "tied", "gemma2", "gpt2"])
@pytest.mark.parametrize("own", ["shared", "own"])
def test_a_saved_student_is_a_plain_model_of_transformers(tmp_path, family, own):
    model = tiny.target(family)
    head = head_for(model, kind="draft", num_layers=3, embedding=own, output=own).eval()
    folder = save_student(head, model, tmp_path / "student")
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    assert plain.config.num_hidden_layers == 3
    batch = collate([row(24, [], vocab=250)], [[0]])
    with torch.no_grad():
        states = head.states(batch, model.embedding)
        expected = head.logits(states, None if own == "own" else model.output.select())
        torch.testing.assert_close(plain(batch.input_ids).logits, expected, rtol=1e-5, atol=1e-5)
    assert AutoTokenizer.from_pretrained(folder).get_vocab() == model.tokenizer.get_vocab()
    assert load_target(str(folder), dtype="float32", device="cpu").end_token_ids == model.end_token_ids


def test_a_student_is_exported_as_that_and_as_nothing_else(tmp_path):
    model = tiny.target("tied")
    head = head_for(model, vocab_of(range(64), 257), kind="draft")
    with pytest.raises(HeadError, match="sglang has no place for a student; give --format transformers"):
        write_foreign(head, model, tmp_path / "no", "sglang")
    with pytest.raises(HeadError, match="transformers has no place for medusa heads; give --format medusa"):
        write_foreign(head_for(model), model, tmp_path / "no", "transformers")
    with pytest.warns(UserWarning, match="has no draft vocabulary"):
        folder = write_foreign(head, model, tmp_path / "it", "transformers", dtype=torch.bfloat16)
    assert model.dtype == torch.float32 and load_target(str(folder), dtype="bfloat16", device="cpu").num_layers == 2
    assert {tensor.dtype for tensor in load_file(folder / "model.safetensors").values()} == {torch.bfloat16}


def test_a_saved_student_with_own_rows_of_few_tokens_has_the_targets_for_the_others(tmp_path):
    model = tiny.target("phi")
    head = head_for(model, vocab_of(range(0, 128, 2)), kind="draft", output="own").eval()
    plain = AutoModelForCausalLM.from_pretrained(save_student(head, model, tmp_path / "it"), dtype=torch.float32)
    rows, theirs = plain.get_output_embeddings(), model.model.get_output_embeddings()
    inside = torch.zeros(264, dtype=torch.bool)
    inside[head.draft_ids] = True
    assert head.output_weight is not None and head.output_bias is not None
    assert torch.equal(rows.weight[inside], head.output_weight) and torch.equal(rows.bias[inside], head.output_bias)
    assert torch.equal(rows.weight[~inside], theirs.weight[~inside])
    assert torch.equal(rows.bias[~inside], theirs.bias[~inside])
