# SPDX-License-Identifier: Apache-2.0
"""Probes of options: the same work with and without an option, and its visible effects.

An option that is ignored leaves both observations equal, so no probe passes by itself.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import re
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptmgr import (
    Checkpoint,
    CheckpointConfig,
    CheckpointManager,
    CkptmgrError,
    ModelCheckpoint,
    Ranks,
    RanksMissing,
    Resume,
    load_checkpoint,
    load_state,
    open_checkpoint,
    save_checkpoint,
    save_state,
)
from ckptmgr.crypto.keys.signing import SigningKey
from ckptmgr.io.temp_names import temp_name
from ckptmgr.parallel import ParallelLayout
from ckptmgr.store.manifest.codec import SUFFIX, manifest_name
from tests.parallel.ranks import Meeting, Seat, run_ranks
from tests.support.held import HeldDisk
from tests.support.held_staging import HeldStaging
from tests.support.runs import made, manager_on
from tests.support.saved import overwrite
from tests.support.surface import Loop

KEY, OTHER_KEY = bytes(range(16)), bytes(range(16, 32))
SIGNER = SigningKey.generate()
HALVES = {"w": ParallelLayout(device_matrix=(2,), tensor_map=((0,),))}
WHOLE = {name: ParallelLayout(device_matrix=(2,), tensor_map=((),)) for name in "abc"}
Options = Mapping[str, Any]


class At(tuple[Callable[[Path], object]]):
    """A value that depends on the directory of the probe."""

    __slots__ = ()

    def __new__(cls, made: Callable[[Path], object]) -> At:
        """Wrap a function from the directory to the value."""
        return super().__new__(cls, (made,))


@dataclass(frozen=True)
class Probe:
    """One option.

    Attributes:
        see: Does some work in an empty directory with the options, and returns what can be seen.
        value: The value of the option.
        beside: Options that are given both times; the option itself is among them if it has no default.
        refusal: Part of the error, if the option is refused here.
    """

    see: Callable[..., object]
    value: object
    beside: Options = field(default_factory=dict)
    refusal: str | None = None


_WITHOUT: dict[tuple[object, str], object] = {}
"""What is seen without the option: many probes have that in common."""


def check(probe: Probe, option: str, directory: Path) -> None:
    """Assert that an option has a visible effect, or is refused."""

    def seen(name: str, given: Options) -> object:
        place = directory / name
        place.mkdir()
        options = {**probe.beside, **given}
        made = {n: v[0](place) if isinstance(v, At) else v for n, v in options.items()}
        return probe.see(place, **made)

    common = (probe.see, repr(sorted(probe.beside.items())))
    if common not in _WITHOUT:
        _WITHOUT[common] = seen("without", {})
        assert seen("again", {}) == _WITHOUT[common], "what is seen differs by itself"
    if probe.refusal is None:
        assert seen("with", {option: probe.value}) != _WITHOUT[common], f"{option} has no effect"
        return
    with pytest.raises((ValueError, TypeError), match=probe.refusal):
        seen("with", {option: probe.value})


def tried(work: Callable[[], object]) -> object:
    """Return the result, or the kind of an error that a user is told."""
    try:
        return work()
    except (CkptmgrError, OSError, ValueError, RuntimeError) as error:
        return type(error).__name__


def framework(directory: Path, **options: Any) -> object:
    """Return the kinds of the values that a load returns."""
    save_checkpoint({"w": np.ones(2, np.float32)}, directory / "x.ckpt")
    found = load_checkpoint(directory / "x.ckpt", **options)
    return [type(one).__module__ for one in found.values()]


def plain(value: object) -> object:
    """Return a value as plain values that compare."""
    if isinstance(value, np.ndarray):
        return (value.dtype.name, value.tolist())
    if isinstance(value, Mapping):
        return {name: plain(one) for name, one in value.items()}
    return [plain(one) for one in value] if isinstance(value, list | tuple) else value


def files(directory: Path) -> object:
    """Return each data file below a directory: its size, and what its manifest says that is no chance."""
    found: dict[str, object] = {}
    for path in sorted(directory.rglob("*")):
        if path.is_file() and not path.name.startswith(".") and not path.name.endswith(SUFFIX):
            name = re.sub(r"\.[0-9a-f]{16}\.", ".", str(path.relative_to(directory)))
            status = path.stat()
            found[name] = (status.st_size, status.st_mode, described(path))
    return found


def described(path: Path) -> object:
    """Return the facts in the manifest of a data file, and whether it is signed."""
    manifest = path.with_name(manifest_name(path.name))
    if not manifest.exists():
        return None
    document = json.loads(manifest.read_text())
    facts = [document[name] for name in ("step", "epoch", "why", "metrics")]
    (entry,) = document["files"]
    has = ("signatures" in document, "verify_s" in document["stats"])
    return [*facts, entry["cipher"], *has]


def dates(directory: Path) -> list[object]:
    """Return when the checkpoints below a directory were saved."""
    found = sorted(directory.rglob(f"*{SUFFIX}"))
    return [json.loads(path.read_text())["saved_at"] for path in found]


def key_file(directory: Path, key: bytes = OTHER_KEY) -> str:
    """Return the source of a key in a file."""
    path = directory / ".key"
    path.touch(mode=0o600)
    path.write_text(f"hex:{key.hex()}")
    return f"file:{path}"


@dataclass
class Ticks:
    """A clock that tests move."""

    now: float = 1_700_000_000.0

    def __call__(self) -> float:
        return self.now


def state(step: int = 1) -> dict[str, Any]:
    """A state that compresses; by step."""
    noise = np.random.default_rng(step).integers(0, 5, 9000).astype(np.float32)
    return {"w": noise, "n": step}


# Effects of a configuration in a manager.


def trained(directory: Path, /, *, steps: int = 1, **config: Any) -> object:
    """Some steps of 20 seconds in a manager."""
    clock = Ticks()
    runs = directory / "runs"
    with manager_on(runs, CheckpointConfig(**config), clock=clock, prefix="net") as manager:
        for step in range(1, steps + 1):
            clock.now += 20
            manager.step_end(step, state(step), epoch=1, metrics={"loss": float(step % 3)})
    return files(runs)


def interrupted(directory: Path, /, **config: Any) -> object:
    """An exception in the third step."""
    manager = CheckpointManager(directory, CheckpointConfig(**config), prefix="net")

    def train() -> None:
        with manager:
            for step in range(1, 3):
                manager.step_end(step, state(step))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()
    return files(directory)


def heard(directory: Path, /, **config: Any) -> object:
    """The events of a save, in any order."""
    names: list[str] = []
    config = {"save_checkpoint_steps": 1, **config}
    with CheckpointManager(
        directory, CheckpointConfig(**config), observe=lambda event: names.append(event.name)
    ) as manager:
        manager.step_end(1, state())
    return sorted(names)


def constructed(directory: Path, /, **config: Any) -> object:
    """A manager, a rank of two, that holds slices."""
    CheckpointManager(
        directory, CheckpointConfig(**config), ranks=Ranks(Seat(Meeting(2), 0), layout=HALVES)
    )
    return None


def queued(directory: Path, /, **config: Any) -> object:
    """Three saves of which the first is held up."""
    disk = HeldDisk()
    with manager_on(directory, CheckpointConfig(async_save=True, **config), fs=disk) as manager:
        disk.gate.clear()
        manager.save(1, state())
        disk.arrive()
        for step in (2, 3):
            manager.save(step, state())
        disk.gate.set()
        manager.wait()
        return [one.step for one in manager.checkpoints()]


def failed(directory: Path, /, **config: Any) -> object:
    """A save in the background that fails."""
    disk = HeldDisk()
    with manager_on(directory, CheckpointConfig(async_save=True, **config), fs=disk) as manager:
        disk.failure = OSError(30, "Read-only file system")
        manager.save(1, state())
        return tried(manager.wait)


def copied(directory: Path, /, **config: Any) -> object:
    """Whether a large tensor is copied when `save` returns."""
    torch = pytest.importorskip("torch")
    with pytest.MonkeyPatch.context() as patch:
        held = HeldStaging(patch)
        manager = CheckpointManager(directory, CheckpointConfig(async_save=True, **config))
        handle = manager.save(1, {"w": torch.zeros(1 << 20)})
        assert handle is not None
        is_copied = handle.staged.done()
        held.let_go_soon()
        manager.close()
    return is_copied


def staged(directory: Path, /, **config: Any) -> object:
    """A save in the background."""
    with CheckpointManager(directory, CheckpointConfig(async_save=True, **config)) as manager:
        return tried(lambda: manager.save(1, state()) is not None)


# Effects of the arguments of a manager and of a callback.

STEPS_3 = CheckpointConfig(save_checkpoint_steps=3)
KEYED = CheckpointConfig(enc_key=KEY)


def managed(directory: Path, /, **options: Any) -> object:
    """Four steps in a manager; all files of its directory and around it."""
    options = {"directory": directory / "runs", "prefix": "net", "clock": Ticks(), **options}
    with made(CheckpointManager, **options) as manager:
        for step in range(1, 5):
            manager.step_end(step, state(step))
    return files(directory), dates(directory), noted(directory)


def preempted(directory: Path, /, **options: Any) -> object:
    """Return the step after which a run stops that Slurm signals in step 3, of at most 6."""
    step = 0
    with made(CheckpointManager, directory=directory, **options) as manager:
        while step < 6 and not manager.should_stop:
            step += 1
            if step == 3:
                signal.raise_signal(signal.SIGUSR1)
            manager.step_end(step, {"n": step})
    return step


def held(directory: Path, /, **options: Any) -> object:
    """Return whether SIGTERM has its default action after a step."""
    with made(CheckpointManager, directory=directory, **options) as manager:
        manager.step_end(1, {"n": 1})
        return signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def left(directory: Path, /, **options: Any) -> object:
    """Return the state that the exit saves of a run that changes it after its last pass."""
    state = {"n": np.zeros(1)}
    with made(CheckpointManager, directory=directory, **options) as manager:
        for step in manager.batches(range(1, 3)):
            manager.step_end(step, state)
        state["n"][0] = 9
    return CheckpointManager(directory).load("latest")


def asked_to_save(directory: Path, /, **options: Any) -> object:
    """Return the steps of a run that are saved, of which the second gets a signal."""
    with made(CheckpointManager, directory=directory, **options) as manager:
        for step in range(1, 4):
            if step == 2:
                signal.raise_signal(signal.SIGURG)  # without effect by default
            manager.step_end(step, {"n": step})
        return [one.step for one in manager.checkpoints()]


HIDDEN = np.random.default_rng(0)


class _Loader:
    """Its batches are of its epoch, and of a generator that is no attribute of it."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[object]:
        yield from (self.epoch, *HIDDEN.permutation(9).tolist())


