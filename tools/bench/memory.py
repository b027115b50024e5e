# SPDX-License-Identifier: Apache-2.0
"""The memory a save or load takes beyond the tensors themselves: the high-water mark of a fresh process."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from tools.bench.contestant import Contestant
from tools.bench.disk import remove
from tools.bench.modes import MODES, Mode
from tools.bench.workload import State, new_state, tensor_sizes

MIB = 1 << 20
LIMIT_PLAIN_BYTES = 64 * MIB
LIMIT_ENCRYPTED_BYTES = 256 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """Peak extra memory of one mode, in bytes, and its limit."""

    mode: str
    save_bytes: int
    load_bytes: int
    limit_bytes: int

    @property
    def is_within(self) -> bool:
        """Whether both stay below the limit."""
        return max(self.save_bytes, self.load_bytes) <= self.limit_bytes

    def as_json(self) -> dict[str, object]:
        """Return its fields."""
        return asdict(self)


def measure_memory(mode: str, directory: Path, *, size_bytes: int, is_encrypted: bool) -> Peak:
    """Save in one child process and load in another."""
    peaks = [_in_child(what, mode, directory, size_bytes) for what in ("save", "load")]
    limit = LIMIT_ENCRYPTED_BYTES if is_encrypted else LIMIT_PLAIN_BYTES
    return Peak(mode=mode, save_bytes=peaks[0], load_bytes=peaks[1], limit_bytes=limit)


def _in_child(what: str, mode: str, directory: Path, size_bytes: int) -> int:
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-m", "tools.bench.memory"]
    done = subprocess.run(
        [*command, what, mode, str(directory), str(size_bytes)],
        cwd=root,
        check=True,
        capture_output=True,
        text=True,
    )
    return int(json.loads(done.stdout)["extra_bytes"])


def _child(what: str, mode_name: str, directory: Path, size_bytes: int) -> int:
    mode = next(mode for mode in MODES if mode.name == mode_name)
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        small = _ours(new_state(MIB), mode, directory)
        path = Path(scratch) / f"warm{mode.suffix}"
        small.actions["save"](path)
        small.actions["load"](path)  # imports are not measured
    path = directory / f"memory-{mode.name}{mode.suffix}"
    if what == "save":
        contestant = _ours(new_state(size_bytes), mode, directory)
        before = _reset_peak()
        contestant.actions["save"](path)
        return _status("VmHWM") - before
    # Never in this process was the model: memory that it had left behind would be used again, and not be seen.
    total = sum(tensor_sizes(size_bytes))
    try:
        before = _reset_peak()
        small.actions["load"](path)
        return _status("VmHWM") - before - total
    finally:
        remove(path)


def _ours(state: State, mode: Mode, directory: Path) -> Contestant:
    from tools.bench.peers.ours import Library

    return Library(state, 0, directory=directory, rest_s=0).contestant(mode)


def _reset_peak() -> int:
    """Set the high-water mark to the memory in use, and return that."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmHWM")


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"the kernel does not tell {field}")


if __name__ == "__main__":
    asked, mode_asked, where, size = sys.argv[1:]
    extra = _child(asked, mode_asked, Path(where), int(size))
    sys.stdout.write(json.dumps({"extra_bytes": extra}))
