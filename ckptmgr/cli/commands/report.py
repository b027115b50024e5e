# SPDX-License-Identifier: Apache-2.0
"""`ckptmgr report`: saved and kept checkpoints of a run, why, and at what cost."""

from __future__ import annotations

import contextlib
import os
import secrets
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ckptmgr.cli import key_options, options, render
from ckptmgr.cli.exits import UsageProblem, report_all
from ckptmgr.cli.options import Session
from ckptmgr.core.errors import (
    CheckpointFileNotFound,
    CheckpointNotFound,
    CkptmgrError,
    UnsafeWrite,
)
from ckptmgr.core.sizes import size_text

if TYPE_CHECKING:
    from ckptmgr.maintenance.prune_plan import PolicyOf
    from ckptmgr.maintenance.report.model import RunReport
    from ckptmgr.observe.json_lines import EventLines
    from ckptmgr.policy.rules import RetentionPolicy
    from ckptmgr.store.store import Store

_FORMS = ("terminal", "csv", "markdown")
_DEFAULT_TARGET = "report.html"
_MOST_CHARACTERS = 1 << 20  # of a line of events


@options.command(
    "report",
    examples=("report runs/resnet50 -o report.html", "report runs/resnet50 --markdown"),
)
@click.argument("directory", type=options.PATH, default=Path())
@click.option(
    "-o",
    "--output",
    "target",
    metavar="FILE",
    callback=options.checked_output,
    help="The page; - for stdout.  [default: report.html, here]",
)
@click.option("--terminal", is_flag=True, help="Print a short text instead of a page.")
@click.option("--csv", is_flag=True, help="Print a line for each checkpoint instead.")
@click.option("--markdown", is_flag=True, help="Print Markdown instead.")
@click.option("--keep", metavar="EXPR", help="What to keep.  [default: as prune]")
@click.option(
    "--events",
    type=options.PATH,
    metavar="FILE",
    help="Events that a JsonLinesObserver noted.  [default: events.jsonl in the directory]",
)
@click.option("--force", is_flag=True, help="Replace a file that is not an earlier report.")
@options.series_option
@key_options.trust_options(has_public_key=True)
@options.output_options
@click.pass_context
def report_command(
    ctx: click.Context,
    directory: Path,
    target: str | None,
    terminal: bool,
    csv: bool,
    markdown: bool,
    keep: str | None,
    events: Path | None,
    force: bool,
    series: str | None,
    given_trust: key_options.GivenTrust,
) -> int:
    """Write a page about the checkpoints of a directory: one HTML file that loads nothing.

    It shows the checkpoints on the curves of their metrics, which of them the policy keeps and why,
    what each save cost, disk use and when the disk is full, damage and failures. It reads manifests
    and the file of events that a run writes with observe=JsonLinesObserver(...); without events the
    cost of saves, failures and verifications are unknown. Nothing is verified. A page that an
    earlier report wrote is replaced. -q prints the path of the page.
    """
    from ckptmgr.cli import report_view
    from ckptmgr.cli.foreign import check_directory, check_not_foreign, why_none

    chosen = [
        name for name, wanted in zip(_FORMS, (terminal, csv, markdown), strict=True) if wanted
    ]
    if len(chosen) + ("ckptmgr.json" in ctx.meta) > 1:
        raise UsageProblem(
            "one report has one form", hint="choose one of --json, --terminal, --csv and --markdown"
        )
    is_printed = bool(chosen) or target == "-"
    for name, option in (("quiet", "-q"), ("verbose", "-v")):
        if is_printed and f"ckptmgr.{name}" in ctx.meta:
            raise UsageProblem(
                f"{option} has no effect on a report that is printed", hint=f"drop {option}"
            )
    if chosen and target is not None:
        raise UsageProblem(
            f"-o is for the page, and --{chosen[0]} prints", hint="drop one of them, or redirect"
        )
    store = options.open_store(directory, trust=given_trust.load())
    check_directory(directory)
    check_not_foreign(store.fs, store.directory)
    if not store.scan() and (absence := why_none(store.fs, store.directory)) is not None:
        raise absence
    made = report_of(
        store, keep=keep, events=events, now=ctx.ensure_object(Session).now(), series=series
    )
    output = render.make_output(ctx, store.directory)
    if output.is_json:
        report_view.print_json(output, made)
    elif csv:
        report_view.print_csv(made)
    elif markdown:
        report_view.print_markdown(made)
    elif terminal:
        report_view.print_text(output, made)
    else:
        _write_page(output, made, target or _DEFAULT_TARGET, force=force)
    return report_all(made.refused, is_partial=True, as_json=output.is_json)


