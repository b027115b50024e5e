# SPDX-License-Identifier: Apache-2.0
"""`ckptmgr ls`."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ckptmgr.cli import key_options, options, render
from ckptmgr.cli.exits import report_all
from ckptmgr.cli.filters import chosen_by, filter_options
from ckptmgr.cli.options import Session
from ckptmgr.cli.render import Cell, Output
from ckptmgr.cli.run_lines import (
    are_as_series,
    line_json,
    sentence_of_latest,
    shown_run,
)
from ckptmgr.core.model import Checkpoint, State
from ckptmgr.core.sizes import size_text
from ckptmgr.formats.strict_json import Json
from ckptmgr.policy.lines import meant_line

if TYPE_CHECKING:
    from ckptmgr.cli.places import ListedEntry, ListedPlace

_HEADER = ("STEP", "SAVED", "SIZE", "METRIC", "FORMAT", "CIPHER", "STATE", "TAGS")
_STATE = _HEADER.index("STATE")
_SHOWN_METRICS = 2


@options.command("ls", examples=("ls runs/resnet50", "ls -r runs --filter 'age>7d' --sort -size"))
@click.argument("directory", type=options.PLACE, default=Path())
@click.option("-r", "--recursive", is_flag=True, help="Also those of the runs in folders below.")
@click.option("--all", "show_all", is_flag=True, help="Also what interrupted saves left.")
@options.series_option
@filter_options
@key_options.trust_options(has_public_key=True)
@options.output_options
@click.pass_context
def ls_command(
    ctx: click.Context,
    directory: Path,
    recursive: bool,
    show_all: bool,
    series: str | None,
    filters: tuple[str, ...],
    sort: str | None,
    given_trust: key_options.GivenTrust,
) -> int:
    """List the checkpoints of a directory, or below a URL of an object store, newest last.

    Reads manifests only. With a key they are authenticated, with --public-key their signatures are
    checked; without either nothing proves their writer. STATE is ok, unverified (nothing vouches
    for the file), corrupt, unreadable (this user may not read the manifest), missing (the manifest
    is here, the data is not), leftover or writing.
    RUN, where a series has checkpoints of several runs or a run several series, is the newest run
    of those that were resumed from each other.

    Checkpoints of the Trainer of Transformers, Lightning, Megatron, DeepSpeed, torchtitan, Orbax
    and torch.distributed.checkpoint are listed, too: FORMAT is the tool, STATE complete or
    incomplete, and TAGS what points at one, such as latest.

    Where verify has been here, CHECKED is the age of its result, and what it found damaged or
    missing, and has not changed since, is shown so. Such notes decide nothing; with keys, which do
    not prove them, only bad ones are shown.

    With -r the folders below are searched for runs, and each row names its directory; a run is not
    searched for further runs, and hidden folders and links are left out.
    """
    from ckptmgr.cli.places import checkpoint_of, entry_json, places_of

    output = render.make_output(ctx, options.absolute(directory))
    places, failures = places_of(
        directory, given_trust, series=series, with_leftovers=show_all, is_recursive=recursive
    )
    chosen = chosen_by(filters, sort, ctx.ensure_object(Session).now())
    shown = chosen.apply([one for place in places for one in place.entries], of=checkpoint_of)
    if output.is_quiet:
        output.paths([one.checkpoint.path for one in shown])
    elif output.is_text:
        _print(output, shown, places, ctx.ensure_object(Session), is_recursive=recursive)
    if output.has_fields:
        output.result([entry_json(one) for one in shown], _summary(shown, places))
    return report_all(failures, is_partial=True, as_json=output.is_json)


def _summary(shown: list[ListedEntry], places: list[ListedPlace]) -> dict[str, Json]:
    found = [one.checkpoint for one in shown]
    return {
        "count": len(found),
        "size_bytes": sum(c.size_bytes for c in found),
        "states": dict(sorted(Counter(c.state.value for c in found).items())),
        "lines": [
            line_json(line, meant_line(place.lines)) for place in places for line in place.lines
        ],
    }


def _print(
    output: Output,
    shown: list[ListedEntry],
    places: list[ListedPlace],
    session: Session,
    *,
    is_recursive: bool,
) -> None:
    from ckptmgr.cli.foreign import remarks
    from ckptmgr.cli.places import counted_directories

    own = [one for one in shown if one.foreign is None]
    has_series = any(len({one.series for one in place.found}) > 1 for place in places)
    has_runs = any(not are_as_series(place.lines) for place in places)
    names = (["DIR"] * is_recursive, ["SERIES"] * has_series, ["RUN"] * has_runs)
    has_checks = any(one.past is not None for one in shown)
    header = (*(name for part in names for name in part), *_HEADER, *["CHECKED"] * has_checks)
    now = session.now()
    rows = []
    for one in shown:
        row = _row(one.checkpoint, saved=render.age(one.checkpoint.saved_at, now))
        series, run = Cell(one.checkpoint.series), Cell(shown_run(one.run))
        if one.foreign is not None:
            row[-1] = Cell(" ".join(one.foreign.named_by) or "-")
            series = run = Cell("-")
        row[_STATE] = render.state(one.state)
        row += [Cell("-" if one.past is None else render.age(one.past.at, now))] * has_checks
        place = Cell(one.place(output.root))
        rows.append([*[place] * is_recursive, *[series] * has_series, *[run] * has_runs, *row])
    if rows:
        output.table(header, rows, right="STEP SAVED SIZE")
    problems: dict[str, list[str]] = {}
    for one in own:
        problem, state = one.checkpoint.problem, one.checkpoint.state.value
        if problem is not None and state not in ("unverified",):
            problems.setdefault(problem, []).append(one.shown_name(output.root))
    for problem, affected in problems.items():
        more = f" and {len(affected) - 1} more" if affected[1:] else ""
        output.line(f"{affected[0]}{more}: {problem}")
    for one in own:
        if one.past is not None and one.state != one.checkpoint.state.value:
            name, age = one.shown_name(output.root), render.age(one.past.at, now)
            output.line(f"{name}: verify found it {one.state} {age}: {one.past.problem}")
    for one in own:
        if one.checkpoint.health is not None:
            output.line(f"{one.shown_name(output.root)}: {one.checkpoint.health}")
    if own and all(one.checkpoint.state is State.OTHER_KEY for one in own):
        output.line("wrong key: none of these checkpoints was written under the given one")
    for one in shown:
        for remark in remarks(one.foreign) if one.foreign is not None else ():
            output.line(remark)
    for place_of_run in places if not is_recursive else ():
        latest = sentence_of_latest(place_of_run.lines, meant_line(place_of_run.lines))
        if latest is not None:
            output.line(latest)
    everything = [one.checkpoint for one in shown]
    total = size_text(sum(c.size_bytes for c in everything))
    states = Counter(one.state for one in shown)
    words = "".join(f", {n} {word}" for word, n in sorted(states.items()) if word != "ok")
    runs = f" in {counted_directories(shown)}" if is_recursive else ""
    output.line(f"{render.counted(len(everything), 'checkpoint')}{runs}, {total}{words}")


def _row(checkpoint: Checkpoint, *, saved: str) -> list[Cell]:
    return [
        Cell(render.step(checkpoint)),
        Cell(saved),
        Cell(size_text(checkpoint.size_bytes)),
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
    tags = [*(f"@{pin.name}" for pin in checkpoint.pins), *checkpoint.tags]
    if checkpoint.is_emergency:
        tags.append("emergency")
    if checkpoint.health is not None:
        tags.append("unhealthy")
    return " ".join(tags) or "-"
