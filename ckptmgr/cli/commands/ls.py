# SPDX-License-Identifier: Apache-2.0
"""`ckptmgr ls`."""

from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ckptmgr.cli import options, render
from ckptmgr.cli.exits import Exit
from ckptmgr.cli.options import Session
from ckptmgr.cli.render import Cell, Output
from ckptmgr.cli.run_lines import (
    are_as_series,
    line_json,
    run_by_name,
    sentence_of_latest,
    shown_run,
)
from ckptmgr.core.model import Checkpoint, State
from ckptmgr.formats.errors import FormatError
from ckptmgr.formats.strict_json import Json
from ckptmgr.policy.lines import RunLine, lines_of, meant_line

if TYPE_CHECKING:
    from ckptmgr.maintenance.foreign.model import ForeignCheckpoint
    from ckptmgr.store.store import Store

_HEADER = ("STEP", "SAVED", "SIZE", "METRIC", "FORMAT", "CIPHER", "STATE", "TAGS")
_SHOWN_METRICS = 2


@options.command("ls", examples=("ls runs/resnet50", "ls runs/resnet50 --json"))
@click.argument("directory", type=options.PATH, default=Path())
@click.option("--all", "show_all", is_flag=True, help="Also what interrupted saves left.")
@options.series_option
@options.trust_options(has_public_key=True)
@options.output_options
@click.pass_context
def ls_command(
    ctx: click.Context,
    directory: Path,
    show_all: bool,
    series: str | None,
    given_trust: options.GivenTrust,
) -> int:
    """List the checkpoints of a directory, newest last.

    Reads manifests only. With a key they are authenticated, with --public-key their signatures are
    checked; without either nothing proves their writer. STATE is ok, unverified (nothing vouches
    for the file), corrupt, unreadable (this user may not read the manifest), missing (the manifest
    is here, the data is not), leftover or writing.
    RUN, where a series has checkpoints of several runs or a run several series, is the newest run
    of those that were resumed from each other.

    Checkpoints of the Trainer of Transformers, Lightning, Megatron, DeepSpeed, torchtitan, Orbax
    and torch.distributed.checkpoint are listed, too: FORMAT is the tool, STATE complete or
    incomplete, and TAGS what points at one, such as latest.
    """
    from ckptmgr.cli.foreign import foreign_of, why_none
    from ckptmgr.cli.plain import as_plain, is_shown_as_plain, showing_opener
    from ckptmgr.cli.selectors import list_selected

    store = showing_opener(given_trust)(directory)
    listed = list_selected(store, series=series, with_leftovers=show_all)
    foreign = foreign_of(store)
    found = [_sniffed(store, c) for c in listed if c.path not in foreign.paths]
    others = [one for one in foreign.checkpoints if series in (None, one.checkpoint.series)]
    if foreign.is_itself:
        found = []
    if is_shown_as_plain(given_trust, store):
        found = [as_plain(one) for one in found]
    if not (found or foreign.checkpoints or store.scan()):
        absence = why_none(store.fs, store.directory)
        if absence is not None:
            raise absence
    output = render.make_output(ctx, store.directory)
    if output.is_json:
        _print_json(output, found, others)
    elif output.is_quiet:
        output.paths([*(c.path for c in found), *(one.checkpoint.path for one in others)])
    else:
        _print(output, found, others, ctx.ensure_object(Session))
    return Exit.DONE


def _print_json(output: Output, found: list[Checkpoint], others: list[ForeignCheckpoint]) -> None:
    from ckptmgr.cli.foreign import foreign_json

    lines = lines_of(found)
    runs = run_by_name(lines)
    own: list[dict[str, Json]] = [
        {**render.checkpoint_json(c), "line": runs[c.name]} for c in found
    ]
    theirs = [{**foreign_json(one), "line": None} for one in others]
    summary = _summary([*found, *(one.checkpoint for one in others)], lines)
    output.result([*own, *theirs], summary)


