"""From nothing to a report: trains the heads of a recipe, tunes their tree on this machine, measures, and says how long
each part took.

    python scripts/quickstart.py                                  # what `make quickstart` runs: quickstart.yaml
    python scripts/quickstart.py --recipe smollm2-medusa.yaml
    python scripts/quickstart.py --smoke                          # a minute: random weights, a few steps

A run that was killed goes on where it stopped when the same line is given again.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from headstart.errors import HeadstartError
from headstart.recipe import load_recipe, override


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="quickstart.yaml", metavar="FILE")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--output", default="runs", metavar="DIR")
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args(arguments)
    try:
        recipe = override(load_recipe(options.recipe, smoke=options.smoke), options.set)
    except HeadstartError as error:
        print(error, file=sys.stderr)
        return error.exit_status
    run = Path(options.output) / recipe.name
    train = ["train", "--recipe", options.recipe, "--output", options.output, "--cpu"]
    train += [word for override_ in options.set for word in ("--set", override_)]
    train += ["--smoke"] if options.smoke else []
    train += ["--resume"] if run.is_dir() and not options.smoke else []
    steps = {
        "train": train,
        "tune": ["tune", "--head", str(run)],
        "measure": ["eval", "--head", str(run)],
    }
    seconds: dict[str, float] = {}
    for name, words in steps.items():
        print(f"\n$ headstart {' '.join(words)}", flush=True)
        started = time.monotonic()
        status = subprocess.run([sys.executable, "-m", "headstart.cli", *words]).returncode
        if status:
            return status
        seconds[name] = time.monotonic() - started
    parts = ", ".join(f"{name} {spent:.0f}" for name, spent in seconds.items())
    print(f"\n{sum(seconds.values()):.0f} seconds: {parts}. The report: {run / 'report.html'}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
