# SPDX-License-Identifier: Apache-2.0
"""Runs, power cuts, full disks, deaths, damage and rollbacks in any order; promises must hold after each."""

from __future__ import annotations

import errno
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ckptmgr import (
    Checkpoint,
    CheckpointManager,
    Resume,
    Resumption,
    StoreLocked,
    UnprovenCheckpoint,
)
from tests.faults.training import KEYS, RUNS, SERIES, Trainer, state_of, value_of
from tests.support import api
from tests.support.crashmodel import FailingDisk, ModelDisk, Order, PowerCut
from tests.support.damage import flip_bit, manifest_of, truncate

POLICIES = ("all", "last(1)", "last(2)", "last(1) | every(3)", "best(1, loss, max) | last(1)")
policies = st.sampled_from(POLICIES)
orders = st.sampled_from(Order)


@dataclass
class Known:
    """Knowledge of the machine about the directory.

    Attributes:
        intact: Name to value of the checkpoints that were promised, oldest commit first.
        spoiled: Names that were damaged from outside: they may be listed, but never load.
        writers: Name to the run that wrote it.
        pinned: Names that retention must not touch.
        undurable: Names that are there, but that nobody promised: their writer died or got an error.
        lone: Names whose data was deleted: their manifests stay for a while, as missing or as leftovers.
        removed: Name to value of the checkpoints that retention removed. After a fault their manifests
            may be there: leftovers, as long as something newer is intact.
    """

    intact: dict[str, float] = field(default_factory=dict)
    spoiled: set[str] = field(default_factory=set)
    writers: dict[str, int] = field(default_factory=dict)
    pinned: set[str] = field(default_factory=set)
    undurable: set[str] = field(default_factory=set)
    lone: set[str] = field(default_factory=set)
    removed: dict[str, float] = field(default_factory=dict)

    @property
    def unusable(self) -> set[str]:
        """Names that may be listed or skipped, but never load."""
        return self.spoiled | self.lone


@dataclass
class Run:
    """One process that trains."""

    number: int
    manager: CheckpointManager
    lineage: set[int]
    resumed_from: str | None


