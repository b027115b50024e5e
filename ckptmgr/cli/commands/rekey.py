# SPDX-License-Identifier: Apache-2.0
"""`ckptmgr rekey` and `ckptmgr reencrypt`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Unpack

import click

from ckptmgr.cli import options
from ckptmgr.cli.exits import note
from ckptmgr.cli.key_changes import ChangeOptions, KeyChanges, plan_options
from ckptmgr.core.errors import KeyProblem

if TYPE_CHECKING:
    from ckptmgr.crypto.keys.ring import KeyRing

_KEY_ID = re.compile(r"[0-9a-f]{16}")


@options.command(
    "rekey",
    examples=(
        "rekey runs/resnet50 --key file:old.key --add file:new.key --remove file:old.key",
        "rekey runs/resnet50 --key file:run.key --add file:alice.pem.pub --add passphrase:prompt:",
        "rekey latest --key file:run.key --remove 0011223344556677",
    ),
)
@plan_options
@click.option(
    "--add",
    metavar="SOURCE",
    multiple=True,
    help="Who opens it from now on: a key, passphrase:SOURCE, or a file of a public key. May be repeated.",
)
@click.option(
    "--remove",
    metavar="KEYID|SOURCE",
    multiple=True,
    help="Who opens it no longer, by the id of a key or by source. May be repeated.",
)
@options.output_options
@click.pass_context
def rekey_command(
    ctx: click.Context,
    add: tuple[str, ...],
    remove: tuple[str, ...],
    **given: Unpack[ChangeOptions],
) -> int:
    """Change the keys that open checkpoints, without touching their data.

    Of containers (.ckpe) a few KiB are rewritten; an encrypted .ckpt, which has one key, is
    re-encrypted as a stream. Nothing is touched unless --key opens all of them. Doing the same
    again finishes an interrupted run; meanwhile each checkpoint opens with the old or the new key.
    A key to remove that opens none of them is named. Without --add and --remove, damaged header
    copies are mended. A reader with a removed key may have kept data keys of files: reencrypt makes
    new ones.
    """
    from ckptmgr.maintenance.rekey import plan_rekeying, rekey_checkpoint
    from ckptmgr.maintenance.rekey_change import KeyChange

    by_id = tuple(text for text in remove if _KEY_ID.fullmatch(text))
    change = KeyChange(
        keys=_old_keys(given["given_trust"].key_sources),
        add=_rings("--add", add, is_new=True),
        remove=_rings("--remove", [text for text in remove if text not in by_id]),
        remove_ids=by_id,
    )
    changes = KeyChanges(ctx, change, given)
    code = changes.run(plan_rekeying, rekey_checkpoint)
    if remove and changes.has_changed:
        note(
            "a reader with a removed key may have kept a data key; ckptmgr reencrypt makes new ones"
        )
    return code


@options.command(
    "reencrypt",
    examples=(
        "reencrypt runs/resnet50 --key file:old.key --to file:new.key",
        "reencrypt latest --key file:old.key --to file:alice.pem.pub --to passphrase:prompt:",
    ),
)
@plan_options
@click.option(
    "--to",
    metavar="SOURCE",
    multiple=True,
    required=True,
    help="Who opens it then, and nobody else: as --add of rekey. May be repeated.",
)
@options.output_options
@click.pass_context
def reencrypt_command(
    ctx: click.Context, to: tuple[str, ...], **given: Unpack[ChangeOptions]
) -> int:
    """Encrypt checkpoints again, under new data keys.

    Each file is written once more, as a stream, without plaintext on the disk, and
    replaces the old one like a save; those of many ranks all at once. Old copies elsewhere still
    open with the old keys. Nothing is touched unless --key opens all of them, but for those that
    were encrypted for --to alone and never rekeyed: they are done.
    """
    from ckptmgr.maintenance.rekey import plan_reencryption, reencrypt_checkpoint
    from ckptmgr.maintenance.rekey_change import KeyChange

    change = KeyChange(
        keys=_old_keys(given["given_trust"].key_sources),
        add=_rings("--to", to, is_new=True),
        is_exclusive=True,
    )
    return KeyChanges(ctx, change, given).run(plan_reencryption, reencrypt_checkpoint)


def _old_keys(sources: Sequence[str]) -> KeyRing:
    from ckptmgr.crypto.keys.ring import ring_of

    keys = options.keys_of_command(sources)
    if keys is None:
        raise KeyProblem("a key is needed", hint="pass --key env:NAME, file:PATH or cmd:COMMAND")
    ring = ring_of(keys)
    if not ring.can_open:
        raise KeyProblem(
            "--key names a public key, which opens nothing", hint="give the private key"
        )
    return ring


def _rings(option: str, sources: Sequence[str], *, is_new: bool = False) -> tuple[KeyRing, ...]:
    from ckptmgr.crypto.keys.ring import ring_of

    return tuple(
        ring_of(options.keys_of_option(option, [source], is_new=is_new)) for source in sources
    )
