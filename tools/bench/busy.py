# SPDX-License-Identifier: Apache-2.0
"""One processor that is busy: the disk of a virtual machine may be emulated on the same ones."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from blake3 import blake3

_IN_CACHE_BYTES = 1 << 20


@contextmanager
def busy_processor() -> Iterator[None]:
    """Digest the same MiB with BLAKE3 again and again, in a thread and without the interpreter's lock, until the end."""
    content = bytes(_IN_CACHE_BYTES)
    is_over = threading.Event()

    def digest() -> None:
        hasher = blake3()
        while not is_over.is_set():
            hasher.update(content)

    thread = threading.Thread(target=digest)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
