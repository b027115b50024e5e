# SPDX-License-Identifier: Apache-2.0
"""Where the data loaders of a run stand, and the global random numbers: `CheckpointManager.batches`.

They are saved beside the state, as one text in the metadata of the file, so that a load by a
program without them still works. Rules, each found by failing:

* `iter(loader)` draws from generators. So they are put back twice: as they were before the iterator
  was made, to get the same order and the same seeds of workers, and as they were at the save, at
  the first batch.
* A run that saved at the last batch of a pass has not seen the end of that pass. So its resumption
  begins with an empty pass, after which the program goes on where the first one did: the scheduler
  of an epoch steps, and the next pass draws its order.
* Between two passes nothing is skipped: `resume` itself puts the generators back.
* A save at the exit of the manager is of the last step that ended. A batch that was fetched after
  it, and left by `break`, comes again.
* A loader of Accelerate or Ray fetches the next batch before it gives one. So the numbers that this fetch
  drew, and the one before it, are put back before the last batches that are skipped.
* A pass that was left before a step ended is over: the program that was saved begins a new one.
* A loader that is continued steps later, such as one of validation, or beside another, as in `zip`,
  leaves the random numbers that the run has drawn from since where they are.
"""

from __future__ import annotations

import inspect
import itertools
import logging
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

from ckptmgr.core.errors import UnsupportedState
from ckptmgr.core.notes import add_note
from ckptmgr.formats.file_crc import crc32
from ckptmgr.state.global_random import GlobalRandom, global_draws, mark_of
from ckptmgr.state.packed import pack, unpack
from ckptmgr.state.paths import StateMismatch, TreeError
from ckptmgr.training.companions import Companion
from ckptmgr.training.loaders import LoaderParts, fingerprint_of

_LOG = logging.getLogger(__name__)
_VERSION = 1
_T = TypeVar("_T")


@dataclass(slots=True)
class _Pass:
    """One pass over a loader: the batches that it gave, and the generators that it drew from.

    It is open until the loader has ended, also when the loop was left by `break`.
    """

    parts: LoaderParts
    count: int = 0
    thread: int = 0
    is_open: bool = True
    is_iterated: bool = True
    fingerprint: int | None = None  # of the last batch
    before: tuple[Mapping[str, object], ...] = ()
    start: Mapping[str, Any] = field(default_factory=dict)

    def to_state(self, at: _Place | None) -> dict[str, Any]:
        """Return where the loader stands, or stood."""
        count = self.count if at is None else at.batches
        # Of torch's loaders a state at the end would cost one more draw when it is loaded.
        has_state = self.parts.has_state and (self.is_open or not self.parts.is_torch)
        return {
            "is_open": self.is_open,
            "count": count,
            "fingerprint": self.fingerprint if at is None else at.fingerprint,
            "before": self.before if at is None else at.before,
            "start": dict(self.start) if self.is_open else None,
            "generators": self.parts.generators() if at is None else at.generators,
            "epochs": self._own_epochs(),
            "loader": self.parts.loader.state_dict() if has_state and count == self.count else None,
        }

    def to_be_begun(self) -> dict[str, Any]:
        """Return the state of a loader whose next pass is this one, of which no step has ended."""
        return {
            "is_open": False,
            "count": 0,
            "fingerprint": None,
            "before": (),
            "start": None,
            "generators": self.start["generators"],
            "epochs": self.start["epochs"],
            "loader": None,
        }

    def _own_epochs(self) -> dict[str, int]:
        """Return the epoch numbers that the loader itself has advanced; others are the user's."""
        before = self.start.get("epochs", {})
        return {path: one for path, one in self.parts.epochs().items() if before.get(path) != one}


class _Place(NamedTuple):
    """Where an open pass stood at the end of a step, and whether it had given a batch in that step."""

    of: _Pass
    batches: int
    generators: Mapping[str, object]
    fingerprint: int | None
    before: tuple[Mapping[str, object], ...]
    is_used: bool


