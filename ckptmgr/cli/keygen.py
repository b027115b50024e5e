# SPDX-License-Identifier: Apache-2.0
"""`ckptmgr keygen`."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ckptmgr.cli import options, render
from ckptmgr.cli.exits import Exit, UsageProblem, note
from ckptmgr.errors import CheckpointNotFound, UnsafeWrite

if TYPE_CHECKING:
    from ckptmgr.crypto.key import Key

_PIPE = "-"
_PRIVATE = 0o600


@options.command(
    "keygen",
    examples=(
        "keygen --out run.key",
        "keygen --bytes 16 --out sm4.key",
        "keygen --out - | secret-tool store --label run key run",
    ),
)
@click.option(
    "-o",
    "--out",
    "target",
    metavar="FILE",
    default="run.key",
    show_default=True,
    help="Where the key goes; - for stdout.",
)
@click.option(
    "--bytes",
    "size",
    type=click.Choice(["16", "24", "32"]),
    default="32",
    show_default=True,
    help="Length; SM4 takes 16.",
)
@options.output_options
@click.pass_context
def keygen_command(ctx: click.Context, target: str, size: str, as_json: bool, quiet: bool) -> int:
    """Make a key.

    The file is readable by its owner only and never replaces another one; use it as --key file:FILE. What is shown is
    the id of the key, which is not secret and stands in every manifest. Keep a copy of the file in another place: without
    the key, nobody can read what it encrypted.
    """
    from ckptmgr.crypto.key import Key

    if target == _PIPE and as_json:
        raise UsageProblem("--json never holds a key", hint="leave --json away, or name a file")
    key = Key(secrets.token_bytes(int(size)))
    if target == _PIPE:
        click.echo(key.raw.hex())
        if not quiet:
            note(f"key {key.key_id}")
        return Exit.DONE
    path = Path(target)
    _write(path, key)
    output = render.make_output(ctx, path.parent, as_json=as_json, quiet=quiet)
    if output.is_json:
        item: dict[str, render.Json] = {
            "path": str(path),
            "key_id": key.key_id,
            "size_bytes": len(key.raw),
        }
        output.result([item], {})
    elif output.is_quiet:
        output.paths([path])
    else:
        output.line(f"{path}  key {key.key_id}, {len(key.raw)} bytes")
        note("keep a copy in another place: nothing it encrypts can be read without it")
    return Exit.DONE


def _write(path: Path, key: Key) -> None:
    """Write a key into a new file, durably, or leave nothing."""
    from ckptmgr.fsio import OsFileSystem, discard

    fs, place = OsFileSystem(), path.absolute()
    if not place.parent.is_dir():
        raise CheckpointNotFound("no such directory", path=place.parent)
    try:
        file = fs.create(place, mode=_PRIVATE)
    except FileExistsError:
        raise UnsafeWrite(
            "exists, and a key that is lost takes all it encrypted with it",
            path=path,
            hint="choose another name",
        ) from None
    try:
        try:
            file.write_at(0, f"{key.raw.hex()}\n".encode("ascii"))
            file.sync()
        finally:
            file.close()
        fs.sync_directory(place.parent)
    except BaseException:
        discard(fs, place)
        raise
