# SPDX-License-Identifier: Apache-2.0
"""`ckptmgr convert`: compress checkpoints in place, or expand them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ckptmgr.cli import key_options, options, render
from ckptmgr.cli.exits import Exit, code_of, report
from ckptmgr.cli.render import Cell, Output
from ckptmgr.core.errors import CkptmgrError
from ckptmgr.core.sizes import rate_text, size_text
from ckptmgr.formats.strict_json import Json

if TYPE_CHECKING:
    from ckptmgr.cli.selectors import Selected
    from ckptmgr.files.load.options import ReadOptions
    from ckptmgr.files.save.compressed import FrameFigures
    from ckptmgr.maintenance.recompress import RecompressResult

_MAX_LEVEL = 19


@options.command(
    "convert",
    examples=(
        "convert runs/resnet50 --compression zstd",
        "convert net-40.safetensors.ckpe --compression zstd --level 9 --key file:run.key",
        "convert net-40.safetensors.ckpz --compression none",
    ),
)
@click.argument("selectors", metavar="PATH...", nargs=-1, required=True)
@click.option(
    "--compression",
    type=click.Choice(["zstd", "none"]),
    required=True,
    help="What the files shall have.",
)
@click.option(
    "--level",
    type=click.IntRange(1, _MAX_LEVEL),
    default=1,
    show_default=True,
    help=f"Of zstd: 1 is fast, {_MAX_LEVEL} smallest; above 1 hardly pays for weights.",
)
@options.dir_option
@options.series_option
@key_options.trust_options(has_signing_key=True)
@options.output_options
@click.pass_context
def convert_command(
    ctx: click.Context,
    selectors: tuple[str, ...],
    compression: str,
    level: int,
    directory: Path,
    series: str | None,
    given_trust: key_options.GivenTrust,
) -> int:
    """Compress safetensors checkpoints in place, or expand them.

    The content stays the same byte for byte, and so do step, metrics, pins, key and cipher; a
    compressed plain file is called .ckpz. A file that several keys open needs them all (--key for
    each; a public key will do). Each new file is read back, expanded and compared before the old
    one goes. A file that is done already stays, so doing the same again finishes an interrupted
    run. -q prints the paths of the files afterwards.
    """
    from ckptmgr.cli.selectors import root_of, select
    from ckptmgr.files.load.options import ReadOptions

    trust = given_trust.load()
    opener = partial(options.open_store, trust=trust)
    selected = select(selectors, directory, opener, series=series)
    output = render.make_output(ctx, root_of(selected, directory))
    reading = ReadOptions(trust=trust)
    failures: list[Exception] = []
    wanted = level if compression == "zstd" else None
    done = list(_convert_all(output, selected, wanted, reading, failures))
    _show(output, done, failed=len(failures))
    if not failures:
        return Exit.DONE
    return Exit.PARTLY if done else code_of(failures[0])


def _convert_all(
    output: Output,
    selected: Sequence[Selected],
    level: int | None,
    reading: ReadOptions,
    failures: list[Exception],
) -> Iterator[RecompressResult]:
    from ckptmgr.maintenance.recompress import recompress

    for one in selected:
        try:
            with output.progress(one.checkpoint.name, one.checkpoint.size_bytes):
                answer = recompress(one.store, one.checkpoint, level=level, options=reading)
        except (CkptmgrError, OSError) as error:
            failures.append(error)
            report(error, as_json=output.is_json)
            continue
        if output.is_text:
            _print(output, answer)
        yield answer


def _print(output: Output, answer: RecompressResult) -> None:
    before, after = answer.source.size_bytes, answer.target.size_bytes
    arrow = "→" if output.has_unicode else "->"
    if answer.outcome.value == "nothing":
        output.line(f"unchanged   {answer.target.name}")
        return
    speed = rate_text(answer.raw_bytes / answer.elapsed_s)
    output.line(
        f"{answer.outcome.value:<10}  {answer.target.name}  {size_text(before)} {arrow} {size_text(after)} "
        f"({after / before:.1%}), {answer.elapsed_s:.1f} s, {speed}"
    )


def _show(output: Output, done: Sequence[RecompressResult], *, failed: int) -> None:
    by_dtype = _together(done)
    if output.is_quiet:
        output.paths([one.target.path for one in done])
    elif output.is_text and by_dtype:
        output.line()
        header = ("DTYPE", "RAW", "STORED", "RATIO", "GB/S")
        rows = [_row(name, figures) for name, figures in by_dtype.items()]
        output.table(header, rows, right="RAW STORED RATIO GB/S")
    if output.has_fields:
        summary: dict[str, Json] = {
            "source_bytes": sum(one.source.size_bytes for one in done),
            "target_bytes": sum(one.target.size_bytes for one in done),
            "failed": failed,
            "by_dtype": {name: _figures_json(one) for name, one in by_dtype.items()},
        }
        output.result([_item(one) for one in done], summary)


def _together(done: Sequence[RecompressResult]) -> Mapping[str, FrameFigures]:
    from ckptmgr.files.save.compressed import FrameFigures

    total: dict[str, FrameFigures] = {}
    for one in done:
        for name, figures in one.by_dtype.items():
            total[name] = total.get(name, FrameFigures()) + figures
    return dict(sorted(total.items(), key=lambda item: -item[1].raw_bytes))


def _row(name: str, figures: FrameFigures) -> list[Cell]:
    texts = (
        name,
        size_text(figures.raw_bytes),
        size_text(figures.stored_bytes),
        f"{figures.ratio:.1%}",
        f"{figures.gigabytes_per_s:.2f}",
    )
    return [Cell(text) for text in texts]


def _item(one: RecompressResult) -> dict[str, Json]:
    return {
        **render.checkpoint_json(one.target),
        "outcome": one.outcome.value,
        "source": str(one.source.path),
        "source_bytes": one.source.size_bytes,
        "raw_bytes": one.raw_bytes,
        "elapsed_s": one.elapsed_s,
        "by_dtype": {name: _figures_json(figures) for name, figures in one.by_dtype.items()},
    }


def _figures_json(figures: FrameFigures) -> dict[str, Json]:
    return {
        "raw_bytes": figures.raw_bytes,
        "stored_bytes": figures.stored_bytes,
        "ratio": figures.ratio,
        "bytes_per_s_per_core": figures.gigabytes_per_s * 1e9,
    }
