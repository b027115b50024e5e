# SPDX-License-Identifier: Apache-2.0
"""Keys, file ids and nonces are new for every file, also in a process that was forked."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from .container.containers import HEAD, opened
from .container.containers import MODES as CONTAINER_MODES
from .container.containers import seal as container
from .mindspore.sealing import MODES, seal, split


@pytest.mark.parametrize("mode", CONTAINER_MODES)
def test_data_keys_file_ids_and_message_nonces_of_many_containers_never_repeat(mode: str) -> None:
    files = [container(b"the same", mode) for _ in range(300)]
    data_keys = {opened(file).unlocked.data_key.raw for file in files}
    file_ids = {file[16:32] for file in files}
    heads = {file[HEAD - 74 : HEAD] for file in files}
    assert {len(data_keys), len(file_ids), len(heads)} == {300}


def forked(make: Callable[[], bytes]) -> bytes:
    """Return the result of a function in a forked child; it must fit into a pipe."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, make())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        content = file.read()
    os.waitpid(child, 0)
    return content


@pytest.mark.parametrize("mode", CONTAINER_MODES)
def test_container_of_a_forked_child_shares_nothing_with_that_of_its_parent(mode: str) -> None:
    container(b"warm", mode)
    child, parent = forked(lambda: container(b"x" * 96, mode)), container(b"x" * 96, mode)
    data_keys = {opened(file).unlocked.data_key.raw for file in (child, parent)}
    file_ids = {file[16:32] for file in (child, parent)}
    ivs = {file[HEAD - 64 : HEAD - 32] for file in (child, parent)}
    segments = {file[HEAD + 4 :] for file in (child, parent)}
    assert [len(each) for each in (data_keys, file_ids, ivs, segments)] == [2, 2, 2, 2]


@pytest.mark.parametrize("mode", MODES)
def test_records_of_a_forked_child_have_other_nonces_than_those_of_its_parent(mode: str) -> None:
    seal(b"warm", mode)
    child, parent = (
        split(file, mode) for file in (forked(lambda: seal(b"x" * 96, mode)), seal(b"x" * 96, mode))
    )
    assert not set(child) & set(parent)
