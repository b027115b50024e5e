# SPDX-License-Identifier: Apache-2.0
"""Work of another user, in a forked process; only root can start it."""

from __future__ import annotations

import ctypes
import json
import os
import traceback
from collections.abc import Callable

USER, GROUP = 12345, 23456
_PR_SET_DUMPABLE = 4


def as_user(act: Callable[[], object], *, user: int = USER, group: int = GROUP) -> object:
    """Do something in a process of a user, and return what JSON can say of it.

    It is a fork, because the user may be unable to read the interpreter; its imports must be done already.
    """
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([])
            os.setresgid(group, group, group)
            os.setresuid(user, user, user)
            # A process that changed its user may not look at itself in /proc without this.
            ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)
            answer = [act(), None]
        except BaseException:  # whatever it is, the parent shows it
            answer = [None, traceback.format_exc()]
        os.write(writing, json.dumps(answer).encode())
        os._exit(0)
    os.close(writing)
    with open(reading, "rb") as stream:
        result, failure = json.loads(stream.read())
    os.waitpid(pid, 0)
    assert failure is None, failure
    return result
