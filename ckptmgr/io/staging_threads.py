# SPDX-License-Identifier: Apache-2.0
"""Do many pieces of GIL-free work in a few threads, and hand the first failure to the caller."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from ckptmgr.io.threads import run_together

Piece = TypeVar("Piece")


def drain(pieces: Iterator[Piece], work: Callable[[Piece], None], *, threads: int) -> None:
    """Call `work` with every piece, at most `threads` at a time.

    Pieces are made one at a time. No thread is left when this returns.

    Raises:
        BaseException: The first failure of `pieces` or `work`; the pieces after it are left undone.
    """
    _Drain(pieces, work).run(threads)


class _Drain(Generic[Piece]):
    def __init__(self, pieces: Iterator[Piece], work: Callable[[Piece], None]) -> None:
        self._pieces = pieces
        self._work = work
        self._lock = threading.Lock()
        self._failure: BaseException | None = None

    def run(self, threads: int) -> None:
        if threads > 1:
            run_together([self._loop] * threads, fail=self._fail)
        else:
            self._loop()
        if self._failure is not None:
            raise self._failure

    def _loop(self) -> None:
        try:
            while self._failure is None:
                with self._lock:
                    piece = next(self._pieces, None)
                if piece is None:
                    return
                self._work(piece)
        except BaseException as error:  # raised by run() in the caller
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        self._failure = self._failure or error