class Training(RuleBasedStateMachine):
    """A directory over many runs."""

    def __init__(self) -> None:
        super().__init__()
        self.disk = ModelDisk()
        self.known = Known()
        self.run: Run | None = None
        self.runs: list[set[int]] = []
        self.value = 0.0
        self.step = 0
        self.key: bytes | None = None

    @initialize(key=st.sampled_from(KEYS))
    def begin(self, key: bytes | None) -> None:
        self.key = key

    def trainer(self, keep: str = "all", failing: FailingDisk | None = None) -> Trainer:
        return Trainer(self.disk, fs=failing, key=self.key, keep=keep)

    @precondition(lambda self: self.run is None)
    @rule(keep=policies)
    def start(self, keep: str) -> None:
        manager = self.trainer(keep).manager()
        resumption = self.resumed(manager)
        newest = next(reversed(self.known.intact), None)
        found = resumption.checkpoint
        assert (None if found is None else found.name) == newest
        assert {skip.checkpoint.name for skip in resumption.skipped} <= self.known.unusable
        self.step = resumption.step
        self.run = self.new_run(manager, newest)

    def resumed(self, manager: CheckpointManager) -> Resumption:
        """Resume; start anew where only files without a manifest are left beside a key."""
        try:
            return manager.resume()
        except UnprovenCheckpoint:
            assert self.key is not None
            assert not self.known.intact
            return manager.resume(None, Resume(start="new"))

    def new_run(self, manager: CheckpointManager, resumed_from: str | None) -> Run:
        number = len(self.runs)
        parent = None if resumed_from is None else self.known.writers[resumed_from]
        lineage = {number} if parent is None else {number, *self.runs[parent]}
        self.runs.append(lineage)
        return Run(number, manager, lineage, resumed_from)

    @precondition(lambda self: self.run is not None)
    @rule(forward=st.integers(-2, 3))
    def save(self, forward: int) -> None:
        assert self.run is not None
        handle = self.save_step(self.run, forward)
        self.promised(self.run, handle)

    def save_step(self, run: Run, forward: int) -> Checkpoint:
        self.value += 1
        self.step = max(0, self.step + forward)
        metrics = {"loss": self.value % 3}
        handle = run.manager.save(self.step, state_of(self.value), metrics=metrics)
        assert handle is not None
        return handle.wait()

    def promised(self, run: Run, checkpoint: Checkpoint) -> None:
        assert checkpoint.name not in self.known.intact
        self.known.writers[checkpoint.name] = run.number
        self.retained(run, self.listed())
        self.known.intact[checkpoint.name] = self.value
        self.known.undurable.clear()

    def retained(self, run: Run, listed: dict[str, Checkpoint]) -> None:
        """Forget what retention removed, if it was allowed to."""
        for name in set(self.known.intact) - set(listed):
            assert self.known.writers[name] in run.lineage
            assert name not in self.known.pinned
            assert name != run.resumed_from
            self.known.removed[name] = self.known.intact.pop(name)
        self.known.spoiled &= set(listed)

    def listed(self) -> dict[str, Checkpoint]:
        found = self.trainer().store().scan()
        unfinished = (api.State.LEFTOVER, api.State.WRITING, api.State.MISSING)
        return {c.name: c for c in found if c.state not in unfinished}

    @precondition(lambda self: self.run is not None)
    @rule(
        forward=st.integers(0, 2), after=st.integers(0, 40), order=orders, which=st.integers(0, 50)
    )
    def save_and_cut(self, forward: int, after: int, order: Order, which: int) -> None:
        assert self.run is not None
        is_promised = self.is_saved_before_cut(self.run, forward, after)
        self.cut(order, which)
        self.found_after_fault(self.run, is_promised=is_promised)
        self.known.undurable.clear()  # content that survived a power cut stays
        self.run = None

    @precondition(lambda self: self.run is not None)
    @rule(forward=st.integers(0, 2), after=st.integers(0, 40))
    def save_and_die(self, forward: int, after: int) -> None:
        assert self.run is not None
        is_promised = self.is_saved_before_cut(self.run, forward, after)
        self.disk = self.disk.restart()
        self.found_after_fault(self.run, is_promised=is_promised)
        self.run = None

    def is_saved_before_cut(self, run: Run, forward: int, after: int) -> bool:
        self.disk.cut_after(after)
        try:
            self.save_step(run, forward)
        except PowerCut:
            return False
        return True

    def cut(self, order: Order, which: int) -> None:
        states = list(self.disk.crash_states(order))
        self.disk = states[which % len(states)]
        listed = self.listed()
        for name in self.known.undurable - set(listed):
            self.known.intact.pop(name, None)
        self.known.undurable.clear()

    def found_after_fault(self, run: Run, *, is_promised: bool) -> None:
        """Find out whether the save in flight is there; without it nothing may be gone."""
        listed = self.listed()
        new = [name for name in listed if name not in self.known.intact.keys() | self.known.spoiled]
        assert len(new) <= 1
        assert new or not is_promised
        if not new:
            assert set(self.known.intact) <= set(listed)
            return
        self.known.writers[new[0]] = run.number
        self.retained(run, listed)
        self.known.intact[new[0]] = self.value
        self.known.undurable = set() if is_promised else {new[0]}

    @precondition(lambda self: self.run is None)
    @rule(
        keep=policies,
        call=st.integers(1, 60),
        error=st.sampled_from([errno.ENOSPC, errno.EIO, errno.EROFS, errno.EMFILE]),
        is_lasting=st.booleans(),
    )
    def run_on_a_failing_disk(self, keep: str, call: int, error: int, is_lasting: bool) -> None:
        calls = FailingDisk(self.disk)
        with self.trainer(keep, calls).manager() as manager:
            self.step = self.resumed(manager).step
        failing = FailingDisk(
            self.disk, error=error, call=len(calls.calls) + call, is_lasting=is_lasting
        )
        with self.trainer(keep, failing).manager() as manager:
            found = self.resumed(manager).checkpoint
            run = self.new_run(manager, None if found is None else found.name)
            is_promised = self.is_saved(run, error)
        self.found_after_fault(run, is_promised=is_promised)

    def is_saved(self, run: Run, error: int) -> bool:
        """Save, and return whether that worked; the only legal failure is that of the disk."""
        try:
            self.save_step(run, 1)
        except OSError as failure:
            if failure.errno != error:
                raise
            return False
        return True

    @precondition(lambda self: self.run is not None)
    @rule()
    def end(self) -> None:
        assert self.run is not None
        self.run.manager.close()
        self.run = None

    @rule()
    def die(self) -> None:
        self.disk = self.disk.restart()
        self.run = None

    @rule(order=orders, which=st.integers(0, 50))
    def cut_at_rest(self, order: Order, which: int) -> None:
        self.cut(order, which)
        self.run = None

    @precondition(lambda self: self.run is not None)
    @rule()
    def second_writer_is_refused(self) -> None:
        try:
            self.trainer().manager().resume()
        except StoreLocked:
            return
        raise AssertionError("two writers")

    @precondition(lambda self: self.run is not None and self.known.intact)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        assert self.run is not None
        name = data.draw(st.sampled_from(sorted(self.known.intact)))
        self.run.manager.pin(name)
        self.known.pinned.add(name)

    @precondition(lambda self: self.known.intact)
    @rule(data=st.data(), how=st.sampled_from(["flip", "cut", "cut manifest", "flip manifest"]))
    def damage(self, data: st.DataObject, how: str) -> None:
        name = data.draw(st.sampled_from(sorted(self.known.intact)))
        if how == "flip":
            flip_bit(self.disk, name, data.draw(st.integers(-200, 199)))
        elif how == "cut":
            truncate(self.disk, name, data.draw(st.integers(0, 200)))
        elif how == "cut manifest":
            truncate(self.disk, manifest_of(name), data.draw(st.integers(0, 300)))
        else:
            flip_bit(self.disk, manifest_of(name), 5)
        self.spoil(name)

    @precondition(lambda self: self.known.intact)
    @rule(data=st.data(), is_manifest=st.booleans())
    def delete(self, data: st.DataObject, is_manifest: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.known.intact)))
        self.disk.unlink(RUNS / (manifest_of(name) if is_manifest else name))
        self.disk.settle()
        self.spoil(name)
        if not is_manifest:
            self.known.spoiled.discard(name)  # gone for good, and the name may be used again
            self.known.lone.add(name)

    def spoil(self, name: str) -> None:
        del self.known.intact[name]
        self.known.spoiled.add(name)
        self.known.pinned.discard(name)
        newest = max(self.known.intact.values(), default=-1.0)
        self.known.lone |= {one for one, value in self.known.removed.items() if value > newest}

    @invariant()
    def what_was_promised_is_listed_and_loads(self) -> None:
        listed = self.listed()
        for name in self.known.intact:
            assert listed[name].state is api.State.OK, listed[name]
        assert set(listed) <= self.known.intact.keys() | self.known.unusable
        manager = self.trainer().manager()
        for name, value in self.known.intact.items():
            assert value_of(manager.load(name)) == value

    @invariant()
    def latest_is_intact_as_far_as_known(self) -> None:
        latest = self.trainer().manager().latest()
        newest = next(reversed(self.known.intact), None)
        assert latest is None or latest.name in self.known.intact.keys() | self.known.spoiled
        assert latest is not None or newest is None

    def teardown(self) -> None:
        disk = self.disk.restart()
        with Trainer(disk, key=self.key).manager() as manager:
            self.resumed(manager)
            manager.save(10_000, state_of(0.0))
        names = set(disk.list(RUNS)) - {f".{SERIES}.lease", f".{SERIES}.starts"}
        damaged = {kept for name in self.known.unusable for kept in (name, manifest_of(name))}
        data = {name for name in names - damaged if name.endswith(".ckpt")}
        assert names - damaged == data | {manifest_of(name) for name in data}


TestTraining = Training.TestCase
TestTraining.settings = settings(max_examples=30, stateful_step_count=20, deadline=None)