class _Noted(NamedTuple):
    """The end of a step: the global random numbers, and the open passes."""

    step: int
    random: Mapping[str, object]
    places: Mapping[str, _Place]
    thread: int


class _AtSave(NamedTuple):
    """Generator states that a pass sets, once its loader stands where it stood at the save."""

    random: Mapping[str, Any]
    generators: Mapping[str, Any]


class DataState(Companion):
    """The places of the loaders of a manager, and the global random numbers."""

    def __init__(self, *, has_gone_on: bool = False) -> None:
        self._random = GlobalRandom()
        self._passes: dict[str, _Pass] = {}
        self._pending: dict[str, Any] = {}
        self._pending_random: Any = None
        self._noted: _Noted | None = None
        self._has_gone_on = has_gone_on  # a step has ended since the restore
        self._ended = 0  # passes since the restore
        self._asked: dict[str, int] = {}  # how many had ended when a loader was first asked for
        self._has_warned = False
        self.pass_ended: Callable[[int], None] = lambda _: None
        self.batch_asked: Callable[[], None] = lambda: None
        self._may_differ: Collection[str] = ()
        self._left_to_skip = 0
        self._skipped: str | None = None  # the loader whose batches are skipped
        self.is_inside_pass = False  # at the restore
        self._fetching: tuple[_Pass, int] | None = None  # the pass and thread that wait for a batch
        self._fetch_end = threading.Lock()
        self._empty: str | None = None  # the loader whose continued pass had no batch left

    def step_ended(self, step: int) -> None:
        """Remember where the loaders stand at the end of a step."""
        self._has_gone_on, self._empty = True, None
        if self._passes:
            self._warn_of_prefetching()
            self._close_left()
            places = {
                name: _Place(
                    one,
                    one.count,
                    one.parts.generators(),
                    one.fingerprint,
                    one.before,
                    self._is_used(name, one),
                )
                for name, one in self._passes.items()
                if one.is_open
            }
            own = threading.get_ident()
            self._noted = _Noted(step, self._random.state_dict(), places, own)

    def _is_used(self, name: str, place: _Pass) -> bool:
        earlier = None if self._noted is None else self._noted.places.get(name)
        return earlier is None or earlier.of is not place or earlier.batches < place.count

    def marks(self, step: int) -> tuple[int, int]:
        """Return a mark of the batches of a step, and one of the global generators at its end.

        That of batches is a CRC32, that of generators `mark_of`; 0 stands for unknown.
        """
        noted = self._noted
        if noted is None or noted.step != step:
            return 0, 0
        batch = 0
        for place in noted.places.values():
            mark = place.of.fingerprint if place.of.is_iterated and place.is_used else None
            if mark is not None:
                batch = crc32(mark.to_bytes(4, "little"), batch) if batch else mark
        return batch, mark_of(noted.random)

    def explain(self, error: NameError) -> None:
        """Add a note to the error of a name that only a batch assigns, if there was none yet."""
        if self._empty is not None:
            add_note(
                error,
                f"ckptmgr: the run goes on at the last batch of a pass, so its first pass over {self._empty!r} was empty, and"
                " what the loop assigns for each batch has no value yet. Give it one before the loop: the metrics of the"
                " saved step are in resume(...).metrics",
            )

    def _close_left(self) -> None:
        """Count the passes as ended that were left by `break`."""
        for one in self._passes.values():
            one.is_open = one.is_open and one.is_iterated

    def _warn_of_prefetching(self) -> None:
        """Warn once if another thread than that of the steps takes the batches, ahead of them."""
        own = threading.get_ident()
        ahead = [
            name
            for name, one in self._passes.items()
            if one.is_open and one.is_iterated and one.thread not in (0, own)
        ]
        if ahead and not self._has_warned:
            self._has_warned = True
            _LOG.warning(
                "the batches of loader %r are taken in another thread than the one whose steps end, as by a prefetcher around "
                "manager.batches: a batch counts as used when it is taken, so a resumed run would skip those that it fetched "
                "ahead. Put the prefetcher inside: manager.batches(prefetch(loader))",
                ahead[0],
            )

    def to_text(self, step: int) -> str | None:
        """Return the text that a save of a step stores; None if no loader was ever given."""
        if not self._passes and not self._pending:
            return None
        places: Mapping[str, _Place] = {}
        random: object = None
        if self._noted is not None and self._noted.step == step:
            places = {
                name: place
                for name, place in self._noted.places.items()
                if self._passes.get(name) is place.of and place.of.is_open
            }
            random = self._noted.random
            if len(places) < len(self._noted.places):  # another loader has ended beside them
                places = {name: one for name, one in places.items() if one.of.is_iterated}
                self._close_left()
        again = {} if places else self._begun_again(step)
        if not places:  # the passes have ended since, and the program went on
            begun = next(iter(again.values()), None)
            random = self._random.state_dict() if begun is None else begun.start["random"]
        loaders = {
            name: one.to_be_begun() if name in again else one.to_state(places.get(name))
            for name, one in self._passes.items()
        }
        try:
            return pack(
                {"version": _VERSION, "random": random, "loaders": {**self._pending, **loaders}}
            )
        except UnsupportedState as error:
            raise UnsupportedState(
                f"the state of a data loader cannot be stored: {error.message}", hint=error.hint
            ) from error

    def _begun_again(self, step: int) -> dict[str, _Pass]:
        """Return the passes that have begun since the end of a step had another of the loader."""
        noted = self._noted
        if noted is None or noted.step != step:
            return {}
        return {
            name: one
            for name, one in self._passes.items()
            if name in noted.places and noted.places[name].of is not one
            if one.is_open and not one.parts.has_state
        }

    def forget(self, *, skip: int = 0) -> None:
        """Begin again, without places."""
        self._left_to_skip, self._skipped = skip, None
        self._passes.clear()
        self._pending = {}
        self._noted = self._empty = None
        self.is_inside_pass = False

    def end_pass(self, name: str) -> None:
        """Count the pass over a loader as ended."""
        place = self._passes.get(name)
        if place is not None:
            place.is_open = place.is_iterated = False

    def plan_restore(
        self,
        text: str | None,
        *,
        is_own: bool = True,
        may_differ: Collection[str] = (),
        skip: int = 0,
    ) -> Callable[[], None]:
        """Return a function that takes the places of a checkpoint, and sets the random numbers.

        Those of a rank among others, which divided the data otherwise, say only in which epoch the
        run is: its pass begins again. The first `skip` batches are not given.

        Raises:
            TreeError: The text is damaged.
        """
        if text is None:
            return partial(self.forget, skip=skip)
        stored = unpack(text)
        if not isinstance(stored, dict) or stored.get("version") != _VERSION:
            raise TreeError(
                "the places of the data loaders are of an unknown version",
                hint="resume with a newer ckptmgr",
            )

        def restore() -> None:
            self.forget(skip=skip)
            self._may_differ = may_differ
            self.is_inside_pass = any(one["is_open"] for one in stored["loaders"].values())
            if not is_own:
                return
            self._pending, self._pending_random = stored["loaders"], stored["random"]
            self._has_gone_on = False
            self._ended, self._asked = 0, {}
            put()

        put = self._random.plan(stored["random"])
        return restore

    def batches(
        self,
        loader: Iterable[_T],
        *,
        name: str,
        epoch: int | None,
        random: Sequence[object],
    ) -> Iterator[_T]:
        """Return the batches of one pass, from where the checkpoint was."""
        stored = self._pending.get(name)
        if stored is not None and self._asked.setdefault(name, self._ended) < self._ended:
            # `zip` has left it before, without a batch, when the loader beside it ended.
            self._pending[name] = {**stored, "is_open": False, "loader": None}
        return self._batches(loader, name=name, epoch=epoch, random=random)

    def _batches(
        self,
        loader: Iterable[_T],
        *,
        name: str,
        epoch: int | None,
        random: Sequence[object],
    ) -> Iterator[_T]:
        self._refuse_beside(loader, name)
        parts = LoaderParts(loader, random)
        stored = self._pending.pop(name, None)
        at_save = None if stored is None else self._at_save(parts, stored)
        continued = stored if stored is not None and stored["is_open"] else None
        if continued is None or at_save is None:
            place, iterator = self._begun(parts, stored, at_save, name=name, epoch=epoch)
        else:  # in the epoch of the save
            place, iterator = self._continued(parts, continued, at_save, name=name)
        self._passes[name] = place
        first, asked_by = place.count, 0
        try:
            for batch in self._fetched(iterator, place):
                place.count += 1
                place.thread = threading.get_ident()
                place.fingerprint = fingerprint_of(batch)
                if self._left_to_skip and self._skipped in (None, name):
                    self._skipped = name
                    self._left_to_skip -= 1
                    continue
                asked_by = _caller()
                yield batch
            self._say_ended(name, place)
            is_empty = place.count == first
            if is_empty and continued:
                self._empty = name
            may_have_drawn = continued and _is_stateful(parts, continued) and not parts.restarts
            if is_empty and at_save and may_have_drawn:
                # What the first run drew before the save.
                self._put_back(parts, at_save, name)
            place.is_open = False
            self._ended += 1
        except GeneratorExit:
            # Left by `break`; else a variable had it, and more of the program has run since.
            if _caller() == asked_by:
                self._say_ended(name, place)
            raise
        finally:
            place.is_iterated = False

    def _say_ended(self, name: str, place: _Pass) -> None:
        """Say that a pass has ended, if the last step that ended had the last batch of it.

        Not in another thread than that of the steps, which may be in the code of the program.
        """
        noted = self._noted
        if noted is None or noted.thread != threading.get_ident():
            return
        at = noted.places.get(name)
        if at is not None and at.of is place and at.is_used and _is_between_steps(noted):
            self.pass_ended(noted.step)

    def _fetched(self, iterator: Iterator[_T], place: _Pass) -> Iterator[_T]:
        """Yield batches; note the random numbers before a fetch that is one batch ahead.

        There is no second `iter`, as of `yield from`: it restarts some loaders.
        """
        while True:
            self.batch_asked()
            before = self._random.state_dict() if place.parts.is_ahead else None
            self._fetching = place, threading.get_ident()
            try:
                batch = next(iterator)
            except StopIteration:
                return
            finally:
                with self._fetch_end:
                    self._fetching = None
            if before is not None:
                place.before = (*place.before[-1:], before)
            yield batch

    def while_fetching(
        self, step: int, copy: Callable[[], _T], drop: Callable[[], None]
    ) -> _T | None:
        """Return a copy of the state of `step`, made while its thread waits for a batch; or None.

        The batch is given when the copy is made, so that only the loader's code runs meanwhile. What
        that changes must not be in the copy: the state of a loader that has one, and generators.
        It must be the first batch of the next step: inside a step, and in a validation, the program
        has changed the state. Of several passes that gave batches in a step none is surely the first.
        """
        noted = self._noted
        with self._fetch_end:
            if noted is None or noted.step != step or not _is_between_steps(noted):
                return None
            used = [at.of for at in noted.places.values() if at.is_used]
            if self._fetching is None or [self._fetching] != [(one, noted.thread) for one in used]:
                return None
            if not all(self._is_as_noted(name, at) for name, at in noted.places.items()):
                return None
            found = copy()
            is_drawn = pack(noted.random) != pack(self._random.state_dict()) or any(
                pack(at.generators) != pack(at.of.parts.generators())
                for at in noted.places.values()
            )
            if is_drawn:
                drop()
            return None if is_drawn else found

    def _is_as_noted(self, name: str, at: _Place) -> bool:
        return self._passes.get(name) is at.of and at.of.is_open and not at.of.parts.has_state

    def _as_drawn(
        self, iterator: Iterator[_T], before: Sequence[Mapping[str, Any]], count: int
    ) -> Iterator[_T]:
        """Yield batches; set the random numbers before the last fetches of `count` as they were."""
        for number in itertools.count(len(before) - count):
            if 0 <= number < len(before):
                self._random.load_state_dict(before[number])
            try:
                yield next(iterator)
            except StopIteration:
                return

    def _refuse_beside(self, loader: object, name: str) -> None:
        other = self._passes.get(name)
        if other is not None and other.is_iterated and other.parts.loader is not loader:
            raise ValueError(
                f"another loader is being iterated as {name!r}; give each its name: manager.batches(loader, name='validation')"
            )

    def _begun(
        self,
        parts: LoaderParts,
        stored: Mapping[str, Any] | None,
        at_save: _AtSave | None,
        *,
        name: str,
        epoch: int | None,
    ) -> tuple[_Pass, Iterator[Any]]:
        if stored is not None and at_save is not None:
            _set_generators(parts, at_save.generators, name)
            parts.set_epochs(stored["epochs"])
            if _is_stateful(parts, stored) and parts.restarts:
                parts.continued(stored["loader"])  # draws what the end of that pass had drawn
                self._put_back(parts, at_save, name)
            elif _is_stateful(parts, stored):
                parts.loader.load_state_dict(stored["loader"])
        if epoch is not None:
            parts.set_epoch(epoch)
        start = {
            "random": self._random.state_dict(),
            "generators": parts.generators(),
            "epochs": parts.epochs(),
        }
        return _Pass(parts, start=start), iter(parts.loader)

    def _continued(
        self, parts: LoaderParts, stored: Mapping[str, Any], at_save: _AtSave, *, name: str
    ) -> tuple[_Pass, Iterator[Any]]:
        start, count = stored["start"], stored["count"]
        _set_generators(parts, start["generators"], name)
        parts.set_epochs(start["epochs"])
        self._random.load_state_dict(start["random"])
        has_state = _is_stateful(parts, stored)
        iterator = parts.continued(stored["loader"]) if has_state else iter(parts.loader)
        if not has_state:
            before = stored.get("before") or ()
            used = _skipped(self._as_drawn(iterator, before, count), count, name=name)
            wanted = stored.get("fingerprint")
            is_comparable = wanted is not None and (before or not used.is_drawn)
            if is_comparable and used.last != wanted:
                self._refuse_other(parts, start, used, count, name=name)
        self._put_back(parts, at_save, name)
        return _Pass(parts, count=count, start=start), iterator

    def _refuse_other(
        self,
        parts: LoaderParts,
        start: Mapping[str, Any],
        used: _Used,
        count: int,
        *,
        name: str,
    ) -> None:
        """Raise StateMismatch as the last used batch is another, or warn where noise may be why.

        Workers that draw from generators of their own give other batches from the same start.
        """
        text = (
            f"batch {count} of loader {name!r} is another than in the saved run, so the run does not go on bit for bit: the"
            " data or the batch size is another, its order is drawn outside the pass, or from a generator that nothing"
            " seeds and manager.batches(..., random=[...]) does not name"
        )
        is_persistent = getattr(parts.loader, "persistent_workers", False)
        if is_persistent:
            text += ", or its persistent workers go on with the random numbers of an earlier pass"
        is_noise = parts.has_workers and not is_persistent
        if is_noise:
            self._random.load_state_dict(start["random"])
            _set_generators(parts, start["generators"], name)
            is_noise = fingerprint_of(next(iter(parts.loader), None)) != used.first
        if is_noise or "data" in self._may_differ:
            _LOG.warning("%s", text)
            return
        raise StateMismatch(
            text,
            hint='resume with the same data in the same order; or go on with it: Resume(may_differ=["data"])',
        )

    def _at_save(self, parts: LoaderParts, stored: Mapping[str, Any]) -> _AtSave:
        """Return the generators of the save; as they are now, where the run has drawn from them.

        It has when a step has ended, or when another loader has given its batch of this step.
        """
        generators = stored["generators"]
        if not (self._has_gone_on or any(one.is_iterated for one in self._passes.values())):
            return _AtSave(self._pending_random, generators)
        others = [one.parts for one in self._passes.values()]
        shared = {path: one for path, one in parts.generators(others).items() if path in generators}
        return _AtSave(self._random.state_dict(), {**generators, **shared})

    def _put_back(self, parts: LoaderParts, at_save: _AtSave, name: str) -> None:
        """Set the generators as they were at the save."""
        _set_generators(parts, at_save.generators, name)
        self._random.load_state_dict(at_save.random)


