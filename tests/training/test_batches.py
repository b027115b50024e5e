# SPDX-License-Identifier: Apache-2.0
"""`CheckpointManager.batches`: a cut run gives the batches and the random numbers of an uncut one."""

from __future__ import annotations

import itertools
import queue
import random
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptmgr import (
    CheckpointConfig,
    CheckpointManager,
    CkptmgrError,
    Ranks,
    Resume,
    StateMismatch,
    UnsupportedState,
    load_state,
)
from ckptmgr.training.loaders import fingerprint_of
from tests.parallel.ranks import Meeting, Seat, run_ranks

PER_EPOCH, LAST = 4, 10
ROWS = np.arange(12.0)
EDGES = {"inside": 6, "last batch": 8, "first batch": 5, "very first batch": 1}


class Shuffled:
    """A plain iterable with a generator of its own; its batches also draw from the global one."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(5)

    def __iter__(self) -> Iterator[np.ndarray]:
        order = self.rng.permutation(12)
        for part in np.split(order, PER_EPOCH):
            yield ROWS[part] + np.random.random()

    def __len__(self) -> int:
        return PER_EPOCH


class Global:
    """A plain iterable that draws its order from the global generator of Python."""

    def __iter__(self) -> Iterator[np.ndarray]:
        order = random.sample(range(12), 12)
        yield from np.split(ROWS[order], PER_EPOCH)


class Stateful:
    """A loader that says where it stands, and draws when it is asked to go on."""

    def __init__(self) -> None:
        self.epoch, self.place, self.loaded = 0, 0, 0

    def __iter__(self) -> Iterator[np.ndarray]:
        np.random.random()
        return self._rest()

    def _rest(self) -> Iterator[np.ndarray]:
        first, self.place = self.place, 0
        for index in range(first, PER_EPOCH):
            self.place = index + 1
            yield ROWS[index :: index + 1 + self.epoch]
        self.epoch, self.place = self.epoch + 1, 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.place, self.loaded = state["epoch"], state["place"], 1


def torch_loader(**options: Any) -> Callable[[], Any]:
    def made() -> Any:
        torch: Any = pytest.importorskip("torch")
        own = options.get("generator")
        made_own = {"generator": torch.Generator().manual_seed(own)} if own else {}
        return torch.utils.data.DataLoader(
            torch.arange(12.0), 3, shuffle=True, **{**options, **made_own}
        )

    return made


class Sampler:
    """Like torch's DistributedSampler: its order is that of its epoch number."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class Distributed:
    def __init__(self) -> None:
        self.sampler = Sampler()

    def __iter__(self) -> Iterator[np.ndarray]:
        order = np.random.default_rng(self.sampler.epoch).permutation(12)
        yield from np.split(ROWS[order], PER_EPOCH)


class Advancing(Distributed):
    """It advances its epoch number itself, as the loaders of Accelerate do."""

    def __iter__(self) -> Iterator[np.ndarray]:
        yield from super().__iter__()
        self.sampler.epoch += 1


class Late:
    """A sampler that makes its generator in its first pass, as those of Accelerate do."""

    def __init__(self) -> None:
        self.rng: random.Random | None = None

    def __iter__(self) -> Iterator[np.ndarray]:
        self.rng = self.rng or random.Random(3)
        yield from np.split(ROWS[self.rng.sample(range(12), 12)], PER_EPOCH)


class Ahead:
    """Fetches a batch before it gives the last one, as the loaders of Accelerate do."""

    use_stateful_dataloader = False

    def __iter__(self) -> Iterator[np.ndarray]:
        fetched = (ROWS[index::PER_EPOCH] + np.random.random() for index in range(PER_EPOCH))
        last = next(fetched)
        for batch in fetched:
            yield last
            last = batch
        yield last

    def state_dict(self) -> object:
        raise AttributeError("it has the method, and no state")

    def load_state_dict(self, state: object) -> None:
        raise AttributeError("nor this one")


