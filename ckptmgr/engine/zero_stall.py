# SPDX-License-Identifier: Apache-2.0
"""Saves that do not stop the training for the copy: it is made during forward and backward.

Parameters do not change then. `save()` describes the state, copies small tensors and those that
change in the forward pass, and returns. The thread of the save copies the rest. The copy must be
complete before the next update in place: `before_update()` waits for that (or makes the copy, if no
thread has begun it), and every torch optimizer of the process calls it before its step.

* An update that does not wait fails the save with the name of the tensor, as far as `change_guard`
  detects it.
* Immutable arrays are not copied at all (a worker process needs a copy, which then delays no
  update).
* Snapshots for `rollback` are copied at once all the same.
* A copy that fails is a failed save like any other. `handle.staged` is done in every case: the
  arrays are free again.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import traceback
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from functools import partial

from ckptmgr.core.errors import SaveFailed
from ckptmgr.core.handle import SaveHandle
from ckptmgr.engine.change_guard import Guarded, guard
from ckptmgr.engine.staged_state import StagedState
from ckptmgr.engine.staging import StagingPool
from ckptmgr.formats.tensor import Item, Tensor
from ckptmgr.state.items import tensors_in, tensors_of

_GIVEN_UP = "given up before it was copied"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """The division of the items of a state.

    Attributes:
        staged: The items that get a copy.
        late: Index among the tensors of `staged` to a tensor that may wait.
        at_once: Indices of the other tensors.
        direct: Index among all items to an immutable array, which is read at its own place.
    """

    staged: list[Item]
    late: dict[int, Guarded]
    at_once: list[int]
    direct: dict[int, Guarded]


def _plan(items: Sequence[Item], changing: Container[int], *, copies_all: bool) -> _Plan:
    plan = _Plan(staged=[], late={}, at_once=[], direct={})
    count = 0
    for index, item in enumerate(items):
        if not isinstance(item, Tensor):
            start, count = count, count + len(tensors_of(item))
            plan.staged.append(item)
            plan.at_once.extend(range(start, count))
            continue
        guarded = guard(item, changing=changing)
        if guarded is None:
            plan.staged.append(item)
            plan.at_once.append(count)
        elif guarded.is_immutable and not copies_all:
            plan.direct[index] = guarded
            continue
        else:
            plan.staged.append(guarded.tensor)
            plan.late[count] = guarded
        count += 1
    return plan


class DeferredState:
    """A state that is being copied. Made by `defer`; safe to use from several threads.

    Attributes:
        staged: The copied part.
        handle: Of its save; `handle.staged` is done when the copying is over, also after a failure.
    """

    def __init__(self, items: Sequence[Item], staged: StagedState, plan: _Plan) -> None:
        self._count = len(items)
        self._direct = {index: guarded.tensor for index, guarded in plan.direct.items()}
        self.staged = staged
        self.handle = SaveHandle()
        self._sources = tensors_in(plan.staged)
        self._at_once = plan.at_once
        self._late = plan.late
        self._lock = threading.Lock()
        self._is_begun = False
        self._is_released = False
        self._failure: BaseException | None = SaveFailed(_GIVEN_UP)  # until it is copied
        self._started_at = time.perf_counter()

    @property
    def items(self) -> list[Item]:
        """The items to save, in the given order; complete after `wait`, gone after the release."""
        copies, direct = iter(self.staged.items), self._direct
        return [direct[i] if i in direct else next(copies) for i in range(self._count)]

    @property
    def size_bytes(self) -> int:
        """Bytes of the copy."""
        return self.staged.size_bytes

    @property
    def has_more(self) -> bool:
        """Whether tensors are left to copy after `copy_at_once`."""
        return bool(self._late)

    def copy_at_once(self) -> None:
        """Copy the tensors that may not wait."""
        self.staged.fill(self._sources, only=self._at_once)

    def copy(self) -> None:
        """Copy the rest in the first call; do nothing in other calls and after the release.

        Raises:
            KeyboardInterrupt: The save fails with it, too.
        """
        is_ours = False  # an interrupt at any line must also end the copy, or others wait forever
        try:
            with self._lock:
                if self._is_begun:
                    return
                self._is_begun = is_ours = True
            self._copy_late()
            self._failure = None
        except BaseException as error:
            if is_ours:
                self._failure = error
            traceback.clear_frames(error.__traceback__)  # they hold the arrays
            if not isinstance(error, Exception):
                raise
        finally:
            if is_ours:
                try:
                    self._finish_copy()
                except BaseException:
                    if not self.handle.staged.done():
                        self._finish_copy()
                    raise

    def wait(self) -> None:
        """Return when the copy is complete.

        Raises:
            SaveFailed: An array was changed too early; names it.
            BaseException: The copy failed.
        """
        self.wait_until_copied()
        if self._failure is not None:
            raise self._failure

    def wait_until_copied(self) -> None:
        """Return when the copying has ended or failed: the caller may change the arrays."""
        # Do not only wait: the copying thread may run late or never.
        self.copy()
        self.handle.staged.result()

    def release(self) -> None:
        """Give memory and arrays back once no copy is in progress. Calling it again is fine."""
        with self._lock:
            self._is_released = True
            is_begun, self._is_begun = self._is_begun, True
        if not is_begun:
            self._finish_copy()
        self.handle.staged.result()
        self._count, self._direct = 0, {}
        self.staged.release()

    def _copy_late(self) -> None:
        sources = list(self._sources)
        for index in self._late:
            sources[index] = self._unless_released(sources[index])
        self.staged.fill(sources, only=list(self._late))
        copies = tensors_in(self.staged.items)
        for index, guarded in self._late.items():
            is_changed = guarded.is_counted_as_changed()
            is_changed = is_changed or guarded.differs_from(copies[index].content)
            _refuse(guarded, is_changed=is_changed)

    def _finish_copy(self) -> None:
        self._sources, self._late = [], {}  # perhaps the last references to the arrays
        self.handle.stats.stage_s = time.perf_counter() - self._started_at
        self.handle.staged.set_result(None)

    def _unless_released(self, tensor: Tensor) -> Tensor:
        return Tensor(tensor.spec, partial(self._content, tensor.content))

    def _content(self, content: Callable[[], memoryview]) -> memoryview:
        if self._is_released:
            raise SaveFailed(_GIVEN_UP)
        return content()


def defer(
    items: Sequence[Item],
    pool: StagingPool,
    *,
    changing: Container[int] = (),
    copies_all: bool = False,
) -> DeferredState:
    """Return a state of which only the tensors that may not wait are copied yet.

    Items that are no tensors are copied at once. `changing` has the addresses of torch storages
    that change in the forward pass. With `copies_all` immutable arrays are copied, too, for another
    process.

    Raises:
        StagingExhausted: They do not fit. Nothing is left behind.
        BaseException: From a content that is copied at once.
    """
    plan = _plan(items, changing, copies_all=copies_all)
    staged = pool.reserve(plan.staged)
    try:
        deferred = DeferredState(items, staged, plan)
    except BaseException:
        staged.release()
        raise
    try:
        deferred.copy_at_once()
        if not deferred.has_more:
            deferred.copy()
    except BaseException:
        deferred.release()
        raise
    return deferred


class Updates:
    """The copies that must be complete before the state is changed in place."""

    def __init__(self) -> None:
        self._pending: list[DeferredState] = []
        self._unhook: Callable[[], object] | None = None

    def add(self, deferred: DeferredState) -> None:
        """Add a state that is being copied; from now on torch optimizers wait, too."""
        self._pending = [d for d in self._pending if not d.handle.durable.done()]
        self._pending.append(deferred)
        if self._unhook is None and "torch" in sys.modules:
            from ckptmgr.engine.torch_hooks import wait_before_steps

            self._unhook = wait_before_steps(self)

    def wait(self) -> None:
        """Return when all arrays may be changed; failures are raised by the saves."""
        for deferred in list(self._pending):
            started = time.perf_counter()
            deferred.wait_until_copied()
            deferred.handle.stats.blocked_s += time.perf_counter() - started
            with contextlib.suppress(ValueError):  # another thread waited, too
                self._pending.remove(deferred)

    def close(self) -> None:
        """Remove the hook from the optimizers."""
        unhook, self._unhook = self._unhook, None
        if unhook is not None:
            unhook()

    def forget_parent(self) -> None:
        """Forget all copies; for a forked child, in which no thread copies."""
        self._pending = []


def changing_in_forward(state: object) -> frozenset[int]:
    """Return addresses of the torch storages that change in the forward pass: module buffers."""
    if "torch" not in sys.modules:
        return frozenset()
    from ckptmgr.engine.torch_hooks import buffers_of_modules

    return buffers_of_modules(state)


def _refuse(guarded: Guarded, *, is_changed: bool) -> None:
    if is_changed:
        raise SaveFailed(
            f"{guarded.tensor.spec.name!r} changed before it was copied; nothing was published",
            hint="call manager.before_update() before the optimizer step, and before any other change of the state in"
            " place; or save without zero_stall",
        )