def _caller() -> int:
    """Return what identifies the frame that has called the generator that calls this."""
    own = inspect.currentframe()
    return id(own and own.f_back and own.f_back.f_back)


def _is_between_steps(noted: _Noted) -> bool:
    """Return whether no pass has given a batch since the end of a step."""
    return all(at.of.count == at.batches for at in noted.places.values())


class _Used(NamedTuple):
    """The batches that the saved run had used, fetched again: fingerprints of the first and the last.

    `is_drawn` says whether the fetch of the last one drew from a global generator: the steps that
    drew between the batches of the first run are not repeated.
    """

    first: int | None
    last: int | None
    is_drawn: bool


def _skipped(iterator: Iterator[Any], count: int, *, name: str) -> _Used:
    """Fetch the batches that were used."""
    skipped, first, batch, is_drawn, before = 0, None, None, False, global_draws()
    for batch in itertools.islice(iterator, count):
        skipped += 1
        first = fingerprint_of(batch) if skipped == 1 else first
        after = global_draws()
        is_drawn, before = before != after, after
    if skipped < count:
        raise StateMismatch(
            f"loader {name!r} gives {skipped} batches, but the run was saved after batch {count} of it",
            hint="resume with the same data and the same batch size",
        )
    return _Used(first, fingerprint_of(batch), is_drawn)


