# SPDX-License-Identifier: Apache-2.0
"""Names of the files of a sharded checkpoint.

```
net-40.shards.manifest.json                  the checkpoint: it exists when this does
net-40.0-of-2.67d2f1a41f0c9a2e.ckpt          file of rank 0: a `.ckpt` or `.safetensors`
net-40.1-of-2.67d2f1a41f0c9a2e.ckpt
```
The 16 hexadecimal digits are the attempt: 8 for its commit deadline in seconds since 1970, 8 random
ones. So two attempts at one step never write the same file, and the name alone shows when a file
that no manifest names is garbage.

>>> shard_name("net-40", 1, world=2, attempt_id="67d2f1a41f0c9a2e", format="ckpt")
'net-40.1-of-2.67d2f1a41f0c9a2e.ckpt'
>>> shard = parse_shard_name("net-40.1-of-2.67d2f1a41f0c9a2e.ckpt")
>>> shard.set_name, shard.rank, shard.series, shard.expires_at
('net-40.shards', 1, 'net', 1741877668)
"""

from __future__ import annotations

import re
import secrets
from typing import NamedTuple

from ckptmgr.core.names import ATTEMPT, DATA_SUFFIXES, parse_name, parse_step_name

SET_FORMAT = "shards"
_SET_SUFFIX = f".{SET_FORMAT}"
_SECONDS_DIGITS = 8
_MAX_SECONDS = 0xFFFFFFFF
_CLOCK_SKEW_S = 60  # how far the clocks of hosts may be apart
_SHARD = re.compile(
    r"(?P<stem>[^/\0]+)\.(?P<rank>0|[1-9][0-9]{0,8})-of-(?P<world>[1-9][0-9]{0,8})"
    r"\.(?P<attempt>[0-9a-f]{16})\.(?:ckpt|safetensors)(?:\.ckp[ez])?"
)


class ShardName(NamedTuple):
    """The fields of a shard's name; `stem` is the name of the checkpoint without suffix."""

    stem: str
    rank: int
    world: int
    attempt_id: str

    @property
    def set_name(self) -> str:
        """Name of the checkpoint."""
        return self.stem + _SET_SUFFIX

    @property
    def series(self) -> str:
        """Name of the series."""
        first = ATTEMPT.sub("", self.stem)
        parsed = parse_name(f"{first}.ckpt") or parse_step_name(f"{first}.ckpt")
        return self.stem if parsed is None else parsed.prefix

    @property
    def expires_at(self) -> int:
        """The commit deadline of its attempt, in seconds since 1970."""
        return int(self.attempt_id[:_SECONDS_DIGITS], 16)

    def has_expired(self, now: float) -> bool:
        """Return whether the commit deadline has passed by the clock of every host."""
        return self.expires_at + _CLOCK_SKEW_S < now


def new_attempt_id(expires_at: float) -> str:
    """Return a new attempt id with this commit deadline (seconds since 1970)."""
    seconds = min(max(0, int(expires_at)), _MAX_SECONDS)
    return f"{seconds:0{_SECONDS_DIGITS}x}{secrets.token_hex(4)}"


def shard_name(stem: str, rank: int, *, world: int, attempt_id: str, format: str) -> str:
    """Return the name of the file that a rank saves."""
    return f"{stem}.{rank}-of-{world}.{attempt_id}.{format}"


def parse_shard_name(name: str) -> ShardName | None:
    """Return the fields of a shard's name; None for other names."""
    match = _SHARD.fullmatch(name) if "-of-" in name else None  # listings ask for each file
    if match is None:
        return None
    return ShardName(match["stem"], int(match["rank"]), int(match["world"]), match["attempt"])


def with_attempt(name: str, attempt_id: str) -> str:
    """Return the name of a shard with another attempt; raise ValueError when it is no shard's name.

    >>> with_attempt("net-40.1-of-2.67d2f1a41f0c9a2e.safetensors.ckpe", "67d2f1a5c0ffee00")
    'net-40.1-of-2.67d2f1a5c0ffee00.safetensors.ckpe'
    """
    old = parse_shard_name(name)
    if old is None:
        raise ValueError(f"{name!r} is not the name of the file of a rank")
    prefix = shard_name(old.stem, old.rank, world=old.world, attempt_id=old.attempt_id, format="")
    format = name.removeprefix(prefix)
    return shard_name(old.stem, old.rank, world=old.world, attempt_id=attempt_id, format=format)


def is_set_name(name: str) -> bool:
    """Return whether this is the name of a sharded checkpoint."""
    return name.endswith(_SET_SUFFIX)


def is_checkpoint_name(name: str) -> bool:
    """Return whether a checkpoint of a directory or prefix may have this name.

    A manifest beside another name, such as `train.py`, may have been put there to have that file
    removed, replaced or copied; so only the manifest of a set speaks for the files of its ranks.

    >>> names = ("net-3.ckpt", "net-40.shards", ".net-3.ckpt", "ckptmgr.toml", "net.bin")
    >>> [is_checkpoint_name(name) for name in names]
    [True, True, False, False, False]
    """
    if name.startswith("."):
        return False
    return is_set_name(name) or (name.endswith(DATA_SUFFIXES) and parse_shard_name(name) is None)


def set_stem(set_name: str) -> str:
    """Return the name of a sharded checkpoint without its suffix."""
    return set_name.removesuffix(_SET_SUFFIX)
