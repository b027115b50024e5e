# SPDX-License-Identifier: Apache-2.0
"""A budget for stretching passphrases, and the stretched keys of a passphrase.

A slot states how a passphrase is to be stretched, and nothing is authenticated before that is done:
an attacker may use slots to keep readers busy. So each stretching is paid from a budget of the
whole process, and refunded if it opened a slot. A command has all of the budget; in a long-lived
process it refills within an hour.

Stretched keys are cached by cost and salt, whether they opened a slot or not.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable

from ..errors import StretchingError
from ..secret_bytes import SecretBytes

MOST_STRETCHING_KIB = 32 << 20
"""KiB of memory times the passes over them: twice the dearest slot, or 170 of the usual ones."""

_REFILLED_IN_S = 3600.0
_MOST_TRIED = 4096


class StretchingBudget:
    """The work that may still be spent on slots that do not open. Safe to use from several threads.

    `most_kib` counts like `PassphraseCost.stretching_kib`; `clock` returns monotonic seconds.
    """

    def __init__(
        self,
        *,
        most_kib: int = MOST_STRETCHING_KIB,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._most_kib = most_kib
        self._clock = clock
        self._lock = threading.Lock()
        self._left_kib = float(most_kib)
        self._at_s = clock()

    def spend(self, kib: int) -> None:
        """Pay for one stretching, or raise StretchingError if it costs more than half of the rest.

        So a few dear slots leave enough for the usual ones.
        """
        with self._lock:
            now_s = self._clock()
            self._refill((now_s - self._at_s) * self._most_kib / _REFILLED_IN_S)
            self._at_s = now_s
            if 2 * kib > self._left_kib:
                raise StretchingError(
                    "the key slots ask for more stretching of passphrases than is accepted",
                    hint="other slots, which this passphrase does not open, used up what may be tried in an hour, or in a"
                    " command; give a key that opens the file, or move away files that you do not know",
                )
            self._left_kib -= kib

    def refund(self, kib: int) -> None:
        """Refund a payment: the stretching opened a slot."""
        with self._lock:
            self._refill(kib)

    def _refill(self, kib: float) -> None:
        self._left_kib = min(self._left_kib + kib, float(self._most_kib))


_of_process = StretchingBudget()


def process_budget() -> StretchingBudget:
    """Return the budget that all passphrases of this process share."""
    return _of_process


class StretchedKeys:
    """The stretched keys of one passphrase, by parameters (cost and salt). Thread-safe.

    `budget` pays; None for that of the process.
    """

    def __init__(self, budget: StretchingBudget | None = None) -> None:
        self._budget = budget
        self._lock = threading.Lock()
        self._proven: dict[Hashable, SecretBytes] = {}
        self._tried: OrderedDict[Hashable, tuple[SecretBytes, int]] = OrderedDict()

    def for_new_slot(self, parameters: Hashable, stretch: Callable[[], bytes]) -> SecretBytes:
        """Return the stretched key for parameters that this process chose: free of charge."""
        with self._lock:
            found = self._proven.get(parameters)
            if found is None:
                found = self._proven[parameters] = SecretBytes(stretch())
            return found

    def for_slot(
        self, parameters: Hashable, stretch: Callable[[], bytes], *, kib: int
    ) -> SecretBytes:
        """Return the stretched key for parameters of a slot, at a price."""
        with self._lock:
            found = self._proven.get(parameters)
            if found is not None:
                return found
            if parameters not in self._tried:
                (self._budget or process_budget()).spend(kib)
                self._tried[parameters] = SecretBytes(stretch()), kib
                if len(self._tried) > _MOST_TRIED:
                    self._tried.popitem(last=False)
            return self._tried[parameters][0]

    def confirm(self, parameters: Hashable) -> None:
        """Record that the stretched key for these parameters opened a slot."""
        with self._lock:
            if parameters in self._tried:
                self._proven[parameters], kib = self._tried.pop(parameters)
                (self._budget or process_budget()).refund(kib)