def _is_stateful(parts: LoaderParts, stored: Mapping[str, Any]) -> bool:
    return stored["loader"] is not None and parts.has_state


def _set_generators(parts: LoaderParts, stored: Mapping[str, Any], name: str) -> None:
    try:
        parts.set_generators(stored)
    except ValueError as error:
        raise StateMismatch(
            f"loader {name!r}: {error}",
            hint="several loaders need names of their own: manager.batches(loader, name='validation')",
        ) from None


class Batches(Generic[_T]):
    """The batches of a loader, pass by pass; see `CheckpointManager.batches`."""

    def __init__(
        self,
        data: DataState,
        loader: Iterable[_T],
        *,
        name: str,
        epoch: int | None,
        random: Sequence[object],
    ) -> None:
        self._data = data
        self._loader = loader
        self._name = name
        self._epoch = epoch
        self._random = tuple(random)

    def __iter__(self) -> Iterator[_T]:
        """Begin a pass, or continue the one in which the run was saved."""
        return self._data.batches(
            self._loader, name=self._name, epoch=self._epoch, random=self._random
        )

    def end_pass(self) -> None:
        """Count the pass as ended, though the loader may have more batches: the next one is new."""
        self._data.end_pass(self._name)

    def __len__(self) -> int:
        """Return the number of batches of a whole pass, where the loader knows it."""
        if not isinstance(self._loader, Sized):
            raise TypeError(f"a {type(self._loader).__name__} has no length")
        return len(self._loader)
