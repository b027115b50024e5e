# SPDX-License-Identifier: Apache-2.0
# pyright: reportAttributeAccessIssue=false
# (without Ray pyright takes this file for it)
"""Checkpoints of Ray Train: workers save into a directory of the manager, and report references.

```
def train(config):
    with RayCheckpointManager(config["directory"], CheckpointConfig()) as manager:
        step = manager.resume(state).step  # also after Ray has restarted failed workers
        ...
            manager.step_end(step, state, metrics={"loss": loss})
        manager.report({"loss": loss})  # ray.train.report, with a reference to the newest checkpoint
```

The checkpoints are those of the manager, and are stored once. Ray gets a folder of some hundred
bytes that says where the checkpoint is: `num_to_keep` of Ray removes such folders, and never a
checkpoint, which only the retention policy of the manager removes.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import ray
import ray.exceptions
import ray.train

from ckptmgr.config.config import CheckpointConfig
from ckptmgr.config.subjects import Stop
from ckptmgr.core.arguments import checked_interval, no_effect
from ckptmgr.core.errors import UnsupportedCheckpoint
from ckptmgr.integrations.job import job_coordinator
from ckptmgr.maintenance.fleet import FleetVerification, Lines, combined, parts_of, verify_part
from ckptmgr.parallel.team import Ranks
from ckptmgr.training.manager import CheckpointManager
from ckptmgr.training.old_names import OldRanks

if TYPE_CHECKING:
    from ckptmgr.core.handle import SaveHandle

__all__ = [
    "CheckpointConfig",
    "FleetVerification",
    "RayCheckpointManager",
    "load_reported",
    "verify",
]

_KEY = "ckptmgr"


class RayCheckpointManager(CheckpointManager):
    """The manager of a worker of Ray Train.

    Several workers save together: those of a `TorchTrainer` or a `JaxTrainer` find each other.

    Args:
        directory: Directory of the checkpoints, which all nodes see. It is absolute, because the
            working directory of a worker is one of Ray's session.
        config: When and how to save, what to keep; that of ckptmgr, not of Ray.
        preemption_steps: Interval in steps at which all workers ask Ray whether a node is going to
            be taken away (`ray.train.get_preemption_info`); the step is then saved at once. None to
            not ask.
        options: As for `CheckpointManager`.

    Raises:
        RuntimeError: This is no worker of Ray Train, but a trial of Ray Tune, or no process of Ray.
        ValueError: The directory is relative; `stop` has `after`; or there are several workers, and nothing by which
            they could save together.
        TypeError, CkptmgrError: As `CheckpointManager`.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        config: CheckpointConfig | None = None,
        *,
        preemption_steps: int | None = 10,
        **options: Any,
    ) -> None:
        context = _context()
        if not (_is_local() or Path(directory).is_absolute()):
            raise ValueError(
                f"the directory {os.fspath(directory)!r} is relative, and a worker of Ray runs in a directory of Ray's"
                " session, which the next one does not have: pass an absolute path"
            )
        stop = options.get("stop")
        if isinstance(stop, Stop) and stop.after is not None and not _is_local():
            raise no_effect(
                "after of Stop",
                "in a worker of Ray Train, which counts a loop that is left as finished",
                "leave it out",
            )
        workers = context.get_world_size()
        ranks = options.get("ranks") or Ranks()
        if workers > 1 and (options.get("coordinator") or ranks.coordinator) is None:
            if OldRanks.__annotations__.keys().isdisjoint(options):
                options["ranks"] = replace(ranks, coordinator=_coordinator(workers))
            else:
                options["coordinator"] = _coordinator(workers)
        super().__init__(directory, config, **options)
        self._is_first = context.get_world_rank() == 0
        self._preemption_steps = (
            None
            if preemption_steps is None
            else checked_interval("preemption_steps", preemption_steps)
        )
        self._preempted: Sequence[str] = ()
        self._is_background = self._config.async_save is not False
        self._metrics: Mapping[str, Any] | None = None
        self._has_saved_since = False
        self._reported: str | None = None

    @property
    def should_stop(self) -> bool:
        """False in a worker: Ray counts a loop that is left as finished, and would not restart it.

        A node that is going to be taken away is dealt with by `step_end`. In the local mode of Ray
        Train (`num_workers=0`), as for `CheckpointManager`.
        """
        return _is_local() and super().should_stop

    def step_end(
        self,
        step: int,
        state: object,
        *,
        epoch: int | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> SaveHandle | None:
        """Save if the policy says so, or if a node is going to be taken away.

        Args and errors are those of `CheckpointManager.step_end`.
        """
        handle = super().step_end(step, state, epoch=epoch, metrics=metrics)
        if self._preemption_steps is None or step % self._preemption_steps:
            return handle
        info = ray.train.get_preemption_info()
        nodes = () if info is None else tuple(info.preempted_node_ids)
        is_new, self._preempted = not set(nodes) <= set(self._preempted), nodes
        if not is_new or handle is not None:
            return handle
        return self.save(step, state, epoch=epoch, metrics=metrics, why="preempted")

    def save(
        self,
        step: int,
        state: object,
        *,
        epoch: int | None = None,
        metrics: Mapping[str, float] | None = None,
        why: str = "manual",
    ) -> SaveHandle | None:
        """As `CheckpointManager.save`."""
        self._has_saved_since = True
        return super().save(step, state, epoch=epoch, metrics=metrics, why=why)

    def report(self, metrics: Mapping[str, Any]) -> None:
        """Report metrics to Ray, with a reference to the newest durable checkpoint.

        As `ray.train.report`: all workers call it equally often, and wait for each other. It takes
        up to the two seconds in which Ray polls its workers, so report once an epoch rather than
        once a step. If a save follows the last report, the exit of the manager reports its metrics
        again, with that checkpoint. `Result.checkpoint` is then the last one; `load_reported` opens
        it.
        """
        self._metrics, self._has_saved_since = dict(metrics), False
        newest = self.latest() if self._is_first else None
        if newest is None or newest.name == self._reported:
            ray.train.report(dict(metrics))
            return
        folder = tempfile.mkdtemp(prefix="ckptmgr-reference-")
        reference = ray.train.Checkpoint.from_directory(folder)
        weakref.finalize(reference, shutil.rmtree, folder, ignore_errors=True)
        facts = {
            "directory": str(self.directory.absolute()),
            "prefix": self.prefix,
            "name": newest.name,
            "step": newest.step,
        }
        reference.set_metadata({_KEY: facts})
        ray.train.report(dict(metrics), checkpoint=reference)
        self._reported = newest.name

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Save the last step as `CheckpointManager` does, and report it, unless there is an error."""
        super().__exit__(kind, error, traceback)
        # All workers decide alike: whether a save has become durable may differ between them.
        is_unreported = self._has_saved_since or self._is_background
        if error is None and self._metrics is not None and is_unreported:
            self.report(self._metrics)


def load_reported(
    checkpoint: Any,
    state: object = None,
    *,
    key: bytes | str | None = None,
    only: str | Sequence[str] | None = None,
    **options: Any,
) -> object:
    """Load the checkpoint that a reference of `RayCheckpointManager.report` names, verified.

    Args:
        checkpoint: `Result.checkpoint`, one of `Result.best_checkpoints`, or what
            `ray.train.get_checkpoint()` returns.
        state: As for `CheckpointManager.load`, as is `only`.
        key: Opens encrypted checkpoints.
        only: Names of entries of the state.
        options: As for `CheckpointManager`, such as `trust`.

    Raises:
        UnsupportedCheckpoint: It is no such reference.
        CheckpointNotFound: The retention policy has removed the checkpoint since.
        CkptmgrError, OSError: As `CheckpointManager.load`.
    """
    facts = None if checkpoint is None else checkpoint.get_metadata().get(_KEY)
    if not isinstance(facts, dict):
        raise UnsupportedCheckpoint(
            "is no reference of RayCheckpointManager",
            path=getattr(checkpoint, "path", None),
            hint="report with manager.report(metrics) in the workers",
        )
    config = CheckpointConfig() if key is None else CheckpointConfig(enc_key=key)
    with CheckpointManager(
        facts["directory"], config, prefix=facts["prefix"], **options
    ) as manager:
        return manager.load(facts["name"], state, only=only)


def verify(
    place: str | os.PathLike[str],
    *,
    parts: int | None = None,
    level: str = "full",
    series: str | None = None,
    key: str | None = None,
    public_keys: Sequence[str | os.PathLike[str]] = (),
    allow_unencrypted: bool = False,
    allow_unsealed: bool = False,
    **options: Any,
) -> FleetVerification:
    """Verify the checkpoints of a directory by the workers of a Ray cluster.

    Each part is a task of Ray, which schedules it, and repeats it when its worker dies
    (`max_retries=`). A part that is not carried out after that is named in `failed`.

    Args:
        place: Directory that all workers see; or an address such as `s3://bucket/runs`.
        parts: Number of tasks. None for two for each CPU of the cluster.
        level: `quick`, `full` or `deep`.
        series: Only this series.
        key: Source of the key, which each worker reads: `env:NAME`, `file:/run/secrets/key` or
            `cmd:COMMAND`. Never the key itself: Ray stores the arguments of tasks.
        public_keys: Files of public keys whose signatures count, on each worker.
        allow_unencrypted: With a key: accept plain files, too.
        allow_unsealed: With a key: accept encrypted files that are not proven as a whole.
        options: Of the tasks, as for `.options()` of a remote function of Ray: `num_cpus`,
            `max_retries`, `runtime_env`.

    Raises:
        TypeError, ValueError: An argument is wrong; or `key` holds the bytes of a key.
        CkptmgrError, OSError: All parts failed; the error of the first one.
    """
    if not ray.is_initialized():
        ray.init()
    if parts is None:
        parts = max(1, 2 * int(ray.cluster_resources().get("CPU", 1)))
    tasks = parts_of(
        place,
        parts,
        level=level,
        series=series,
        key=key,
        public_keys=public_keys,
        allow_unencrypted=allow_unencrypted,
        allow_unsealed=allow_unsealed,
    )
    function = ray.remote(verify_part).options(**{"name": "ckptmgr verify", **options})
    waiting = [function.remote(task) for task in tasks]
    return combined(tasks, [_outcome(one) for one in waiting])


def _outcome(waiting: Any) -> Lines | BaseException:
    outcome: Lines | BaseException
    try:
        outcome = ray.get(waiting)
    except ray.exceptions.RayTaskError as error:
        outcome = error.cause or error
    except ray.exceptions.RayError as error:  # the worker died, its node was lost, ...
        outcome = error
    return outcome


def _context() -> Any:
    """Return the context of this worker; raise RuntimeError elsewhere."""
    try:
        return ray.train.get_context()
    except DeprecationWarning as error:  # which Ray raises in a trial
        raise RuntimeError(
            "RayCheckpointManager is the manager of a worker of Ray Train, and this is a trial of Ray Tune: use"
            " CheckpointManager here, with a directory or prefix for each trial, such as"
            " prefix=ray.tune.get_context().get_trial_id(), and ray.tune.report; or start a trainer in the trial"
        ) from error


def _is_local() -> bool:
    """Return whether Ray Train runs the loop in the program itself; workers run it in a thread."""
    return threading.current_thread() is threading.main_thread()


def _coordinator(workers: int) -> Any:
    try:
        return job_coordinator()
    except ValueError as error:
        raise ValueError(
            f"{workers} workers save together, and need a coordinator: use TorchTrainer or JaxTrainer, whose workers have one,"
            f" or pass ranks=Ranks(coordinator) ({error})"
        ) from None
