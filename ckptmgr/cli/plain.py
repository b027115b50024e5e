# SPDX-License-Identifier: Apache-2.0
"""Plain directories under a key of the environment: `ls`, `inspect` and `verify` show them as plain.

A key in the environment is there for all directories of a user, and says nothing about this one.
Where a command only shows, and nothing in a directory is encrypted or authenticated, it shows
that. Commands that decide something, and `--key`, stay strict.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

from ckptmgr.cli import key_options, options
from ckptmgr.cli.exits import note
from ckptmgr.core.model import UNFINISHED, Checkpoint, State
from ckptmgr.core.trust import Trust
from ckptmgr.formats.errors import FormatError
from ckptmgr.store.store import Store


def showing_opener(given: key_options.GivenTrust) -> Callable[[Path], Store]:
    """Return the function that opens a directory for a command that only shows."""
    trust = given.load()
    if given.key_sources or given.public_keys or trust.keys is None or not trust.is_strict:
        return lambda directory: options.open_store(directory, trust=trust)

    @cache
    def chosen(directory: Path) -> Trust:
        if not _is_plain(options.open_store(directory, trust=trust)):
            return trust
        note(
            f"{directory}: the key of the environment is not used: nothing here is encrypted or "
            "authenticated"
        )
        return replace(trust, keys=None)

    return lambda directory: options.open_store(directory, trust=chosen(directory))


def is_shown_as_plain(given: key_options.GivenTrust, store: Store) -> bool:
    """Return whether a key of the environment was left out for a store."""
    return not given.key_sources and store.trust.keys is None and given.has_environment_key()


def as_plain(checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint of a plain directory as it is shown; damage stays damage."""
    if checkpoint.state not in (State.OK, State.UNVERIFIED):
        return checkpoint
    return replace(checkpoint, state=State.PLAIN, problem=None)


def _is_plain(store: Store) -> bool:
    """Return whether a directory has checkpoints, and no key has to do with any of them."""
    found = [one for one in store.scan() if one.state not in UNFINISHED]
    return bool(found) and not any(_may_be_of_a_key(store, one) for one in found)


def _may_be_of_a_key(store: Store, one: Checkpoint) -> bool:
    from ckptmgr.crypto.detect import cipher_of

    if one.state in (State.CORRUPT, State.MISSING) and one.run_id is not None:
        return True  # its manifest is proven
    if one.state is not State.UNPROVEN or one.cipher is not None or one.opened_by:
        return True
    if not one.is_bare:
        return False
    with (
        contextlib.suppress(OSError, FormatError),
        contextlib.closing(store.fs.open(one.path)) as file,
    ):
        return cipher_of(file) is not None
    return True
