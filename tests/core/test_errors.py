# SPDX-License-Identifier: Apache-2.0
"""The error tree: of which built-in classes an error is, and which of them are errors of the disk."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptmgr import CheckpointFileNotFound, CheckpointNotFound, load_checkpoint, open_checkpoint
from ckptmgr.io.passing_errors import is_damage, may_be_whole, may_pass, may_return
from ckptmgr.parallel import build_searched_strategy


@pytest.mark.parametrize(
    ("read", "name"),
    [
        (load_checkpoint, "net.ckpt"),
        (load_checkpoint, "net-3.shards"),
        (open_checkpoint, "net.safetensors"),
        (build_searched_strategy, "strategy.ckpt"),
    ],
)
@pytest.mark.parametrize("kind", [CheckpointNotFound, FileNotFoundError, ValueError, LookupError])
def test_missing_file_is_an_error_of_each_of_these_classes(
    tmp_path: Path, read: Callable[[Path], object], name: str, kind: type[Exception]
) -> None:
    with pytest.raises(kind, match=name) as caught:
        read(tmp_path / name)
    assert isinstance(caught.value, CheckpointFileNotFound)
    assert caught.value.errno == errno.ENOENT


def test_missing_file_of_a_caller_is_no_error_of_the_disk() -> None:
    error = CheckpointFileNotFound("no such file", path="net.ckpt")
    assert str(error) == "net.ckpt: no such file"
    assert not any(ask(error) for ask in (may_pass, is_damage, may_be_whole, may_return))
