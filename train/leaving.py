"""Leaving in good order: when a scheduler says SIGTERM, the step in hand is finished and saved, and all ranks go.

    with Leaving(accelerator) as leaving:
        while ...:
            ...                                  # a step
            if number := leaving.asked():        # the same on every rank
                save(); raise Interrupted(...)

A second signal ends the process at once, as if nobody had listened.
"""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any

import torch
from accelerate import Accelerator

from headstart.errors import HeadstartError

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Interrupted(HeadstartError):
    """Training that was told to stop, and can be resumed. Its exit status is 128 and the signal's number, as a shell
    has it: 143 for SIGTERM, 130 for ^C."""

    def __init__(self, sentence: str, number: int):
        super().__init__(sentence)
        self.exit_status = 128 + number


class Leaving:
    """Notes the first signal of SIGNALS that any rank gets while it is entered."""

    def __init__(self, accelerator: Accelerator):
        self.accelerator = accelerator
        self._number = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Leaving:
        for number in SIGNALS:
            try:
                self._before[number] = signal.signal(number, self._note)
            except ValueError:  # signals come to the main thread alone
                break
        return self

    def __exit__(self, *_: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)
        self._before = {}

    def asked(self) -> int:
        """The number of the signal, or 0; called by all ranks after the same step, which one number is sent for."""
        if self.accelerator.num_processes == 1:
            return self._number
        mine = torch.tensor([self._number], device=self.accelerator.device)
        everyone = self.accelerator.gather(mine)
        assert isinstance(everyone, torch.Tensor)
        return int(everyone.max())

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self._number = number
        self.__exit__()