class Restarting:
    """Its own iterator, which every `iter` begins anew, as the prepared loaders of Ray are."""

    def __iter__(self) -> Iterator[np.ndarray]:
        self.rest: list[np.ndarray] = np.split(ROWS[random.sample(range(12), 12)], PER_EPOCH)
        return self

    def __next__(self) -> np.ndarray:
        if not self.rest:
            raise StopIteration
        return self.rest.pop(0)


LOADERS: dict[str, Callable[[], Any]] = {
    "late generator": Late,
    "one batch ahead": Ahead,
    "its own iterator": Restarting,
    "own generator": Shuffled,
    "global generator": Global,
    "stateful": Stateful,
    "advancing": Advancing,
    "torch": torch_loader(),
    "torch with a generator": torch_loader(generator=3),
    "torch with two workers": torch_loader(num_workers=2),
    "torch with workers and a generator": torch_loader(num_workers=2, generator=3),
}


def seed() -> None:
    random.seed(1)
    np.random.seed(1)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(1)


Steps = list[list[float]]


def step_of(batch: Any) -> list[float]:
    """Return the input of a step: its batch, and a draw from each global generator."""
    rows = batch["x"][0] if isinstance(batch, dict) else batch
    seen = [*np.asarray(rows).tolist(), random.random(), float(np.random.random())]
    if torch := sys.modules.get("torch"):
        seen.append(float(torch.rand(())))
    return seen


def train(
    loader: Iterable[Any],
    last: int,
    manager: CheckpointManager | None = None,
    *,
    every: bool = True,
    seen: Steps | None = None,
) -> Steps:
    """Run to step `last` and return the inputs of the steps; the state is a number that epochs change too."""
    seen = [] if seen is None else seen
    state = {"epochs": np.zeros(1)}
    step = 0 if manager is None else manager.resume(state).step
    while step < last:
        for batch in loader if manager is None else manager.batches(loader):
            step += 1
            seen.append([*step_of(batch), float(state["epochs"][0])])
            if manager is not None:
                manager.step_end(step, state)
            if step == last:
                break
        else:
            state["epochs"] += random.random()
    return seen


def saving(directory: Path, interval: int = 1, **options: Any) -> CheckpointManager:
    config = CheckpointConfig(save_checkpoint_steps=interval, keep="last(2)", **options)
    return CheckpointManager(directory, config)


IN_PROCESS = [kind for kind in LOADERS if "workers" not in kind]
CASES = [
    *itertools.product(IN_PROCESS, EDGES, (1, 100)),  # saved by the policy, or at the exit
    ("torch with two workers", "inside", 1),  # each pass starts two processes
    ("torch with workers and a generator", "last batch", 1),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "edge", "interval"), CASES)
def test_resumed_run_sees_what_an_uncut_run_sees(
    kind: str, edge: str, interval: int, tmp_path: Path
) -> None:
    make, cut = LOADERS[kind], EDGES[edge]
    make()  # imports torch, so that it is seeded, too
    seed()
    expected = train(make(), LAST)
    seed()
    with saving(tmp_path, interval) as manager:
        first = train(make(), cut, manager)
    random.seed(99)
    np.random.seed(99)
    with saving(tmp_path, interval) as manager:
        assert first + train(make(), LAST, manager) == expected


def test_stateful_loader_is_not_skipped_through(tmp_path: Path) -> None:
    with saving(tmp_path) as manager:
        train(Stateful(), 6, manager)
    loader = Stateful()
    with saving(tmp_path) as manager:
        train(loader, 7, manager)
    assert loader.loaded == 1


def test_save_between_passes_goes_on_with_the_next_pass(tmp_path: Path) -> None:
    def run(directory: Path, cut: int | None) -> Steps:
        seed()
        seen: Steps = []
        for part in ([cut] if cut else []) + [3]:
            with saving(directory, 100) as manager:
                state = {"epoch": np.zeros(1)}
                manager.resume(state)
                loader = Shuffled()
                while state["epoch"][0] < part:
                    seen += [step_of(batch) for batch in manager.batches(loader)]
                    state["epoch"] += 1
                    manager.save(int(state["epoch"][0]) * PER_EPOCH, state)
        return seen

    assert run(tmp_path / "cut", 1) == run(tmp_path / "uncut", None)


