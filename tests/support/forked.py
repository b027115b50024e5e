# SPDX-License-Identifier: Apache-2.0
"""Processes that are forked from that of a test, side by side; each returns what JSON can say."""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Callable, Sequence


def run_forked(acts: Sequence[Callable[[], object]]) -> list[object]:
    """Do several things at once, each in a process of its own; return their results in order."""
    started = [_start(act) for act in acts]
    answers = [_answer(*one) for one in started]
    for _, failure in answers:
        assert failure is None, failure
    return [result for result, _ in answers]


def _start(act: Callable[[], object]) -> tuple[int, int]:
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            answer = [act(), None]
        except BaseException:  # whatever it is, the parent shows it
            answer = [None, traceback.format_exc()]
        with open(writing, "wb") as stream:
            stream.write(json.dumps(answer).encode())
        os._exit(0)
    os.close(writing)
    return pid, reading


def _answer(pid: int, reading: int) -> tuple[object, str | None]:
    with open(reading, "rb") as stream:
        result, failure = json.loads(stream.read() or b'[null, "it ended without an answer"]')
    os.waitpid(pid, 0)
    return result, failure
