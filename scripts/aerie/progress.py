"""Progress of long work as lines: what, how far, how fast, how long still.

Jobs run under Snakemake with their output in log files, where a bar that redraws itself is unreadable;
so tqdm counts, and each of its refreshes becomes a line of its own.
"""

from __future__ import annotations

import sys

from tqdm import tqdm

REFRESH_S = 5.0  # a line every five seconds: a hang is visible, a log stays short


class _Lines:
    """A text stream that turns tqdm's carriage returns into line ends."""

    def write(self, text: str) -> int:
        text = text.strip("\r\n ")
        if text:
            sys.stderr.write(text + "\n")
        return len(text)

    def flush(self) -> None:
        sys.stderr.flush()


def progress(total: int, what: str, unit: str, done: int = 0) -> tqdm:
    """Return a counter of `total` steps of `unit`, `done` of which were finished by an earlier run."""
    return tqdm(
        total=total,
        initial=done,
        desc=what,
        unit=f" {unit}",
        unit_scale=total >= 10_000,
        file=_Lines(),
        mininterval=REFRESH_S,
        bar_format="{desc}: {n_fmt}/{total_fmt}{unit}, {rate_fmt}, {elapsed} elapsed, {remaining} left",
    )


def say(text: str) -> None:
    """Print one line for people, at once."""
    print(text, file=sys.stderr, flush=True)