def test_batch_that_was_fetched_but_not_trained_on_comes_again(tmp_path: Path) -> None:
    seed()
    expected = train(Shuffled(), LAST)
    seed()
    state, seen = {"epochs": np.zeros(1)}, []
    with saving(tmp_path, 100) as manager:
        manager.resume(state)
        for step, batch in enumerate(manager.batches(Shuffled()), start=1):
            if step == 3:
                break
            seen.append([*step_of(batch), 0.0])
            manager.step_end(step, state)
    with saving(tmp_path) as manager:
        assert seen + train(Shuffled(), LAST, manager) == expected


def test_exception_saves_the_batches_of_the_last_ended_step(tmp_path: Path) -> None:
    seed()
    expected = train(Shuffled(), LAST)
    seed()
    seen: Steps = []

    def fail_at_the_third_batch(manager: CheckpointManager) -> None:
        with manager:
            for step, batch in enumerate(manager.batches(Shuffled()), start=1):
                if step == 3:
                    raise RuntimeError("the third batch is bad")
                seen.append([*step_of(batch), 0.0])
                manager.step_end(step, {"epochs": np.zeros(1)})

    with pytest.raises(RuntimeError, match="third batch"):
        fail_at_the_third_batch(saving(tmp_path, 100, exception_save=True))
    with saving(tmp_path) as manager:
        assert seen + train(Shuffled(), LAST, manager) == expected


def test_epoch_of_a_sampler_is_that_of_the_saved_pass(tmp_path: Path) -> None:
    def run(last: int, manager: CheckpointManager) -> list[list[float]]:
        loader, seen = Distributed(), []
        start = manager.resume({"n": 1})
        for epoch in range(start.next_epoch, 3):
            for step, batch in enumerate(manager.batches(loader, epoch=epoch), start.step + 1):
                seen.append(batch.tolist())
                manager.step_end(step, {"n": 1}, epoch=epoch)
                if len(seen) == last:
                    return seen
        return seen

    with saving(tmp_path / "uncut") as manager:
        expected = run(12, manager)
    with saving(tmp_path / "cut") as manager:
        seen = run(6, manager)
    with saving(tmp_path / "cut") as manager:
        assert seen + run(6, manager) == expected
    assert len({tuple(one) for one in expected}) == 12


def epochs_of(manager: CheckpointManager, epochs: int, *, last: int = 99) -> list[Any]:
    """Train in whole epochs, each of which ends with a step; return the drawn batches."""
    loader, seen = Shuffled(), []
    start = manager.resume({"n": 1})
    for epoch in range(start.next_epoch, min(epochs, start.next_epoch + last)):
        seen += [batch.tolist() for batch in manager.batches(loader)]
        manager.step_end(PER_EPOCH * (epoch + 1), {"n": 1}, epoch=epoch)
    return seen


def test_epoch_that_had_ended_at_its_save_does_not_come_again(tmp_path: Path) -> None:
    seed()
    with saving(tmp_path / "uncut") as manager:
        expected = epochs_of(manager, 3)
    seed()
    with saving(tmp_path / "cut") as manager:
        seen = epochs_of(manager, 3, last=2)
    with saving(tmp_path / "cut") as manager:
        assert seen + epochs_of(manager, 3) == expected
    with saving(tmp_path / "cut") as manager:
        assert epochs_of(manager, 3) == []  # the run had ended


@pytest.mark.parametrize("last", [2, 4], ids=["inside", "last batch"])
def test_epoch_in_which_a_run_was_saved_goes_on(last: int, tmp_path: Path) -> None:
    with saving(tmp_path) as manager:
        assert manager.resume({"n": 1}).next_epoch == 0
        for step, _ in enumerate(manager.batches(Shuffled()), start=1):
            manager.step_end(step, {"n": 1}, epoch=6)
            if step == last:
                break
    assert saving(tmp_path).resume({"n": 1}).next_epoch == 6


