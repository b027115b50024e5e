# SPDX-License-Identifier: Apache-2.0
"""The files that a secret or a trust anchor comes from: keys, passphrases, PINs, public keys, wrapped keys.

Who can change such a file chooses what is trusted, so one rule holds for all of them: a regular file that belongs to the
user who runs this or to root, and that neither its group nor others can write. A file of a secret is also closed to readers.

The rule judges the open descriptor that is then read, so another user gains nothing by swapping the file in between. A
symbolic link counts for nothing itself: the file that it leads to is judged. Directories are not judged.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

from ..errors import KeySourceError
from ..secret_bytes import SecretBytes
from .source_names import looks_like_key

MAX_SOURCE_BYTES = 4096

_ROOT = 0
_WRITABLE = stat.S_IWGRP | stat.S_IWOTH
_USABLE = stat.S_IRWXG | stat.S_IRWXO
# O_NONBLOCK: opening a FIFO that has no writer must not wait for one; it means nothing for a regular file.
_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY


def read_trusted_file(
    name: str | os.PathLike[str],
    *,
    kind: str = "key file",
    is_public: Callable[[bytes], bool] = lambda _: False,
    way_out: str = "use fd: or cmd:",
) -> SecretBytes:
    """Return what a file holds, at most one byte more than `MAX_SOURCE_BYTES`.

    Args:
        name: The file; `~` is the home directory.
        kind: What to call it in messages.
        is_public: Tells of the content whether others may read the file.
        way_out: What to use in place of a pipe.

    Raises:
        KeySourceError: It cannot be opened, is not a regular file, or others can change or read it.
    """
    shown = shown_name(os.fspath(name))
    try:
        descriptor = os.open(Path(name).expanduser(), _FLAGS)
    except (OSError, ValueError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a usable path"
        raise KeySourceError(f"the {kind} {shown} cannot be opened: {reason}") from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise KeySourceError(f"the {kind} {shown} is not a regular file", hint=way_out)
        content = read_all(descriptor)
        is_shown = is_public(content)
        refusal = refusal_of(status, user=os.geteuid(), is_public=is_shown)
        if refusal is not None:
            mode = "go-w" if is_shown else "600"
            raise KeySourceError(
                f"the {kind} {shown} {refusal}",
                hint="look at what it holds; if it is right, make it yours:"
                f" chown to the user who runs this (or root), chmod {mode}",
            )
        return content
    finally:
        os.close(descriptor)


def refusal_of(status: os.stat_result, *, user: int, is_public: bool = False) -> str | None:
    """Return why `user` must not trust a file of this status, or None; others may read one that is public.

    Source: the rule of OpenSSH for private keys (`sshkey_perm_ok`), owner included.
    """
    if status.st_uid not in (user, _ROOT):
        return f"belongs to another user (uid {status.st_uid})"
    mode = stat.S_IMODE(status.st_mode)
    if mode & (_WRITABLE if is_public else _USABLE):
        return f"can be {'changed' if is_public else 'used'} by others (mode {mode:04o})"
    return None


def shown_name(name: str) -> str:
    """Return a name for a message, unless the user put the key itself there."""
    return "(not shown: it looks like a key)" if looks_like_key(name) else repr(name)


def read_all(descriptor: int) -> SecretBytes:
    """Return what a descriptor gives, at most one byte more than `MAX_SOURCE_BYTES`."""
    content = b""
    while len(content) <= MAX_SOURCE_BYTES:
        part = os.read(descriptor, MAX_SOURCE_BYTES + 1 - len(content))
        if not part:
            break
        content += part
    return SecretBytes(content)