def iterated(directory: Path, /, **options: Any) -> object:
    """Iterate over a loader beside another one, and once more after a resumption."""
    HIDDEN.bit_generator.state = np.random.default_rng(0).bit_generator.state
    loader = options.pop("loader", None)
    with CheckpointManager(directory) as manager:
        each = iter(manager.batches(loader or _Loader(), **options))
        seen = [next(each)]
        manager.save(1, {"n": 1})
        seen.append(tried(lambda: list(manager.batches([1]))))
    HIDDEN.random()
    with CheckpointManager(directory) as manager:
        manager.resume({"n": 1})
        return seen, tried(lambda: list(manager.batches(loader or _Loader(), **options)))


def looped(directory: Path, /, *, config: Options | None = None, **options: Any) -> object:
    """Four steps with a callback; all files around it."""
    callback = made(
        ModelCheckpoint,
        **{
            "prefix": "net",
            "directory": str(directory / "runs"),
            "config": CheckpointConfig(**(config or {})),
            "clock": Ticks(),
            **options,
        },
    )
    Loop(callbacks=(callback,)).run(4)
    return files(directory), dates(directory), noted(directory)


def noted(directory: Path) -> bool:
    """Whether an observer of `note_in` has heard something."""
    return (directory / ".heard").exists()


def note_in(directory: Path) -> Callable[[object], None]:
    """Return an observer that leaves a note."""
    return lambda event: (directory / ".heard").touch()