def test_next_epoch_of_a_run_that_never_said_its_epoch_is_refused(tmp_path: Path) -> None:
    with saving(tmp_path) as manager:
        manager.save(1, {"n": 1})
    found = saving(tmp_path).resume({"n": 1})
    with pytest.raises(ValueError, match=r"ckpt-1.ckpt.* names no epoch: pass epoch= to step_end"):
        _ = found.next_epoch


def test_loader_that_a_shorter_one_has_ended_begins_anew(tmp_path: Path) -> None:
    """The exit saves a step after which `zip` left the second loader."""

    def run(manager: CheckpointManager, epochs: int) -> list[Any]:
        loaders: list[Any] = [Shuffled(), Global()]
        seen = []
        with manager:
            start = manager.resume({"n": 1})
            step = start.step
            for epoch in range(start.next_epoch, epochs):
                passes = [manager.batches(one, name=str(n)) for n, one in enumerate(loaders)]
                for first, second in zip(*passes, strict=False):
                    seen.append([first.tolist(), second.tolist()])
                    step += 1
                    manager.step_end(step, {"n": 1}, epoch=epoch)
        return seen

    seed()
    expected = run(saving(tmp_path / "uncut", 100), 3)
    seed()
    seen = run(saving(tmp_path / "cut", 100), 2)
    assert seen + run(saving(tmp_path / "cut", 100), 3) == expected


@pytest.mark.parametrize("last", [2, 4, 5], ids=["inside", "last batch", "first batch"])
def test_loaders_that_draw_side_by_side_go_on(last: int, tmp_path: Path) -> None:
    """The second one begins when the first one has fetched its batch already."""

    def run(manager: CheckpointManager, last: int) -> list[Any]:
        loaders: list[Any] = [Shuffled(), Shuffled()]
        seen: list[Any] = []
        with manager:
            step = manager.resume({"n": 1}).step
            while step < last:
                passes = [manager.batches(one, name=str(n)) for n, one in enumerate(loaders)]
                for first, second in zip(*passes, strict=False):
                    seen.append([first.tolist(), second.tolist(), np.random.random()])
                    step += 1
                    manager.step_end(step, {"n": 1})
                    if step == last:
                        break
        return seen

    seed()
    expected = run(saving(tmp_path / "uncut"), 9)
    seed()
    seen = run(saving(tmp_path / "cut"), last)
    np.random.seed(7)
    assert seen + run(saving(tmp_path / "cut"), 9) == expected


class Cut(Exception):
    """The run ends here."""


def reported(directory: Path, *, dies_at: int | None = None, breaks: bool = False) -> list[str]:
    """Report the last batch of each epoch, as programs do; return the notes of the error, if any."""
    config = CheckpointConfig(save_checkpoint_steps=PER_EPOCH)
    try:
        with CheckpointManager(directory, config) as manager:
            start = manager.resume({"n": 0})
            step, last = start.step, 0.0 if breaks else None
            for epoch in range(start.next_epoch, 3):
                for batch in manager.batches(Shuffled()):
                    step += 1
                    manager.step_end(step, {"n": step}, epoch=epoch, metrics={"sum": batch.sum()})
                    if step == dies_at:
                        raise Cut
                    if breaks:
                        _ = missing  # type: ignore[name-defined]
                last = batch.sum() if last is None else last  # pyright: ignore[reportPossiblyUnboundVariable] - the subject
    except Cut:
        return []
    except NameError as error:
        return getattr(error, "__notes__", ["none"])
    return []


def test_name_that_an_empty_pass_left_unassigned_is_explained(tmp_path: Path) -> None:
    reported(tmp_path, dies_at=PER_EPOCH)
    (told,) = reported(tmp_path)
    assert "its first pass over 'batches' was empty" in told
    assert "resume(...).metrics" in told


def test_other_missing_names_are_not_explained(tmp_path: Path) -> None:
    reported(tmp_path, dies_at=PER_EPOCH)
    assert reported(tmp_path, breaks=True) == ["none"]


