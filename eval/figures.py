"""Where a benchmark's figures go: one file of JSON, checked before the work and written after it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from headstart.atomic import write_text
from headstart.errors import refuse_unwritable


def refuse_output(output: str | None) -> None:
    """Raises the OSError of a file that cannot be made; None: nothing is to be written."""
    if output:
        refuse_unwritable(Path(output).resolve().parent)


def write_figures(report: dict[str, Any], output: str | None) -> None:
    """Writes the report and prints where it is; None: neither."""
    if output:
        write_text(Path(output), json.dumps(report, indent=1) + "\n")
        print(output)
