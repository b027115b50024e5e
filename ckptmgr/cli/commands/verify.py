# SPDX-License-Identifier: Apache-2.0
"""`ckptmgr verify`."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ckptmgr.cli import key_options, options, parts, render
from ckptmgr.cli.exits import Exit, UsageProblem, note, report, report_all
from ckptmgr.cli.filters import chosen_by, filter_options
from ckptmgr.cli.options import Session
from ckptmgr.cli.render import Output
from ckptmgr.core.errors import CkptmgrError

if TYPE_CHECKING:
    from ckptmgr.cli.selectors import Selected
    from ckptmgr.core.model import Checkpoint
    from ckptmgr.maintenance.past_checks import Recorder
    from ckptmgr.maintenance.verify import Level, Verification
    from ckptmgr.store.manifest.lineage import Expected

_STATUS_WIDTH = len("unverified")
_SOUND = ("ok", "unverified", "plain")


@options.command(
    "verify",
    examples=(
        "verify runs/resnet50",
        "verify latest --dir runs --deep",
        "verify runs/resnet50 --expect-step 4000",
        "verify runs/resnet50 --public-key sign.pem.pub",
    ),
)
@click.argument("selectors", nargs=-1, metavar="[SEL]...")
@options.place_dir_option
@options.series_option
@click.option("--quick", "level", flag_value="quick", help="Sizes, headers and structure only.")
@click.option("--deep", "level", flag_value="deep", help="Also decode all tensors and count NaN.")
@click.option(
    "-j",
    "--jobs",
    type=click.IntRange(min=1, max=256),
    default=1,
    show_default=True,
    metavar="N",
    help="Checkpoints to verify at a time; each one is read by several threads anyway.",
)
@click.option(
    "--expect-step",
    type=click.IntRange(min=0),
    help="A step that was reached: one as late must be here.",
)
@click.option(
    "--expect-id",
    metavar="ID",
    help="Of a checkpoint that was saved: it must be here, or the next one.",
)
@click.option(
    "--quarantine",
    "quarantines",
    is_flag=True,
    help="Move damaged checkpoints into .ckptmgr-quarantine, where no run is writing.",
)
@click.option(
    "--part",
    metavar="I/N",
    help="Only the I-th of N parts, each in a process of its own; auto and auto/N ask Slurm or Kubernetes.",
)
@click.option(
    "--subset", metavar="I/N", help="Only the I-th of N parts, each at another time, such as a day."
)
@click.option("--sample", metavar="SHARE", help="Only a random share, such as 5%.")
@click.option("--jsonl", is_flag=True, help="Print each answer at once, as a line of JSON.")
@filter_options
@key_options.trust_options(has_public_key=True)
@options.output_options
@click.pass_context
def verify_command(
    ctx: click.Context,
    selectors: tuple[str, ...],
    directory: Path,
    series: str | None,
    level: str | None,
    jobs: int,
    expect_step: int | None,
    expect_id: str | None,
    quarantines: bool,
    part: str | None,
    subset: str | None,
    sample: str | None,
    jsonl: bool,
    filters: tuple[str, ...],
    sort: str | None,
    given_trust: key_options.GivenTrust,
) -> int:
    """Check checkpoints for damage and changes since they were saved, one line each.

    SEL is a path, a directory, a step, latest, best:METRIC:min, best:METRIC:max, @pinned, @tag:NAME,
    id:DIGITS or 1000..5000; without any, all of --dir are checked. Checks every digest of the manifest and the
    CRC32, and with a key the seal and every cipher block. Each line names the checks that passed
    and those that could not be made. -q prints the bad paths.

    A file that was replaced by an older one is found by the next one, which names it. Nothing in
    the directory shows that the newest ones were removed: name a step or id that was saved with
    --expect-step or --expect-id (ls --json shows ids).

    With --part many processes share the work: the part of a checkpoint depends on its name alone.

    The results are kept in .ckptmgr-checks, if the directory can be written, and ls shows them.

    With --public-key no secret key is needed: the signature vouches for the digests, and the
    digests for every byte.

    Checkpoints of other tools are checked as far as their files allow, without opening a pickle:
    they are unverified where nothing is wrong, and incomplete where their save did not end.

    Where the only key is that of the environment, and nothing in a directory is encrypted or
    authenticated, it is checked without the key and said to be plain.
    """
    from ckptmgr.cli.foreign import select_foreign
    from ckptmgr.cli.plain import as_plain, is_shown_as_plain, showing_opener
    from ckptmgr.cli.selectors import Selected, root_of, select
    from ckptmgr.maintenance.past_checks import recorder
    from ckptmgr.maintenance.verify import Level, Status, was_removed

    opener = showing_opener(given_trust)
    foreign, texts = select_foreign(selectors, directory, opener, series=series)
    selected: list[Selected] = []
    failures: list[Exception] = []
    if texts or not foreign:
        selected = select(
            texts, directory, opener, series=series, takes_urls=True, failures=failures
        )
    for one in selected if quarantines else ():
        hint = "ckptmgr prune URL --now removes what is not to be kept"
        options.refuse_without_effect("--quarantine", one.store.can, "moves", hint=hint)
    if failures and not (selected or foreign):
        raise failures[0]
    narrowed = parts.chooser(part, subset, sample, os.environ)
    if jsonl and any(f"ckptmgr.{name}" in ctx.meta for name in ("json", "quiet", "verbose")):
        raise UsageProblem("--jsonl stands alone", hint="drop --json, -q, -0 and -v")
    if jsonl:
        ctx.meta["ckptmgr.json"] = True  # errors, too
    if filters or sort is not None or narrowed is not None:
        if expect_step is not None or expect_id is not None:
            narrowing = (
                "--filter and --sort" if narrowed is None else "--part, --subset and --sample"
            )
            raise UsageProblem(
                "--expect-step and --expect-id ask for all", hint=f"drop {narrowing}"
            )
        chosen = chosen_by(filters, sort, ctx.ensure_object(Session).now())
        selected = chosen.apply(selected, of=lambda one: one.checkpoint)
        foreign = chosen.apply(foreign, of=lambda one: one[1].checkpoint)
    if narrowed is not None:
        selected = narrowed(selected, lambda one: str(one.checkpoint.path))
        foreign = narrowed(foreign, lambda one: str(one[1].checkpoint.path))
    expected = _expected(expect_step, expect_id)
    depth = Level(level or "full")
    now = ctx.ensure_object(Session).now()
    moved: dict[Path, Path | Exception] = {}
    theirs = [Selected(store=store, checkpoint=one.checkpoint) for store, one in foreign]
    output = render.make_output(ctx, root_of([*selected, *theirs], directory))
    bundles = _bundles([one.checkpoint for one in selected], selectors or (str(directory),))

    def answers() -> Iterator[Verification]:
        stores = {one.store.directory: one.store for one in selected}
        with ExitStack() as kept:
            recorders = {
                directory: kept.enter_context(recorder(store, at=now))
                for directory, store in stores.items()
            }
            yield from ours(recorders)
        yield from of_others()

    def ours(recorders: Mapping[Path, Recorder]) -> Iterator[Verification]:
        for one, answer in _verified(output, selected, depth, jobs=jobs):
            if was_removed(one.store, answer):
                continue
            recorders[one.store.directory].note(answer)
            if quarantines and answer.status is Status.DAMAGED:
                moved[one.checkpoint.path] = _quarantined(one, now=now)
            is_sound = answer.status.value in _SOUND
            if is_sound and is_shown_as_plain(given_trust, one.store):
                shown = as_plain(answer.checkpoint)
                answer = replace(answer, checkpoint=shown, status=Status.PLAIN)
            yield answer

    def of_others() -> Iterator[Verification]:
        if not foreign:
            return
        from ckptmgr.maintenance.foreign.check import checked_foreign

        for store, theirs in foreign:
            with output.progress(theirs.checkpoint.name, theirs.checkpoint.size_bytes):
                answer = checked_foreign(store, theirs, depth)
            if quarantines and answer.status is Status.DAMAGED:
                note(f"{theirs.checkpoint.name} stays: what another tool wrote is not moved")
            yield answer

    directories = {one.store.directory for one in selected} | {
        store.directory for store, _ in foreign
    }
    root = directories.pop() if len(directories) == 1 else None
    code = _show(output, answers(), depth.value, expected, bundles, moved, root, is_in_lines=jsonl)
    failed = report_all(failures, is_partial=True, as_json=output.is_json)
    return code or failed


def _verified(
    output: Output, selected: Sequence[Selected], level: Level, *, jobs: int
) -> Iterator[tuple[Selected, Verification]]:
    """Yield the checkpoints in their order, each with its answer; verify `jobs` of them at a time."""
    from concurrent.futures import ThreadPoolExecutor

    from ckptmgr.files.load.options import ReadOptions
    from ckptmgr.maintenance.verify import verify_checkpoint
    from ckptmgr.store.manifest.lineage import Lineage
    from ckptmgr.store.store import Store

    stores = {one.store.directory: one.store for one in selected}
    lineages = {directory: Lineage(store.scan()) for directory, store in stores.items()}

    def verify(one: Selected) -> Verification:
        directory, trust = one.store.directory, one.store.trust
        return verify_checkpoint(
            one.store if jobs == 1 else Store(directory, trust=trust),
            one.checkpoint,
            level=level,
            options=ReadOptions(trust=trust),
            lineage=lineages[directory],
        )

    if jobs == 1:
        for one in selected:
            with output.progress(one.checkpoint.name, one.checkpoint.size_bytes):
                answer = verify(one)
            yield one, answer
        return
    pool = ThreadPoolExecutor(jobs, thread_name_prefix="ckptmgr-verify")
    try:
        waiting = [pool.submit(verify, one) for one in selected]
        for one, done in zip(selected, waiting, strict=True):
            with output.progress(one.checkpoint.name, one.checkpoint.size_bytes):
                answer = done.result()
            yield one, answer
    finally:
        pool.shutdown(cancel_futures=True)


def _quarantined(one: Selected, *, now: datetime) -> Path | Exception:
    """Move a damaged checkpoint away; return its new folder, or why it stays."""
    from ckptmgr.maintenance.quarantine import quarantine

    try:
        return quarantine(one.store, one.checkpoint, now=now)
    except (CkptmgrError, OSError) as error:
        return error


def _bundles(checkpoints: Iterable[Checkpoint], selectors: Iterable[str]) -> list[Path]:
    """Return the OpenSSF bundles beside the verified checkpoints."""
    folders = [Path(text) for text in selectors if _is(Path.is_dir, Path(text))]
    candidates = [path / "model.sig" for path in folders]
    candidates += [c.path.with_name(c.name + ".sig") for c in checkpoints]
    return [path for path in candidates if _is(Path.is_file, path)]


def _is(kind: Callable[[Path], bool], path: Path) -> bool:
    """Return whether a path is of a kind; not if this user may not look."""
    try:
        return kind(path)
    except OSError:
        return False


def _expected(step: int | None, identity: str | None) -> Expected:
    from ckptmgr.store.manifest.lineage import Expected

    try:
        return Expected(step=step, id=identity)
    except ValueError as error:
        raise UsageProblem(f"--expect-id: {error}", hint="ls --json shows the ids") from error


def _show(
    output: Output,
    answers: Iterable[Verification],
    level: str,
    expected: Expected,
    bundles: Sequence[Path],
    moved: Mapping[Path, Path | Exception],
    root: Path | None,
    *,
    is_in_lines: bool,
) -> int:
    """Show the answers; `root` is the directory of all, None where there are several."""
    from ckptmgr.maintenance.json_fields import verification_json, verify_summary
    from ckptmgr.maintenance.verdict import EXIT_CODES

    done: list[Verification] = []
    for answer in answers:
        done.append(answer)
        if is_in_lines:
            output.json_line({"event": "verified", **verification_json(answer)})
        elif output.is_quiet and answer.status.value not in _SOUND:
            output.paths([answer.checkpoint.path])
        elif output.is_text:
            _print(output, answer, root)
            into = moved.get(answer.checkpoint.path)
            if isinstance(into, Path):
                output.line(f"  moved to {into.relative_to(answer.checkpoint.path.parent)}")
            if output.is_verbose:
                output.fields(verification_json(answer))
    counts = Counter(answer.status.value for answer in done)
    missing = expected.missing(
        [one.checkpoint for one in done if one.status.value in (*_SOUND, "partial")]
    )
    if output.is_json:
        summary = verify_summary(
            level,
            counts.elements(),
            missing=missing,
            bundles=[str(path) for path in bundles],
            quarantined=[
                str(into / path.name) for path, into in moved.items() if isinstance(into, Path)
            ],
        )
        if is_in_lines:
            output.json_line({"event": "summary", **summary})
        else:
            output.result([verification_json(answer) for answer in done], summary)
    elif output.is_text:
        words = ", ".join(f"{n} {word}" for word, n in sorted(counts.items()))
        output.line(f"{render.counted(len(done), 'checkpoint')} ({level}): {words}")
        for path in bundles:
            output.line(
                f"{path}: an OpenSSF bundle, not checked here; model_signing verify key does"
            )
        for sentence in missing:
            output.line(f"{sentence}: newer ones were removed, or the directory was put back")
    for error in moved.values():
        if isinstance(error, Exception):
            report(error, as_json=output.is_json)
    if missing:
        return Exit.NO
    return next((code for status, code in EXIT_CODES.items() if counts[status.value]), Exit.DONE)


def _print(output: Output, answer: Verification, root: Path | None) -> None:
    path = answer.checkpoint.path
    is_beside = path.parent == root
    parts = [
        f"  {path.name if is_beside else os.path.relpath(path) if path.is_absolute() else path}"
    ]
    if answer.problems:
        parts.append(f": {'; '.join(answer.problems)}")
    elif answer.checked:
        parts.append(f"  checked {', '.join(answer.checked)}")
    if answer.unchecked:
        parts.append(f"; not checked: {'; '.join(answer.unchecked)}")
    if answer.checkpoint.health is not None and not answer.nonfinite:
        parts.append(f"; {answer.checkpoint.health}")
    for name, (nan_count, inf_count) in answer.nonfinite.items():
        parts.append(f"; {name} has {nan_count} NaN, {inf_count} Inf")
    word = answer.status.value
    output.line(render.state(word), " " * (_STATUS_WIDTH - len(word)), *parts)
    if answer.hint is not None:
        output.line(f"  hint: {answer.hint}")
