# SPDX-License-Identifier: Apache-2.0
"""Loops with Accelerate go on bit for bit: `make kit FRAMEWORK=accelerate`."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ckptmgr import CheckpointConfig, CheckpointManager, CkptmgrError, Ranks, Resume
from ckptmgr.testing.child import find_program
from ckptmgr.testing.grid import Cell
from ckptmgr.testing.kit import differences
from tests.kit.cuts import KILLS_AT_EDGES, every_cut, every_pair
from tests.parallel.ranks import Meeting, Seat
from tests.test_examples import MOST_LINES, lines_of

torch = pytest.importorskip("torch")
pytest.importorskip("accelerate", reason="needs accelerate: make kit FRAMEWORK=accelerate")

from accelerate import Accelerator  # noqa: E402
from accelerate.utils import DataLoaderConfiguration, set_seed  # noqa: E402

from ckptmgr.integrations.accelerate import AcceleratorCheckpoints  # noqa: E402
from ckptmgr.state.paths import StateMismatch  # noqa: E402

pytestmark = pytest.mark.kit
ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "accelerate_loop.py"
OWN = "tests/kit/accelerate_programs.py"
PROGRAMS = {
    "examples/accelerate_loop.py:main": {"steps_per_epoch": 10, "keep": 5, "fork": True},
    f"{OWN}:accumulated": {"steps_per_epoch": 4, "fork": True},
}
AT_EDGES = {
    f"{OWN}:{name}": {"steps_per_epoch": 4, "fork": True}
    for name in ("seeded", "workers", "streamed")
}


@every_cut(PROGRAMS)
@pytest.mark.usefixtures("kit")
def test_loop_goes_on_as_if_it_had_not_been_cut(cut: str, check: Callable[[str], None]) -> None:
    check(cut)


@every_cut(AT_EDGES, KILLS_AT_EDGES)
@pytest.mark.usefixtures("kit")
def test_loop_with_other_loaders_goes_on_at_the_edges_of_an_epoch(
    cut: str, check: Callable[[str], None]
) -> None:
    check(cut)


class Loop:
    """A loop of four batches an epoch."""

    def __init__(self, directory: Path, seed: int = 0, config: Any = None, **options: Any) -> None:
        set_seed(seed)
        self.accelerator = Accelerator(cpu=True, **options)
        self.checkpoints = AcceleratorCheckpoints(self.accelerator, directory, config)
        data = torch.utils.data.DataLoader(torch.eye(8), 2, shuffle=True)
        model = torch.nn.Linear(8, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        self.parts = (model, optimizer, data)
        self.seen: list[Any] = []

    def run(self, steps: int) -> Any:
        """Train to a step; return the weights."""
        with self.checkpoints as checkpoints:
            model, optimizer, loader = checkpoints.prepare(*self.parts)
            self.loader = loader
            self.found = checkpoints.resume()
            step = self.found.step
            while step < steps and not checkpoints.should_stop:
                for rows in checkpoints.batches(loader):
                    self.seen.append(rows.argmax(1).tolist())
                    with self.accelerator.accumulate(model):
                        self.accelerator.backward(model(rows).square().sum())
                        optimizer.step()
                        optimizer.zero_grad()
                    step += 1
                    checkpoints.step_end(step, metrics={"loss": 1.0 / step})
                    if step == steps or checkpoints.should_stop:
                        break
        return model.weight.detach().clone()


def test_epoch_counter_of_the_loader_goes_on_also_after_the_empty_pass(tmp_path: Path) -> None:
    uncut = Loop(tmp_path / "uncut")
    uncut.run(10)
    Loop(tmp_path / "cut").run(8)  # the last batch of the second epoch
    resumed = Loop(tmp_path / "cut")
    resumed.run(10)
    assert resumed.loader.iteration == uncut.loader.iteration == 2
    assert resumed.seen == uncut.seen[8:]


def test_position_and_counter_of_an_accumulation_go_on_with_its_gradients(tmp_path: Path) -> None:
    expected = Loop(tmp_path / "uncut", gradient_accumulation_steps=3).run(10)
    Loop(tmp_path / "cut", gradient_accumulation_steps=3).run(5)  # two batches were added up
    found = Loop(tmp_path / "cut", gradient_accumulation_steps=3).run(10)
    assert torch.equal(found, expected)


def test_order_of_a_seedable_sampler_is_that_of_the_saved_run_whatever_the_seed(
    tmp_path: Path,
) -> None:
    loaders = DataLoaderConfiguration(use_seedable_sampler=True)
    uncut = Loop(tmp_path / "uncut", dataloader_config=loaders)
    uncut.run(10)
    Loop(tmp_path / "cut", dataloader_config=loaders).run(5)
    resumed = Loop(tmp_path / "cut", seed=7, dataloader_config=loaders)
    resumed.run(10)
    assert resumed.seen == uncut.seen[5:]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # by torchdata
def test_stateful_loader_is_refused_by_name(tmp_path: Path) -> None:
    pytest.importorskip("torchdata")
    loaders = DataLoaderConfiguration(use_stateful_dataloader=True, use_seedable_sampler=True)
    with pytest.raises(ValueError, match=r"use_stateful_dataloader=True.*leave it out"):
        Loop(tmp_path, dataloader_config=loaders).run(1)


def test_nothing_is_pickled_and_nothing_is_in_the_clear(tmp_path: Path) -> None:
    """As `accelerator.save_state` would leave optimizer.bin and random_states_0.pkl."""
    secret = CheckpointConfig(enc_key=bytes(range(32)), format="safetensors")
    Loop(tmp_path, config=secret).run(2)
    kinds = {path.name.split(".", 1)[1] for path in tmp_path.iterdir() if path.is_file()}
    # The witness has the metrics, as the manifests, and with a key no marks of batches.
    assert kinds == {"safetensors.ckpe", "safetensors.ckpe.manifest.json", "ckpt.witness"}
    with pytest.raises(CkptmgrError, match="encrypted"):
        Loop(tmp_path).run(3)
    assert Loop(tmp_path, config=secret).run(3) is not None


def test_sigterm_ends_the_loop_with_its_last_step_saved(tmp_path: Path) -> None:
    loop = Loop(tmp_path, config=CheckpointConfig(save_checkpoint_steps=100))
    step_end = loop.checkpoints.step_end

    def asked(step: int, **options: Any) -> Any:
        if step == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return step_end(step, **options)

    loop.checkpoints.step_end = asked  # type: ignore[method-assign]
    loop.run(50)
    (saved,) = CheckpointManager(tmp_path).checkpoints()
    assert (saved.step, saved.why) == (3, "preempted")


def test_save_saves_what_no_policy_asks_for(tmp_path: Path) -> None:
    loop = Loop(tmp_path, config=CheckpointConfig(save_checkpoint_steps=100))
    with loop.checkpoints as checkpoints:
        checkpoints.prepare(*loop.parts)
        checkpoints.resume(Resume(start="new"))
        checkpoints.save(7, epoch=1, metrics={"loss": 0.5})
    (saved,) = CheckpointManager(tmp_path).checkpoints()
    assert (saved.step, saved.epoch, dict(saved.metrics)) == (7, 1, {"loss": 0.5})


def test_objects_that_are_prepared_already_may_be_given(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    prepared = loop.accelerator.prepare(*loop.parts)
    again = loop.checkpoints.prepare(*prepared)
    assert all(one is other for one, other in zip(prepared, again, strict=True))
    assert loop.checkpoints.prepare(prepared[0]) is prepared[0]
    assert loop.checkpoints.resume().is_fresh


def test_run_without_prepared_objects_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"checkpoints.prepare\(model, optimizer, loader\)"):
        Loop(tmp_path).checkpoints.resume()


def test_object_that_is_registered_with_the_accelerator_is_refused(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    loop.checkpoints.prepare(*loop.parts)
    loop.accelerator.register_for_checkpointing(torch.optim.SGD(loop.parts[0].parameters(), 1.0))
    with pytest.raises(RuntimeError, match=r"call checkpoints\.register_for_checkpointing"):
        loop.checkpoints.resume()


def test_object_that_comes_after_the_resume_is_refused(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    loop.checkpoints.prepare(*loop.parts)
    loop.checkpoints.resume()
    with pytest.raises(RuntimeError, match="prepare and register before"):
        loop.checkpoints.register_for_checkpointing(loop.parts[1])


def test_object_that_is_no_part_of_a_training_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"a dict is no model.*register_for_checkpointing"):
        Loop(tmp_path).checkpoints.prepare({})


def test_other_number_of_shuffled_loaders_is_refused(tmp_path: Path) -> None:
    loaders = DataLoaderConfiguration(use_seedable_sampler=True)
    Loop(tmp_path, dataloader_config=loaders).run(1)
    loop = Loop(tmp_path, dataloader_config=loaders)
    loop.checkpoints.prepare(*loop.parts[:2])
    with pytest.raises(ValueError, match="there are 0 shuffled loaders, and 1 were saved"):
        loop.checkpoints.resume()


def prepared(directory: Path, optimizer: Any, schedule: Any) -> Any:
    """Return the checkpoints of a model, an optimizer and a schedule, or none of it."""
    model = torch.nn.Linear(8, 1)
    made = optimizer(model.parameters())
    parts = [model, made] if schedule is None else [model, made, schedule(made)]
    checkpoints = AcceleratorCheckpoints(Accelerator(cpu=True), directory)
    checkpoints.prepare(*parts)
    return checkpoints


def cosine(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 9)


OTHERS: dict[str, tuple[Any, Any, str]] = {
    "optimizer": (torch.optim.AdamW, cosine, "Adam and AdamW differ in it"),
    "schedule": (
        torch.optim.Adam,
        lambda one: torch.optim.lr_scheduler.StepLR(one, 3),
        r"state\['schedulers'\]\[0\].*\['T_max'\] is only in .* another than this StepLR",
    ),
    "no schedule": (torch.optim.Adam, None, "has 1 schedulers, and here are 0"),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_other_optimizer_or_schedule_is_refused_by_name(kind: str, tmp_path: Path) -> None:
    optimizer, schedule, message = OTHERS[kind]
    with prepared(tmp_path, torch.optim.Adam, cosine) as checkpoints:
        checkpoints.resume()
        checkpoints.save(1)
    with pytest.raises(StateMismatch, match=message):
        prepared(tmp_path, optimizer, schedule).resume()
    assert prepared(tmp_path, torch.optim.Adam, cosine).resume().step == 1


@pytest.mark.parametrize(
    ("count", "kind"), [(2, "MULTI_CPU"), (1, "FSDP"), (1, "DEEPSPEED")], ids=str
)
def test_several_processes_and_sharded_states_are_refused(
    count: int, kind: str, tmp_path: Path
) -> None:
    accelerator: Any = SimpleNamespace(
        num_processes=count, distributed_type=SimpleNamespace(value=kind)
    )
    with pytest.raises(ValueError, match=rf"has {count}, with distributed_type={kind}: use"):
        AcceleratorCheckpoints(accelerator, tmp_path)


def test_coordinator_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="coordinator= has no effect"):
        AcceleratorCheckpoints(Accelerator(cpu=True), tmp_path, ranks=Ranks(Seat(Meeting(1), 0)))


def without_checkpoints(text: str) -> str:
    """Return the same program without ckptmgr."""
    text = re.sub(r"from ckptmgr.*\n", "", text)
    text = re.sub(r" +checkpoints\.step_end\(.*\n", "", text)
    head, _, body = re.split(r"( +with AcceleratorCheckpoints.*\n)", text)
    block, end, tail = body.partition("    return {")
    text = head + re.sub("^    ", "", block, flags=re.MULTILINE) + end + tail
    text = text.replace("checkpoints.prepare", "accelerator.prepare")
    text = text.replace("checkpoints.resume().step", "0").replace("checkpoints.batches", "")
    text = re.sub(r" (and not|or) checkpoints\.should_stop", "", text)
    assert "checkpoints." not in text
    return text


def test_example_is_at_most_three_lines_longer_and_trains_alike(tmp_path: Path) -> None:
    text = EXAMPLE.read_text()
    plain = without_checkpoints(text)
    assert 0 < lines_of(text) - lines_of(plain) <= MOST_LINES
    names: dict[str, Any] = {"__name__": "plain"}
    exec(plain, names)  # noqa: S102 - our own example
    expected = names["main"](str(tmp_path / "none"), 13)
    found = find_program(f"{EXAMPLE}:main")(str(tmp_path / "runs"), 13)
    assert differences(expected, found) == []


def test_example_runs_as_printed(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLE)]
    subprocess.run(command, cwd=tmp_path, capture_output=True, check=True)
    assert list((tmp_path / "runs").rglob("*-25.ckpt"))


def test_page_runs_twice_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = ROOT / "docs" / "accelerate.md"
    (block,) = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    for end in (12, 16):
        names: dict[str, Any] = {}
        exec(block.replace("step < 12", f"step < {end}"), names)  # noqa: S102 - our own page
        assert names["step"] == end


@every_pair("tests/kit/accelerate_grid_programs.py:train", "docs/accelerate.md")
def test_cell_of_the_grid_is_as_its_page_says(
    cell: Cell, check_pair: Callable[[Cell], None]
) -> None:
    check_pair(cell)
