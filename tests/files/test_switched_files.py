# SPDX-License-Identifier: Apache-2.0
"""A storage that serves another save of the same name for some of the reads never gets its content returned."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import numpy as np
import pytest

from ckptmgr import CkptmgrError, load_checkpoint, save_checkpoint
from ckptmgr.files.load.open import open_source
from ckptmgr.files.load.values import read_values
from ckptmgr.maintenance.convert import decrypt_file
from tests.support import api
from tests.support.saved import KEY as SAVED_KEY
from tests.support.saved import save_run

KEY = bytes(range(16))
CHANGED = "changed while it was being read"


class SwitchingSource:
    """Serves one file, and in the reads whose numbers are in a range another one of the same size."""

    def __init__(self, usual: bytes, other: bytes, reads: range) -> None:
        self.size = len(usual)
        self._usual, self._other, self._reads = usual, other, reads
        self._count = 0

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from the file whose turn it is."""
        data = self._other if self._count in self._reads else self._usual
        self._count += 1
        buffer[:] = data[offset : offset + buffer.nbytes]


@pytest.mark.parametrize("is_for_loading", [False, True], ids=["reading", "loading"])
@pytest.mark.parametrize("mode", ["AES-GCM", "AES-CBC", "SM4-CBC"])
@pytest.mark.parametrize("format", ["ckpt", "safetensors"])
def test_other_save_that_hides_during_the_checks_is_refused(
    tmp_path: Path, format: str, mode: str, is_for_loading: bool
) -> None:
    described, other = (
        save_checkpoint(
            {"w": np.full(100, value)}, tmp_path / name, format=format, enc_key=KEY, enc_mode=mode
        ).path
        for name, value in (("described", 1.0), ("other", 2.0))
    )
    store = api.place(tmp_path, keys=api.Key(KEY))
    manifest = store.read_manifest(described.name)
    messages = []
    for start in range(14):
        for stop in range(start + 1, start + 4):
            source = SwitchingSource(other.read_bytes(), described.read_bytes(), range(start, stop))
            with pytest.raises(CkptmgrError) as caught:
                read_values(
                    open_source(
                        source,
                        path=described.name,
                        options=api.reading(keys=api.Key(KEY)),
                        manifest=manifest,
                        is_for_loading=is_for_loading,
                    )
                )
            messages.append(str(caught.value))
    assert any(CHANGED in message for message in messages)


@pytest.mark.parametrize("format", ["ckpt", "safetensors"])
def test_file_that_becomes_another_save_while_it_is_decrypted_gives_nothing_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: str
) -> None:
    source, other = (
        save_checkpoint(
            {"w": np.full(100, value)}, tmp_path / name, format=format, enc_key=KEY
        ).path
        for name, value in (("source", 1.0), ("other", 2.0))
    )
    source.chmod(0o600)
    described, replacement = source.read_bytes(), other.read_bytes()
    inode = source.stat().st_ino
    preadv, left = os.preadv, 0

    def switching(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        nonlocal left
        if os.fstat(descriptor).st_ino == inode:
            if left == 0:
                source.write_bytes(replacement)
            left -= 1
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", switching)
    values = []
    for count in range(30):
        source.write_bytes(described)
        left, target = count, tmp_path / f"{count}.{format}"
        with contextlib.suppress(CkptmgrError):
            decrypt_file(source, target, options=api.reading(keys=api.Key(KEY)))
            values.append(float(np.asarray(load_checkpoint(target)["w"])[0]))
    assert set(values) == {1.0}
    assert len(values) < 30


def test_target_says_what_the_manifest_said_that_vouched_for_the_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (source,) = save_run(
        tmp_path, [10], options=api.SaveOptions(key=SAVED_KEY), metrics={10: {"loss": 0.5}}
    )
    system_open = os.open

    def without_manifest(
        path: str | Path, flags: int, mode: int = 0o777, *, dir_fd: int | None = None
    ) -> int:
        if path == source:
            api.manifest_of(source).unlink(missing_ok=True)
        return system_open(path, flags, mode, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", without_manifest)
    done = decrypt_file(source, tmp_path / "p.ckpt", options=api.reading(keys=SAVED_KEY))
    assert dict(done.target.metrics) == {"loss": 0.5}
