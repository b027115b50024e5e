# SPDX-License-Identifier: Apache-2.0
"""The training loaders of a trainer, iterated through `CheckpointManager.batches`.

Lightning asks its strategy to process each loader; there it is given a stand-in that iterates as the
manager wants it, and is the loader itself in all other respects. Nothing is drawn from generators
when an iterator is made, only when its first batch is fetched: Lightning makes iterators early.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

from ckptmgr.training.data_state import Batches
from ckptmgr.training.manager import CheckpointManager

_LOG = logging.getLogger(__name__)
_OWN = (
    "_ckptmgr_loader",
    "_ckptmgr_batches",
    "_ckptmgr_before_first",
    "_ckptmgr_has_ended",
    "_ckptmgr_stays_ended",
)


class TrainingLoader:
    """Stands for a loader: all is the loader's, but the iteration."""

    def __init__(
        self,
        loader: Any,
        batches: Batches[Any],
        before_first: Callable[[], None],
        *,
        has_ended: bool,
    ) -> None:
        self._ckptmgr_loader = loader
        self._ckptmgr_batches = batches
        self._ckptmgr_before_first = before_first
        self._ckptmgr_has_ended = self._ckptmgr_stays_ended = has_ended

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride, reportIncompatibleMethodOverride]
        """Return the class of the loader: Lightning asks whether it is torch's."""
        return type(self._ckptmgr_loader)

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of a pass, or the rest of the one in which the run was saved.

        There is no rest of a loader that had ended beside a longer one.
        """
        self._ckptmgr_before_first()
        is_over, self._ckptmgr_stays_ended = self._ckptmgr_stays_ended, False
        if not is_over:
            self._ckptmgr_has_ended = False
            yield from self._ckptmgr_batches
        self._ckptmgr_has_ended = True

    def __len__(self) -> int:
        return len(self._ckptmgr_loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_ckptmgr_loader"], name)

    def __setattr__(self, name: str, value: object) -> None:
        target = self.__dict__ if name in _OWN else None
        if target is None:
            setattr(self._ckptmgr_loader, name, value)
        else:
            target[name] = value


class TrainingLoaders:
    """The stand-ins of one trainer; loaders are known by their order."""

    def __init__(self, manager: CheckpointManager, before_first: Callable[[], None]) -> None:
        self._manager = manager
        self._before_first = before_first
        self._made: list[TrainingLoader] = []
        self._have_ended: set[int] = set()
        self._is_asked_anew = False

    def resume(self, ended: list[int]) -> None:
        """Take the numbers of the loaders that had ended when the run was saved."""
        self._have_ended = set(ended)

    def ended(self) -> list[int]:
        """Return the numbers of the loaders that have ended in the epoch that runs."""
        return [number for number, one in enumerate(self._made) if one._ckptmgr_has_ended]

    def ask_anew(self) -> None:
        """Number the next loaders from zero: Lightning asks for all of them again."""
        self._is_asked_anew = True

    def stand_in(self, loader: Any) -> TrainingLoader:
        """Return a stand-in for a loader; warn where it cannot go on bit for bit."""
        if not _has_length(loader):
            _LOG.warning(
                "Lightning fetches one batch ahead from a loader without a length, so a run that is resumed inside an epoch"
                " skips one batch: give %s a __len__, or save at the end of epochs",
                type(loader).__name__,
            )
        if getattr(loader, "persistent_workers", False):
            _LOG.warning(
                "the persistent workers of %s go on with the random numbers of an earlier epoch, which a resumed run does"
                " not repeat, so it has another order: leave persistent_workers out",
                type(loader).__name__,
            )
        if self._is_asked_anew:
            self._made, self._is_asked_anew = [], False
        number = len(self._made)
        name = f"train {number}" if number else "train"
        batches = self._manager.batches(loader, name=name)
        has_ended = number in self._have_ended
        self._have_ended.discard(number)
        made = TrainingLoader(loader, batches, self._before_first, has_ended=has_ended)
        self._made.append(made)
        return made

    def end_pass(self) -> None:
        """Count the passes as ended: the epoch is over, though a loader may have more batches."""
        for one in self._made:
            one._ckptmgr_batches.end_pass()


def _has_length(loader: Any) -> bool:
    try:
        len(loader)
    except (TypeError, NotImplementedError):
        return False
    return True