def test_metrics_of_the_saved_step_stand_for_those_of_an_empty_pass(tmp_path: Path) -> None:
    reported(tmp_path, dies_at=PER_EPOCH)
    start = CheckpointManager(tmp_path).resume({"n": 0})
    assert start.is_inside_epoch
    assert start.metrics["sum"] > 0


def test_generator_that_is_named_is_put_back(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)

    class Hidden:
        def __iter__(self) -> Iterator[int]:
            return iter(rng.permutation(12).tolist())

    with saving(tmp_path) as manager:
        passing = manager.batches(Hidden(), random=[rng])
        seen = [next(each := iter(passing)), next(each)]
        manager.save(2, {"n": 1})
        expected = list(each)
    rng.random(7)
    with saving(tmp_path) as manager:
        manager.resume({"n": 1})
        assert list(manager.batches(Hidden(), random=[rng])) == expected
    assert len({*seen, *expected}) == 12


def test_arguments_of_a_generator_function_are_put_back(tmp_path: Path) -> None:
    def batches(rng: np.random.Generator) -> Iterator[int]:
        yield from rng.permutation(12).tolist()

    with saving(tmp_path) as manager:
        each = iter(manager.batches(batches(np.random.default_rng(3))))
        next(each)
        manager.save(1, {"n": 1})
        expected = list(each)
    with saving(tmp_path) as manager:
        manager.resume({"n": 1})
        assert list(manager.batches(batches(np.random.default_rng(4)))) == expected


def test_checkpoint_of_loaders_loads_without_them(tmp_path: Path) -> None:
    state = {"w": np.ones(3)}
    with saving(tmp_path) as manager:
        next(iter(manager.batches(Shuffled())))
        manager.save(1, state)
        latest = manager.latest()
        assert latest is not None
        np.testing.assert_equal(manager.load(1), state)
    np.testing.assert_equal(load_state(latest.path), state)


def test_run_that_never_asks_for_batches_saves_what_it_did_before(tmp_path: Path) -> None:
    with saving(tmp_path) as manager:
        manager.resume({"n": 1})
        manager.save(1, {"n": 1})
    assert b"ckptmgr.data" not in (tmp_path / "ckpt-1.ckpt").read_bytes()


def test_places_stay_saved_until_they_are_used(tmp_path: Path) -> None:
    seed()
    with saving(tmp_path) as manager:
        first = train(Shuffled(), 6, manager)
    with saving(tmp_path) as manager:
        manager.resume({"epochs": np.zeros(1)})
        manager.save(7, {"epochs": np.ones(1)})
    seed()
    expected = train(Shuffled(), 7)
    with saving(tmp_path) as manager:
        manager.resume({"epochs": np.zeros(1)})
        batch = next(iter(manager.batches(Shuffled())))
    assert batch.tolist() == expected[6][:3]
    assert len(first) == 6


def test_new_start_forgets_the_places(tmp_path: Path) -> None:
    with saving(tmp_path) as manager:
        train(Shuffled(), 6, manager)
    with saving(tmp_path) as manager:
        manager.resume({"epochs": np.zeros(1)})
        manager.resume({"epochs": np.zeros(1)}, Resume(start="new"))
        assert len(list(manager.batches(Shuffled()))) == PER_EPOCH


def test_loader_with_fewer_batches_is_refused(tmp_path: Path) -> None:
    with saving(tmp_path) as manager:
        train([[1], [2], [3]], 3, manager)
    with saving(tmp_path) as manager:
        manager.resume({"epochs": np.zeros(1)})
        with pytest.raises(StateMismatch, match=r"'batches' gives 2 batches, but .* after batch 3"):
            list(manager.batches([1, 2]))


def test_loader_with_other_generators_is_refused(tmp_path: Path) -> None:
    with saving(tmp_path) as manager:
        train(Shuffled(), 2, manager)
    with saving(tmp_path) as manager:
        manager.resume({"epochs": np.zeros(1)})
        said = r"draws from no generator, but the checkpoint has loader.rng \(numpy.Generator"
        with pytest.raises(StateMismatch, match=said):
            list(manager.batches([1, 2]))