def report_of(
    store: Store,
    *,
    keep: str | None = None,
    events: Path | None = None,
    now: datetime,
    series: str | None = None,
) -> RunReport:
    """Return the report of a directory, with its policy and its file of events unless others are named."""
    from ckptmgr.cli.policy_file import policy_in
    from ckptmgr.maintenance.report.model import make_report

    policy: RetentionPolicy | PolicyOf | None = None
    refused: list[CkptmgrError | OSError] = []
    try:
        policy = policy_in(keep, store, series=series)
    except UsageProblem:  # nothing says what to keep
        pass
    except (CkptmgrError, OSError) as error:
        if keep is not None:
            raise
        refused.append(error)
    noted = None
    try:
        noted = _events(events, store.directory)
    except OSError as error:
        if events is not None:
            raise
        refused.append(error)
    made = make_report(store, policy=policy, now=now, series=series, noted=noted)
    return replace(made, refused=(*refused, *made.refused)) if refused else made


def _events(given: Path | None, directory: Path) -> EventLines | None:
    """Return the noted events; None where no file is named and the directory has none."""
    from ckptmgr.io.appending import opened_to_read
    from ckptmgr.observe.json_lines import EVENTS_NAME, read_events

    with contextlib.ExitStack() as opened:
        if given is None:
            try:
                source: int | Path = opened.enter_context(opened_to_read(directory / EVENTS_NAME))
            except FileNotFoundError:
                return None
        elif given.is_file():  # a FIFO would be waited for
            source = given
        else:
            raise CheckpointFileNotFound("no such file of events", path=given)
        closes = not isinstance(source, int)
        file = opened.enter_context(
            open(source, encoding="utf-8", errors="replace", closefd=closes)
        )
        # A line without an end, such as the zeros that a power cut may leave, is read in pieces.
        return read_events(iter(partial(file.readline, _MOST_CHARACTERS), ""))


def _write_page(output: render.Output, report: RunReport, target: str, *, force: bool) -> None:
    from ckptmgr.cli import report_view
    from ckptmgr.maintenance.report.model import Fate
    from ckptmgr.maintenance.report.page import MARK, page

    text = page(report)
    if target == "-":
        click.echo(text.encode(), nl=False)
        return
    path = Path(target)
    if path.is_dir():
        path /= _DEFAULT_TARGET
    if not path.parent.is_dir():
        raise CheckpointNotFound("no such directory", path=path.parent)
    if os.path.lexists(path) and not (force or _begins_with(path, MARK)):
        raise UnsafeWrite(
            "exists, and is no report", path=path, hint="choose another name, or pass --force"
        )
    _replace(path, text.encode())
    if output.is_quiet:
        output.paths([path])
        return
    here = sum(one.fate not in (Fate.TRASH, Fate.GONE) for one in report.entries)
    output.line(f"{path}  {render.counted(here, 'checkpoint')}, {size_text(len(text))}")
    if output.is_verbose:
        report_view.print_json(output, report)


def _begins_with(path: Path, mark: str) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(mark)) == mark.encode()


def _replace(path: Path, data: bytes) -> None:
    """Put data into a file, which appears whole or not at all, with the mode that the umask gives."""
    temporary = path.parent / f".{path.name}.{secrets.token_hex(8)}.tmp"
    try:
        with temporary.open("xb") as file:
            file.write(data)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
