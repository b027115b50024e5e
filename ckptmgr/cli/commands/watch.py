# SPDX-License-Identifier: Apache-2.0
"""`ckptmgr watch`."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import click

from ckptmgr.cli import key_options, options, render
from ckptmgr.cli.durations import parse_time, seconds_of
from ckptmgr.cli.exits import Exit, UsageProblem, note, report_all
from ckptmgr.cli.options import Session
from ckptmgr.cli.watch_program import program_of
from ckptmgr.core.contexts import contextmanager
from ckptmgr.core.errors import CkptmgrError

if TYPE_CHECKING:
    from ckptmgr.cli.serve import ReportServer
    from ckptmgr.cli.watch_view import View
    from ckptmgr.core.trust import Trust
    from ckptmgr.maintenance.prune_plan import PolicyOf
    from ckptmgr.maintenance.watch.model import Report
    from ckptmgr.maintenance.watch.watcher import Watcher
    from ckptmgr.policy.rules import RetentionPolicy
    from ckptmgr.remote.watch_mirror import WatchMirror

_SETTLE_S = 10.0
_MIRROR_WITHIN_S = 3600.0
_REFRESH_S = 15


@options.command(
    "watch",
    examples=(
        "watch runs/resnet50 --expect-every 30min --exec 'mail-me --subject checkpoints'",
        "watch runs/* --prune --state ~/.local/state/ckptmgr-watch.json --json",
    ),
)
@click.argument(
    "directories", type=options.ONE_OF_SEVERAL, nargs=-1, required=True, metavar="DIR..."
)
@click.option("--quick", "level", flag_value="quick", help="Verify sizes and structure only.")
@click.option("--deep", "level", flag_value="deep", help="Also decode all tensors.")
@click.option(
    "--expect-every",
    metavar="TIME",
    callback=seconds_of,
    help="Alarm when no checkpoint was saved for so long.  [default: 3 times the usual interval "
    "of a live run]",
)
@click.option(
    "--slow",
    type=click.FloatRange(min=1, min_open=True),
    default=3.0,
    show_default=True,
    help="Alarm when a save wrote so many times slower than those before.",
)
@click.option(
    "--full-within",
    metavar="TIME",
    default="1h",
    show_default=True,
    callback=seconds_of,
    help="Alarm when the disk will be full in less, at the present rate.",
)
@click.option(
    "--exec", "command", metavar="CMD", help="Run a program when an alarm begins or ends."
)
@click.option("--stop-on-alarm", is_flag=True, help="End with exit code 1 at the first alarm.")
@click.option("--once", "is_once", is_flag=True, help="Do everything once, and end.")
@click.option("--prune", "prunes", is_flag=True, help="Apply retention where no live run does.")
@click.option(
    "--quarantine", "quarantines", is_flag=True, help="Move damaged checkpoints out of the way."
)
@click.option("--keep", metavar="EXPR", help="With --prune: the policy.  [default: as prune]")
@click.option("--grace", metavar="TIME", help="With --prune: life of the trash.  [default: 24h]")
@click.option(
    "--mirror", "mirror_url", metavar="URL", help="Upload what was verified to an object store."
)
@click.option("--mirror-keep", metavar="EXPR", help="With --mirror: what to keep there.")
@click.option(
    "--mirror-within",
    metavar="TIME",
    callback=seconds_of,
    help="With --mirror: alarm when a checkpoint waits longer for its upload.  [default: 1h]",
)
@click.option(
    "--state",
    "state_file",
    type=options.PATH,
    callback=options.checked_output,
    metavar="FILE",
    help="Remember what was verified: a restart verifies only the rest.",
)
@click.option(
    "--poll",
    metavar="TIME",
    default="30s",
    show_default=True,
    callback=seconds_of,
    help="List all directories as often, in case an event was lost.",
)
@click.option(
    "--serve",
    metavar="[HOST:]PORT",
    help="Serve the page of report, which is live; on this machine only, unless a HOST is named.",
)
@click.option("--poll-only", is_flag=True, help="Do not rely on events of the file system at all.")
@key_options.trust_options(has_public_key=True)
@options.output_options
@click.pass_context
def watch_command(
    ctx: click.Context,
    /,
    directories: tuple[Path, ...],
    level: str | None,
    command: str | None,
    stop_on_alarm: bool,
    is_once: bool,
    state_file: Path | None,
    serve: str | None,
    given_trust: key_options.GivenTrust,
    **given: Any,
) -> int:
    """Follow directories: verify what appears, and raise alarms.

    Verifies each checkpoint when it gets its name, the newest first. An alarm begins when one is
    damaged, when saves stop, fail or become slow, when the disk will be full, or when a directory
    vanishes; it ends when that is over. On a terminal there is a table; elsewhere, one line for
    each event; -v gives lines with every field, on a terminal, too. With --json each line is one object.

    --prune applies the retention policy, into the trash, to series that no live run writes; live
    runs apply their own. --quarantine moves damaged checkpoints of such series to the folder
    .ckptmgr-quarantine, where they stay until they are moved back or removed by hand.

    --mirror uploads each checkpoint that was verified, also those of live runs, and what is not
    there yet after a restart; of several directories, each to a folder of its name below the URL.
    With --prune, nothing goes before it was uploaded. Credentials come from the environment.

    --exec runs a program without a shell; it reads the event as JSON, and CKPTMGR_WATCH_ALARM,
    CKPTMGR_WATCH_EVENT (alarm or cleared), CKPTMGR_WATCH_DIRECTORY and CKPTMGR_WATCH_MESSAGE are
    set.

    --serve shows the page of report in a browser, updated every few seconds. Nothing can be
    changed there, and everyone who reaches the address sees it.

    Ctrl-C and SIGTERM end it, with exit code 1 if an alarm stands, else 0.
    """
    from ckptmgr.cli.foreign import check_directory
    from ckptmgr.cli.watch_view import view_for
    from ckptmgr.maintenance.watch.watcher import Watcher

    session = ctx.ensure_object(Session)
    paths = list(dict.fromkeys(options.absolute(path) for path in directories))
    for path in paths:
        check_directory(
            path, hint="a run makes its directory with the first save; mkdir -p makes it now"
        )
    run = program_of(command)
    settings = _settings(
        paths, level, given_trust, session, is_once=is_once, state=state_file, **given
    )
    output = render.make_output(ctx, paths[0])
    if serve is not None and is_once:
        raise UsageProblem("--serve needs a watch that goes on", hint="drop --once, or use report")
    watched, refused = _watchable(paths, is_once=is_once)
    code = report_all(refused, is_partial=bool(watched), as_json=output.is_json)
    if not watched:
        return code
    with ExitStack() as stack:
        served = None
        if serve is not None:
            served = stack.enter_context(_server(serve, watched, settings.trust, session))
        watcher = stack.enter_context(Watcher(watched, settings, clock=session.clock))
        view = view_for(
            output, watcher.rows, session.now, has_several=len(paths) > 1, is_once=is_once
        )
        with closing(view), _ended_by_signals(watcher) as ended:
            if served is not None:
                view.show(_note(session.clock(), f"the reports are at {served.url}"))
            try:
                _follow(watcher, view, run, stop_on_alarm=stop_on_alarm)
            except KeyboardInterrupt:
                view.show(_end(watcher, session.clock(), " and ".join(ended)))
                view.refresh()
    return Exit.NO if watcher.standing else code


def _watchable(
    directories: Sequence[Path], *, is_once: bool
) -> tuple[list[Path], list[CkptmgrError | OSError]]:
    """Return the directories that can be watched, and why the others cannot."""
    from ckptmgr.cli.foreign import check_not_foreign
    from ckptmgr.io.filesystem import OsFileSystem

    watched: list[Path] = []
    refused: list[CkptmgrError | OSError] = []
    for path in directories:
        try:
            check_not_foreign(OsFileSystem(), path)
            _look_below(path, is_once=is_once)
        except (CkptmgrError, OSError) as error:
            refused.append(error)
        else:
            watched.append(path)
    return watched, refused


def _look_below(directory: Path, *, is_once: bool) -> None:
    """Note that a directory without checkpoints is above runs; raise it where the watch ends at once."""
    from ckptmgr.cli.foreign import why_none
    from ckptmgr.io.filesystem import OsFileSystem
    from ckptmgr.store.store import Store

    absence = None if Store(directory).scan() else why_none(OsFileSystem(), directory)
    if absence is None:
        return
    if is_once:
        raise absence
    note(f"{directory}: {absence.message}; those are not watched unless they are named")


def _settings(
    paths: Sequence[Path],
    level: str | None,
    given_trust: key_options.GivenTrust,
    session: Session,
    *,
    is_once: bool,
    state: Path | None,
    expect_every: float | None,
    slow: float,
    full_within: float,
    poll: float,
    poll_only: bool,
    prunes: bool,
    quarantines: bool,
    keep: str | None,
    grace: str | None,
    mirror_url: str | None,
    mirror_keep: str | None,
    mirror_within: float | None,
) -> Any:
    from ckptmgr.cli.policy_file import policy_in
    from ckptmgr.maintenance.verdict import Level
    from ckptmgr.maintenance.watch.memory import Memory
    from ckptmgr.maintenance.watch.model import Limits
    from ckptmgr.maintenance.watch.watcher import Settings
    from ckptmgr.store.store import Store

    if not prunes and (keep is not None or grace is not None):
        raise UsageProblem("--keep and --grace need --prune", hint="add --prune, or drop them")
    if mirror_url is None and (mirror_keep is not None or mirror_within is not None):
        raise UsageProblem(
            "--mirror-keep and --mirror-within need --mirror", hint="add --mirror URL, or drop them"
        )
    depth, trust = Level(level or "full"), given_trust.load()
    limits = Limits(
        expect_every_s=expect_every,
        slow_factor=slow,
        full_within_s=full_within,
        settle_s=0.0 if is_once else min(_SETTLE_S, poll),  # there is no second look
        retry_s=poll,
        mirror_within_s=mirror_within or _MIRROR_WITHIN_S,
    )

    def policy_of(store: Store) -> RetentionPolicy | PolicyOf:
        try:
            return policy_in(keep, store)
        except UsageProblem as problem:  # what said it is gone: an alarm, not the end
            raise CkptmgrError(problem.message, path=store.directory, hint=problem.hint) from None

    if prunes:
        _check_policies([partial(policy_in, keep, Store(path, trust=trust)) for path in paths])
    return Settings(
        trust=trust,
        level=depth,
        limits=limits,
        poll_s=poll,
        is_polling=poll_only,
        quarantines=quarantines,
        policy_of=policy_of if prunes else None,
        grace=parse_time(grace or "24h"),
        memory=None if state is None else Memory(options.absolute(state), level=depth),
        uploads=None
        if mirror_url is None
        else _uploads(mirror_url, mirror_keep, paths, trust, session.clock),
        is_once=is_once,
    )


def _check_policies(checks: Sequence[Callable[[], object]]) -> None:
    """Raise the first error if no directory has a policy; that of one of several is an alarm."""
    problems: list[Exception] = []
    for check in checks:
        try:
            check()
        except (UsageProblem, CkptmgrError, OSError) as error:
            problems.append(error)
    if len(problems) == len(checks):
        raise problems[0]


def _uploads(
    url: str,
    keep: str | None,
    paths: Sequence[Path],
    trust: Trust,
    clock: Callable[[], float],
) -> WatchMirror:
    from ckptmgr.policy.text import parse_policy
    from ckptmgr.remote.watch_mirror import WatchMirror, addresses_of

    options.checked_address(url)
    try:
        addresses = addresses_of(url, paths)
    except ValueError as error:
        raise UsageProblem(str(error), hint="see docs/watch.md") from None
    policy = None if keep is None else parse_policy(keep)
    return WatchMirror(addresses, trust=trust, keep=policy, clock=clock)


def _follow(
    watcher: Watcher, view: View, run: Callable[[Report], None], *, stop_on_alarm: bool
) -> None:
    with closing(watcher.run(tick_s=view.tick_s)) as reports:
        for report in reports:
            if report is None:
                view.refresh()
                continue
            view.show(report)
            if report.event in ("alarm", "cleared"):
                with watcher.interruptible():
                    run(report)
            if stop_on_alarm and report.event == "alarm":
                return


def _server(address: str, paths: Sequence[Path], trust: Trust, session: Session) -> ReportServer:
    """Return the server of a page for each directory; of several, with a page of links."""
    from ckptmgr.cli.commands.report import report_of
    from ckptmgr.cli.serve import ReportServer
    from ckptmgr.maintenance.report.page import links, page
    from ckptmgr.store.store import Store

    def page_of(path: Path) -> str:
        made = report_of(Store(path, trust=trust), now=session.now())
        return page(made, refresh_s=_REFRESH_S)

    if len(paths) == 1:
        return ReportServer(address, {"/": partial(page_of, paths[0])})
    places = {f"/{number}/": path for number, path in enumerate(paths, 1)}
    pages: dict[str, Callable[[], str]] = {at: partial(page_of, places[at]) for at in places}
    return ReportServer(address, {"/": partial(links, places), **pages})


def _note(at: float, message: str) -> Report:
    from ckptmgr.maintenance.watch.model import Report

    return Report(event="note", at=at, directory=None, message=message)


def _end(watcher: Watcher, at: float, by: str) -> Report:
    from ckptmgr.maintenance.watch.model import Report

    count = len(watcher.standing)
    alarms = "no alarm stands" if not count else f"{render.counted(count, 'alarm')} standing"
    return Report(event="stopped", at=at, directory=None, message=f"by {by}; {alarms}")


_ENDS = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}


@contextmanager
def _ended_by_signals(watcher: Watcher) -> Iterator[list[str]]:
    """Let Ctrl-C and SIGTERM end the watch; yield the names of the signals that came."""
    names: list[str] = []

    def end(number: int, _: FrameType | None) -> None:
        names.append(_ENDS[signal.Signals(number)])
        watcher.end()

    before = {number: signal.signal(number, end) for number in _ENDS}
    try:
        yield names
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
