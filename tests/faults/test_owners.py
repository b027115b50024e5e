# SPDX-License-Identifier: Apache-2.0
"""What an administrator makes in the directory of another user belongs to that user."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ckptmgr.output_files import adopt_owner

USER, GROUP = 12345, 23456

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


@needs_root
def test_new_file_of_root_gets_the_owner_of_another_one(tmp_path: Path) -> None:
    os.chown(tmp_path, USER, GROUP)
    descriptor = os.open(tmp_path / "new", os.O_CREAT | os.O_WRONLY, 0o600)
    try:
        adopt_owner(descriptor, os.stat(tmp_path))
        figures = os.fstat(descriptor)
    finally:
        os.close(descriptor)
    assert (figures.st_uid, figures.st_gid) == (USER, GROUP)
