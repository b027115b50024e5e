# SPDX-License-Identifier: Apache-2.0
"""ckptmgr in every mode, and one copy in memory, by which a background save is measured."""

from __future__ import annotations

import inspect
import itertools
from pathlib import Path
from typing import Any

import numpy as np

import ckptmgr
from ckptmgr.core.trust import Trust
from ckptmgr.crypto.keys.key import Key
from ckptmgr.crypto.sm4_ipp import sm4_lanes
from ckptmgr.files.load.options import ReadOptions
from ckptmgr.maintenance.verify import Status, verify_checkpoint
from ckptmgr.store.store import Store
from tools.bench.contestant import Action, Background, Contestant, Flight, touch
from tools.bench.modes import MODES, Mode
from tools.bench.workload import State

NAME = "ckptmgr"
MEMCPY = "one memcpy"
_CAN_FILL = "into" in inspect.signature(ckptmgr.load_checkpoint).parameters
_CAN_STAGE_LATE = "zero_stall" in inspect.signature(ckptmgr.CheckpointConfig).parameters


class Library:
    """Ours."""

    def __init__(self, state: State, size_bytes: int, *, directory: Path, rest_s: float) -> None:
        del size_bytes, rest_s
        self._state = state
        self._directory = directory
        self._arrays: State = {}
        self._own: dict[str, Any] = {}
        self.about = {"sm4": "16 lanes" if sm4_lanes() is not None else "OpenSSL"}

    def contestants(self) -> list[Contestant]:
        """Return every mode."""
        return [self.contestant(mode) for mode in MODES]

    def contestant(self, mode: Mode) -> Contestant:
        """Return one mode."""
        actions: dict[str, Action] = {
            "save": lambda path: ckptmgr.save_checkpoint(self._state, path, **mode.save_options),
            "load": lambda path: touch(ckptmgr.load_checkpoint(path, **mode.load_options)),
        }
        if _CAN_FILL:
            actions["into"] = lambda path: self._fill(path, mode)
            actions["into own"] = lambda path: self._fill_own(path, mode)
        actions["load warm"] = actions["load"]
        if not mode.is_encrypted:
            actions["load mmap"] = _load_mapped
        actions["verify"] = lambda path: _verify(path, mode)
        return Contestant(name=NAME, mode=mode.name, suffix=mode.suffix, actions=actions)

    def _fill(self, path: Path, mode: Mode) -> None:
        options: dict[str, Any] = dict(mode.load_options)
        if not self._arrays:
            self._arrays = {name: np.ones_like(array) for name, array in self._state.items()}
        touch(ckptmgr.load_checkpoint(path, into=self._arrays, **options))

    def _fill_own(self, path: Path, mode: Mode) -> None:
        """Fill arrays of an earlier load of such a file, whose first time is the round to warm up."""
        options: dict[str, Any] = dict(mode.load_options)
        if mode.name not in self._own:
            self._own = {mode.name: ckptmgr.load_checkpoint(path, **options)}
        touch(ckptmgr.load_checkpoint(path, into=self._own[mode.name], **options))

    def backgrounds(self) -> list[Background]:
        """Return the modes of background saves, and the copy."""
        modes: list[tuple[str, dict[str, Any]]] = [
            ("thread", {"async_save": "thread"}),
            ("process", {"async_save": "process"}),
        ]
        if _CAN_STAGE_LATE:
            modes.append(("zero-stall", {"async_save": "thread", "zero_stall": True}))
        return [_memcpy(self._state)] + [self._background(name, options) for name, options in modes]

    def _background(self, mode: str, options: dict[str, Any]) -> Background:
        config = ckptmgr.CheckpointConfig(
            keep_checkpoint_max=1, format="safetensors", back_pressure="wait", **options
        )
        manager = ckptmgr.CheckpointManager(self._directory / f"ckptmgr-{mode}", config)
        steps = itertools.count(1)

        def start(path: Path) -> Flight:
            handle = manager.save(next(steps), self._state)
            assert handle is not None
            return Flight(
                wait=handle.wait,
                before_update=getattr(manager, "before_update", None)
                if "zero_stall" in options
                else None,
            )

        return Background(name=NAME, mode=mode, start=start, close=manager.close)


def _load_mapped(path: Path) -> None:
    with ckptmgr.open_checkpoint(path, mmap=True) as reader:
        touch({name: reader.read(name) for name in reader.tensor_names()})


def _verify(path: Path, mode: Mode) -> None:
    secret = mode.load_options.get("dec_key")
    key = None if secret is None else Key(secret)
    options = ReadOptions(trust=Trust(keys=key), mode=mode.load_options.get("dec_mode", "AES-GCM"))
    store = Store(path.parent, trust=Trust(keys=key, allow_unencrypted=True))
    manifest = store.read_manifest(path.name)
    assert manifest is not None
    verdict = verify_checkpoint(store, manifest.to_checkpoint(path.parent), options=options)
    if verdict.status is not Status.OK:
        raise ValueError(f"{path.name} is {verdict.status.value}: {verdict.problems}")


def _memcpy(state: State) -> Background:
    """Return a copy of the state into memory that was used before."""
    copies = {name: np.ones_like(array) for name, array in state.items()}

    def start(path: Path) -> Flight:
        for name, array in state.items():
            np.copyto(copies[name], array)
        return Flight(wait=lambda: None)

    return Background(name=MEMCPY, mode="unit", start=start)
