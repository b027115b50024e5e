# SPDX-License-Identifier: Apache-2.0
"""Names of checkpoint files, and the checks of prefixes and directories; nothing changes a disk.

```
{prefix}-{epoch}_{step in epoch}.{ckpt | safetensors}        an ordinary checkpoint
{prefix}-{epoch}_{step in epoch}.safetensors.ckpe            the same, encrypted
{prefix}-{epoch}_{step in epoch}.safetensors.ckpz            the same, compressed and not encrypted
{prefix}-{epoch}_{step in epoch}_breakpoint.{...}            any of these, saved when training fails
```
A run that finds files of its prefix in the directory continues under `{prefix}_1`, `{prefix}_2`,
..., so that it overwrites nothing. Names, numbers and messages are MindSpore's
(`mindspore/train/callback/_checkpoint.py`, 2.10.0).

A `CheckpointManager` counts no epochs; it writes `{prefix}-{step}.{format}`, and after a rollback
`{prefix}-{step}-r1.{format}`. Sharded checkpoints `{prefix}-{epoch}_{step in epoch}.shards` get
`-r1` likewise, because they are never overwritten.

>>> checkpoint_name("net", 3, step_in_epoch=step_in_epoch(41, batch_num=20), format="ckpt")
'net-3_1.ckpt'
>>> parse_name("net-3_1.ckpt")
ParsedName(prefix='net', epoch=3, step_in_epoch=1, is_breakpoint=False, format='ckpt')
>>> restart_prefix("net", ["net-3_1.ckpt", "net_1-3_1.ckpt"])
'net_2'
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path, PurePath
from typing import NamedTuple

from ckptmgr.core.urls import refuse_url, without_secrets

FORMATS = ("ckpt", "safetensors")
OPAQUE = "opaque"
"""The format of a container whose content is not a checkpoint."""
CONTAINER_SUFFIX = ".ckpe"
"""Suffix of encrypted containers; runs put no `.ckpt` into one, as MindSpore reads it encrypted."""
COMPRESSED_SUFFIX = ".ckpz"
"""Suffix of compressed files; if they are encrypted, too, they have that of a container only."""
DATA_SUFFIXES = tuple(
    f".{format}{suffix}"
    for format in FORMATS
    for suffix in ("", CONTAINER_SUFFIX, COMPRESSED_SUFFIX)
)
MAX_DIRECTORY_CHARACTERS = 1024
"""MindSpore's limit on the resolved path of a directory."""

_BREAKPOINT = re.compile(r"_breakpoint\.(?:ckpt|safetensors)(?:\.ckp[ez])?$")
# No leading zeros, as in the numbers a run writes; 18 digits fit in 64 bits.
_NAME = re.compile(
    r"(?P<prefix>[^/\0]*)-(?P<epoch>0|[1-9][0-9]{0,17})_(?P<step>0|[1-9][0-9]{0,17})"
    r"(?P<breakpoint>_breakpoint)?\.(?P<format>ckpt|safetensors)(?:\.ckp[ez])?"
)
# A longer number is no count of runs, and its successor may fit into no name.
_MAX_RESTARTS_DIGITS = 9
_STEP_NAME = re.compile(
    r"(?P<prefix>[^/\0]*)-(?P<step>0|[1-9][0-9]{0,17})(?:-r(?P<attempt>[1-9][0-9]{0,8}))?"
    r"\.(?:ckpt|safetensors)(?:\.ckp[ez])?"
)

_RESTART = re.compile(r"_\d+")
_LAST_RESTART = re.compile(r"_\d+$")
ATTEMPT = re.compile(r"-r[1-9][0-9]{0,8}$")
"""Suffix of the stem when the step was saved before."""


class ParsedName(NamedTuple):
    """The fields of a checkpoint's file name.

    Attributes:
        prefix: Name of the series.
        epoch: Epoch number; 0 is possible for a breakpoint, and for loops that count from 0.
        step_in_epoch: From 1; 0 only for a breakpoint before the first step of an epoch.
        is_breakpoint: Whether it was saved because training failed.
        format: `ckpt` or `safetensors`.
    """

    prefix: str
    epoch: int
    step_in_epoch: int
    is_breakpoint: bool
    format: str


