# SPDX-License-Identifier: Apache-2.0
"""Log observer: one sentence per event, with the whole event as an attribute for JSON logs.

>>> from ckptmgr.observe.events import Event
>>> print(sentence(Event(name="save.durable", at=0.0, series="net", step=7, size_bytes=2_000_000, seconds=0.5)))
save.durable net step 7: 1.9 MiB in 0.50 s
"""

from __future__ import annotations

import logging

from ckptmgr.core.printable import printable
from ckptmgr.core.sizes import size_text
from ckptmgr.observe.events import Event

_MOST = 4000  # characters


class LogObserver:
    """Log successes as INFO and failures as WARNING; the record's `ckptmgr` attribute is the event.

    Args:
        logger: The logger; `ckptmgr.events` by default.
        level: The level of successes.
    """

    def __init__(self, logger: logging.Logger | None = None, *, level: int = logging.INFO) -> None:
        self._logger = logging.getLogger("ckptmgr.events") if logger is None else logger
        self._level = level

    def __call__(self, event: Event) -> None:
        """Log one event."""
        level = self._level if event.is_ok else max(self._level, logging.WARNING)
        if self._logger.isEnabledFor(level):
            self._logger.log(level, "%s", sentence(event), extra={"ckptmgr": event.to_json()})


def sentence(event: Event) -> str:
    """Return an event as one line of text, whatever a server or a library said."""
    about = [event.name]
    if event.series:
        about.append(event.series)
    if event.step is not None:
        about.append(f"step {event.step}")
    facts = []
    if event.size_bytes:
        facts.append(size_text(event.size_bytes))
    if event.seconds:
        facts.append(f"in {event.seconds:.2f} s")
    if event.figures.get("blocked_s"):
        facts.append(f"(training held up for {event.figures['blocked_s']:.2f} s)")
    parts = [" ".join(facts), event.error_type and f"{event.error_type}: {event.error}"]
    details = [part for part in (*parts, *event.notes) if part]
    return printable(" ".join(about) + (f": {'; '.join(details)}" if details else ""), _MOST)
