# SPDX-License-Identifier: Apache-2.0
"""Wait until the machine is at rest, so that no contestant pays for the leftovers of the one before.

Removing a file of 1 GiB keeps the kernel busy long after: blocks are discarded, pages are freed and, on a virtual machine,
handed back to the host. Measured at once, whoever comes next shares the processor with that work; and who needs fresh
pages gets them warm. In a training loop saves are minutes apart, and neither happens.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

_WINDOW_S = 0.25
_BUSY_SHARE = 0.05
_PATIENCE_S = 20.0


def rest(rest_s: float) -> None:
    """Return after `rest_s` seconds or later, when the processors are idle; after 20 s more at the latest. 0 is no rest."""
    if rest_s <= 0:
        return
    os.sync()
    started = time.perf_counter()
    is_busy = True
    while is_busy and time.perf_counter() - started < rest_s + _PATIENCE_S:
        busy, total = _ticks()
        time.sleep(_WINDOW_S)
        later_busy, later_total = _ticks()
        share = (later_busy - busy) / max(1, later_total - total)
        is_busy = share > _BUSY_SHARE or time.perf_counter() - started < rest_s


def _ticks() -> tuple[int, int]:
    """Return the busy and all clock ticks of all processors since the start."""
    fields = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    idle = fields[3] + fields[4]
    return sum(fields) - idle, sum(fields)
