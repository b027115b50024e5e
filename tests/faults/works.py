# SPDX-License-Identifier: Apache-2.0
"""Works that the strace and root lanes disturb: saves in each mode and commands, each with its conditions afterwards.

A work finds a disk that `prepare` has filled. `check` looks at the state after a fault, given whether the work was
acknowledged, and then does the work again, undisturbed, which must finish it.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from ckptmgr import CheckpointConfig, CheckpointManager, KeyProblem, export_weights, load_checkpoint
from tests.cli.running import run
from tests.faults.straced import Call, python
from tests.faults.training import SERIES, state_of, value_of
from tests.support import api

OLD_KEY, NEW_KEY = "old.key", "new.key"
_NO_CHECKPOINT = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A save or a command.

    Attributes:
        prepare: Fills a disk.
        command: The process that does the work on a disk.
        check: Checks a disk after a fault, given whether the work was acknowledged.
    """

    prepare: Callable[[Path], None]
    command: Callable[[Path], list[str]]
    check: Callable[[Path, bool], None]


def save_steps(directory: Path, *steps: int, keep: str = "all", **config: object) -> None:
    """Save steps in this process, undisturbed."""
    settings = CheckpointConfig(keep=keep, **config)  # type: ignore[arg-type]
    with CheckpointManager(directory, settings, prefix=SERIES) as manager:
        manager.resume()
        for step in steps:
            manager.save(step, state_of(10.0 * step))


def temporaries(disk: Path) -> list[str]:
    """Return the temporary files below a directory."""
    return [path.name for path in disk.rglob("*.tmp")]


def check_directory(directory: Path, *, must: set[int], may: set[int]) -> None:
    """Check with a fresh start that all that must be there loads, and that nothing else is listed; then go on."""
    with CheckpointManager(directory, prefix=SERIES) as manager:
        latest = manager.latest()
        resumption = manager.resume()
        found = {checkpoint.step: checkpoint for checkpoint in manager.checkpoints()}
        assert must <= set(found) <= must | may
        for step, checkpoint in found.items():
            assert checkpoint.state is api.State.OK
            assert value_of(manager.load(checkpoint)) == 10.0 * step
        assert resumption.step == max(found, default=0)
        assert (0 if latest is None else latest.step) == resumption.step
        assert not resumption.skipped
        manager.save(99, state_of(990.0))
    assert temporaries(directory) == []


def listed(directory: Path, *keys: Path) -> dict[str, int]:
    """Return name to step of the checkpoints that verify, after checking that nothing is damaged and all load."""
    options = [part for key in keys for part in ("--key", f"file:{key}")]
    result = run("verify", directory, "--json", *options, now_s=time.time())
    if result.exit_code == _NO_CHECKPOINT:
        return {}
    assert result.exit_code == 0, result.output
    found = {}
    for item in _items(result.stdout):
        assert item["status"] in ("ok", "leftover"), item
        if item["status"] == "ok":
            path = Path(str(item["path"]))
            step = int(str(item["step"]))
            assert opened(path, *keys) == 10.0 * step
            found[path.name] = step
    return found


def _items(text: str) -> list[dict[str, object]]:
    items = json.loads(text)["items"]
    assert isinstance(items, list)
    return items


def opened(path: Path, *keys: Path) -> float:
    """Return the number in a checkpoint file that the first of these keys that fits opens."""
    sources: list[str | None] = [f"file:{key}" for key in keys]
    for source in sources or [None]:
        with contextlib.suppress(KeyProblem):
            weights = load_checkpoint(path, dec_key=source)["weights"]
            assert weights.tolist() == [weights[0]] * 3
            return float(weights[0])
    raise AssertionError(f"no key opens {path}")


# Saves.


def _saver(mode: str) -> Work:
    def check(disk: Path, is_acknowledged: bool) -> None:
        # The second one was resumed from; the first one goes only after the third is durable.
        run_directory = disk / "run"
        assert (run_directory / "net-1.ckpt").exists() or (run_directory / "net-3.ckpt").exists()
        must = {2, 3} if is_acknowledged else {2}
        check_directory(run_directory, must=must, may={1, 3})

    return Work(
        prepare=lambda disk: save_steps(disk / "run", 1, 2),
        command=lambda disk: python("-m", "tests.faults.saver", disk / "run", "3", mode),
        check=check,
    )


