# SPDX-License-Identifier: Apache-2.0
"""Files that hold a secret or a trust anchor: keys, passphrases, PINs, public keys, wrapped keys.

A user with write access to such a file chooses the trust, so one rule holds for all of them: a
regular file that belongs to the current user or to root, and that neither its group nor others can
write. A file of a secret must also be unreadable to others; where its reader cannot change that, as
for the secrets of Kubernetes and Docker (root's, or on a read-only mount), a warning is logged.

The rule is checked on the open descriptor that is then read, so swapping the file in between is
useless. A symbolic link is followed to its file. Directories are not checked.
"""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Callable
from pathlib import Path

from ..errors import KeySourceError
from ..secret_bytes import SecretBytes
from .source_names import looks_like_key

MAX_SOURCE_BYTES = 4096
_LOG = logging.getLogger("ckptmgr.crypto.keys")

_ROOT = 0
_WRITABLE = stat.S_IWGRP | stat.S_IWOTH
_USABLE = stat.S_IRWXG | stat.S_IRWXO
# O_NONBLOCK: opening a FIFO without a writer must not block; a regular file ignores the flag.
_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY


def read_trusted_file(
    name: str | os.PathLike[str],
    *,
    kind: str = "key file",
    is_public: Callable[[bytes], bool] = lambda _: False,
    way_out: str = "use fd: or cmd:",
) -> SecretBytes:
    """Return the content of a file, at most one byte more than `MAX_SOURCE_BYTES`.

    `kind` is the name of such a file in messages, `way_out` the hint for a pipe. `is_public`
    decides by the content whether others may read the file.

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
        user = os.geteuid()
        refusal = refusal_of(status, user=user, is_public=is_shown)
        is_read_only = bool(os.fstatvfs(descriptor).f_flag & os.ST_RDONLY)
        if refusal is not None and is_given(status, user=user, is_read_only=is_read_only):
            _LOG.warning("the %s %s %s", kind, shown, refusal)
            return content
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
    """Return why `user` must not trust a file, or None; others may read a public one.

    Source: the rule of OpenSSH for private keys (`sshkey_perm_ok`), owner included.
    """
    if status.st_uid not in (user, _ROOT):
        return f"belongs to another user (uid {status.st_uid})"
    mode = stat.S_IMODE(status.st_mode)
    if mode & (_WRITABLE if is_public else _USABLE):
        return f"can be {'changed' if is_public else 'used'} by others (mode {mode:04o})"
    return None


def is_given(status: os.stat_result, *, user: int, is_read_only: bool) -> bool:
    """Return whether `user` can neither write a trusted file nor make it unreadable to others.

    It is root's and `user` is another one, or its mount is read-only.
    """
    mode = stat.S_IMODE(status.st_mode)
    if status.st_uid not in (user, _ROOT) or mode & _WRITABLE:
        return False
    return is_read_only or (status.st_uid == _ROOT and user != _ROOT)


def shown_name(name: str) -> str:
    """Return a name for a message, unless it looks like a key."""
    return "(not shown: it looks like a key)" if looks_like_key(name) else repr(name)


def read_all(descriptor: int) -> SecretBytes:
    """Read a descriptor to its end, at most one byte more than `MAX_SOURCE_BYTES`."""
    content = b""
    while len(content) <= MAX_SOURCE_BYTES:
        part = os.read(descriptor, MAX_SOURCE_BYTES + 1 - len(content))
        if not part:
            break
        content += part
    return SecretBytes(content)
