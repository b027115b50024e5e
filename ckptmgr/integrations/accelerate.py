# SPDX-License-Identifier: Apache-2.0
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# (without Accelerate pyright takes this file for it)
"""Checkpoints of loops with Hugging Face Accelerate: durable, encrypted, and resumed bit for bit.

```
accelerator = Accelerator()
with AcceleratorCheckpoints(accelerator, "runs/digits") as checkpoints:
    model, optimizer, loader = checkpoints.prepare(model, optimizer, loader)
    step = checkpoints.resume().step
    for x, y in checkpoints.batches(loader):
        ...
        checkpoints.step_end(step := step + 1, metrics={"loss": loss.item()})
```

* The state is all prepared and registered objects, the loss scale, the counter of `accumulate`,
  and the gradients, where a step ends in the middle of an accumulation.
* `batches` gives the loader its epoch number, its order and its place: `CheckpointManager.batches`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler

from ckptmgr.config.config import CheckpointConfig
from ckptmgr.core.handle import SaveHandle
from ckptmgr.integrations.base import FrameworkManager
from ckptmgr.state.paths import StateMismatch
from ckptmgr.training.data_state import Batches

if TYPE_CHECKING:
    from ckptmgr.config.subjects import Resume
    from ckptmgr.training.old_names import OldResume
    from ckptmgr.training.resume import Resumption

_Batch = TypeVar("_Batch")
_KINDS = ("models", "optimizers", "schedulers", "registered")


class AcceleratorCheckpoints:
    """Saves and resumes the training of an `Accelerator`, and prunes; a context manager around it.

    Args:
        accelerator: The accelerator, of one process.
        directory: Directory of the checkpoints.
        config: When and how to save, and what to keep.
        options: `resume=Resume(...)`, and as for `CheckpointManager`: `prefix`, `stop`, `trust` and
            others. There are no `ranks`, because only training in one process is supported.

    Attributes:
        manager: The `CheckpointManager`, to list, pin or load checkpoints.

    Raises:
        ValueError: The accelerator has several processes, or shards the state.
        TypeError, NotADirectoryError: As `CheckpointManager`.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        directory: str | os.PathLike[str],
        config: CheckpointConfig | None = None,
        **options: Any,
    ) -> None:
        kind = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))
        if accelerator.num_processes > 1 or kind != "NO":
            raise ValueError(
                f"AcceleratorCheckpoints saves the state of one process, and this Accelerator has {accelerator.num_processes},"
                f" with distributed_type={kind}: use CheckpointManager(ranks=Ranks(job_coordinator())) with the unwrapped"
                " model, or for FSDP2 ckptmgr.integrations.dcp"
            )
        self.manager = FrameworkManager(
            "AcceleratorCheckpoints", directory, config, gives_batches=True, **options
        )
        self._accelerator = accelerator
        self._parts: dict[str, list[Any]] = {kind: [] for kind in _KINDS}
        self._samplers: list[Any] = []
        self._is_resumed = False

    def __enter__(self) -> Self:
        self.manager.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Leave the loop as `CheckpointManager` does: save the last step if it is due, and wait."""
        self.manager.__exit__(kind, error, traceback)

    def prepare(self, *objects: Any, **options: Any) -> Any:
        """Return what `accelerator.prepare` returns, and take it into the checkpoints.

        Objects that the accelerator has prepared before may be given.

        Raises:
            ValueError: A loader is stateful, whose first pass cannot be repeated.
            TypeError: An object is of another kind.
            RuntimeError: The run has already resumed.
        """
        prepared = self._accelerator.prepare(*objects, **options)
        for one in prepared if len(objects) > 1 else (prepared,):
            if isinstance(one, torch.utils.data.DataLoader):
                self._note_loader(one)
            elif isinstance(one, torch.nn.Module):
                self._note("models", self._accelerator.unwrap_model(one))
            elif isinstance(one, AcceleratedOptimizer):
                self._note("optimizers", one)
            elif isinstance(one, AcceleratedScheduler):
                self._note("schedulers", one)
            else:
                raise TypeError(
                    f"a {type(one).__name__} is no model, optimizer, scheduler or loader: for an object with state_dict()"
                    " call checkpoints.register_for_checkpointing"
                )
        return prepared

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Take objects with `state_dict` and `load_state_dict` into the checkpoints.

        Raises:
            RuntimeError: The run has already resumed.
        """
        for one in objects:
            self._note("registered", one)

    def resume(self, resume: Resume | None = None, **old: Unpack[OldResume]) -> Resumption:
        """Restore the newest checkpoint into the prepared objects; see `CheckpointManager.resume`.

        Raises:
            RuntimeError: Nothing was prepared, or objects were registered with the accelerator.
            StateMismatch: Other objects were prepared than in the saved run.
            CkptmgrError, OSError: As `CheckpointManager.resume`.
        """
        if not self._parts["models"]:
            raise RuntimeError(
                "nothing was prepared here, so there is nothing to restore: model, optimizer, loader ="
                " checkpoints.prepare(model, optimizer, loader), also with objects that are prepared already"
            )
        if getattr(self._accelerator, "_custom_objects", None):  # it has no public name
            raise RuntimeError(
                "objects are registered with the accelerator, which would not be saved: call"
                " checkpoints.register_for_checkpointing instead of accelerator.register_for_checkpointing"
            )
        counts = {kind: len(parts) for kind, parts in self._parts.items()}
        found = self.manager.resume(self._state(), resume, **old)
        for kind, parts in self._parts.items():
            stored = len(parts)
            del parts[counts[kind] :]  # an empty list takes plain values, as of a history
            if stored != counts[kind]:
                raise StateMismatch(
                    f"the checkpoint has {stored} {kind}, and here are {counts[kind]}",
                    hint="prepare and register what the saved run did, or begin a run in another directory",
                )
        self._is_resumed = True
        return found

    def batches(
        self, loader: Iterable[_Batch], *, name: str = "batches", random: Sequence[object] = ()
    ) -> Batches[_Batch]:
        """Return the batches of a loader; see `CheckpointManager.batches`."""
        return self.manager.batches(loader, name=name, random=random)

    @property
    def should_stop(self) -> bool:
        """Whether the run should leave its loop; see `CheckpointManager.should_stop`."""
        return self.manager.should_stop

    def step_end(
        self, step: int, *, epoch: int | None = None, metrics: Mapping[str, float] | None = None
    ) -> SaveHandle | None:
        """Save if the policy says so; call it after every step, or every batch.

        See `CheckpointManager.step_end`. The step is counted by the loop.
        """
        return self.manager.step_end(step, self._state, epoch=epoch, metrics=metrics)

    def save(
        self, step: int, *, epoch: int | None = None, metrics: Mapping[str, float] | None = None
    ) -> SaveHandle | None:
        """Save now; see `CheckpointManager.save`."""
        return self.manager.save(step, self._state, epoch=epoch, metrics=metrics)

    def _note(self, kind: str, one: Any) -> None:
        if any(one is known for known in self._parts[kind]):
            return
        if self._is_resumed:
            raise RuntimeError(
                f"a {type(one).__name__} comes after resume(), which has not restored it: prepare and register before"
            )
        self._parts[kind].append(one)

    def _note_loader(self, loader: Any) -> None:
        if loader.use_stateful_dataloader:
            raise ValueError(
                "DataLoaderConfiguration(use_stateful_dataloader=True) begins its first pass when it is prepared, which no"
                " later pass repeats: leave it out, because checkpoints.batches finds the place of every loader"
            )
        sampler = loader.get_sampler()
        if hasattr(sampler, "initial_seed"):
            self._samplers.append(sampler)

    def _state(self) -> dict[str, Any]:
        scaler = self._accelerator.scaler
        progress = _Progress(self._accelerator, self._parts["models"], self._samplers)
        parts: dict[str, Any] = {**self._parts, "accelerator": progress}
        return parts if scaler is None else parts | {"scaler": scaler}