def prepare_second(disk: Path) -> None:
    """Put only the checkpoint on a disk that a saver resumes from: nothing is removed and synced after its save."""
    save_steps(disk / "run", 2)


def commit_of(calls: list[Call]) -> int:
    """Return the index of the call that publishes the checkpoint of a saver."""
    return next(n for n, c in enumerate(calls) if c.line.endswith('net-3.ckpt") = 0'))


def without_sync(calls: list[Call], forgotten: str) -> list[str]:
    """Return options of strace that leave out one sync of a saver: of the data, the manifest, or after the commit."""
    if forgotten == "commit":
        sync = next(call for call in calls[commit_of(calls) :] if call.kind == "sync")
    else:
        start = ".net-3.ckpt.manifest." if forgotten == "manifest" else ".net-3.ckpt."
        sync = next(c for c in calls if c.kind == "sync" and Path(c.path).name.startswith(start))
    return ["-e", f"inject=fsync:retval=0:when={sync.number}"]


# Commands. The command line is run again in this process.


def _command(
    prepare: Callable[[Path], None],
    arguments: Callable[[Path], list[str | Path]],
    check: Callable[[Path, bool], None],
) -> Work:
    def check_and_finish(disk: Path, is_acknowledged: bool) -> None:
        check(disk, is_acknowledged)
        again = run(*arguments(disk), now_s=time.time())
        assert again.exit_code == 0, again.output
        check(disk, True)

    return Work(
        prepare=prepare,
        command=lambda disk: python("-m", "ckptmgr", *arguments(disk)),
        check=check_and_finish,
    )


def _prune(*options: str) -> Work:
    def check(disk: Path, is_acknowledged: bool) -> None:
        steps = set(listed(disk / "run").values())
        assert {3, 4} <= steps <= ({3, 4} if is_acknowledged else {1, 2, 3, 4})

    return _command(
        lambda disk: save_steps(disk / "run", 1, 2, 3, 4),
        lambda disk: ["prune", disk / "run", "--keep", "last(2)", "--yes", *options],
        check,
    )


def _pin() -> Work:
    def check(disk: Path, is_acknowledged: bool) -> None:
        assert set(listed(disk / "run").values()) == {1, 2}
        items = _items(run("ls", disk / "run", "--json", now_s=time.time()).stdout)
        pins = {item["step"]: bool(item["pins"]) for item in items}
        assert not pins[2]
        assert pins[1] or not is_acknowledged

    return _command(
        lambda disk: save_steps(disk / "run", 1, 2),
        lambda disk: ["pin", disk / "run" / "net-1.ckpt", "--reason", "paper"],
        check,
    )


def _with_keys(disk: Path) -> tuple[Path, Path]:
    """Return two key files of a disk; made when they are missing."""
    keys = disk / OLD_KEY, disk / NEW_KEY
    for number, key in enumerate(keys):
        if not key.exists():
            key.touch(mode=0o600)
            key.write_bytes(bytes([number + 1]) * 32)
    return keys


def _keys_changed(format: str, arguments: Callable[[Path], list[str | Path]]) -> Work:
    """Return a change from the old key to the new one."""

    def prepare(disk: Path) -> None:
        old, _ = _with_keys(disk)
        save_steps(disk / "run", 1, format=format, enc_key=f"file:{old}")

    def check(disk: Path, is_acknowledged: bool) -> None:
        keys = _with_keys(disk)
        needed = keys[1:] if is_acknowledged else keys
        assert list(listed(disk / "run", *needed).values()) == [1]

    return _command(prepare, arguments, check)


def _rekey(format: str) -> Work:
    def arguments(disk: Path) -> list[str | Path]:
        old, new = (f"file:{key}" for key in _with_keys(disk))
        change = ["--add", new, "--remove", old]
        return ["rekey", disk / "run", "--key", old, "--key", new, *change, "--yes"]

    return _keys_changed(format, arguments)


