# SPDX-License-Identifier: Apache-2.0
"""A process and the children it forks read encrypted files without touching each other's memory."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from ckptmgr.crypto.container.source import ContainerSource
from ckptmgr.crypto.mindspore.blocks import BlockSource, open_blocks
from ckptmgr.formats.source import BytesSource

from .container import containers
from .mindspore import sealing

_BLOCKS = 10


def _container() -> tuple[ContainerSource, bytes, int]:
    first = containers.opened(containers.seal(b""))
    block_bytes = first.block_bytes
    plaintext = b"".join(bytes([number]) * block_bytes for number in range(1, _BLOCKS + 1))
    return containers.opened(containers.seal(plaintext)), plaintext, block_bytes


def _sealed_blocks() -> tuple[BlockSource, bytes, int]:
    block_bytes = 1024
    plaintext = b"".join(bytes([number]) * block_bytes for number in range(1, _BLOCKS + 1))
    file = sealing.seal(plaintext, "AES-GCM", block_bytes=block_bytes)
    return open_blocks(BytesSource(file), sealing.KEY, "AES-GCM"), plaintext, block_bytes


@pytest.mark.parametrize("made_by", [_container, _sealed_blocks])
def test_what_a_forked_child_reads_does_not_change_what_its_parent_has(
    made_by: Callable[[], tuple[ContainerSource | BlockSource, bytes, int]],
) -> None:
    source, plaintext, block_bytes = made_by()

    def read(block: int) -> bytes:
        return sealing.read_range(source, block * block_bytes + 5, 10)

    def expected(block: int) -> bytes:
        return plaintext[block * block_bytes + 5 :][:10]

    assert [read(0), read(1)] == [expected(0), expected(1)]  # now there are buffers, and a cache
    child = os.fork()
    if child == 0:
        os._exit(int([read(block) for block in range(2, 9)] != [*map(expected, range(2, 9))]))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert [read(0), read(1)] == [expected(0), expected(1)]
