"""Two processes that train together over gloo on this machine's CPU, in any mode, forked from the test."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
from accelerate import DistributedType
from accelerate.state import AcceleratorState, PartialState

# what `accelerate launch` sets for each mode, with the files of recipes/accelerate
VARIABLES = {
    "DDP": {"ACCELERATE_USE_CPU": "true"},
    "ZeRO-2": {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2"},
    "ZeRO-3": {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"},
    "FSDP2": {
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": "2",
        "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
        "FSDP_RESHARD_AFTER_FORWARD": "true",
        "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
    },
}


def fork(work: Callable[[], object], log: Path | None = None) -> int:
    """Runs `work` in a forked process, whose id is returned; its status is 0 where nothing was raised, that of a
    SystemExit, else 1. log: what it prints is appended there."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        if log is not None:
            sys.stdout = sys.stderr = open(log, "a")
        work()
        status = 0
    except SystemExit as ended:
        status = int(ended.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)


def in_two_processes(folder: Path, work: Callable[[int], object], mode: str = "DDP") -> list[str]:
    """Runs `work(rank)` in two forked processes, with what a launch in this mode sets; what each of them returned."""
    children = start_two(folder, work, mode)
    statuses = [os.waitpid(child, 0)[1] for child in children]
    assert statuses == [0, 0], logs(folder)
    return [(folder / f"result-{rank}").read_text() for rank in range(2)]


def logs(folder: Path) -> str:
    """What the two processes have said."""
    return "".join((folder / f"log-{rank}").read_text() for rank in range(2))


def ended(children: list[int], seconds: float) -> list[int]:
    """The statuses of processes once they have ended, minus the signal where one did it; those that still run after so
    many seconds are killed, and the test has failed."""
    statuses: dict[int, int] = {}
    until = time.monotonic() + seconds
    while len(statuses) < len(children):
        for child in set(children) - set(statuses):
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                statuses[child] = os.waitstatus_to_exitcode(status)
        if time.monotonic() > until:
            for child in set(children) - set(statuses):
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
            raise AssertionError(f"a process still ran after {seconds} s: {statuses} of {children}")
        time.sleep(0.01)
    return [statuses[child] for child in children]


def start_two(folder: Path, work: Callable[[int], object], mode: str = "DDP") -> list[int]:
    """Starts `work(rank)` in two processes as `in_two_processes` does, and waits for neither; their ids."""
    folder.mkdir(parents=True, exist_ok=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    def one(rank: int) -> None:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
        os.environ |= VARIABLES[mode]
        forget_processes(mode)
        (folder / f"result-{rank}").write_text(str(work(rank)))

    for rank in range(2):
        (folder / f"log-{rank}").unlink(missing_ok=True)
    return [fork(lambda rank=rank: one(rank), folder / f"log-{rank}") for rank in range(2)]


def forget_processes(mode: str) -> None:
    """Accelerate starts afresh. It shards with FSDP2 on GPUs only, unless its own state says that there are some; that
    it does on a CPU too is tried with the pinned version."""
    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState._reset_state()
    if mode == "FSDP2":
        PartialState(cpu=True)
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        assert not torch.cuda.is_available()
