# SPDX-License-Identifier: Apache-2.0
"""`ckptmgr rm`: remove checkpoints by name."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ckptmgr.cli import key_options, options, render
from ckptmgr.cli.exits import Exit, UsageProblem, note, report_all
from ckptmgr.cli.filters import chosen_by, filter_option
from ckptmgr.cli.options import Session
from ckptmgr.cli.render import Cell, Output
from ckptmgr.core.errors import UnsafePrune
from ckptmgr.core.sizes import size_text
from ckptmgr.formats.strict_json import Json

if TYPE_CHECKING:
    from ckptmgr.cli.selectors import Selected
    from ckptmgr.core.model import Checkpoint
    from ckptmgr.store.applied import Applied
    from ckptmgr.store.store import Store

_HEADER = ("STEP", "SAVED", "SIZE", "STATE", "NAME")


@options.command(
    "rm",
    examples=("rm 1000 2000..3000 --dir runs/resnet50", "rm runs/a/net-40.ckpt --dry-run"),
)
@click.argument("selectors", nargs=-1, required=True, metavar="SEL...")
@options.place_dir_option
@options.series_option
@filter_option
@click.option("-n", "--dry-run", is_flag=True, help="Show what would go; write nothing at all.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@click.option("--now", "at_once", is_flag=True, help="Remove at once instead of into the trash.")
@click.option("--force", is_flag=True, help="Also pinned ones, and the newest good one of a run.")
@key_options.trust_options()
@options.output_options
@click.pass_context
def rm_command(
    ctx: click.Context,
    selectors: tuple[str, ...],
    directory: Path,
    series: str | None,
    filters: tuple[str, ...],
    dry_run: bool,
    yes: bool,
    at_once: bool,
    force: bool,
    given_trust: key_options.GivenTrust,
) -> int:
    """Remove the checkpoints that are named, into the trash.

    SEL is a path, a step, latest, best:METRIC:min, best:METRIC:max, @tag:NAME, id:DIGITS or 1000..5000.
    Refused by name without --force: a pinned checkpoint, and the newest good one of a run; the last
    good one of a directory always stays. A directory is no SEL: prune removes by a policy. Not
    while a run writes the series. Removed ones stay in .ckptmgr-trash for a day, and prune --undo
    brings them back. Of an object store, where SEL may be the URL of a checkpoint, they go for
    good: --now must be given.
    """
    from ckptmgr.cli.foreign import why_not_here
    from ckptmgr.cli.selectors import is_run_address, root_of, select
    from ckptmgr.maintenance.removal import check_removable

    for text in selectors:
        if is_run_address(text) or Path(text).is_dir():
            absence = None if is_run_address(text) else why_not_here(Path(text))
            if absence is not None:
                raise absence
            raise UsageProblem(
                f"{text[:60]!r} is a directory", hint="ckptmgr prune removes by a policy"
            )
    opener = partial(options.open_store, trust=given_trust.load())
    session = ctx.ensure_object(Session)
    chosen = chosen_by(filters, None, session.now())
    selected = chosen.apply(
        select(selectors, directory, opener, series=series, takes_urls=True),
        of=lambda one: one.checkpoint,
    )
    groups = _by_directory(selected)
    for store, checkpoints in groups:
        options.check_said_now(store.can, at_once=at_once, only_shows=dry_run)
        ctx.with_resource(store.fs.hold_directory(store.directory))
        check_removable(store, checkpoints, force=force)
    output = render.make_output(ctx, root_of(selected, directory))
    if not (dry_run or yes) and selected:
        options.check_can_ask(UnsafePrune)
    if output.is_text:
        _print_plan(output, selected, session)
    if dry_run or not selected:
        _print_end(output, selected, None)
        return Exit.DONE
    if not (yes or _agreed(selected, at_once=at_once)):
        note("nothing was changed")
        return Exit.NO
    return _act(output, groups, selected, session, force=force, at_once=at_once)


def _by_directory(selected: Sequence[Selected]) -> list[tuple[Store, list[Checkpoint]]]:
    groups: dict[Path, tuple[Store, list[Checkpoint]]] = {}
    for one in selected:
        place = groups.setdefault(one.store.directory, (one.store, []))
        place[1].append(one.checkpoint)
    return list(groups.values())


def _print_plan(output: Output, selected: Sequence[Selected], session: Session) -> None:
    now = session.now()
    rows = [
        [
            Cell(render.step(one)),
            Cell(render.age(one.saved_at, now)),
            Cell(size_text(one.size_bytes)),
            render.state(one.state.value),
            Cell(one.name),
        ]
        for one in (chosen.checkpoint for chosen in selected)
    ]
    if rows:
        output.table(_HEADER, rows, right="STEP SAVED SIZE")


def _agreed(selected: Sequence[Selected], *, at_once: bool) -> bool:
    counted = render.counted(len(selected), "checkpoint")
    question = f"Remove {counted} for good?" if at_once else f"Move {counted} to the trash?"
    return options.confirm(question, refusal=UnsafePrune)


def _act(
    output: Output,
    groups: Sequence[tuple[Store, Sequence[Checkpoint]]],
    selected: Sequence[Selected],
    session: Session,
    *,
    force: bool,
    at_once: bool,
) -> int:
    from ckptmgr.maintenance.removal import remove_chosen

    outcomes = [
        remove_chosen(store, checkpoints, now=session.now(), force=force, at_once=at_once)
        for store, checkpoints in groups
    ]
    _print_end(output, selected, outcomes)
    if any(one.batch is not None and one.removed for one in outcomes):
        note(render.IN_THE_TRASH)
    failures = [error for one in outcomes for error in one.failures]
    is_partial = any(one.removed for one in outcomes)
    return report_all(failures, is_partial=is_partial, as_json=output.is_json)


def _print_end(
    output: Output, selected: Sequence[Selected], outcomes: Sequence[Applied] | None
) -> None:
    chosen = [one.checkpoint for one in selected]
    removed = None if outcomes is None else [one for done in outcomes for one in done.removed]
    shown = chosen if removed is None else removed
    size = sum(one.size_bytes for one in shown)
    if output.is_quiet:
        output.paths([one.path for one in shown])
    elif output.is_text:
        counted = f"{render.counted(len(shown), 'checkpoint')}, {size_text(size)}"
        if outcomes is None:
            output.line(f"would remove {counted}")
        elif any(one.batch is not None for one in outcomes):
            output.line(f"moved {counted} to the trash")
        else:
            output.line(f"removed {counted}")
    if output.has_fields:
        summary: dict[str, Json] = {
            "count": len(chosen),
            "is_done": outcomes is not None,
            "removed": [str(one.path) for one in removed or ()],
            "freed_bytes": size,
            "trash": [str(one.batch) for one in outcomes or () if one.batch and one.removed],
        }
        output.result([render.checkpoint_json(one) for one in chosen], summary)
