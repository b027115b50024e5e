# SPDX-License-Identifier: Apache-2.0
"""Overwrites of one file that the disk or a power cut ends, by writers with and without keys."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from ckptmgr import Trust
from ckptmgr.crypto.keys.key import Key
from ckptmgr.crypto.keys.signing import SigningKey
from ckptmgr.files.save.job import SaveFacts, SaveOptions
from ckptmgr.io.filesystem import OsFileSystem
from ckptmgr.series.writer import SeriesWriter
from ckptmgr.store.store import Store
from tests.support.rekeying import NEW, OLD
from tests.support.saved import items

NAME = "net-1_1.ckpt"
SIGNER = SigningKey(bytes(range(32)))
WRITERS: dict[str, tuple[Key | None, SigningKey | None]] = {
    "plain": (None, None),
    "old key": (OLD, None),
    "new key": (NEW, None),
    "signed": (None, SIGNER),
    "old key, signed": (OLD, SIGNER),
}
OVERWRITES = [
    (old, new) for old in WRITERS for new in WRITERS if old != new or old in ("signed", "old key")
]


class FailingRename(OsFileSystem):
    """Does not rename the data; with a power cut, nothing that follows is done either.

    Args:
        is_power_cut: Whether it is one.
        is_late: Whether the data is renamed, and nothing but that.
    """

    def __init__(self, *, is_power_cut: bool, is_late: bool = False) -> None:
        super().__init__()
        self._is_power_cut, self._is_late, self._is_off = is_power_cut, is_late, False

    def replace(self, source: Path, target: Path) -> None:
        """Rename a file that is no data."""
        if self._is_off or target.name == NAME:
            if self._is_late and not self._is_off:
                super().replace(source, target)
            self._is_off = self._is_power_cut
            raise OSError(errno.EIO, "the disk is gone")
        super().replace(source, target)

    def status(self, path: Path) -> object:  # type: ignore[override]
        """Tell nothing once the power is off."""
        if self._is_off:
            raise OSError(errno.EIO, "the disk is gone")
        return super().status(path)


def store_of(directory: Path, writer: str, fs: OsFileSystem | None = None) -> Store:
    """Return the store of one of the writers."""
    key, signing_key = WRITERS[writer]
    return Store(
        directory, fs=fs, trust=Trust(keys=key, signing_key=signing_key, allow_unencrypted=True)
    )


def strict_store_of(directory: Path, writer: str) -> Store:
    """Return the store of a reader who accepts what one of the writers proves, and nothing else."""
    key, signing_key = WRITERS[writer]
    trusted = () if signing_key is None else (signing_key.public_key,)
    return Store(directory, trust=Trust(keys=key, trusted_keys=trusted))


def save(directory: Path, writer: str, seed: float, fs: OsFileSystem | None = None) -> None:
    """Save the file, whatever has its name."""
    options = SaveOptions(key=WRITERS[writer][0])
    series = SeriesWriter(store_of(directory, writer, fs), "net", options=options, clock=lambda: 0)
    try:
        series.save(NAME, items(seed), SaveFacts(step=1, epoch=1))
    finally:
        series.close()


def fail(directory: Path, writer: str, *, is_power_cut: bool, is_late: bool = False) -> None:
    """Let a save over the file fail at the swap."""
    with pytest.raises(OSError, match="the disk is gone"):
        save(directory, writer, 2, FailingRename(is_power_cut=is_power_cut, is_late=is_late))
