# SPDX-License-Identifier: Apache-2.0
"""`ckptmgr transform`, `ckptmgr unify` and `ckptmgr merge`: checkpoints sharded over ranks."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ckptmgr.cli import key_options, options, render
from ckptmgr.cli.exits import Exit, UsageProblem, note
from ckptmgr.cli.foreign import tool_named
from ckptmgr.cli.options import Command
from ckptmgr.core.sizes import size_text
from ckptmgr.formats.strict_json import Json

if TYPE_CHECKING:
    from ckptmgr.parallel.mindspore.outputs import WrittenFiles

_PATH = options.PATH


def _source_and_target(function: Command) -> Command:
    function = click.option(
        "-o",
        "--output",
        "target",
        metavar="OUT",
        type=_PATH,
        callback=options.checked_output,
        required=True,
        help="Where to.",
    )(function)
    return click.argument("source", metavar="DIR", type=_PATH)(function)


def _from_option(function: Command) -> Command:
    return click.option(
        "--from",
        "source_strategy",
        metavar="STRATEGY",
        type=_PATH,
        help="Strategy file of the source; without it, rank_0 holds whole tensors.",
    )(function)


def _checked_step(_: click.Context, __: click.Parameter, value: str | None) -> str | None:
    from ckptmgr.parallel.mindspore.rank_steps import checked_step

    try:
        return checked_step(value)
    except ValueError:
        raise UsageProblem(
            "--step takes a step, or epoch and step in the epoch", hint="write 20, or 3_40"
        ) from None


def _step_option(function: Command) -> Command:
    return click.option(
        "--step",
        metavar="STEP",
        callback=_checked_step,
        help="The training step to take, such as 20, or 3_40 for step 40 of epoch 3; ranks without it are left out.  "
        "[default: the newest that all ranks have]",
    )(function)


@options.command(
    "transform",
    examples=(
        "transform runs/dp2_mp2 -o runs/dp2_mp4 --from dp2_mp2.ckpt --to dp2_mp4.ckpt",
        "transform runs/tp8 -o whole --from tp8.ckpt --format safetensors",
    ),
)
@_source_and_target
@_from_option
@click.option(
    "--to",
    "target_strategy",
    metavar="STRATEGY",
    type=_PATH,
    help="Strategy file of the output; without it, whole tensors in rank_0.",
)
@click.option("--prefix", default="net", show_default=True, help="Start of the file names.")
@click.option(
    "--format",
    "output_format",
    type=click.Choice(["ckpt", "safetensors"]),
    default="ckpt",
    show_default=True,
    help="Format of the output.",
)
@click.option(
    "--plain", is_flag=True, help="With a key: write plain files instead of encrypted ones."
)
@_step_option
@key_options.trust_options(has_public_key=True)
@options.output_options
@click.pass_context
def transform_command(
    ctx: click.Context,
    source: Path,
    target: Path,
    source_strategy: Path | None,
    target_strategy: Path | None,
    prefix: str,
    output_format: str,
    plain: bool,
    step: str | None,
    given_trust: key_options.GivenTrust,
) -> int:
    """Rewrite the checkpoints of all ranks for another parallel strategy.

    DIR holds rank_0, rank_1, ... with their files; OUT gets rank_R/PREFIXR. All files are of one
    training step: the newest that all ranks have, unless --step names another one. A slice is taken
    from any rank that has it, so deduplicated checkpoints need nothing special. Content that no
    file has is an error before anything is written. With a key, the output is encrypted with it.
    Strategy files are used as they are: no key proves them.
    """
    from ckptmgr.files.load.options import ReadOptions
    from ckptmgr.files.save.job import SaveOptions
    from ckptmgr.parallel.mindspore.transform import rewrite

    if "/" in prefix:
        raise UsageProblem("--prefix starts a file name", hint="name the directory with -o")
    # Input that is not authenticated need not open with the key that the output is encrypted with.
    is_new = (given_trust.allow_unsealed or given_trust.allow_unencrypted) and not plain
    trust = given_trust.load(is_new=is_new)
    started = time.perf_counter()
    with tool_named(source):
        files = rewrite(
            source,
            target,
            prefix=prefix,
            strategies=(source_strategy, target_strategy),
            reading=ReadOptions(trust=trust),
            options=SaveOptions(format=output_format, key=None if plain else trust.keys),
            step=step,
        )
    return _report(ctx, target, files, started)


@options.command(
    "unify",
    examples=("unify runs/dp2_mp2 -o unified --from dp2_mp2.ckpt",),
)
@_source_and_target
@_from_option
@click.option(
    "--plain", is_flag=True, help="Agree to plain files although the source is encrypted."
)
@_step_option
@key_options.trust_options(has_public_key=True)
@options.output_options
@click.pass_context
def unify_command(
    ctx: click.Context,
    source: Path,
    target: Path,
    source_strategy: Path | None,
    plain: bool,
    step: str | None,
    given_trust: key_options.GivenTrust,
) -> int:
    """Join the checkpoints of all ranks into whole tensors.

    All files are of one training step: the newest that all ranks have, unless --step names another
    one. OUT gets part0.safetensors and so on, hyper_param.safetensors and param_name_map.json, as
    MindSpore's unified_safetensors writes them. They are always plain.
    """
    from ckptmgr.files.load.options import ReadOptions
    from ckptmgr.parallel.mindspore.unified import unify

    trust = given_trust.load()
    if trust.keys is not None and not plain:
        raise UsageProblem(
            "unified files are plain, but a key was given",
            hint="add --plain if plain files are wanted, or use ckptmgr transform, which encrypts",
        )
    started = time.perf_counter()
    reading = ReadOptions(trust=trust)
    with tool_named(source):
        files = unify(source, target, strategy=source_strategy, reading=reading, step=step)
    return _report(ctx, target, files, started)


@options.command("merge", examples=("merge strategies/ -o strategy.ckpt",))
@_source_and_target
@options.output_options
@click.pass_context
def merge_command(ctx: click.Context, source: Path, target: Path) -> int:
    """Join the strategy files of all pipeline stages.

    DIR holds .ckpt or .json strategy files; several of one stage must say the same.
    """
    from ckptmgr.parallel.mindspore.outputs import WrittenFiles
    from ckptmgr.parallel.mindspore.strategy_files import merge_pipeline_strategys

    started = time.perf_counter()
    with tool_named(source):
        merge_pipeline_strategys(source, target)
    return _report(ctx, target.parent, WrittenFiles([target]), started)


def _report(
    ctx: click.Context,
    root: Path,
    files: WrittenFiles,
    started: float,
) -> int:
    output = render.make_output(ctx, options.absolute(root))
    elapsed_s = time.perf_counter() - started
    sizes = [file.stat().st_size for file in files]
    for text in () if output.is_json else files.notes:
        note(text)
    if output.is_quiet:
        output.paths(list(files))
    elif output.is_text:
        for file, size in zip(files, sizes, strict=True):
            output.line(f"{file}  {size_text(size)}")
        step = "" if files.step is None else f"step {files.step}, "
        written = f"{render.counted(len(files), 'file')}, {size_text(sum(sizes))}"
        output.line(f"{step}{written}, {elapsed_s:.1f} s")
    if output.has_fields:
        items: list[dict[str, Json]] = [
            {"path": str(options.absolute(file)), "size_bytes": size}
            for file, size in zip(files, sizes, strict=True)
        ]
        summary: dict[str, Json] = {
            "step": files.step,
            "notes": list(files.notes),
            "size_bytes": sum(sizes),
            "elapsed_s": elapsed_s,
        }
        output.result(items, summary)
    return Exit.DONE
