# SPDX-License-Identifier: Apache-2.0
"""A run with a mirror that ends at one of its requests: `python dying_run.py DIRECTORY URL REQUEST`.

Each line of the output is the step of a checkpoint whose upload was acknowledged; the last one, of
a run that was not ended, is the number of requests.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from ckptmgr import CheckpointConfig, CheckpointManager, Mirror
from ckptmgr.remote import mirror as mirrors
from tests.support import api
from tests.support.counted_objects import CountedObjects

STEPS = 3
_Done = TypeVar("_Done")


class Dying(CountedObjects):
    """Ends the process, without any cleaning up, when a request is to be sent.

    With `is_in_flight` another thread sends it meanwhile, and SIGKILL ends the process.
    """

    def __init__(self, objects: api.Objects, last: int, *, is_in_flight: bool = False) -> None:
        super().__init__(objects)
        self._end = last
        self._is_in_flight = is_in_flight

    def _request(self, kind: str, key: str, carry_out: Callable[[], _Done]) -> _Done:
        if len(self.requests) + 1 == self._end:
            if self._is_in_flight:
                threading.Thread(target=carry_out, daemon=True).start()
                os.kill(os.getpid(), signal.SIGKILL)
            os._exit(9)
        return super()._request(kind, key, carry_out)


def train(directory: str, url: str) -> None:
    """Save some steps, each after the upload of the one before."""
    mirror = Mirror(url, keep="last(1)", retry_s=0)
    config = CheckpointConfig(keep_checkpoint_max=2)
    with CheckpointManager(directory, config, mirror=mirror) as manager:
        start = manager.resume({"w": np.zeros(9)})
        for step in range(max(1, start.next_step), STEPS + 1):
            handle = manager.save(step, {"w": np.full(9, float(step))})
            assert handle is not None
            assert handle.mirrored is not None
            handle.mirrored.result(60)
            print(step, flush=True)  # noqa: T201


def main(directory: str, url: str, last: int) -> None:
    """Train with a store that ends the process."""
    objects = Dying(api.open_objects(url), last)
    mirrors.open_objects = lambda url: objects  # type: ignore[attr-defined]
    train(directory, url)
    print(len(objects.requests))  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
