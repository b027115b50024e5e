# SPDX-License-Identifier: Apache-2.0
"""`ckptmgr decrypt` and `ckptmgr encrypt`."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ckptmgr.cli import key_options, options, render
from ckptmgr.cli.exits import Exit, UsageProblem
from ckptmgr.cli.options import Command
from ckptmgr.core.errors import CheckpointFileNotFound, KeyProblem, UnsafeWrite
from ckptmgr.core.names import CONTAINER_SUFFIX
from ckptmgr.core.sizes import size_text
from ckptmgr.formats.strict_json import Json

if TYPE_CHECKING:
    from ckptmgr.crypto.keys.ring import Keys
    from ckptmgr.maintenance.convert_target import ConversionResult

_PIPE = "-"


def _target_options(function: Command) -> Command:
    function = click.option("--force", is_flag=True, help="Replace an existing OUT.")(function)
    function = click.option(
        "-o",
        "--output",
        "target",
        metavar="OUT",
        callback=options.checked_path,
        required=True,
        help="A file, an existing directory, or - for a pipe.",
    )(function)
    return click.argument("source", metavar="IN", type=options.PATH)(function)


def _refuse_part(_: click.Context, __: click.Parameter, part: str | None) -> None:
    if part is not None:
        raise UsageProblem(
            "decrypt writes the whole file; --only goes with export",
            hint="ckptmgr export IN -o OUT --to ckpt --only PART writes a part",
        )


@options.command(
    "decrypt",
    examples=(
        "decrypt net-3_40.ckpt -o plain/ --key file:run.key",
        "decrypt net-3_40.ckpt -o - --key env:RUN_KEY | sha256sum",
        "decrypt tokenizer.json.ckpe -o tokenizer.json --key file:run.key",
    ),
)
@_target_options
@click.option("--only", hidden=True, expose_value=False, callback=_refuse_part)
@key_options.trust_options(has_public_key=True)
@options.output_options
@click.pass_context
def decrypt_command(
    ctx: click.Context,
    source: Path,
    target: str,
    force: bool,
    given_trust: key_options.GivenTrust,
) -> int:
    """Write the plaintext of an encrypted file.

    The plaintext is the ordinary file, with the bytes that were sealed. Only checked bytes come
    out. The file is written completely or not at all, readable by its owner only; a checkpoint gets
    a manifest.
    """
    from ckptmgr.files.load.options import ReadOptions
    from ckptmgr.maintenance import convert
    from ckptmgr.maintenance.convert_source import open_plaintext

    _check_input(source)
    # Without a key the file says whether it needs one.
    reading = ReadOptions(trust=given_trust.load())
    if target == _PIPE:
        _check_pipe(ctx)
        with open_plaintext(source, reading) as (content, _):
            return _write(content.chunks())
    session = ctx.ensure_object(options.Session)
    return _convert(
        ctx,
        source,
        lambda out: convert.decrypt_file(
            source, out, options=reading, force=force, clock=session.clock
        ),
        _target(target, name=source.name.removesuffix(CONTAINER_SUFFIX)),
    )


@options.command(
    "encrypt",
    examples=(
        "encrypt net-3_40.ckpt -o sealed/ --key file:run.key",
        "encrypt net-3_40.ckpt -o net.ckpt --mode SM4-CBC --key env:RUN_KEY",
        "encrypt net.safetensors -o net.safetensors.ckpe --key file:run.key",
        "encrypt net.ckpt -o net.ckpt.ckpe --key file:alice.pem.pub",
        "encrypt tokenizer.json -o sealed/ --key file:run.key",
    ),
)
@_target_options
@click.option(
    "--mode",
    type=click.Choice(["AES-GCM", "AES-CBC", "SM4-CBC", "SM4-GCM"]),
    default="AES-GCM",
    show_default=True,
    help="Cipher mode; SM4-GCM only for containers.",
)
@key_options.key_option
@options.output_options
@click.pass_context
def encrypt_command(
    ctx: click.Context,
    source: Path,
    target: str,
    force: bool,
    mode: str,
    key_sources: tuple[str, ...],
) -> int:
    """Encrypt and seal a plain checkpoint, or any other file.

    The result is authenticated as a whole, and opens with every --key that is given. A .ckpt still
    loads in MindSpore, which takes one key; under a name that ends in .ckpe, and for passphrases,
    public keys and several keys, it goes into a container. So does a safetensors file, expanded if
    it was compressed (convert does that again), and any other file, such as a tokenizer: decrypt
    gives it back. Damaged checkpoints are refused, never sealed. The input stays; remove it
    yourself.
    """
    from ckptmgr.maintenance import convert

    _check_input(source)
    key = _key(key_sources, is_new=True)
    if target == _PIPE:
        _check_pipe(ctx)
        return _write(convert.encrypted_chunks(source, key=key, mode=mode))
    session = ctx.ensure_object(options.Session)
    return _convert(
        ctx,
        source,
        lambda out: convert.encrypt_file(
            source, out, key=key, mode=mode, force=force, clock=session.clock
        ),
        _target(target, name=convert.encrypted_name(source.name, key=key, mode=mode)),
    )


def _key(sources: Sequence[str], *, is_new: bool = False) -> Keys:
    key = key_options.keys_of_command(sources, is_new=is_new)
    if key is None:
        raise KeyProblem("a key is needed", hint="pass --key env:NAME, file:PATH or cmd:COMMAND")
    return key


def _check_input(source: Path) -> None:
    from ckptmgr.cli.foreign import why_not_here

    absence = why_not_here(source)
    if absence is not None:
        raise absence
    if source.is_dir():
        raise CheckpointFileNotFound(
            "is a directory", path=source, hint="name a file; xargs -n 1 takes one after the other"
        )
    if not source.is_file():
        raise CheckpointFileNotFound("no such file", path=source)


def _target(target: str, *, name: str) -> Path:
    path = Path(target)
    return path / name if path.is_dir() else path


def _check_pipe(ctx: click.Context) -> None:
    for name, option in (("json", "--json"), ("verbose", "-v")):
        if f"ckptmgr.{name}" in ctx.meta:
            raise UsageProblem(
                f"{option} has no effect with -o -: stdout is the file", hint=f"drop {option}"
            )
    if sys.stdout.isatty():
        raise UnsafeWrite(
            "stdout is a terminal, which is no place for binary data",
            hint="redirect it, or name a file with -o",
        )


def _write(chunks: Iterable[memoryview]) -> int:
    stdout = sys.stdout.buffer
    for chunk in chunks:
        stdout.write(chunk)
    stdout.flush()
    return Exit.DONE


def _convert(
    ctx: click.Context,
    source: Path,
    convert: Callable[[Path], ConversionResult],
    target: Path,
) -> int:
    output = render.make_output(ctx, options.absolute(target).parent)
    started = time.perf_counter()
    with output.progress(source.name, source.stat().st_size if source.is_file() else 0):
        done = convert(target)
    elapsed_s = time.perf_counter() - started
    if output.is_quiet:
        output.paths([done.target.path])
    elif output.is_text:
        arrow = "→" if output.has_unicode else "->"
        sizes = f"{size_text(done.source_bytes)} {arrow} {size_text(done.target.size_bytes)}"
        output.line(f"{done.source} {arrow} {target}  {sizes}, {elapsed_s:.1f} s")
    if output.has_fields:
        summary: dict[str, Json] = {
            "source": str(options.absolute(done.source)),
            "source_bytes": done.source_bytes,
            "elapsed_s": elapsed_s,
        }
        output.result([render.checkpoint_json(done.target)], summary)
    return Exit.DONE
