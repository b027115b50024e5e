# SPDX-License-Identifier: Apache-2.0
"""A storage that serves another save of the same name for some of the reads never gets its content returned."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ckptmgr.crypto.key import Key
from ckptmgr.errors import CkptmgrError
from ckptmgr.loader import ReadOptions, open_source, read_values
from ckptmgr.serialization import save_checkpoint
from ckptmgr.store import Store

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
    store = Store(tmp_path, key=Key(KEY), must_authenticate=True)
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
                        options=ReadOptions(key=Key(KEY)),
                        manifest=manifest,
                        is_for_loading=is_for_loading,
                    )
                )
            messages.append(str(caught.value))
    assert any(CHANGED in message for message in messages)