def test_batches_with_noise_that_come_one_ahead_are_recognised(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for last in (3, 4):
        with saving(tmp_path) as manager:
            train(Ahead(), last, manager)
    assert "is another than in the saved run" not in caplog.text


def test_batch_on_a_device_has_no_fingerprint() -> None:
    torch: Any = pytest.importorskip("torch")
    assert fingerprint_of([torch.ones(1, device="meta")]) is None


def test_loader_that_is_its_own_dataset_is_looked_at_once(tmp_path: Path) -> None:
    loader = Shuffled()
    loader.dataset = loader  # type: ignore[attr-defined]
    with saving(tmp_path) as manager:
        assert len(list(manager.batches(loader))) == PER_EPOCH


def test_loader_of_torch_with_a_state_begins_the_next_pass_without_it(tmp_path: Path) -> None:
    torch: Any = pytest.importorskip("torch")
    loaded: list[object] = []

    class Loader(torch.utils.data.DataLoader):  # type: ignore[misc]
        def state_dict(self) -> dict[str, int]:
            return {"n": 1}

        def load_state_dict(self, state: object) -> None:
            loaded.append(state)

    for _ in range(2):
        with saving(tmp_path) as manager:
            manager.resume({"n": 1})
            assert len(list(manager.batches(Loader(range(4))))) == 4
            manager.save(1, {"n": 1})
    assert loaded == []


def test_loader_with_a_state_gets_it_also_between_passes(tmp_path: Path) -> None:
    for epoch in (1, 2):
        loader = Stateful()
        with saving(tmp_path) as manager:
            manager.resume({"n": 1})
            list(manager.batches(loader))
            manager.save(epoch, {"n": 1})
        assert loader.epoch == epoch


def test_epoch_of_a_part_without_a_number_is_only_set(tmp_path: Path) -> None:
    class Silent:
        epochs: list[int] = []  # noqa: RUF012 - of all

        def set_epoch(self, epoch: int) -> None:
            self.epochs.append(epoch)

        def __iter__(self) -> Iterator[int]:
            return iter([1, 2])

    with saving(tmp_path) as manager:
        assert list(manager.batches(Silent(), epoch=4)) == [1, 2]
        manager.save(1, {"n": 1})
    assert Silent.epochs == [4]


def test_pass_that_was_left_before_a_step_ended_is_not_continued(tmp_path: Path) -> None:
    def run(last: int, directory: Path) -> list[list[float]]:
        seed()
        loader, validation, seen = Shuffled(), Shuffled(), []
        with saving(directory) as manager:
            step = manager.resume({"a": 1}).step
            while step < last:
                for batch in manager.batches(loader):
                    if step % 3 == 2:
                        checked = manager.batches(validation, name="validation")
                        seen += [[step, *one] for one in itertools.islice(checked, 2)]
                    step += 1
                    seen.append([step, *step_of(batch)])
                    manager.step_end(step, {"a": 1})
                    if step == last:
                        break
        return seen

    uncut = run(10, tmp_path / "uncut")
    assert run(4, tmp_path / "cut") + run(10, tmp_path / "cut") == uncut


@pytest.mark.parametrize("is_shared", [False, True], ids=["own generators", "a shared one"])
@pytest.mark.parametrize("first", [1, 3], ids=["continued", "begun"])
def test_loader_that_is_used_steps_after_the_resume_leaves_the_others_alone(
    first: int, is_shared: bool, tmp_path: Path
) -> None:
    def run(last: int, directory: Path) -> list[list[float]]:
        seed()
        loader, other, seen = Shuffled(), Shuffled(), []
        if is_shared:
            other.rng = loader.rng
        with saving(directory) as manager:
            step = manager.resume({"a": 1}).step
            passes = itertools.chain.from_iterable(
                itertools.repeat(manager.batches(other, name="other"))
            )
            while step < last:
                for batch in manager.batches(loader):
                    for one in itertools.islice(passes, 4 if step == first else 0):
                        seen.append([step, *one])
                    if step == 7:
                        seen.append([step, *next(passes)])
                    step += 1
                    seen.append([step, *step_of(batch)])
                    manager.step_end(step, {"a": 1})
                    if step == last:
                        break
        return seen

    uncut = run(14, tmp_path / "uncut")
    assert run(4, tmp_path / "cut") + run(14, tmp_path / "cut") == uncut


def test_batches_of_sparse_and_nested_tensors_are_given(tmp_path: Path) -> None:
    torch: Any = pytest.importorskip("torch")
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    given = [torch.eye(2).to_sparse(), nested, torch.ones(1)]

    def run() -> list[int]:
        with saving(tmp_path) as manager:
            step = manager.resume({"a": 1}).step
            for batch in manager.batches(given):
                manager.step_end(step + 1, {"a": 1})
                return [index for index, one in enumerate(given) if one is batch]
        return []

    assert run() + run() + run() == [0, 1, 2]


def test_two_loaders_at_a_time_need_names(tmp_path: Path) -> None:
    with saving(tmp_path) as manager:
        outer = iter(manager.batches([1, 2]))
        next(outer)
        with pytest.raises(ValueError, match=re.escape("batches(loader, name='validation')")):
            list(manager.batches([3, 4]))
        assert list(manager.batches([3, 4], name="validation")) == [3, 4]
        assert list(outer) == [2]


def test_epoch_without_set_epoch_is_refused(tmp_path: Path) -> None:
    with (
        saving(tmp_path) as manager,
        pytest.raises(ValueError, match="epoch= is for loaders that have set_epoch"),
    ):
        list(manager.batches([1], epoch=1))


@pytest.mark.parametrize("epoch", ["a", -1, 1.5])
def test_epoch_that_is_no_count_is_refused_at_once(epoch: Any, tmp_path: Path) -> None:
    with saving(tmp_path) as manager, pytest.raises(ValueError, match="epoch is an integer from 0"):
        manager.batches(range(3), epoch=epoch)


class Prefetched:
    """Batches that a thread takes ahead of the training."""

    def __init__(self, loader: Iterable[int]) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[int]:
        ready: queue.Queue[int | None] = queue.Queue()

        def fetch() -> None:
            for batch in self._loader:
                ready.put(batch)
            ready.put(None)

        thread = threading.Thread(target=fetch)
        thread.start()
        while (batch := ready.get()) is not None:
            yield batch
        thread.join()


def test_prefetcher_around_batches_is_warned_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    goes_on = threading.Event()

    def waiting() -> Iterator[int]:
        yield from range(2)
        goes_on.wait()

    with saving(tmp_path) as manager:
        for step, _ in enumerate(Prefetched(manager.batches(waiting())), 1):
            manager.step_end(step, {"n": step})
            if step == 2:
                goes_on.set()
    (warning,) = (text for text in caplog.messages if "ahead" in text)
    assert "Put the prefetcher inside: manager.batches(prefetch(loader))" in warning


def test_prefetcher_inside_batches_goes_on_with_the_next_batch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    used = []
    for last in (3, 8):
        with saving(tmp_path) as manager:
            state = {"n": 0}
            step = manager.resume(state).step
            for batch in manager.batches(Prefetched(range(8))):
                used.append(batch)
                step += 1
                manager.step_end(step, state)
                if step == last:
                    break
    assert used == list(range(8))
    assert "ahead" not in caplog.text


def test_random_that_is_no_generator_is_refused(tmp_path: Path) -> None:
    with (
        saving(tmp_path) as manager,
        pytest.raises(TypeError, match=re.escape("random[0] is a int")),
    ):
        list(manager.batches([1], random=[5]))


def test_state_of_a_loader_that_cannot_be_stored_is_named(tmp_path: Path) -> None:
    class Odd(Stateful):
        def state_dict(self) -> dict[str, Any]:
            return {"socket": object()}

    with saving(tmp_path) as manager:
        next(iter(manager.batches(Odd())))
        with pytest.raises(UnsupportedState, match="the state of a data loader cannot be stored"):
            manager.save(1, {"n": 1})


def test_places_of_a_newer_version_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as newer, saving(tmp_path) as manager:
        newer.setattr("ckptmgr.training.data_state._VERSION", 2)
        next(iter(manager.batches([1])))
        manager.save(1, {"n": 1})
    state = {"n": 0}
    with saving(tmp_path) as manager, pytest.raises(CkptmgrError, match="of an unknown version"):
        manager.resume(state)
    assert state == {"n": 0}


def test_batches_are_as_long_as_the_loader(tmp_path: Path) -> None:
    manager = saving(tmp_path)
    assert len(manager.batches(Shuffled())) == PER_EPOCH
    with pytest.raises(TypeError, match="a Global has no length"):
        len(manager.batches(Global()))


@pytest.mark.parametrize("world", [2, 1], ids=["same", "another"])
def test_each_rank_goes_on_with_its_own_batches(
    world: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def loader(rank: int) -> list[list[int]]:
        return [[rank, index] for index in range(PER_EPOCH)]

    def manager_of(seat: Seat) -> CheckpointManager:
        return CheckpointManager(tmp_path, CheckpointConfig(), ranks=Ranks(seat))

    first, second = Meeting(2), Meeting(world)

    def save(rank: int) -> None:
        with manager_of(Seat(first, rank)) as manager:
            each = iter(manager.batches(loader(rank)))
            for _ in range(2 + rank):
                next(each)
            manager.save(1, {"n": 1}, epoch=3)

    def resume(rank: int) -> list[list[int]]:
        with manager_of(Seat(second, rank)) as manager:
            manager.load("latest")
            assert "begin their pass anew" not in caplog.text
            assert manager.resume({"n": 1}).next_epoch == 3
            return list(manager.batches(loader(rank)))

    assert [one.raised for one in run_ranks(first, save)] == [None, None]
    found = [one.result for one in run_ranks(second, resume)]
    if world == 2:
        assert found == [[[0, 2], [0, 3]], [[1, 3]]]
    else:
        assert found == [loader(0)]
        assert "the loaders begin their pass anew" in caplog.text


def test_pass_that_was_ended_is_not_continued(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        batches = manager.batches(range(4))
        batches.end_pass()  # of none
        assert next(iter(batches)) == 0
        batches.end_pass()
        manager.save(1, {})
    with CheckpointManager(tmp_path) as manager:
        manager.resume({})
        assert list(manager.batches(range(4))) == [0, 1, 2, 3]


class Noisy:
    """Adds noise from the global generator to each batch as it is fetched."""

    def __iter__(self) -> Iterator[np.ndarray]:
        for index in range(PER_EPOCH):
            yield np.array([index, random.random()])


def test_noise_from_a_global_generator_is_no_other_batch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def run(directory: Path, stops: Iterable[int]) -> list[tuple[float, ...]]:
        random.seed(5)
        seen: list[tuple[float, ...]] = []
        for stop in stops:
            with CheckpointManager(directory, CheckpointConfig(save_checkpoint_steps=1)) as manager:
                step = manager.resume({"n": 1}).step
                for batch in manager.batches(Noisy()):
                    seen.append((*batch, random.random()))  # a step with dropout draws, too
                    step += 1
                    manager.step_end(step, {"n": 1})
                    if step == stop:
                        break
            random.seed(6)
        return seen

    assert run(tmp_path / "cut", [3, PER_EPOCH]) == run(tmp_path / "uncut", [PER_EPOCH])
    assert "is another than in the saved run" not in caplog.text


@pytest.mark.slow
def test_loader_with_more_values_than_a_resume_takes_is_refused_by_the_save(tmp_path: Path) -> None:
    class Large:
        def __iter__(self) -> Iterator[int]:
            return iter(range(PER_EPOCH))

        def state_dict(self) -> dict[str, object]:
            return {"order": list(range(7_000_000))}

        def load_state_dict(self, state: dict[str, object]) -> None:
            raise AssertionError

    with saving(tmp_path) as manager:
        next(iter(manager.batches(Large())))
        with pytest.raises(UnsupportedState, match="too many values"):
            manager.save(1, {"n": 1})
