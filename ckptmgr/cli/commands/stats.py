# SPDX-License-Identifier: Apache-2.0
"""`ckptmgr stats`: bytes of a tree of runs, by run, kind and age."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ckptmgr.cli import key_options, options, render
from ckptmgr.cli.exits import note, report_all
from ckptmgr.cli.filters import chosen_by, filter_option
from ckptmgr.cli.options import Session
from ckptmgr.cli.render import Cell, Output
from ckptmgr.cli.run_lines import shown_run
from ckptmgr.core.model import Checkpoint, State
from ckptmgr.core.sizes import size_text
from ckptmgr.formats.strict_json import Json
from ckptmgr.maintenance.json_fields import has_known_step

if TYPE_CHECKING:
    from ckptmgr.cli.places import ListedEntry, ListedPlace

_HEADER = ("RUN", "COUNT", "SIZE", "SHARE", "STEP", "SAVED", "KINDS")
_DAY_S = 86_400
_AGES = (("under 1 d", 1), ("1 to 7 d", 7), ("7 to 30 d", 30), ("over 30 d", float("inf")))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """The checkpoints of one line of runs, or of another tool, in one directory."""

    directory: Path
    run: str | None
    checkpoints: Sequence[Checkpoint]

    @property
    def size_bytes(self) -> int:
        """Bytes of all of them."""
        return sum(one.size_bytes for one in self.checkpoints)

    @property
    def newest(self) -> Checkpoint:
        """The one that was saved last."""
        return max(self.checkpoints, key=lambda one: one.saved_at)

    @property
    def step(self) -> int | None:
        """The step of the newest one; None where it is not known."""
        newest = self.newest
        return newest.step if has_known_step(newest) else None


@options.command(
    "stats", examples=("stats runs", "stats runs --filter 'age>30d'", "stats runs --json")
)
@click.argument("directory", type=options.PATH, default=Path())
@options.series_option
@filter_option
@key_options.trust_options(has_public_key=True)
@options.output_options
@click.pass_context
def stats_command(
    ctx: click.Context,
    directory: Path,
    series: str | None,
    filters: tuple[str, ...],
    given_trust: key_options.GivenTrust,
) -> int:
    """Show how many bytes the runs in a directory and in the folders below take, the largest first.

    Each row is a run together with those that it was resumed from; then follow the bytes by kind
    (format and cipher), those of leftovers and of the trash, and the bytes by age. Reads manifests
    only. -q prints the directories.
    """
    from ckptmgr.cli.places import checkpoint_of, places_of

    session = ctx.ensure_object(Session)
    output = render.make_output(ctx, options.absolute(directory))
    places, failures = places_of(
        directory, given_trust, series=series, with_leftovers=True, is_recursive=True
    )
    chosen = chosen_by(filters, None, session.now())
    shown = chosen.apply([one for place in places for one in place.entries], of=checkpoint_of)
    runs = sorted(_runs(shown), key=lambda run: -run.size_bytes)
    trash_bytes = _trash_bytes(places)
    if output.is_quiet:
        output.paths(list(dict.fromkeys(run.directory for run in runs)))
    elif output.is_text:
        _print(output, runs, trash_bytes, session.now())
    if output.has_fields:
        _print_json(output, runs, trash_bytes, session.now())
    return report_all(failures, is_partial=True, as_json=output.is_json)


def _runs(entries: Sequence[ListedEntry]) -> Iterator[_Run]:
    found: dict[tuple[Path, str | None, bool], list[Checkpoint]] = {}
    for one in entries:
        place = (one.directory, one.run, one.foreign is not None)
        found.setdefault(place, []).append(one.checkpoint)
    for (directory, run, _), checkpoints in found.items():
        yield _Run(directory=directory, run=run, checkpoints=checkpoints)


def _trash_bytes(places: Sequence[ListedPlace]) -> int:
    from ckptmgr.maintenance.foreign.place import ForeignTrash
    from ckptmgr.store.trash import DirectoryTrash

    total = 0
    for place in places:
        try:
            total += sum(batch.size_bytes for batch in DirectoryTrash(place.store).batches())
            total += sum(batch.size_bytes for batch in ForeignTrash(place.store).batches())
        except OSError as error:
            note(f"the trash in {place.store.directory} cannot be read: {error.strerror}")
    return total


def _kind(checkpoint: Checkpoint) -> str:
    if checkpoint.state in (State.LEFTOVER, State.WRITING):
        return str(checkpoint.state.value)
    cipher = f" {checkpoint.cipher}" if checkpoint.cipher else ""
    return f"{checkpoint.format}{cipher}"


def _by_kind(checkpoints: Sequence[Checkpoint]) -> Counter[str]:
    sizes: Counter[str] = Counter()
    for one in checkpoints:
        sizes[_kind(one)] += one.size_bytes
    return sizes


def _by_age(checkpoints: Sequence[Checkpoint], now: datetime) -> dict[str, int]:
    sizes = {label: 0 for label, _ in _AGES}
    for one in checkpoints:
        days = (now - one.saved_at).total_seconds() / _DAY_S
        sizes[next(label for label, most in _AGES if days < most)] += one.size_bytes
    return sizes


def _print_json(output: Output, runs: Sequence[_Run], trash_bytes: int, now: datetime) -> None:
    everything = [one for run in runs for one in run.checkpoints]
    items: list[dict[str, Json]] = [
        {
            "directory": str(run.directory),
            "run": run.run,
            "count": len(run.checkpoints),
            "size_bytes": run.size_bytes,
            "newest": {"path": str(run.newest.path), "step": run.step},
            "saved_at": render.timestamp(run.newest.saved_at),
            "oldest_saved_at": render.timestamp(min(one.saved_at for one in run.checkpoints)),
            "kinds": dict(_by_kind(run.checkpoints)),
            "ages": _by_age(run.checkpoints, now),
        }
        for run in runs
    ]
    summary: dict[str, Json] = {
        "runs": len(runs),
        "count": len(everything),
        "size_bytes": sum(one.size_bytes for one in everything),
        "trash_bytes": trash_bytes,
        "kinds": dict(_by_kind(everything)),
        "ages": _by_age(everything, now),
    }
    output.result(items, summary)


def _print(output: Output, runs: Sequence[_Run], trash_bytes: int, now: datetime) -> None:
    everything = [one for run in runs for one in run.checkpoints]
    total = sum(one.size_bytes for one in everything)
    several = Counter(run.directory for run in runs)
    rows = []
    for run in runs:
        place = str(run.directory.relative_to(output.root))
        name = f"{place} {shown_run(run.run)}" if several[run.directory] > 1 else place
        texts = (
            name,
            str(len(run.checkpoints)),
            size_text(run.size_bytes),
            f"{run.size_bytes / total:.0%}" if total else "-",
            "-" if run.step is None else str(run.step),
            render.age(run.newest.saved_at, now),
            ", ".join(_by_kind(run.checkpoints)),
        )
        rows.append([Cell(text) for text in texts])
    if rows:
        output.table(_HEADER, rows, right="COUNT SIZE SHARE STEP SAVED")
    kinds = [f"{kind} {size_text(size)}" for kind, size in _by_kind(everything).most_common()]
    if trash_bytes:
        kinds.append(f"trash {size_text(trash_bytes)}")
    ages = [f"{label} {size_text(size)}" for label, size in _by_age(everything, now).items() if size]  # fmt: skip
    for title, texts_of in (("kind", kinds), ("age", ages)):
        if texts_of:
            output.line(Cell(title.ljust(4), "bold"), f"  {', '.join(texts_of)}")
    counted = render.counted(len(everything), "checkpoint")
    output.line(f"{render.counted(len(runs), 'run')}, {counted}, {size_text(total)}")