class Held:
    """An object whose `load_state_dict` may change what is stored."""

    def __init__(self, load: Callable[[dict[str, Any]], dict[str, Any]] = lambda one: one) -> None:
        self._held: dict[str, Any] = {"held": np.zeros(2), "count": 1}
        self._load = load

    def state_dict(self) -> dict[str, Any]:
        return self._held

    def load_state_dict(self, stored: dict[str, Any]) -> None:
        self._held = self._load(stored)


def changed(stored: dict[str, Any]) -> dict[str, Any]:
    """Another array than the stored one."""
    return {**stored, "held": stored["held"] + 1}


def counted_on(stored: dict[str, Any]) -> dict[str, Any]:
    """Another number than the stored one."""
    return {**stored, "count": 2}


def resumed(
    directory: Path,
    /,
    *,
    saved: Options,
    is_bare: bool = False,
    loads: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
    batches: Sequence[int] = (),
    value: float | None = None,
    **options: Any,
) -> object:
    """A resumption in a directory with one checkpoint; `loads` is how its object loads.

    With `value`, that of its array.

    With `batches` what comes of them.
    """
    with CheckpointManager(directory, CheckpointConfig(**saved), prefix="net") as manager:
        plain = state() if value is None else {"w": np.full(3, value)}
        manager.save(1, plain if loads is None else {"object": Held()})
    target = None if loads is None else {"object": Held(loads)}
    if is_bare:
        (directory / manifest_name("net-1.ckpt")).unlink()
    fields = [field.name for field in dataclasses.fields(Resume)]
    how = {name: options.pop(name) for name in fields if name in options}
    with made(CheckpointManager, directory=directory, prefix="net", **options) as manager:
        step = tried(lambda: manager.resume(target, Resume(**how)).step)
        return [step, *manager.batches(batches)] if batches else step


