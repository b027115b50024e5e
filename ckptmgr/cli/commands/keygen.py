# SPDX-License-Identifier: Apache-2.0
"""`ckptmgr keygen`."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ckptmgr.cli import options, render
from ckptmgr.cli.exits import Exit, UsageProblem, note
from ckptmgr.core.errors import CheckpointNotFound, KeyProblem, UnsafeWrite
from ckptmgr.formats.strict_json import Json

if TYPE_CHECKING:
    from ckptmgr.crypto.keys.key import Key
    from ckptmgr.crypto.keys.signing import KeyPair

_PIPE = "-"
_PRIVATE, _PUBLIC = 0o600, 0o644
_USES = {
    "ed25519": ("CheckpointConfig(signing_key='file:{}')", "ckptmgr verify --public-key {}"),
    "x25519": ("opening: --key file:{}", "CheckpointConfig(enc_recipients=['file:{}'])"),
    "mlkem768-x25519": ("opening: --key file:{}", "CheckpointConfig(enc_recipients=['file:{}'])"),
    "p256": ("ckptmgr sign --private-key file:{}", "model_signing verify key --public_key {}"),
}
_KINDS = ("secret", *_USES)


@options.command(
    "keygen",
    examples=(
        "keygen --out run.key",
        "keygen --bytes 16 --out sm4.key",
        "keygen --service aws-kms:alias/training --context run=7f --out run.wrapped",
        "keygen --out - | secret-tool store --label run key run",
        "keygen --type ed25519 --out sign.pem",
        "keygen --type x25519 --out alice.pem",
    ),
)
@click.option(
    "-o",
    "--out",
    "target",
    metavar="FILE",
    callback=options.checked_output,
    default="run.key",
    show_default=True,
    help="Where the key goes; - for stdout.",
)
@click.option(
    "--type",
    "kind",
    type=click.Choice(_KINDS),
    default="secret",
    show_default=True,
    help="secret: encrypts. x25519, mlkem768-x25519: a pair for encrypting. ed25519: signs checkpoints; p256: signs "
    "bundles. The public key of a pair goes to FILE.pub.",
)
@click.option(
    "--bytes",
    "size",
    type=click.Choice(["16", "24", "32"]),
    default="32",
    show_default=True,
    help="Length; SM4 takes 16.",
)
@click.option(
    "--service",
    metavar="ADDRESS",
    help="Have the key wrapped by a key service; FILE is then no secret and read as wrapped:FILE.",
)
@click.option(
    "--context",
    "words",
    metavar="NAME=VALUE",
    multiple=True,
    help="With --service: bind the key to this; may be repeated.",
)
@options.output_options
@click.pass_context
def keygen_command(
    ctx: click.Context,
    target: str,
    kind: str,
    size: str,
    service: str | None,
    words: tuple[str, ...],
) -> int:
    """Make a key.

    The file is readable by its owner only and never replaces another one; use it as --key
    file:FILE. The output is the id of the key, which is not secret and stands in every manifest.
    Keep a copy of the file in another place: without the key, its checkpoints cannot be read.

    A key of type ed25519 signs checkpoints; its public key verifies them. With the public key of an
    x25519 pair, a machine encrypts checkpoints that only the private key opens; mlkem768-x25519
    also withstands quantum computers.
    """
    output = render.make_output(ctx, options.absolute(Path(target)).parent)
    if target == _PIPE and output.is_json:
        raise UsageProblem("--json never holds a key", hint="leave --json away, or name a file")
    if target == _PIPE and output.is_verbose:
        raise UsageProblem("-v has no effect with -o -: stdout is the key", hint="drop -v")
    if kind in _USES:
        if service is not None or words or target == _PIPE:
            raise UsageProblem(
                f"--type {kind} writes FILE and FILE.pub, and has neither service nor context",
                hint="name a file with --out",
            )
        return _make_pair(output, kind, Path(target))
    key, content = _make(int(size), service, words)
    if target == _PIPE:
        click.echo(content, nl=False)
        if not output.is_quiet:
            note(f"key {key.key_id}")
        return Exit.DONE
    path = Path(target)
    _write(path, content)
    if output.is_quiet:
        output.paths([path])
    elif output.is_text:
        output.line(f"{path}  key {key.key_id}, {len(key.raw)} bytes")
        note("keep a copy in another place: nothing it encrypts can be read without it")
    if output.has_fields:
        _print_json(output, path, key_id=key.key_id, size_bytes=len(key.raw))
    return Exit.DONE


def _make_pair(output: render.Output, kind: str, path: Path) -> int:
    """Write a private key and its public half, or neither."""
    from ckptmgr.io.filesystem import OsFileSystem, discard

    pair = _new_pair(kind)
    public_path = path.with_name(path.name + ".pub")
    _write(path, pair.private_pem)
    try:
        _write(public_path, pair.public_pem, mode=_PUBLIC)
    except BaseException:
        discard(OsFileSystem(), path)
        raise
    if output.is_quiet:
        output.paths([path, public_path])
    elif output.is_text:
        private_use, public_use = _USES[kind]
        output.line(f"{path}  private key {pair.key_id}, for {private_use.format(path)}")
        output.line(
            f"{public_path}  its public key, for everybody: {public_use.format(public_path)}"
        )
    if output.has_fields:
        _print_json(output, path, key_id=pair.key_id, public_path=public_path)
    return Exit.DONE


def _print_json(
    output: render.Output,
    path: Path,
    *,
    key_id: str,
    public_path: Path | None = None,
    size_bytes: int | None = None,
) -> None:
    files = [options.absolute(path)]
    files += [] if public_path is None else [options.absolute(public_path)]
    item: dict[str, Json] = {
        "path": str(files[0]),
        "public_path": None if public_path is None else str(files[1]),
        "key_id": key_id,
        "size_bytes": size_bytes,
    }
    output.result([item], {"files": len(files)})


def _new_pair(kind: str) -> KeyPair:
    from ckptmgr.crypto.errors import CryptoError
    from ckptmgr.crypto.keys import pem as key_files
    from ckptmgr.crypto.keys import signing
    from ckptmgr.crypto.keys.ring import KeyKind, KeyMaterial, KeyRing

    if kind not in key_files.KEY_TYPES:
        return signing.generate_signing_pair(kind)
    try:
        private, public = key_files.generate_pair(kind)
        key_id = KeyRing([KeyMaterial(KeyKind.PEM, public)]).key_id
    except CryptoError as error:
        raise KeyProblem(error.message, hint=error.hint) from error
    return signing.KeyPair(key_id=str(key_id), private_pem=private, public_pem=public)


def _make(size: int, service: str | None, words: tuple[str, ...]) -> tuple[Key, bytes]:
    """Return a new key and the content of its file."""
    from ckptmgr.crypto.errors import CryptoError
    from ckptmgr.crypto.keys.key import Key
    from ckptmgr.crypto.providers.registry import open_provider
    from ckptmgr.crypto.providers.run_key import RunKey
    from ckptmgr.crypto.providers.wrapped_file import pack_key_file

    if service is None:
        if words:
            raise UsageProblem("--context is for --service", hint="leave it away")
        key = Key(secrets.token_bytes(size))
        return key, f"{key.raw.hex()}\n".encode("ascii")
    context = dict(_word(text) for text in words)
    try:
        wrapped = RunKey(open_provider(service), context, size_bytes=size).take()
        return wrapped.key, pack_key_file(wrapped)
    except CryptoError as error:
        raise KeyProblem(error.message, hint=error.hint) from error


def _word(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise UsageProblem("--context takes NAME=VALUE", hint="such as --context run=7f")
    return name, value


def _write(path: Path, content: bytes, *, mode: int = _PRIVATE) -> None:
    """Write the content into a new file, durably, or leave nothing."""
    from ckptmgr.io.filesystem import OsFileSystem, discard
    from ckptmgr.io.permissions import is_for_others

    fs, place = OsFileSystem(), path.absolute()
    if not place.parent.is_dir():
        raise CheckpointNotFound("no such directory", path=place.parent)
    try:
        file = fs.create(place, mode=mode)
    except FileExistsError:
        raise UnsafeWrite(
            "exists, and a key that is lost takes all it encrypted with it",
            path=path,
            hint="choose another name",
        ) from None
    try:
        try:
            status = fs.status(place)
            if status is not None and is_for_others(status.mode & ~mode):
                raise UnsafeWrite(
                    f"others could read it: the file system gives its files {status.mode:#o}, and keeps no other"
                    " permission bits",
                    path=path,
                    hint="choose a directory on a disk of this machine",
                )
            file.write_at(0, content)
            file.sync()
        finally:
            file.close()
        fs.sync_directory(place.parent)
    except BaseException:
        discard(fs, place)
        raise
