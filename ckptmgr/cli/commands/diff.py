# SPDX-License-Identifier: Apache-2.0
"""`ckptmgr diff`: the differences of two checkpoints, or of those in two directories."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ckptmgr.cli import key_options, options, render
from ckptmgr.cli.exits import Trouble, UsageProblem
from ckptmgr.core.errors import CorruptCheckpoint

if TYPE_CHECKING:
    from ckptmgr.cli.diff_table import Pair
    from ckptmgr.cli.selectors import Selected
    from ckptmgr.core.trust import Trust
    from ckptmgr.maintenance.diff import Input


def _tolerance(_: click.Context, param: click.Parameter, value: float) -> float:
    if not (math.isfinite(value) and value >= 0):
        raise UsageProblem(f"{param.opts[0]} is no tolerance", hint="write a number such as 1e-6")
    return value


def _part(_: click.Context, param: click.Parameter, value: str | None) -> str | None:
    if value == "":
        raise UsageProblem(f"{param.opts[0]} is empty", hint="leave it out to compare all tensors")
    return value


@options.command(
    "diff",
    examples=(
        "diff 1000 2000 --dir runs/resnet50",
        "diff runs/a runs/b --summary",
        "diff mindspore.ckpt model.safetensors --rtol 1e-5",
        "diff latest model.safetensors --dir runs/a --only net --key file:run.key --allow-unencrypted",
    ),
)
@click.argument("first", metavar="A")
@click.argument("second", metavar="B")
@click.option(
    "--atol", type=float, default=0.0, callback=_tolerance, metavar="X", help="Absolute tolerance."
)
@click.option(
    "--rtol",
    type=float,
    default=0.0,
    callback=_tolerance,
    metavar="X",
    help="Tolerance relative to the larger of the two values.",
)
@click.option("--summary", "is_summary", is_flag=True, help="Totals only.")
@click.option(
    "--only",
    "part",
    metavar="PREFIX",
    callback=_part,
    help="Only what is below this name, such as net, which the names then lose.",
)
@click.option(
    "--other-only",
    "other_part",
    metavar="PREFIX",
    callback=_part,
    help="The same for B, where the name differs from that of --only.",
)
@options.place_dir_option
@click.option(
    "--other-dir",
    "other_directory",
    type=options.PLACE,
    help="Where B is looked up.  [default: that of --dir]",
)
@options.series_option
@click.option(
    "--other-key",
    "other_sources",
    metavar="SOURCE",
    multiple=True,
    help="Key of B, where it is not that of --key. May be repeated.",
)
@key_options.trust_options(has_public_key=True)
@options.output_options
@click.pass_context
def diff_command(
    ctx: click.Context,
    first: str,
    second: str,
    atol: float,
    rtol: float,
    is_summary: bool,
    part: str | None,
    other_part: str | None,
    directory: Path,
    other_directory: Path | None,
    series: str | None,
    other_sources: tuple[str, ...],
    given_trust: key_options.GivenTrust,
) -> int:
    """Compare two checkpoints, as diff does: exit 0 if they are the same, 1 if not, 2 and more for trouble.

    A and B are paths, URLs, steps, latest, best:METRIC:min, best:METRIC:max, @pinned, @tag:NAME or
    id:DIGITS; or two directories, whose checkpoints of the same step are compared. Files of any formats and keys are
    compared by the names of their tensors, those of many ranks as whole tensors; besides, the
    numbers and texts of a state, but no metrics and no metadata of libraries.

    Tensors are the same if their bytes are. With --atol or --rtol, or if their types differ, two
    numbers are the same if |b - a| is at most atol + rtol * max(|a|, |b|); NaN is the same as NaN.
    ABS is the largest |b - a|, REL the largest |b - a| / max(|a|, |b|), and NORM the Euclidean norm of
    b - a; they leave out what is NaN or infinite. A damaged checkpoint is trouble, not a difference. -q prints the
    names of what differs, of directories the paths; -v adds the tensors that are the same.
    """
    from ckptmgr.cli.diff_table import Pair, Shown, exit_code, show
    from ckptmgr.maintenance.diff import compare
    from ckptmgr.maintenance.diff_elements import Tolerance

    trust = given_trust.load()
    other_trust = trust
    if other_sources:
        other_trust = replace(trust, keys=key_options.keys_of_option("--other-key", other_sources))
    output = render.make_output(ctx, options.absolute(directory))
    tolerance = Tolerance(atol=atol, rtol=rtol)

    def pairs() -> Iterator[Pair]:
        for a, b in _selected(
            (first, directory, trust), (second, other_directory or directory, other_trust), series
        ):
            if a is None or b is None:
                yield Pair(
                    a=None if a is None else a.checkpoint, b=None if b is None else b.checkpoint
                )
                continue
            inputs = (_input(a, trust, part), _input(b, other_trust, other_part or part))
            size = sum(one.checkpoint.size_bytes for one in inputs)
            with output.progress(b.checkpoint.name, size):
                found = compare(*inputs, tolerance)
            yield Pair(a=a.checkpoint, b=b.checkpoint, found=found)

    shown = Shown(
        tolerance=tolerance,
        is_summary=is_summary,
        is_verbose=output.is_verbose,
        has_many=_is_directory(first) and _is_directory(second),
    )
    try:
        return exit_code(show(output, pairs(), shown))
    except CorruptCheckpoint as error:
        raise Trouble(error) from error


def _input(selected: Selected, trust: Trust, part: str | None) -> Input:
    from ckptmgr.files.load.options import ReadOptions
    from ckptmgr.maintenance.diff import Input

    return Input(
        store=selected.store,
        checkpoint=selected.checkpoint,
        options=ReadOptions(trust=trust),
        part=part,
    )


Side = tuple[str, Path, "Trust"]


def _selected(
    a: Side, b: Side, series: str | None
) -> Iterator[tuple[Selected | None, Selected | None]]:
    """Yield the checkpoints to compare; None where a directory lacks the other one's step."""
    if not (_is_directory(a[0]) and _is_directory(b[0])):
        yield _one(a, series), _one(b, series)
        return
    ours, theirs = (_by_step(side, series) for side in (a, b))
    for place in sorted({**ours, **theirs}):
        yield ours.get(place), theirs.get(place)


def _one(side: Side, series: str | None) -> Selected:
    from ckptmgr.cli.selectors import is_run_address, select_one
    from ckptmgr.core.error_translation import unproven_error

    text, directory, trust = side
    opener = partial(options.open_store, trust=trust)
    selected = select_one(text, directory, opener, series=series, takes_urls=True)
    is_named = is_run_address(text) or Path(text).exists()
    if selected.checkpoint.is_unproven and not is_named:
        # A path or address names the file itself; a step would be no more than its name.
        raise unproven_error(selected.checkpoint.path, trust)
    return selected


def _is_directory(text: str) -> bool:
    from ckptmgr.cli.selectors import is_run_address

    return is_run_address(text) or Path(text).is_dir()


def _by_step(side: Side, series: str | None) -> dict[tuple[str, int], Selected]:
    """Return the newest checkpoint of each step and series; one series of a directory has any name.

    Raises:
        CheckpointNotFound: The directory has none.
    """
    from ckptmgr.cli.selectors import select

    text, directory, trust = side
    opener = partial(options.open_store, trust=trust)
    found = select([text], directory, opener, series=series, takes_urls=True)
    newest_last = sorted(found, key=lambda one: one.checkpoint.order)
    is_one = len({one.checkpoint.series for one in found}) == 1
    return {
        ("" if is_one else one.checkpoint.series, one.checkpoint.step): one for one in newest_last
    }