def repeated(directory: Path, /, **options: Any) -> object:
    """What comes of a step that is trained again with another loss, after the run died."""
    config = CheckpointConfig(save_checkpoint_steps=100)

    def train(loss: float, how: Resume) -> str:
        with CheckpointManager(directory, config, prefix="net") as manager:
            if manager.resume(state(), how).is_fresh:
                manager.save(1, state())
            manager.step_end(2, state(), metrics={"loss": loss})
            manager._past.unsaved = None
        return str(manager.witness)

    train(1.0, Resume())
    return tried(lambda: train(1.5, Resume(**options)))


def gone_back(directory: Path, /, *, steps: int, **options: Any) -> object:
    """The steps that can be gone back to without a checkpoint."""
    config = CheckpointConfig(save_checkpoint_steps=100)
    with made(CheckpointManager, directory=directory, config=config, **options) as manager:
        for step in range(1, 5):
            manager.step_end(step, state(step))
        manager.step_end(5, state(5))
        found = tried(lambda: manager.rollback(steps_back=steps).step)
        manager._past.unsaved = None
    return found


def alone(directory: Path, /, *, surface: Callable[..., Any], **options: Any) -> object:
    """How long a rank waits for one that never comes."""
    waited: list[float] = []

    class Lonely:
        rank, world = 0, 2

        def all_gather(self, tag: str, value: object, *, timeout_s: float) -> list[Any]:
            waited.append(timeout_s)
            raise RanksMissing(tag, ranks=[1], found={}, timeout_s=timeout_s)

    saver = made(surface, directory=str(directory), coordinator=Lonely(), **options)
    with pytest.raises(CkptmgrError):
        saver.resume()
    return round(max(waited))


def cleaned(directory: Path, /, *, surface: Callable[..., Any], **options: Any) -> object:
    """Whether a first save removes the temporary file of a process that nothing is known of."""
    temp = directory / temp_name("other-9.ckpt", token="nowhere-1", series="other")
    temp.touch()
    saver = made(surface, prefix="net", directory=str(directory), **options)
    if isinstance(saver, CheckpointManager):
        saver.save(1, state())
        saver.close()
    else:
        Loop(callbacks=(saver,)).run(1)
    return temp.exists()


class OnlyProcess:
    """The processes of a host where all others are gone."""

    def token(self) -> str:
        """Return the token of this process."""
        return "here-1"

    def is_dead(self, token: str) -> bool:
        """Return whether it is another one."""
        return token != self.token()


