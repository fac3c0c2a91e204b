"""`accelerate launch` as `headstart train` runs it: with one process it becomes that process; with several it ends in
one sentence, and with the status of the process that ended the others.

    python -m headstart.launch launch --config_file recipes/accelerate/two-cpu.yaml -m headstart.train.medusa ...
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from headstart.errors import ANOTHER_IS_GONE

GRACE_SECONDS = 120
"""What the launcher leaves its processes to save once it was asked to end, or one of them has died; torch's own: 30."""


def main() -> int:
    """Runs accelerate's command line on this process's arguments; the exit status."""
    from accelerate.commands import launch
    from accelerate.commands.accelerate_cli import main as accelerate
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    launch.simple_launcher = _become  # else a signal would end the launcher alone, and the status be 1 always
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(GRACE_SECONDS))
    try:
        accelerate()
    except SignalException as stopped:
        return 128 + int(stopped.sigval)
    except ChildFailedError as failed:
        return report({rank: (one.exitcode, one.pid) for rank, one in failed.failures.items()})
    return 0


def report(failures: dict[int, tuple[int, int]]) -> int:
    """The status of the launch; a process that was killed could say nothing itself, so this says it.

    failures: rank -> (status, minus the signal's number where one ended the process; process id).
    """
    killed = {rank: one for rank, one in failures.items() if one[0] < 0}
    for rank, (status, process) in killed.items():
        name = signal.Signals(-status).name
        why = ", perhaps for want of memory" if -status == signal.SIGKILL else ""
        print(
            f"rank {rank} (process {process}) was ended by {name}{why}; the same command with --resume goes on from "
            "the last checkpoint",
            file=sys.stderr,
            flush=True,
        )
    if killed:
        return 128 - next(iter(killed.values()))[0]
    own = [status for status, _ in failures.values() if status != ANOTHER_IS_GONE]  # the others ended for its sake
    return own[0] if own else ANOTHER_IS_GONE


def _become(arguments: Any) -> None:
    """In the place of accelerate's launcher of one process: the script takes over this very process."""
    from accelerate.commands.launch import prepare_simple_launcher_cmd_env

    command, environment = prepare_simple_launcher_cmd_env(arguments)
    sys.stdout.flush()
    os.execvpe(command[0], command, environment)


if __name__ == "__main__":
    sys.exit(main())