def step_in_epoch(step: int, batch_num: int) -> int:
    """Return the position of a global step (from 1) in its epoch of `batch_num` steps, from 1."""
    if batch_num < 1:
        raise ValueError(f"batch_num must be at least 1, but got {batch_num}")
    return (step - 1) % batch_num + 1


def extension_of(format: str, *, is_encrypted: bool, is_compressed: bool = False) -> str:
    """Return the extension of a file name, without its dot.

    >>> extension_of("safetensors", is_encrypted=True), extension_of("ckpt", is_encrypted=True)
    ('safetensors.ckpe', 'ckpt')
    >>> extension_of("safetensors", is_encrypted=False, is_compressed=True)
    'safetensors.ckpz'
    """
    if is_encrypted and format == "safetensors":
        return f"{format}{CONTAINER_SUFFIX}"
    return f"{format}{COMPRESSED_SUFFIX}" if is_compressed else format


def without_envelope(name: str) -> str:
    """Return a file name without the ending of a container or a compressed file.

    >>> without_envelope("net.safetensors.ckpz"), without_envelope("net.ckpt")
    ('net.safetensors', 'net.ckpt')
    """
    return name.removesuffix(CONTAINER_SUFFIX).removesuffix(COMPRESSED_SUFFIX)


def stem_of(name: str) -> str:
    """Return a file name without the endings of its format and of its container.

    >>> stem_of("net.safetensors.ckpe"), stem_of("net.ckpt"), stem_of("net")
    ('net', 'net', 'net')
    """
    return Path(without_envelope(name)).stem


def checkpoint_name(
    prefix: str, epoch: int, *, step_in_epoch: int, format: str, attempt: int = 0
) -> str:
    """Return the name of an ordinary checkpoint; `format` is an `extension_of`, or `shards`."""
    return f"{prefix}-{epoch}_{step_in_epoch}{_attempt_suffix(attempt)}.{format}"


def breakpoint_name(prefix: str, epoch: int, *, step_in_epoch: int, format: str) -> str:
    """Return the name of a checkpoint saved because training failed; see `checkpoint_name`."""
    return f"{prefix}-{epoch}_{step_in_epoch}_breakpoint.{format}"


def parse_name(file_name: str) -> ParsedName | None:
    """Return the fields of a file name; None when no run writes such a name.

    Stricter than MindSpore, which counts every `{prefix}-*.ckpt` without a letter as its own and
    deletes it in turn: `CKP-(1).ckpt`, `CKP-.ckpt` and a user's `CKP-2023.12.ckpt`.
    """
    match = _NAME.fullmatch(file_name)
    if match is None:
        return None
    step, is_breakpoint = int(match["step"]), match["breakpoint"] is not None
    if step == 0 and not is_breakpoint:
        return None
    return ParsedName(match["prefix"], int(match["epoch"]), step, is_breakpoint, match["format"])


class ParsedStepName(NamedTuple):
    """The fields of a `CheckpointManager`'s file name; `attempt` counts the saves of a step."""

    prefix: str
    step: int
    attempt: int


def step_name(prefix: str, step: int, *, attempt: int, format: str) -> str:
    """Return the `CheckpointManager`'s file name of a step; `format` is an `extension_of`."""
    return f"{prefix}-{step}{_attempt_suffix(attempt)}.{format}"


def _attempt_suffix(attempt: int) -> str:
    return f"-r{attempt}" if attempt else ""


def parse_step_name(file_name: str) -> ParsedStepName | None:
    """Return the fields of a file name of a `CheckpointManager`; None for other names."""
    match = _STEP_NAME.fullmatch(file_name)
    if match is None:
        return None
    return ParsedStepName(match["prefix"], int(match["step"]), int(match["attempt"] or 0))


def is_of_prefix(series: str, prefix: str) -> bool:
    """Return whether a series is that of a prefix, or of a restart under it.

    >>> [is_of_prefix(series, "net") for series in ("net", "net_2", "net-2", "network")]
    [True, True, False, False]
    """
    number = series.removeprefix(prefix)
    return series.startswith(prefix) and (not number or _RESTART.fullmatch(number) is not None)


def is_same_prefix(series: str, other: str) -> bool:
    """Return whether two series can have the same prefix: those of a run and of its restarts.

    >>> [is_same_prefix("net_1", other) for other in ("net", "net_2", "net-2", "network")]
    [True, True, False, False]
    """
    first, second = (_LAST_RESTART.sub("", one) for one in (series, other))
    return first == second


