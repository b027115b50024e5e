# SPDX-License-Identifier: Apache-2.0
"""However a loop saves, waits and updates: the published state is that of its save(), and misuse is never silent."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptmgr import CheckpointConfig, SaveFailed, SaveHandle, SaveSuperseded
from tests.support.crashmodel import ModelDisk
from tests.support.held_staging import HeldStaging
from tests.support.runs import manager_on

SIZE = 20_000
Action = Literal["save", "update", "update without waiting", "copy", "wait"]
ACTIONS: list[Action] = ["save", "update", "update without waiting", "copy", "wait"]
TOLD = (SaveFailed, SaveSuperseded)


class Loop:
    """A training loop that follows orders, and notes the right content of each save."""

    def __init__(self, back_pressure: Any, weights: Any, held: HeldStaging) -> None:
        config = CheckpointConfig(
            async_save=True,
            zero_stall=True,
            back_pressure=back_pressure,
            on_error="warn",
            keep_checkpoint_max=100,
        )
        self.manager = manager_on("/runs", config, fs=ModelDisk())
        self.weights = weights
        self.held = held
        self.value = 0
        self.saves: list[tuple[int, SaveHandle, int]] = []
        self.uncopied: set[int] = set()
        self.misused: set[int] = set()

    def act(self, action: Action) -> None:
        match action:
            case "save":
                self.let_go()
                step = len(self.saves) + 1
                handle = self.manager.save(step, {"w": self.weights})
                if handle is not None:
                    self.saves.append((step, handle, self.value))
                    self.uncopied = {step}
            case "update":
                self.manager.before_update()
                self.uncopied.clear()
                self.change()
            case "update without waiting":
                self.misused |= self.uncopied
                self.change()
            case "copy":
                self.let_go()
            case "wait":
                self.let_go()
                self.manager.wait()

    def let_go(self) -> None:
        # Not waited for: what follows happens while the copy is made.
        self.held.let_go()
        self.uncopied.clear()

    def change(self) -> None:
        self.value += 1
        self.weights += 1

    def end(self) -> None:
        self.let_go()
        self.manager.close()


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@given(
    actions=st.lists(st.sampled_from(ACTIONS), max_size=10),
    back_pressure=st.sampled_from(["wait", "skip", "coalesce"]),
)
def test_published_states_are_those_of_their_saves_and_misuse_is_told(
    kind: str, actions: list[Action], back_pressure: str
) -> None:
    weights = np.zeros(SIZE) if kind == "numpy" else pytest.importorskip("torch").zeros(SIZE)
    with pytest.MonkeyPatch.context() as patch:
        loop = Loop(back_pressure, weights, HeldStaging(patch))
        for action in actions:
            loop.act(action)
        loop.end()
    published = {checkpoint.step for checkpoint in loop.manager.checkpoints()}
    for step, handle, value in loop.saves:
        failure = handle.durable.exception(0)
        assert (failure is None) == (step in published)
        assert failure is None or isinstance(failure, TOLD)
        if failure is None:
            state: Any = loop.manager.load(step)
            assert set(np.unique(np.asarray(state["w"])).tolist()) == {float(value)}
        # NumPy arrays are copied at once, so no update of them comes too early.
        assert kind == "numpy" or step not in loop.misused or failure is not None
