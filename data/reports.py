"""What became of the rows of a data set: how many were kept, how many skipped and why, how much is learnt from."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from headstart.data.messages import SkipRow, UnknownRole

PLACES_SHOWN = 5
LOW_SHARE = 0.01


@dataclass
class SkipReport:
    """What became of the rows of one source: rows = kept + skipped, by reason and place.

    `tokens` and `supervised` are filled in by `prepare`: tokens of the kept rows, and how many of them are labels.
    """

    name: str
    rows: int = 0
    skipped: dict[str, list[str]] = field(default_factory=dict)
    """Reason -> the places, `line 3` or `line 4, roles: user, user, assistant`."""
    unknown_roles: Counter[str] = field(default_factory=Counter)
    truncated: int = 0
    """Kept rows that lost their end to the length limit."""
    tokens: int = 0
    supervised: int = 0
    mismatches: list[str] = field(default_factory=list)
    """Kept rows whose context isn't the prompt that is met at run time, with the first difference."""

    @property
    def num_skipped(self) -> int:
        return sum(map(len, self.skipped.values()))

    @property
    def kept(self) -> int:
        return self.rows - self.num_skipped

    @property
    def share(self) -> float:
        """Share of the tokens that is supervised; 0 where there are none."""
        return self.supervised / self.tokens if self.tokens else 0.0

    def skip(self, origin: str, why: SkipRow) -> None:
        place = f"line {origin.rpartition(':')[2]}" + (f", {why.detail}" if why.detail else "")
        self.skipped.setdefault(why.reason, []).append(place)
        self.tokens += why.tokens
        if isinstance(why, UnknownRole):
            self.unknown_roles[why.role] += 1

    def count(self, supervised: list[bool], truncated: bool, mismatch: str | None, origin: str) -> None:
        """Counts a row that was kept."""
        self.tokens += len(supervised)
        self.supervised += sum(supervised)
        self.truncated += truncated
        if mismatch:
            self.mismatches.append(f"line {origin.rpartition(':')[2]}: {mismatch}")

    def reasons(self) -> str:
        """`no turns (2: line 1; line 4), not JSON (1: line 3)`, the most frequent first."""
        ordered = sorted(self.skipped.items(), key=lambda item: -len(item[1]))
        return ", ".join(f"{reason} ({len(places)}: {_first(places)})" for reason, places in ordered)

    def summary(self) -> str:
        """A few lines: rows kept and skipped, each reason with its first places, unknown roles once with counts."""
        lines = [f"{self.name}: {self.rows} rows, {self.kept} kept, {self.num_skipped} skipped"]
        if self.tokens:
            lines[0] += f"; {self.supervised} of {self.tokens} tokens supervised ({self.share:.1%})"
        for reason, places in sorted(self.skipped.items(), key=lambda item: -len(item[1])):
            lines.append(f"  skipped {len(places)}: {reason} ({_first(places)})")
        if self.unknown_roles:
            counts = ", ".join(f"{role!r} ({count})" for role, count in self.unknown_roles.most_common())
            lines.append(f"  roles not known: {counts}; known are system, user (human) and assistant (gpt, model)")
        if self.truncated:
            lines.append(f"  cut at the length limit: {self.truncated} of the kept rows")
        if self.mismatches:
            lines.append(
                f"  warning: in {len(self.mismatches)} rows the answer doesn't follow the prompt that the target is "
                f"given at run time ({self.mismatches[0]}); check data.chat.arguments"
            )
        if self.tokens and 0 < self.share < LOW_SHARE:
            lines.append(f"  warning: under {LOW_SHARE:.0%} of the tokens are supervised; is this the right format?")
        return "\n".join(lines)


def _first(places: list[str]) -> str:
    more = f"; and {len(places) - PLACES_SHOWN} more" if len(places) > PLACES_SHOWN else ""
    return "; ".join(places[:PLACES_SHOWN]) + more