def by_two(
    directory: Path,
    /,
    *,
    surface: Callable[..., Any],
    held: Callable[[int], dict[str, np.ndarray]],
    config: Options,
    **options: Any,
) -> object:
    """Files of two ranks with equal states, and their load."""
    meeting = Meeting(2)

    def work(rank: int) -> bool:
        saver = made(
            surface,
            prefix="net",
            directory=str(directory),
            config=CheckpointConfig(**config),
            coordinator=Seat(meeting, rank),
            **options,
        )
        if isinstance(saver, CheckpointManager):
            with saver:
                saver.save(1, held(rank))
        else:
            Loop(callbacks=(saver,), network=held(rank)).run(1)
        return True

    for outcome in run_ranks(meeting, work):
        outcome.must()
    sizes = sorted(
        (re.sub(r"\.[0-9a-f]{16}\.", ".", path.name), path.stat().st_size)
        for path in directory.iterdir()
        if path.name.startswith("net") and not path.name.endswith(SUFFIX)
    )
    (manifest,) = directory.glob(f"net*{SUFFIX}")
    whole = manifest.with_name(manifest.name.removesuffix(SUFFIX))
    return sizes, tried(lambda: {n: np.shape(one) for n, one in load_checkpoint(whole).items()})


def same(rank: int) -> dict[str, np.ndarray]:
    """What both ranks hold."""
    del rank
    return {
        name: np.ones(size, np.float32)
        for name, size in zip("abcw", (3000, 500, 9, 4), strict=True)
    }


def half(rank: int) -> dict[str, np.ndarray]:
    """A half of `w`."""
    return {"w": np.full(4, float(rank), np.float32)}


# Single files.


def saved_file(directory: Path, /, **options: Any) -> object:
    """What `save_checkpoint` writes: the file, the listing, the strings and tensors in it."""
    options = {"save_obj": state(), "ckpt_file_name": directory / "x", **options}
    return _file(directory, save_checkpoint(**options), options)


def saved_state(directory: Path, /, **options: Any) -> object:
    """What `save_state` writes."""
    options = {"state": state(), "path": directory / "x.safetensors", **options}
    return _file(directory, save_state(**options), options)


def _file(directory: Path, saved: Checkpoint, options: Options) -> object:
    keys: dict[str, Any] = {"dec_key": options.get("enc_key"), "allow_unencrypted": True}
    if options.get("enc_recipients"):
        keys["dec_key"] = OTHER_KEY
    with open_checkpoint(saved.path, **keys) as reader:
        names = {name: plain(reader.read(name)) for name in reader.names()}
    return files(directory), names, (saved.step, saved.epoch, saved.cipher), _header(saved.path)


def _header(path: Path) -> object:
    if path.suffix != ".safetensors":
        return None
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    try:
        return json.loads(content[8 : 8 + length]).get("__metadata__")
    except ValueError:  # a container
        return None


def opened(
    directory: Path,
    /,
    *,
    load: Callable[..., Any] = load_checkpoint,
    saved: Options | None = None,
    has_manifest: bool = True,
    is_authenticated: bool = True,
    **options: Any,
) -> object:
    """The result of a load of a file that was saved with other options, and the warnings."""
    format = (saved or {}).get("format", "ckpt")
    path, manifest = directory / f"x.{format}", directory / manifest_name(f"x.{format}")
    values = {"w": np.ones(2, np.float32), "b": np.zeros(2, np.float32)}
    save: Callable[..., object] = save_state if load is load_state else save_checkpoint
    save(values, path, **(saved or {}))
    save({"other": np.ones(1)}, directory / "other.ckpt")
    if not is_authenticated:
        document = json.loads(manifest.read_text())
        del document["auth"]
        overwrite(manifest, json.dumps(document).encode())
    if not has_manifest:
        manifest.unlink()
    with warnings_of("ckptmgr") as messages:
        name = "path" if load is load_state else "ckpt_file_name"
        found = tried(lambda: plain(load(**{name: path, **options})))
    targets = (options.get("net"), options.get("into"))
    is_filled = [one is not None and plain(one["w"]) == plain(values["w"]) for one in targets]
    return found, is_filled, messages


@contextmanager
def warnings_of(logger: str) -> Iterator[list[str]]:
    """Collect the warnings of a logger."""
    messages: list[str] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    handler = Collector(logging.WARNING)
    logging.getLogger(logger).addHandler(handler)
    try:
        yield messages
    finally:
        logging.getLogger(logger).removeHandler(handler)


def blank(directory: Path) -> dict[str, np.ndarray]:
    """Return arrays to load into."""
    del directory
    return {"w": np.zeros(2, np.float32), "b": np.ones(2, np.float32)}
