"""Runs code for its shapes alone: no number is computed, and what it would hold in memory and multiply is counted.

    with Rehearsal() as rehearsal:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)      # 70 G parameters in no memory
        output = TrainModule(target, head, ...)(batch)
        output.loss_sum.backward()
    rehearsal.ledger.most("step"), rehearsal.flops

Floating-point tensors are fakes (torch's own FakeTensorMode) that know their shape, dtype and storage. Whole numbers
and truth values are real, so that code which looks at ids, documents or labels goes the way that it goes in training.
What is counted is what autograd and the modules really keep, by the life of every storage.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry

_aten = torch.ops.aten
_FLOPS = {
    **flop_registry,
    _aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[_aten._scaled_dot_product_flash_attention],
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[
        _aten._scaled_dot_product_flash_attention_backward
    ],
}
"""Floating-point operations by operator, a multiplication with its addition as two; all others count none."""

_INDEXING = (_aten.index, _aten.index_put, _aten.index_put_)


class Ledger:
    """Which blocks of memory live when, and what each is for; one book for the foretold and for the measured."""

    def __init__(self):
        self._events: list[tuple[int, int]] = []
        self._labels: list[str] = []

    def take(self, size: int, label: str) -> int:
        """A block of `size` bytes begins to live; returns its number."""
        self._labels.append(label)
        self._events.append((len(self._labels) - 1, size))
        return len(self._labels) - 1

    def free(self, block: int, size: int) -> None:
        self._events.append((block, -size))

    def relabel(self, block: int, label: str) -> None:
        """What a block is for may show only later: a product turns out to be a gradient."""
        self._labels[block] = label

    def restart(self) -> None:
        """Forgets what was freed; what lives goes on living from the start."""
        alive: Counter[int] = Counter()
        for block, size in self._events:
            alive[block] += size
        self._events = [(block, size) for block, size in alive.items() if size]

    def most(self, *labels: str) -> int:
        """The most bytes under these labels that lived at one time."""
        alive = most = 0
        for block, size in self._events:
            if self._labels[block] in labels:
                alive += size
                most = max(most, alive)
        return most


class Rehearsal(TorchDispatchMode):
    """While entered, operations on floats are rehearsed; see the module's docstring.

    ledger: the bytes of every storage that was made inside, by the label that stood when it was made; first of all
    `label`. flops: by the same labels.
    """

    def __init__(self, label: str):
        super().__init__()
        self.ledger, self.flops = Ledger(), Counter[str]()
        self._label = label
        self._fakes = FakeTensorMode(allow_non_fake_inputs=True)
        self._blocks: dict[int, int] = {}

    @contextmanager
    def label(self, label: str) -> Iterator[None]:
        """What is made and multiplied inside is for `label`."""
        before, self._label = self._label, label
        try:
            yield
        finally:
            self._label = before

    def relabel(self, tensors: Any, label: str) -> None:
        """Puts the storages of some tensors under another label."""
        for tensor in tree_leaves(tensors):
            block = self._blocks.get(_key(tensor)) if isinstance(tensor, Tensor) else None
            if block is not None:
                self.ledger.relabel(block, label)

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        keywords = keywords or {}
        result = self._run(function, arguments, keywords)
        formula = _FLOPS.get(function.overloadpacket)
        if formula is not None:
            self.flops[self._label] += formula(*arguments, **keywords, out_val=result)
        for made in tree_leaves(result):
            if isinstance(made, Tensor):
                self._watch(made)
        return result

    def _run(self, function: Any, arguments: Any, keywords: Any) -> Any:
        given = [leaf for leaf in tree_leaves((arguments, keywords)) if isinstance(leaf, Tensor)]
        if given and not any(isinstance(tensor, FakeTensor) or tensor.is_floating_point() for tensor in given):
            return tree_map_only(Tensor, self._fake_if_float, function(*arguments, **keywords))
        changed = _first_changed(function, arguments)
        if changed is not None and not isinstance(changed, FakeTensor) and not changed.is_floating_point():
            return changed  # counts of what was never computed
        if function.overloadpacket in _INDEXING:
            arguments = _with_places(*arguments)
        with self._fakes:
            result = function(*arguments, **keywords)
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if not given and not any(tensor.is_floating_point() for tensor in made):
            return function(*arguments, **keywords)
        return result

    def _fake_if_float(self, tensor: Tensor) -> Tensor:
        return self._fakes.from_tensor(tensor) if tensor.is_floating_point() else tensor

    def _watch(self, tensor: Tensor) -> None:
        storage, key = tensor.untyped_storage(), _key(tensor)
        size = storage.nbytes()
        if key in self._blocks or not size:
            return
        block = self._blocks[key] = self.ledger.take(size, self._label)

        def freed() -> None:
            del self._blocks[key]
            self.ledger.free(block, size)

        weakref.finalize(storage, freed).atexit = False


def rehearsing() -> Rehearsal | None:
    """The rehearsal that is on; None: everything is real."""
    modes = [mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, Rehearsal)]
    return modes[-1] if modes else None


def region(label: str) -> AbstractContextManager[None]:
    """Tells whoever counts what the code inside is for; costs nothing where nobody does."""
    rehearsal = rehearsing()
    return nullcontext() if rehearsal is None else rehearsal.label(label)


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _with_places(tensor: Tensor, indices: Any, *others: Any) -> tuple[Any, ...]:
    """Arguments of an indexing operator with the places that a mask chooses instead of the mask."""
    places: list[Tensor | None] = []
    for index in indices:
        is_mask = isinstance(index, Tensor) and index.dtype == torch.bool and not isinstance(index, FakeTensor)
        places += index.nonzero(as_tuple=True) if is_mask else [index]
    return tensor, places, *others


def _first_changed(function: Any, arguments: Any) -> Tensor | None:
    """The argument that an operator writes into, if that is its first."""
    schema = function._schema.arguments
    changes = bool(schema) and schema[0].alias_info is not None and schema[0].alias_info.is_write
    return arguments[0] if changes and isinstance(arguments[0], Tensor) else None
