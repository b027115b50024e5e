# SPDX-License-Identifier: Apache-2.0
"""`ckptmgr doctor`: whether a directory can be saved to and resumed from."""

from __future__ import annotations

import stat
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ckptmgr.cli import key_options, options, render
from ckptmgr.cli.exits import Exit
from ckptmgr.cli.options import Session
from ckptmgr.cli.render import Cell, Output
from ckptmgr.core.errors import KeyProblem
from ckptmgr.formats.strict_json import Json

if TYPE_CHECKING:
    from ckptmgr.core.trust import Trust
    from ckptmgr.maintenance.doctor import Diagnosis

_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red", "skip": "dim"}
_CHECK_WIDTH = len("leftovers")


@options.command("doctor", examples=("doctor runs/resnet50", "doctor runs/resnet50 --deep --json"))
@click.argument("directory", type=options.PATH, default=Path())
@click.option("--deep", is_flag=True, help="Also read and decode every tensor of the newest.")
@options.series_option
@key_options.trust_options(has_public_key=True)
@options.output_options
@click.pass_context
def doctor_command(
    ctx: click.Context,
    directory: Path,
    deep: bool,
    series: str | None,
    given_trust: key_options.GivenTrust,
) -> int:
    """Check whether a directory can be saved to and resumed from, one line for each check.

    Writes a small file, syncs, renames and locks it, compares its date with the clock, and removes
    it again. Looks at free space, leftovers, keys and the modes of their files, the versions of the
    dependencies, and opens the newest checkpoint of each run. Each line says what was checked and
    what could not be. Exit 1 if a check failed; a warning is no failure. -q prints the names of the
    checks that failed.
    """
    from ckptmgr.cli.foreign import check_directory
    from ckptmgr.core.trust import DEFAULT_TRUST

    check_directory(directory, hint="a run makes it with its first save")
    try:
        trust: Trust = given_trust.load()
        problem: KeyProblem | None = None
    except KeyProblem as error:
        trust, problem = DEFAULT_TRUST, error
    output = render.make_output(ctx, options.absolute(directory))
    sources = given_trust.key_sources or key_options.sources_in_environment()
    done: list[Diagnosis] = []
    findings = _findings(
        directory,
        trust,
        problem,
        sources,
        series=series,
        is_deep=deep,
        session=ctx.ensure_object(Session),
    )
    for finding in findings:
        done.append(finding)
        if output.is_text:
            _print(output, finding)
    return _end(output, done)


def _findings(
    directory: Path,
    trust: Trust,
    problem: KeyProblem | None,
    sources: Sequence[str],
    *,
    series: str | None,
    is_deep: bool,
    session: Session,
) -> Iterator[Diagnosis]:
    from ckptmgr.cli.foreign import why_none, without_foreign
    from ckptmgr.crypto.keys.ring import ring_of
    from ckptmgr.files.load.options import ReadOptions
    from ckptmgr.maintenance import doctor
    from ckptmgr.maintenance.doctor_disk import check_disk

    store = options.open_store(directory, trust=trust)
    yield from check_disk(store.fs, store.directory, now_s=session.clock())
    try:
        found = store.scan_for(series)
    except OSError as error:
        text = f"the directory cannot be listed: {error.strerror}"
        yield doctor.Diagnosis(check="listing", grade="fail", message=text)
        found = []
    if series is not None:
        found = [one for one in found if one.series == series]
    dates = doctor.check_dates(found, session.now())
    if dates is not None:
        yield dates
    yield doctor.check_space(store, found)
    yield doctor.check_leftovers(store, found)

    def described() -> list[str]:
        if problem is not None:
            raise problem
        if trust.keys is None:
            return []
        return [*ring_of(trust.keys).labels, *(_mode_of(source) for source in sources)]

    yield doctor.check_keys(described, found)
    yield doctor.check_versions()
    absence = None if without_foreign(store, found) else why_none(store.fs, store.directory)
    if absence is not None:
        yield doctor.Diagnosis(
            check="resume", grade="warn", message=absence.message, hint=absence.hint
        )
    elif problem is None:
        yield from doctor.check_resume(store, found, ReadOptions(trust=trust), is_deep=is_deep)


def _mode_of(source: str) -> str:
    """Return the kind of a source, of a file its name and mode."""
    from ckptmgr.crypto.keys.trusted_files import shown_name

    scheme, _, place = source.partition(":")
    if scheme != "file":
        return f"from {scheme}:"
    mode = stat.S_IMODE(Path(place).expanduser().stat().st_mode)
    return f"from {shown_name(place)} (mode {mode:04o})"


def _print(output: Output, finding: Diagnosis) -> None:
    output.line(
        Cell(finding.grade.ljust(4), _STYLES[finding.grade]),
        f"  {finding.check.ljust(_CHECK_WIDTH)}  {finding.message}",
    )
    if finding.hint is not None:
        output.line(f"      hint: {finding.hint}")


def _end(output: Output, done: Sequence[Diagnosis]) -> int:
    counts = Counter[str](finding.grade for finding in done)
    if output.is_quiet:
        output.names([one.check.encode() for one in done if one.grade == "fail"])
    elif output.is_text:
        words = ", ".join(f"{counts[word]} {word}" for word in _STYLES if counts[word])
        output.line(f"{render.counted(len(done), 'check')}: {words}")
    if output.has_fields:
        items: list[dict[str, Json]] = [
            {
                "check": finding.check,
                "status": finding.grade,
                "message": finding.message,
                "hint": finding.hint,
                "figures": dict(finding.figures),
            }
            for finding in done
        ]
        output.result(items, {"count": len(done), "statuses": dict(sorted(counts.items()))})
    return Exit.NO if counts["fail"] else Exit.DONE
