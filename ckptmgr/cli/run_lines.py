# SPDX-License-Identifier: Apache-2.0
"""Lines of runs on the screen and in JSON: which run a checkpoint, a plan or `latest` is of."""

from __future__ import annotations

from collections.abc import Sequence

from ckptmgr.core.model import Checkpoint
from ckptmgr.formats.strict_json import Json
from ckptmgr.policy.lines import RunLine, short_run


def are_as_series(lines: Sequence[RunLine]) -> bool:
    """Return whether each line is one series and each series one line: its name is unique."""
    names = [name for line in lines for name in line.series]
    return len(names) == len(set(names)) == len(lines)


def run_by_name(lines: Sequence[RunLine]) -> dict[str, str | None]:
    """Return the newest run of its line for the name of each checkpoint."""
    return {one.name: line.run_id for line in lines for one in line.checkpoints}


def shown_run(run_id: str | None) -> str:
    """Return a run as tables show it."""
    return "-" if run_id is None else short_run(run_id)


def line_json(line: RunLine, meant: RunLine | None) -> dict[str, Json]:
    """Return the JSON fields of a line; `meant` is the one that `latest` means."""
    newest = line.newest
    return {
        "run": line.run_id,
        "runs": list(line.runs),
        "series": list(line.series),
        "count": len(line.checkpoints),
        "newest": None if newest is None else newest.name,
        "step": None if newest is None else newest.step,
        "is_latest": line is meant,
    }


def sentence_of_latest(lines: Sequence[RunLine], meant: RunLine | None) -> str | None:
    """Return which run `latest` means, where a series has several lines; else None."""
    newest: Checkpoint | None = None if meant is None else meant.newest
    if newest is None or are_as_series(lines) or len(lines) == 1:
        return None
    return f"latest is step {newest.step} of {meant} ({newest.name})"
