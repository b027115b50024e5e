# SPDX-License-Identifier: Apache-2.0
"""A disk in memory that knows every state a power cut may leave it in.

```python
disk = ModelDisk()
disk.make_directory(RUNS, mode=0o755)
for crash in every_crash(disk, lambda disk: Store(disk, RUNS).save(...), order=Order.WEAK):
    assert is_sound(Store(crash.disk, RUNS)), crash
```

* Content written since the last `sync` of a file may survive wholly, partly or not at all; directory entries changed
  since the last `sync_directory` likewise (`Order`). Reading is always consistent while the power is on.
* `disk.acknowledge("step 3")` inside the operation under test notes a promise; the disks of later crashes carry it in
  `acknowledged`, and the test checks that it is kept.
* Not modelled: stale bytes of other files in new blocks (ext4 `data=writeback`), bit rot, symbolic links, permissions, rmdir.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tests.support.diskstate import Order
from tests.support.failingdisk import FailingDisk, Failure, every_failure
from tests.support.modeldisk import ModelDisk, Operation, PowerCut

__all__ = [
    "Crash",
    "FailingDisk",
    "Failure",
    "ModelDisk",
    "Operation",
    "Order",
    "PowerCut",
    "every_crash",
    "every_failure",
    "every_kill",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Crash:
    """One disk after one crash.

    Attributes:
        after: How many operations of the run had been done.
        operation: The last of them, in words.
        is_finished: Whether the run had returned.
        disk: The remains.
    """

    after: int
    operation: str
    is_finished: bool
    disk: ModelDisk

    def __str__(self) -> str:
        end = " and the return" if self.is_finished else ""
        return f"crash after operation {self.after} ({self.operation}){end}:\n{self.disk.tree()}"


def every_crash(
    disk: ModelDisk, run: Callable[[ModelDisk], object], *, order: Order, tears: int = 2
) -> Iterator[Crash]:
    """Run on a copy of `disk` and yield each distinct disk that a power cut at any moment may leave.

    The run happens once; a photograph is taken before each operation, as a cut there would find it.
    """
    seen = set()
    for moment in _moments(disk, run):
        for left in moment.disk.crash_states(order, tears=tears):
            if (state := (left.state(), left.acknowledged, moment.is_finished)) not in seen:
                seen.add(state)
                yield _with_disk(moment, left)


def every_kill(disk: ModelDisk, run: Callable[[ModelDisk], object]) -> Iterator[Crash]:
    """Run on a copy of `disk` and yield the disk that the death of the process leaves before each operation.

    Nothing is lost then, but unsynced bytes stay so: a power cut may follow.
    """
    for moment in _moments(disk, run):
        yield _with_disk(moment, moment.disk.restart())


def _moments(disk: ModelDisk, run: Callable[[ModelDisk], object]) -> list[Crash]:
    moments: list[Crash] = []
    running = disk.copy()
    running.operations = ()

    def photograph(*, is_finished: bool = False) -> None:
        done = len(running.operations)
        last = str(running.operations[-1]) if done else "nothing"
        photo = running.copy()
        moments.append(Crash(after=done, operation=last, is_finished=is_finished, disk=photo))

    running.before_each_operation(photograph)
    run(running)
    photograph(is_finished=True)
    return moments


def _with_disk(moment: Crash, disk: ModelDisk) -> Crash:
    return Crash(
        after=moment.after,
        operation=moment.operation,
        is_finished=moment.is_finished,
        disk=disk,
    )
