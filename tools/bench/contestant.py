# SPDX-License-Identifier: Apache-2.0
"""The actions of a library in the benchmark: save and load durably, and save in the background."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

PAGE_BYTES = 4096
KEY = bytes(range(32))

Action = Callable[[Path], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Contestant:
    """Something that saves the model to a path durably, and loads it.

    Attributes:
        name: Who.
        mode: In which mode; those of one mode are measured side by side.
        suffix: Of the file or directory name.
        actions: On a path. `save` comes first, to a path that does not exist; its files survive a power
            cut when it returns. The others read it, each with a cold cache but for `load warm`: `load`, `load mmap`, `into`
            and `into own` (arrays that an earlier load made) touch every page of the result, `verify` keeps none. Those of
            the bare disk alone are in `sections.FLOORS`.
    """

    name: str
    mode: str
    suffix: str = ""
    actions: Mapping[str, Action]


def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Flight:
    """A save that goes on in the background.

    Attributes:
        wait: Returns when it is durable.
        before_update: Returns when the state may change, where that is later than the return of `start`; else None.
    """

    wait: Callable[[], object]
    before_update: Callable[[], object] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Background:
    """Something that saves the model in the background.

    Attributes:
        name: Who.
        mode: How: thread, process ...
        suffix: Of the file or directory name.
        start: Starts a save to a path that does not exist; returns when the caller may go on.
        close: Ends threads and processes.
    """

    name: str
    mode: str
    suffix: str = ""
    start: Callable[[Path], Flight]
    close: Callable[[], object] = _nothing


def touch(loaded: Mapping[str, Any]) -> None:
    """Read one byte of every page, so that a lazily mapped file is really loaded."""
    for value in loaded.values():
        array = np.asarray(value)
        if array.nbytes > PAGE_BYTES:
            array.reshape(-1).view(np.uint8)[::PAGE_BYTES].sum(dtype=np.int64)
        elif array.nbytes:  # 2 us for a sum would be most of the time with very many
            array.item(0)
            array.item(-1)