def _sniffed(store: Store, checkpoint: Checkpoint) -> Checkpoint:
    """Return a bare file with the cipher that its first bytes name; all others as they are."""
    if not checkpoint.is_bare:
        return checkpoint
    from ckptmgr.crypto.detect import cipher_of

    try:
        with contextlib.closing(store.fs.open(checkpoint.path)) as file:
            return replace(checkpoint, cipher=cipher_of(file))
    except (OSError, FormatError):
        return checkpoint


def _summary(found: list[Checkpoint], lines: list[RunLine]) -> dict[str, Json]:
    meant = meant_line(lines)
    return {
        "count": len(found),
        "size_bytes": sum(c.size_bytes for c in found),
        "states": dict(sorted(Counter(c.state.value for c in found).items())),
        "lines": [line_json(line, meant) for line in lines],
    }


def _print(
    output: Output,
    found: list[Checkpoint],
    others: list[ForeignCheckpoint],
    session: Session,
) -> None:
    from ckptmgr.cli.foreign import remarks

    has_series = len({c.series for c in found}) > 1
    lines = lines_of(found)
    has_runs = not are_as_series(lines)
    runs = run_by_name(lines)
    header = (*["SERIES"] * has_series, *["RUN"] * has_runs, *_HEADER)
    now = session.now()
    rows = []
    for checkpoint in found:
        row = _row(checkpoint, saved=render.age(checkpoint.saved_at, now))
        series, run = Cell(checkpoint.series), Cell(shown_run(runs[checkpoint.name]))
        rows.append([*[series] * has_series, *[run] * has_runs, *row])
    for one in others:
        row = _row(one.checkpoint, saved=render.age(one.checkpoint.saved_at, now))
        row[0] = row[0] if one.has_step else Cell("-")
        row[-1] = Cell(" ".join(one.named_by) or "-")
        rows.append([*[Cell("-")] * (has_series + has_runs), *row])
    if rows:
        output.table(header, rows, right="STEP SAVED SIZE")
    for checkpoint in found:
        if checkpoint.problem is not None and checkpoint.state.value not in ("unverified",):
            output.line(f"{checkpoint.name}: {checkpoint.problem}")
    if found and all(checkpoint.state is State.OTHER_KEY for checkpoint in found):
        output.line("wrong key: none of these checkpoints was written under the given one")
    for one in others:
        for remark in remarks(one):
            output.line(remark)
    latest = sentence_of_latest(lines, meant_line(lines))
    if latest is not None:
        output.line(latest)
    everything = [*found, *(one.checkpoint for one in others)]
    total = render.size(sum(c.size_bytes for c in everything))
    states = Counter(c.state.value for c in everything)
    words = "".join(f", {n} {word}" for word, n in sorted(states.items()) if word != "ok")
    output.line(f"{render.counted(len(everything), 'checkpoint')}, {total}{words}")


def _row(checkpoint: Checkpoint, *, saved: str) -> list[Cell]:
    return [
        Cell(render.step(checkpoint)),
        Cell(saved),
        Cell(render.size(checkpoint.size_bytes)),
        Cell(_metrics(checkpoint)),
        Cell(checkpoint.format),
        Cell(checkpoint.cipher or "-"),
        render.state(checkpoint.state.value),
        Cell(_tags(checkpoint)),
    ]


def _metrics(checkpoint: Checkpoint) -> str:
    names = sorted(checkpoint.metrics)
    shown = [f"{name}={render.number(checkpoint.metrics[name])}" for name in names[:_SHOWN_METRICS]]
    if len(names) > _SHOWN_METRICS:
        shown.append(f"+{len(names) - _SHOWN_METRICS}")
    return " ".join(shown) or "-"


def _tags(checkpoint: Checkpoint) -> str:
    tags = [f"@{pin.name}" for pin in checkpoint.pins]
    if checkpoint.is_emergency:
        tags.append("emergency")
    return " ".join(tags) or "-"
