# SPDX-License-Identifier: Apache-2.0
"""What one tensor of 1 MiB costs of a large file, opening included and excluded, with a cold and with a warm page cache."""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import ckptmgr
from tools.bench.contestant import touch
from tools.bench.disk import drop_cache, remove
from tools.bench.modes import MODES, Mode
from tools.bench.quiet import rest
from tools.bench.session import NewSession, Session
from tools.bench.workload import State, Workload

LAZY_BYTES = 4 << 30
READ_BYTES = 1 << 20
CACHES = ("cold", "warm")
_MODES = ("container-gcm", "safetensors", "ckpt-gcm")
# No multiple of the 4 MiB of a cipher block or the 16 MiB of a digest range: small tensors then lie differently in them.
_PAIR_BYTES = 33 << 20
_STRIDE = 37
_SPARE_BYTES = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairs(Workload):
    """Pairs of a large tensor and one of 1 MiB; all share the memory of one pair, so that the file may be larger than that."""

    @property
    def pairs(self) -> int:
        """How many tensors of 1 MiB there are."""
        return max(2, self.size_bytes // _PAIR_BYTES)

    @property
    def tensors(self) -> int:
        """How many tensors there are."""
        return 2 * self.pairs

    @property
    def total_bytes(self) -> int:
        """The bytes of all tensors."""
        return self.pairs * (READ_BYTES + self._large_bytes)

    @property
    def _large_bytes(self) -> int:
        return max(4, self.size_bytes // self.pairs - READ_BYTES) // 4 * 4

    def new_state(self) -> State:
        """Return the tensors; those that are read are called `layer000.bias` and so on."""
        elements = (READ_BYTES + self._large_bytes) // 4
        values = np.random.default_rng(elements).standard_normal(elements, dtype=np.float32)
        small, large = np.split(values, [READ_BYTES // 4])
        return {
            f"layer{pair:03}.{name}": array
            for pair in range(self.pairs)
            for name, array in (("weight", large), ("bias", small))
        }


def measure_lazy(new_session: NewSession, size_bytes: int = LAZY_BYTES) -> None:
    """Save a file in each mode and read single tensors of it; nothing is measured where the disk has no room for one."""
    workload = Pairs(size_bytes=size_bytes)
    session = new_session("lazy", workload)
    free_bytes = shutil.disk_usage(session.directory).free
    needed_bytes = workload.total_bytes + _SPARE_BYTES
    if free_bytes < needed_bytes:
        session.failures["lazy"] = (
            f"needs {needed_bytes / 1e9:.0f} GB of disk, {free_bytes / 1e9:.0f} are free"
        )
        return
    state = workload.new_state()
    for mode in MODES:
        if mode.name in _MODES:
            path = session.directory / f"lazy-{mode.name}{mode.suffix}"
            try:
                ckptmgr.save_checkpoint(state, path, **mode.save_options)
                _measure_mode(session, mode, path, pairs=workload.pairs)
            finally:
                remove(path)


def _measure_mode(session: Session, mode: Mode, path: Path, *, pairs: int) -> None:
    for turn in session.turns():
        name = f"layer{(turn + 1) * _STRIDE % pairs:03}.bias"
        rest(session.pace.rest_s)
        drop_cache(path)
        for (
            cache
        ) in CACHES:  # the cold read leaves in the page cache the bytes that the warm one needs
            with_opening_s, alone_s = _read(path, name, mode)
            if turn >= 0:
                session.note(mode.name, f"{cache}, with opening", with_opening_s)
                session.note(mode.name, f"{cache}, alone", alone_s)


def _read(path: Path, name: str, mode: Mode) -> tuple[float, float]:
    """Return the seconds of opening a file and reading a tensor, and of the reading alone."""
    started = time.perf_counter()
    with ckptmgr.open_checkpoint(path, dec_key=mode.load_options.get("dec_key")) as reader:
        opened = time.perf_counter()
        touch({name: reader.read(name)})
        done = time.perf_counter()
    return done - started, done - opened
