# SPDX-License-Identifier: Apache-2.0
"""`ModelCheckpoint`: MindSpore's callback for any training loop.

It takes any run context whose `original_args()` has `cur_step_num`, `cur_epoch_num`, `batch_num` and `train_network` (a
mapping of names to arrays, an object with `state_dict()`, or a MindSpore Cell). File names, triggers and what is kept are
MindSpore's; the order of work is not: a file is removed only after its successor is durable, a failed save is not marked as
done, and only files this run wrote (or the run it was resumed from) are ever removed.
"""

from __future__ import annotations

import logging
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from ckptmgr.chain import contradiction
from ckptmgr.config import CheckpointConfig, check_config
from ckptmgr.engine import engine_for
from ckptmgr.forecaster import Forecaster, size_of
from ckptmgr.formats.tensor import Item
from ckptmgr.fsio import FileSystem
from ckptmgr.handle import SaveStats
from ckptmgr.leaves import named_tensors
from ckptmgr.loader import ReadOptions, Value, read_values
from ckptmgr.model import Checkpoint
from ckptmgr.naming import (
    breakpoint_name,
    check_directory,
    check_prefix,
    check_prefix_result,
    checkpoint_name,
    restart_prefix,
    step_in_epoch,
)
from ckptmgr.observe import Observer, Observers, about
from ckptmgr.progress import Progress
from ckptmgr.resume import Skipped, first_that_loads, newest_first, notes_of, open_checkpoint
from ckptmgr.save_policy import LastSave, decide_at_end
from ckptmgr.saver import Publish, SaveOptions
from ckptmgr.serialization import join_items
from ckptmgr.series import SaveFacts, SeriesWriter
from ckptmgr.store import Store

_LOG = logging.getLogger(__name__)


