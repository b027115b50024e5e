# SPDX-License-Identifier: Apache-2.0
"""Checks of the constructor arguments and `checkpoint_id`s of the DCP storage."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from ckptmgr.config.checks import check_cipher
from ckptmgr.config.config import CheckpointConfig, check_config, trust_of
from ckptmgr.config.surfaces import DCP, SLICED, check_surface
from ckptmgr.core.names import check_directory, check_prefix, parse_step_name
from ckptmgr.core.shard_names import SET_FORMAT, is_set_name, set_stem
from ckptmgr.core.trust import Trust
from ckptmgr.crypto.keys.key import Key
from ckptmgr.crypto.keys.signing import PublicKey
from ckptmgr.integrations.dcp.run import SeriesLocation
from ckptmgr.io.filesystem import FileSystem
from ckptmgr.store.manifest.codec import SUFFIX


def checked_config(config: CheckpointConfig | None) -> CheckpointConfig:
    """Return a configuration, or the default one for None, if it is valid for DCP."""
    checked = check_config(config)
    if checked.async_save:
        raise ValueError("async_save is decided by dcp.async_save here; leave it out of the config")
    raw = checked.keys.raw if isinstance(checked.keys, Key) else None
    check_surface(checked, DCP, {SLICED: True})
    check_cipher(raw, checked.enc_mode, format="safetensors")
    return checked


def place_of(
    directory: str | os.PathLike[str],
    config: CheckpointConfig,
    *,
    prefix: str,
    allow_unsealed: bool = False,
    allow_unencrypted: bool = False,
    trusted_keys: Iterable[str | os.PathLike[str] | PublicKey] = (),
    clock: Callable[[], float] = time.time,
    fs: FileSystem | None = None,
) -> SeriesLocation:
    """Return the series that the arguments of a constructor name, if they are usable."""
    if callable(check_prefix(prefix)):
        raise TypeError("the prefix of a series is a string")
    return SeriesLocation(
        directory=check_directory(directory),
        series=prefix,
        trust=trust_of(
            config,
            Trust(
                trusted_keys=trusted_keys,
                allow_unsealed=allow_unsealed,
                allow_unencrypted=allow_unencrypted,
            ),
        ),
        fs=fs,
        clock=clock,
        file_mode=config.file_mode,
    )


def set_name_of(checkpoint_id: str | os.PathLike[str], place: SeriesLocation) -> str | int:
    """Return the step, or the set name, of an id: a number, or a name or path in this directory.

    Raises:
        ValueError: It is in another directory.
    """
    text = os.fspath(checkpoint_id)
    if text.isascii() and text.isdecimal() and len(text) < 20:
        return int(text)
    path = Path(text)
    if path.name != text and Path(os.path.realpath(path.parent)) != place.directory:
        raise ValueError(f"the checkpoint_id {text!r} is not in {place.directory}")
    name = path.name.removesuffix(SUFFIX)
    return name if is_set_name(name) else f"{name}.{SET_FORMAT}"


def parse_step(checkpoint_id: str | os.PathLike[str], place: SeriesLocation) -> int:
    """Return the step of an id.

    Raises:
        ValueError: It has none, or is of another series.
    """
    found = set_name_of(checkpoint_id, place)
    if isinstance(found, int):
        return found
    parsed = parse_step_name(f"{set_stem(found)}.ckpt")
    if parsed is None or parsed.prefix != place.series or parsed.attempt:
        raise ValueError(
            f"the checkpoint_id {os.fspath(checkpoint_id)!r} is neither a step, such as '500', "
            f"nor a name such as '{place.series}-500'"
        )
    return parsed.step