def restart_prefix(prefix: str, names: Iterable[str], *, is_breakpoint: bool = False) -> str:
    """Return the prefix of a new run in a directory with these file names.

    Breakpoints are numbered on their own.
    """
    taken = [
        name[len(prefix) :]
        for name in names
        if name.startswith(prefix)
        and name.endswith(DATA_SUFFIXES)
        and (_BREAKPOINT.search(name) is not None) == is_breakpoint
    ]
    number = max(map(_taken_number, taken), default=0)
    while any(rest.startswith(f"_{number}-") for rest in taken):
        number += 1  # taken by a run whose number is not counted by `_taken_number`
    return f"{prefix}_{number}" if number else prefix


def _taken_number(rest: str) -> int:
    """Return the first number that a name leaves free; 0 for the name of another series."""
    head, dash, _ = rest.partition("-")
    if not dash:
        return 0
    if not head:
        return 1
    # MindSpore takes any character but a letter between prefix and number: CKP.5-1_1.ckpt counts as
    # the fifth run.
    is_number = head[1:].isdecimal() and len(head) <= 1 + _MAX_RESTARTS_DIGITS
    return int(head[1:]) + 1 if is_number and not head[0].isalpha() else 0


def check_prefix(prefix: object) -> str | Callable[..., object]:
    """Return a prefix for `ModelCheckpoint`: a callable or a usable string, else raise ValueError.

    Unlike MindSpore, a leading dot is refused.
    """
    if callable(prefix):
        return prefix
    if not isinstance(prefix, str) or "/" in prefix or "\0" in prefix:
        raise ValueError(
            "For 'ModelCheckpoint', the argument 'prefix' for checkpoint file name is invalid, "
            f"it must be callable or string that does not contain '/', but got {prefix}."
        )
    _check_start(prefix)
    return prefix


def check_prefix_result(prefix: object) -> str:
    """Return the result of a callable prefix; raise ValueError unless it is a usable string."""
    if not isinstance(prefix, str) or "/" in prefix or "\0" in prefix:
        raise ValueError(
            "For 'ModelCheckpoint', the argument 'prefix' for checkpoint file name is callable, "
            f"it must return a string that does not contain '/', but got {prefix}."
        )
    _check_start(prefix)
    return prefix


def _check_start(prefix: str) -> None:
    # Names with a leading dot are temporary files, leases, or files of other systems
    # (`._net-1_1.ckpt`).
    if prefix.startswith("."):
        raise ValueError(
            f"the prefix {prefix!r} starts with '.': such files are hidden, never listed and never resumed from"
        )
    try:
        os.fsencode(prefix)
    except UnicodeEncodeError:
        raise ValueError(
            f"the prefix {prefix!r} holds a character that no file name can hold"
        ) from None


def check_is_run(place: PurePath) -> None:
    """Raise ValueError for the path or address of a checkpoint, where that of a run is wanted."""
    if place.name.removesuffix(".manifest.json").endswith(DATA_SUFFIXES):
        raise ValueError(
            f"{without_secrets(str(place))!r} is the name of a checkpoint, and a run is wanted: the directory or address "
            f"that has it, such as {without_secrets(str(place.parent))!r}; load_state and load_checkpoint take one file"
        )


def check_directory(directory: object) -> Path:
    """Return the resolved path of a usable directory for checkpoints; it need not exist yet.

    Unlike MindSpore it takes path objects too, and refuses the name of a checkpoint unless there is
    a directory of that name.

    Raises:
        NotADirectoryError: It exists and is not a directory.
    """
    if isinstance(directory, os.PathLike):
        directory = os.fspath(directory)
    if not isinstance(directory, str):
        raise TypeError("The path is invalid, the type should be string.")
    if not directory.strip():
        raise ValueError("The path is invalid, it should be non-blank.")
    if "\0" in directory:
        raise ValueError("The path is invalid, it should not contain a NUL character.")
    refuse_url(directory)
    path = Path(os.path.realpath(directory))
    if len(str(path)) > MAX_DIRECTORY_CHARACTERS:
        raise ValueError(
            f"The path length is too long, it should be limited in {MAX_DIRECTORY_CHARACTERS}."
        )
    if path.exists() and not path.is_dir():
        raise NotADirectoryError(f"The path({path}) is a file path, it should be a directory path.")
    if not path.exists():
        check_is_run(path)
    return path
