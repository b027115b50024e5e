# SPDX-License-Identifier: Apache-2.0
"""How many threads make the bytes of a file: all that help, or, beside a training loop, all but one processor's.

Giving way is not enough. A thread that yields still takes its share of the processor it shares with the loop, and its data
out of the caches; on two cores a loop lost three times as many steps beside two threads as beside one, and the save was no
slower: one core digests and encrypts about as fast as a disk writes.
"""

from __future__ import annotations

import os
import threading

# Two keep a disk busy with plain or GCM bytes; CBC, 1.5 GB/s a core, can use more. Four leave buffers for the writers.
MOST_PRODUCERS = 4

_thread = threading.local()


def work_beside_training() -> None:
    """Leave one processor to others in whatever the calling thread saves from now on."""
    _thread.spared = 1


def producers() -> int:
    """Return how many threads make the bytes of a file that the calling thread saves; at least one."""
    available = len(os.sched_getaffinity(0)) - getattr(_thread, "spared", 0)
    return max(1, min(MOST_PRODUCERS, available))
