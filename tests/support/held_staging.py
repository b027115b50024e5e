# SPDX-License-Identifier: Apache-2.0
"""Copies of states that begin when a test wants them to."""

from __future__ import annotations

import threading

import pytest


class HeldStaging:
    """Holds back the threads that copy and save states."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._held: list[threading.Thread] = []
        self._real_start = threading.Thread.start

        def start(thread: threading.Thread) -> None:
            if thread.name in ("ckptmgr-save", "ckptmgr-stage"):
                self._held.append(thread)
            else:
                self._real_start(thread)

        monkeypatch.setattr(threading.Thread, "start", start)

    @property
    def count(self) -> int:
        """How many threads are held back."""
        return len(self._held)

    def let_go(self) -> None:
        """Let all threads begin that are held back."""
        held, self._held = self._held, []
        for thread in held:
            self._real_start(thread)

    def let_go_soon(self) -> None:
        """Let them begin from another thread, for a caller that is about to wait."""
        opener = threading.Thread(target=self.let_go, name="opener")
        opener.start()
