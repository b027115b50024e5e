# SPDX-License-Identifier: Apache-2.0
"""Open descriptors of this process, and the check that a block leaves none."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator


def open_descriptors() -> set[tuple[int, str]]:
    """Return number and target of each open descriptor, without the one that lists them."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.add((int(name), os.readlink(f"/proc/self/fd/{name}")))
    return found


@contextlib.contextmanager
def nothing_stays_open() -> Iterator[None]:
    """Check that the block leaves no descriptor open.

    One of an earlier test may be closed meanwhile: the garbage collector comes when it wants.
    """
    before = open_descriptors()
    yield
    assert open_descriptors() - before == set()
