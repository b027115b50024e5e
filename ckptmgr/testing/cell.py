# SPDX-License-Identifier: Apache-2.0
"""One run of a cell of a grid, in its process: `Moments` end it at the place of the cell."""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import traceback
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from ckptmgr.testing.child import ChildRun

BATCHES, EPOCHS = 5, 3
Ending = Literal["SIGKILL", "SIGTERM", "Ctrl-C", "exception"]
Place = Literal["inside an epoch", "at its last batch", "at its first", "in a validation"]
BATCH_OF: Mapping[Place, int] = {
    "inside an epoch": BATCHES + 3,
    "at its last batch": 2 * BATCHES,
    "at its first": 2 * BATCHES + 1,
    "in a validation": 2 * BATCHES,
}
"""Place to the batch that has begun last when the end comes there, from 1."""
_NEVER, _HANGS_S = 1000, 240
_OURS = str(Path(__file__).parents[1])


class NoSuchFeature(Exception):
    """Is raised by a program whose framework has no such feature; says why."""


class Ended(Exception):
    """Ends a run at the place of its cell."""


class Moments:
    """Tells a program how to save, and ends its run at the place of a cell.

    Attributes:
        batches: Number of batches that have begun in this process.
        is_cut: Whether the end has come.
    """

    def __init__(self, ending: Ending | None, place: Place | None) -> None:
        self._ending, self._place = ending, place
        self._at = None if place is None else BATCH_OF[place]
        self._is_in_validation = place == "in a validation"
        self.batches, self.is_cut = 0, False

    @property
    def options(self) -> dict[str, Any]:
        """Options for `CheckpointConfig`: a stop must save by itself, the others find each step."""
        saves_itself = self._ending in ("SIGTERM", "exception")
        return {
            "save_checkpoint_steps": _NEVER if saves_itself else 1,
            "exception_save": self._ending == "exception",
            "keep": "last(3)",
        }

    @property
    def is_interrupted(self) -> bool:
        """Whether Ctrl-C has come: for a program whose framework hands none on."""
        return self.is_cut and self._ending == "Ctrl-C"

    def batch(self) -> None:
        """Is called when a batch begins on which the program trains, before anything changes."""
        self.batches += 1
        if not self._is_in_validation and self.batches == self._at:
            self._end()

    def validation(self) -> None:
        """Is called inside each validation of the training."""
        if self._is_in_validation and self.batches == self._at:
            self._end()

    def _end(self) -> None:
        if self.is_cut:
            return
        self.is_cut = True
        match self._ending:
            case "SIGKILL":
                os.kill(os.getpid(), signal.SIGKILL)
            case "SIGTERM":
                signal.raise_signal(signal.SIGTERM)
            case "Ctrl-C":
                signal.raise_signal(signal.SIGINT)
            case _:
                raise Ended(self._place)


class GridProgram(Protocol):
    """A program that a grid can check."""

    def __call__(self, directory: str, feature: str, moments: Moments, /) -> object:
        """Train `EPOCHS` epochs of `BATCHES` batches with a feature; return the final state.

        It saves below `directory` with `moments.options`, resumes from the checkpoints there, and
        calls `moments.batch` and `moments.validation`.

        Raises:
            NoSuchFeature: The framework has no such feature.
        """
        ...


def carry_out_cell(program: GridProgram, run: ChildRun) -> dict[str, Any]:
    """Run a cell; return the state, the number of batches, and all that was said.

    Raises:
        BaseException: That of the end, or one that ckptmgr did not raise.
    """
    faulthandler.dump_traceback_later(_HANGS_S, exit=True)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as of a shell's background job
        signal.signal(signal.SIGINT, signal.default_int_handler)
    moments, said = Moments(run.ending, run.place), _listen()
    found: dict[str, Any] = {"said": said}
    try:
        found["returned"] = program(run.directory, run.feature, moments)
    except NoSuchFeature as reason:
        found["absent"] = str(reason)
    except SystemExit:
        if run.ending != "SIGTERM":
            raise
    except Exception as error:
        if not _is_ours(error) or (moments.is_cut and run.ending != "SIGTERM"):
            raise
        found["refused"] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    faulthandler.cancel_dump_traceback_later()
    return {**found, "batches": moments.batches}


def _is_ours(error: Exception) -> bool:
    """Return whether our code raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and frames[-1].filename.startswith(_OURS)


def _listen() -> list[str]:
    """Return a list that will have the warnings of ckptmgr."""
    said: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    logging.getLogger("ckptmgr").addHandler(Listener(logging.WARNING))
    shown = warnings.showwarning

    def show(message: Any, category: Any, filename: str, *rest: Any, **options: Any) -> None:
        if "ckptmgr" in filename or "resum" in str(message):
            said.append(str(message))
        shown(message, category, filename, *rest, **options)

    warnings.showwarning = show
    warnings.simplefilter("default")
    return said
