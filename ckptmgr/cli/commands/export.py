# SPDX-License-Identifier: Apache-2.0
"""`ckptmgr export`: the weights in a checkpoint, for other programs."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ckptmgr.cli import key_options, options, render
from ckptmgr.cli.exits import Exit, UsageProblem, note
from ckptmgr.cli.render import Output
from ckptmgr.cli.sizes import parse_size
from ckptmgr.core.names import FORMATS, stem_of
from ckptmgr.core.sizes import size_text
from ckptmgr.formats.strict_json import Json

if TYPE_CHECKING:
    from ckptmgr.cli.selectors import Selected
    from ckptmgr.maintenance.export import ExportedWeights

_SHOWN = 5


def _checked_format(_: click.Context, __: click.Parameter, format: str | None) -> str | None:
    """Return a format; an error does not repeat the input, as --to of reencrypt takes keys."""
    if format is not None and format not in FORMATS:
        raise UsageProblem("--to is no format", hint=f"write {' or '.join(FORMATS)}")
    return format


@options.command(
    "export",
    examples=(
        "export latest --dir runs/a -o model --hf --only net",
        "export net-40.safetensors.ckpe -o model --hf --only net --key file:run.key",
        "export net-40.ckpt -o model --hf --max-shard-size 2GB",
        "export net-40.ckpt -o net-40.safetensors --to safetensors",
        "export 40 --dir runs/a -o net.ckpt --to ckpt --only net",
    ),
)
@click.argument("checkpoint", metavar="SEL")
@click.option(
    "-o",
    "--output",
    "target",
    metavar="OUT",
    callback=options.checked_path,
    required=True,
    help="The new directory; with --to the new file, or an existing directory for it.",
)
@click.option(
    "--hf",
    "is_for_hub",
    is_flag=True,
    help="The layout of the Hugging Face Hub: model.safetensors, or shards and their index.",
)
@click.option(
    "--to",
    "format",
    metavar="|".join(FORMATS),
    callback=_checked_format,
    help="One plain file of this format, under the same names.",
)
@click.option(
    "--only",
    "prefix",
    metavar="PREFIX",
    help="Only tensors below this name, such as net, which their names then lose.",
)
@click.option(
    "--max-shard-size",
    "max_shard_size",
    metavar="SIZE",
    help="With --hf: most of a file, e.g. 500MB or 5GiB (default: 5GB); a larger tensor has its own.",
)
@click.option(
    "--force",
    is_flag=True,
    help="Replace a file, or a directory that holds an earlier export only.",
)
@options.dir_option
@options.series_option
@key_options.trust_options(has_public_key=True)
@options.output_options
@click.pass_context
def export_command(
    ctx: click.Context,
    checkpoint: str,
    target: str,
    is_for_hub: bool,
    format: str | None,
    prefix: str | None,
    max_shard_size: str | None,
    force: bool,
    directory: Path,
    series: str | None,
    given_trust: key_options.GivenTrust,
) -> int:
    """Write the weights in a checkpoint as plain files for other libraries.

    SEL is a path, a step, latest, best:METRIC:min, best:METRIC:max, @pinned or id:DIGITS. With --hf, OUT then
    is what huggingface_hub uploads and from_pretrained loads, beside the config.json of the model:
    tied weights are written once, and noted. With --to, OUT is a file with all values, from which
    the state can be loaded again, or with the part that --only takes; it gets a manifest. Only
    checked bytes come out, decrypted as they are read; OUT appears whole or not at all, readable by
    its owner only. -q prints the paths of the files.
    """
    from ckptmgr.cli.selectors import select_one
    from ckptmgr.core.error_translation import unproven_error
    from ckptmgr.files.load.options import ReadOptions
    from ckptmgr.maintenance.export import export_file, export_to

    if is_for_hub == (format is not None):
        raise UsageProblem(
            "export takes --hf or --to", hint="--hf for the Hub, --to ckpt or --to safetensors"
        )
    if format is not None and max_shard_size is not None:
        raise UsageProblem("--max-shard-size goes with --hf", hint="--to writes one file")
    max_shard_bytes = _size(max_shard_size or "5GB")
    if prefix == "":
        raise UsageProblem("--only is empty", hint="leave it out to export all tensors")
    trust = given_trust.load()
    selected = select_one(
        checkpoint, directory, partial(options.open_store, trust=trust), series=series
    )
    if selected.checkpoint.is_unproven and not Path(checkpoint).exists():
        # A path names the file itself; a step would be no more than its name.
        raise unproven_error(selected.checkpoint.path, trust)
    out, reading = Path(target), ReadOptions(trust=trust)
    source = selected.checkpoint.path
    if format is not None and out.is_dir():
        out /= f"{stem_of(source.name)}.{format}"
    output = render.make_output(ctx, options.absolute(out))
    started = time.perf_counter()
    with output.progress(selected.checkpoint.name, selected.checkpoint.size_bytes):
        if format is None:
            done = export_to(
                source,
                out,
                only=prefix,
                max_shard_bytes=max_shard_bytes,
                options=reading,
                force=force,
            )
        else:
            session = ctx.ensure_object(options.Session)
            done = export_file(
                source,
                out,
                format=format,
                only=prefix,
                options=reading,
                force=force,
                clock=session.clock,
            )
    _show(output, selected, done, elapsed_s=time.perf_counter() - started)
    return Exit.DONE


def _size(text: str) -> int:
    size = parse_size(text, option="--max-shard-size")
    if size < 1:
        raise UsageProblem("--max-shard-size is less than one byte", hint="write 500MB, 1GiB or 2g")
    return size


def _show(output: Output, selected: Selected, done: ExportedWeights, *, elapsed_s: float) -> None:
    _note_names(done)
    sizes = [path.stat().st_size for path in done.files]
    if output.is_quiet:
        output.paths(done.files)
    elif output.is_text:
        arrow = "→" if output.has_unicode else "->"
        ties = f" ({len(done.ties)} tied)" if done.ties else ""
        target = done.files[0] if done.is_one_file else done.directory
        output.line(
            f"{selected.checkpoint.path} {arrow} {target}  {render.counted(done.tensor_count, 'tensor')}{ties}, "
            f"{render.counted(len(done.files), 'file')}, {size_text(sum(sizes))}, {elapsed_s:.1f} s"
        )
    if output.has_fields:
        summary: dict[str, Json] = {
            **render.checkpoint_json(selected.checkpoint),
            "directory": str(options.absolute(done.directory)),
            "tensors": done.tensor_count,
            "tensor_bytes": done.tensor_bytes,
            "ties": done.ties,
            "left_out": list(done.left_out),
            "is_verified": done.is_verified,
            "elapsed_s": elapsed_s,
        }
        items: list[dict[str, Json]] = [
            {"path": str(options.absolute(path)), "size_bytes": size}
            for path, size in zip(done.files, sizes, strict=True)
        ]
        output.result(items, summary)


def _note_names(done: ExportedWeights) -> None:
    if done.parts:
        shown = ", ".join(done.parts[:_SHOWN]) + (", ..." if len(done.parts) > _SHOWN else "")
        note(f"names keep the parts of the state ({shown}); --only PART takes one, without it")
    if done.left_out:
        note(f"left out: {render.counted(len(done.left_out), 'text')}, which are no weights")
    if not done.is_verified:
        note("not verified: the file is plain, and has neither a manifest nor a CRC32")