class RunContext(Protocol):
    """What a training loop hands to a callback."""

    def original_args(self) -> Any:
        """Return an object with `cur_step_num`, `cur_epoch_num`, `batch_num` and `train_network`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """What `ModelCheckpoint.resume` found.

    Attributes:
        checkpoint: The newest checkpoint that loads.
        values: Its content, name to array or string.
        skipped: Newer ones that were passed over, and why.
    """

    checkpoint: Checkpoint
    values: dict[str, Value]
    skipped: tuple[Skipped, ...]


class ModelCheckpoint:
    """Save checkpoints from a training loop.

    Args:
        prefix: Start of the file names, or a function of the callback parameters that returns the whole name.
        directory: Where to save; created if missing. Or a function of the callback parameters. Default: the working directory.
        config: When and how to save, what to keep.
        observe: A function, or several, that take an `Event` of `ckptmgr.observe`.
        clock: Seconds since the epoch.
        fs: The disk.

    Raises:
        ValueError, TypeError, NotADirectoryError: An argument is unusable; messages as MindSpore's.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Return an instance that MindSpore accepts as one of its callbacks when MindSpore is in use."""
        if "mindspore" in sys.modules:
            from ckptmgr.integrations.mindspore import callback_class

            adapter: type[Self] = callback_class(cls)
            return super().__new__(adapter)
        return super().__new__(cls)

    def __init__(
        self,
        prefix: str | Callable[[Any], str] = "CKP",
        directory: str | Callable[[Any], str] | None = None,
        config: CheckpointConfig | None = None,
        *,
        observe: Observer | Iterable[Observer] | None = None,
        clock: Callable[[], float] = time.time,
        fs: FileSystem | None = None,
    ) -> None:
        super().__init__()
        checked = check_prefix(prefix)
        self._directory_of = directory if callable(directory) else None
        self._directory = Path.cwd()
        if directory is not None and not callable(directory):
            self._directory = check_directory(directory)
        self._config = check_config(config)
        self._key = self._config.keys
        self._observers = Observers(observe)
        self._clock = clock
        self._fs = fs
        self._prefix_of = checked if callable(checked) else None
        self._base_prefix = "" if callable(checked) else checked
        self._prefix = self._base_prefix
        self._writers: dict[tuple[Path, str], SeriesWriter] = {}
        if self._prefix_of is None and self._directory_of is None:
            self._make_directory(self._directory)
            self._prefix = restart_prefix(self._prefix, self._names(self._directory))
        self._progress = Progress(LastSave(step=0, at=clock()))
        self._engine = engine_for(self._config)
        self._forecaster = Forecaster(self._config, self._observers)
        self._params: Any = None
        self._steps_before_epoch = 0

    @property
    def latest_ckpt_file_name(self) -> str:
        """Path of the newest durable checkpoint of this run, or an empty string."""
        return self._progress.latest_path

    def begin(self, run_context: RunContext) -> None:
        """Note the run context, and warn when disk or memory will not do; called once before training."""
        self._params = run_context.original_args()
        if not (self._prefix_of or self._directory_of) and self._config.save_policy().is_active:
            self._forecaster.before_run(
                self._writer(self._directory, self._prefix),
                lambda: size_of(self._items(self._params, step=0, epoch=0)),
            )

    def epoch_begin(self, run_context: RunContext) -> None:
        """Note the run context."""
        self._params = run_context.original_args()
        self._steps_before_epoch = int(self._params.cur_step_num)

    def step_begin(self, run_context: RunContext) -> None:
        """Note the run context."""
        self._params = run_context.original_args()

    def step_end(self, run_context: RunContext) -> None:
        """Save if the policy says so; called after every step.

        Raises:
            CkptmgrError, OSError: The save failed, or an earlier one in the background; the earlier checkpoints are
                intact and the next step tries again.
        """
        self._params = run_context.original_args()
        self._engine.check()
        self._save_if_due(self._params, is_end=False)

    def epoch_end(self, run_context: RunContext) -> None:
        """Note the run context."""
        self._params = run_context.original_args()

    def end(self, run_context: RunContext) -> None:
        """Save the last step unless it was saved already, and wait for the disk; called once after training.

        Raises:
            CkptmgrError, OSError: A save failed, this one or an earlier one in the background.
        """
        self._params = run_context.original_args()
        try:
            self._engine.wait()
        finally:  # the last step is saved even if the one before it could not be
            try:
                self._save_if_due(self._params, is_end=True)
            finally:
                self.close()

    def on_train_begin(self, run_context: RunContext) -> None:
        """See `begin`."""
        self.begin(run_context)

    def on_train_epoch_begin(self, run_context: RunContext) -> None:
        """See `epoch_begin`."""
        self.epoch_begin(run_context)

    def on_train_step_begin(self, run_context: RunContext) -> None:
        """See `step_begin`."""
        self.step_begin(run_context)

    def on_train_step_end(self, run_context: RunContext) -> None:
        """See `step_end`."""
        self.step_end(run_context)

    def on_train_epoch_end(self, run_context: RunContext) -> None:
        """See `epoch_end`."""
        self.epoch_end(run_context)

    def on_train_end(self, run_context: RunContext) -> None:
        """See `end`."""
        self.end(run_context)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None and self._config.exception_save and self._params is not None:
            self._save_breakpoint(error)
        try:
            self.close()
        except Exception as failure:
            if error is None:
                raise
            error.add_note(f"ckptmgr: a save in the background failed: {failure}")

    def close(self) -> None:
        """Wait for what is in flight, and let other processes write this series. Saving again takes it back.

        Raises:
            CkptmgrError, OSError: The failure of a background save that nobody has fetched.
        """
        try:
            self._engine.close()
        finally:
            if not self._engine.is_busy:  # Ctrl-C does not stop a save, which needs the lease
                for writer in self._writers.values():
                    writer.close()

    def resume(self) -> Resumed | None:
        """Return the newest checkpoint of this prefix in the directory that really loads, or None.

        Runs of the same prefix count (`net`, `net_1`, ...). Damaged files are skipped. From then on this run continues
        that one: its checkpoints count for the keep policy, and it is itself never removed.

        Raises:
            KeyProblem: There are checkpoints, but none opens with the key of the configuration.
        """
        with self._observers.timed("resume", series=self._prefix) as told:
            found, skipped = self._resume()
            if found is not None:
                told |= about(found.checkpoint)
            told["figures"] = {"skipped": len(skipped)}
            told["notes"] = notes_of(skipped)
        return found

    def _resume(self) -> tuple[Resumed | None, Sequence[Skipped]]:
        self._engine.wait_until_idle()
        writer = self._writer(self._directory, self._prefix)
        family = re.compile(re.escape(self._base_prefix) + r"(_\d+)?")
        present = writer.store.scan()
        candidates = [c for c in newest_first(present) if family.fullmatch(c.series)]
        options = ReadOptions(key=self._key, trusted_keys=writer.store.trusted_keys)

        def load(checkpoint: Checkpoint) -> dict[str, Value]:
            with open_checkpoint(writer.store, checkpoint, options=options) as (opened, _):
                return read_values(opened)

        checkpoint, values, skipped = first_that_loads(candidates, load)
        for one in skipped:
            _LOG.warning("skipped %s: %s", one.checkpoint.path, one.reason)
        if checkpoint is None or values is None:
            return None, skipped
        doubt = contradiction(checkpoint, present)
        if doubt is not None:
            _LOG.warning("%s may be an older file under this name: %s", checkpoint.path, doubt)
        writer.continue_from(checkpoint, writer.store.read_manifest(checkpoint.name))
        return Resumed(checkpoint=checkpoint, values=values, skipped=tuple(skipped)), skipped

    def _save_if_due(self, params: Any, *, is_end: bool) -> None:
        step, now = int(params.cur_step_num), self._clock()
        policy = self._config.save_policy()
        prefix = self._prefix
        if self._prefix_of is not None:
            prefix = check_prefix_result(self._prefix_of(params))
        if self._directory_of is not None:
            self._directory = check_directory(self._directory_of(params))
            self._make_directory(self._directory)
        decision = (
            decide_at_end(policy, step, last=self._progress.last)
            if is_end
            else policy.decide(step, now, self._progress.last)
        )
        if not decision.is_due:
            return
        self._refuse_unbuilt()
        epoch = int(params.cur_epoch_num)
        if self._prefix_of is not None:
            name = f"{prefix}.{self._config.extension}"
        else:
            position = step_in_epoch(step, int(params.batch_num))
            name = checkpoint_name(
                prefix, epoch, step_in_epoch=position, format=self._config.extension
            )
        writer = self._writer(self._directory, prefix)
        facts = SaveFacts(
            step=step,
            at=now,
            epoch=epoch,
            why="end" if is_end else "policy",
            metrics=_metrics(params),
        )

        def save(items: Sequence[Item], publish: Publish) -> Checkpoint:
            checkpoint = writer.save(name, items, facts, publish=publish)
            watch.durable(checkpoint.path)
            if self._prefix_of is None:
                writer.retain(self._config.retention_policy())
            return checkpoint

        with self._observers.watch(series=prefix, step=step, why=facts.why) as watch:
            writer.open()
            items = self._items(params, step=step, epoch=epoch)
            handle = self._engine.run(writer.store, items, save, watch=watch)
        if handle is not None:
            self._progress.note(handle, LastSave(step=step, at=now))
            self._forecaster.after_save(handle, now)

    def _save_breakpoint(self, error: BaseException) -> None:
        # Whatever goes wrong here must not replace the error that stopped the training.
        try:
            self._engine.wait()
        except Exception as failure:
            error.add_note(f"ckptmgr: a save in the background failed: {failure}")
        try:
            step, epoch = int(self._params.cur_step_num), int(self._params.cur_epoch_num)
            base = self._base_prefix or "breakpoint"
            prefix = restart_prefix(base, self._names(self._directory), is_breakpoint=True)
            position = 0
            if step > self._steps_before_epoch:
                position = step_in_epoch(step, int(self._params.batch_num))
            name = breakpoint_name(prefix, epoch, step_in_epoch=position)
            facts = SaveFacts(step=step, epoch=epoch, why=f"exception: {type(error).__name__}")
            writer = self._writer(self._directory, self._prefix)
            options = replace(writer.options, format="ckpt")
            with self._observers.watch(series=prefix, step=step, why=facts.why) as watch:
                items = self._items(self._params, step=step, epoch=epoch)
                saved = writer.save(name, items, facts, options=options)
                watch.costs(SaveStats(size_bytes=saved.size_bytes))
                watch.durable(saved.path)
        except Exception as failure:
            error.add_note(f"ckptmgr: the breakpoint checkpoint could not be saved: {failure}")

    def _refuse_unbuilt(self) -> None:
        if self._config.remove_redundancy:
            # MindSpore raises this only after it has deleted an older checkpoint.
            raise TypeError(
                "The deduplication feature for saving checkpoint can only be used in parallel scenarios, "
                "but got 'stand_alone'."
            )

    def _items(self, params: Any, *, step: int, epoch: int) -> list[Item]:
        network = self._config.saved_network
        items = named_tensors(params.train_network if network is None else network)
        append = self._config.append_values(epoch, step=step)
        return join_items(items, named_tensors(append or {}))

    def _writer(self, directory: Path, prefix: str) -> SeriesWriter:
        # Names of a callable prefix share one series that is this object's own: they are never pruned.
        series = prefix if self._prefix_of is None else f"{type(self).__name__}-{id(self):x}"
        writer = self._writers.get((directory, series))
        if writer is None:
            options = SaveOptions(
                format=self._config.format,
                key=self._key,
                mode=self._config.enc_mode,
                has_crc=self._config.crc_check,
                compression_level=self._config.compression_level,
                verify_after_write=self._config.verify_after_write,
            )
            signing_key = self._config.signing_key
            store = Store(
                directory,
                fs=self._fs,
                key=self._key,
                must_authenticate=self._key is not None or signing_key is not None,
                signing_key=signing_key,
                trusted_keys=() if signing_key is None else (signing_key.public_key,),
            )
            writer = SeriesWriter(
                store, series, options=options, clock=self._clock, observers=self._observers
            )
            self._writers[directory, series] = writer
        return writer

    def _make_directory(self, directory: Path) -> None:
        Store(directory, fs=self._fs).fs.make_directory(directory, mode=0o700)

    def _names(self, directory: Path) -> list[str]:
        fs = Store(directory, fs=self._fs).fs
        return [] if fs.status(directory) is None else sorted(fs.list(directory))


def _metrics(params: Any) -> dict[str, float]:
    # MindSpore's parameters are a dictionary whose missing attributes are KeyErrors.
    found = (
        params.get("metrics") if isinstance(params, Mapping) else getattr(params, "metrics", None)
    )
    numbers: dict[str, float] = {}
    for name, value in found.items() if isinstance(found, Mapping) else ():
        try:
            numbers[str(name)] = float(value)
        except (TypeError, ValueError, OverflowError):
            # A loop may keep arrays and tables there; a save does not fail for what cannot be ranked.
            _LOG.warning("the metric %r is no number and is not noted", name)
    return numbers