class _Progress:
    """Where an accumulation of gradients stands, and the seeds of the samplers."""

    def __init__(self, accelerator: Any, models: Sequence[Any], samplers: Sequence[Any]) -> None:
        self._accelerator = accelerator
        self._models = models
        self._samplers = samplers

    def _parameters(self) -> Iterator[Any]:
        return chain.from_iterable(model.parameters() for model in self._models)

    def state_dict(self) -> dict[str, Any]:
        is_between = not self._accelerator.sync_gradients
        return {
            "step": self._accelerator.step,
            "seeds": [sampler.initial_seed for sampler in self._samplers],
            "gradients": [one.grad for one in self._parameters()] if is_between else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._accelerator.step = state["step"]
        if len(state["seeds"]) != len(self._samplers):
            raise ValueError(
                f"there are {len(self._samplers)} shuffled loaders, and {len(state['seeds'])} were saved: prepare the same"
            )
        for sampler, seed in zip(self._samplers, state["seeds"], strict=True):
            sampler.initial_seed = seed
        self._accelerator.sync_gradients = state["gradients"] is None
        if state["gradients"] is not None:
            for one, gradient in zip(self._parameters(), state["gradients"], strict=True):
                if gradient is not None:
                    one.grad = torch.as_tensor(gradient).to(one.device, one.dtype)
