# SPDX-License-Identifier: Apache-2.0
"""What files say about their cipher."""

from __future__ import annotations

import pytest

from ckptmgr.crypto.detect import cipher_of
from ckptmgr.formats.source import BytesSource
from tests.crypto.container import containers

from . import sealing


@pytest.mark.parametrize("mode", containers.MODES)
def test_container_names_its_mode(mode: str) -> None:
    assert cipher_of(BytesSource(containers.seal(b"weights", mode))) == mode


@pytest.mark.parametrize("mode", sealing.MODES)
def test_encrypted_mindspore_file_names_its_mode(mode: str) -> None:
    assert cipher_of(BytesSource(sealing.seal(b"weights", mode))) == mode


@pytest.mark.parametrize(
    "data",
    [b"", b"plain", bytes(100), containers.seal(b"x")[:100]],
    ids=["empty", "plain", "zeros", "cut"],
)
def test_other_or_damaged_file_names_none(data: bytes) -> None:
    assert cipher_of(BytesSource(data)) is None