def _reencrypt() -> Work:
    def arguments(disk: Path) -> list[str | Path]:
        old, new = (f"file:{key}" for key in _with_keys(disk))
        return ["reencrypt", disk / "run", "--key", old, "--key", new, "--to", new, "--yes"]

    return _keys_changed("safetensors", arguments)


def _convert() -> Work:
    def check(disk: Path, is_acknowledged: bool) -> None:
        found = listed(disk / "run")
        assert set(found.values()) == {1}
        if is_acknowledged:
            assert list(found) == ["net-1.safetensors.ckpz"]

    return _command(
        lambda disk: save_steps(disk / "run", 1, format="safetensors"),
        lambda disk: ["convert", disk / "run", "--compression", "zstd"],
        check,
    )


def _crypt(command: str) -> Work:
    """Return `decrypt -o` or `encrypt -o`."""
    is_sealed = command == "decrypt"

    def prepare(disk: Path) -> None:
        old, _ = _with_keys(disk)
        save_steps(disk / "run", 1, enc_key=f"file:{old}" if is_sealed else None)
        shutil.copytree(disk / "run", disk / "before")
        (disk / "out").mkdir()

    def check(disk: Path, is_acknowledged: bool) -> None:
        old, _ = _with_keys(disk)
        for path in (disk / "before").iterdir():
            assert (disk / "run" / path.name).read_bytes() == path.read_bytes()
        made = disk / "out" / "net-1.ckpt"
        assert made.exists() or not is_acknowledged
        keys = () if is_sealed else (old,)
        assert set(listed(disk / "out", *keys)) == ({made.name} if made.exists() else set())

    def arguments(disk: Path) -> list[str | Path]:
        old, _ = _with_keys(disk)
        source, target = disk / "run" / "net-1.ckpt", disk / "out"
        return [command, source, "-o", f"{target}/", "--key", f"file:{old}", "--force"]

    return _command(prepare, arguments, check)


def _export(*options: str) -> Work:
    """Return `export --hf` over an earlier export, or `export --to`."""
    is_for_hub = options == ("--hf",)

    def prepare(disk: Path) -> None:
        save_steps(disk / "run", 1, 2)
        (disk / "out").mkdir()
        if is_for_hub:
            export_weights(disk / "run/net-1.ckpt", disk / "out/hub")

    def weights(directory: Path) -> float:
        return float(load_file(directory / "model.safetensors")["weights"][0])

    def check(disk: Path, is_acknowledged: bool) -> None:
        assert set(listed(disk / "run").values()) == {1, 2}
        if not is_for_hub:
            found = listed(disk / "out")
            assert set(found.values()) == {2} or (not found and not is_acknowledged)
            return
        held = [disk / "out/hub", *(disk / "out").glob(".hub.export-*.old")]
        kept = weights(next(one for one in held if one.exists()))
        assert kept == 20.0 or (kept == 10.0 and not is_acknowledged)
        left = {path.name for path in (disk / "out").iterdir()} - {".hub.lease"}
        assert left == {"hub"} or not is_acknowledged

    def arguments(disk: Path) -> list[str | Path]:
        target = disk / "out" / ("hub" if is_for_hub else "net-2.safetensors")
        return ["export", disk / "run/net-2.ckpt", "-o", target, *options, "--force"]

    return _command(prepare, arguments, check)


SAVERS = {mode: _saver(mode) for mode in ("sync", "thread", "process")}
COMMANDS = {
    "prune": _prune(),
    "prune --now": _prune("--now"),
    "pin": _pin(),
    "rekey container": _rekey("safetensors"),
    "rekey ckpt": _rekey("ckpt"),
    "reencrypt": _reencrypt(),
    "convert": _convert(),
    "decrypt": _crypt("decrypt"),
    "encrypt": _crypt("encrypt"),
    "export --hf": _export("--hf"),
    "export --to": _export("--to", "safetensors"),
}
WORKS = {**SAVERS, **COMMANDS}
each_work = pytest.mark.parametrize("name", WORKS)
each_saver = pytest.mark.parametrize("name", SAVERS)
