# SPDX-License-Identifier: Apache-2.0
"""Export plan: the tensors that are exported, their names, and the files that get them.

>>> names_of_part(["net/0.weight", "net/0.bias", "optimizer/m"], "net")
{'net/0.weight': '0.weight', 'net/0.bias': '0.bias'}
>>> size_of("5GB"), size_of("1.5 MiB"), size_of(4096)
(5000000000, 1572864, 4096)
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ckptmgr.core.errors import UnsupportedCheckpoint
from ckptmgr.core.sizes import bytes_in
from ckptmgr.files.load.named_part import tops_of
from ckptmgr.files.load.state import SKELETON
from ckptmgr.formats.tensor import TensorSpec
from ckptmgr.state.paths import StateMismatch

INDEX_NAME = "model.safetensors.index.json"
_ONE_NAME = "model.safetensors"
_WEIGHTS = re.compile(r"model(-[0-9]{5,}-of-[0-9]{5,})?\.safetensors")
_SEPARATORS = ("/", ".")
_SHOWN = 20


def size_of(size: object) -> int:
    """Return a size in bytes: a number, or a text such as `5GB`, as `bytes_in`.

    Raises:
        TypeError, ValueError: It is neither, or less than one byte.
    """
    if isinstance(size, str):
        try:
            size = bytes_in(size)
        except ValueError:
            raise ValueError(
                "max_shard_size must be a size such as '5GB', '500MB' or '1GiB'"
            ) from None
    if isinstance(size, bool) or not isinstance(size, int):
        raise TypeError(
            f"max_shard_size must be a number of bytes or a text such as '5GB', not {type(size)}"
        )
    if size < 1:
        raise ValueError("max_shard_size must be at least one byte")
    return size


def is_name_of_export(name: str) -> bool:
    """Return whether an export writes files of this name."""
    return name == INDEX_NAME or _WEIGHTS.fullmatch(name) is not None


def names_of_part(names: Iterable[str], part: str | None) -> dict[str, str]:
    """Return the names that begin with a part, each with what follows it; None takes all as they are.

    After the part comes `/`, as in a nested state, or where no name has that `.`, as in a module. A
    tensor that is the part keeps the end of its name.
    """
    if part is None:
        return {name: name for name in names}
    known = list(names)
    if part in known:
        return {part: re.split(r"[/.]", part)[-1]}
    for separator in _SEPARATORS:
        start = part if part.endswith(_SEPARATORS) else part + separator
        found = {name: name[len(start) :] for name in known if name.startswith(start)}
        if found:
            return found
    return {}


@dataclass(frozen=True, slots=True)
class ExportedTensor:
    """A tensor of the export, and its name in the checkpoint."""

    stored_name: str
    spec: TensorSpec


@dataclass(slots=True)
class Shard:
    """The tensors of one file."""

    tensors: list[ExportedTensor] = field(default_factory=list)
    size_bytes: int = 0

    def add(self, tensor: ExportedTensor) -> None:
        """Append a tensor."""
        self.tensors.append(tensor)
        self.size_bytes += tensor.spec.size_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportPlan:
    """The files of an export by name, and `ties`: further name of a tensor to its name."""

    files: Mapping[str, Sequence[ExportedTensor]]
    ties: Mapping[str, str]

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(one.spec.size_bytes for tensors in self.files.values() for one in tensors)

    @property
    def tensor_count(self) -> int:
        """Number of all tensors."""
        return sum(map(len, self.files.values()))

    @property
    def metadata(self) -> dict[str, str]:
        """The metadata strings of each file, as huggingface_hub writes them."""
        return {**self.ties, "format": "pt"}

    def index(self) -> dict[str, dict[str, object]]:
        """Return the content of the index."""
        files = {one.spec.name: name for name, tensors in self.files.items() for one in tensors}
        stated: dict[str, object] = {"total_size": self.size_bytes, **self.ties}
        return {"metadata": stated, "weight_map": {**files}}


def plan_export(
    specs: Sequence[TensorSpec],
    metadata: Mapping[str, str],
    *,
    only: str | None,
    max_shard_bytes: int,
    path: Path,
) -> ExportPlan:
    """Plan the export of tensors in file order.

    Second names of tensors are in the metadata. One whose tensor is outside of the part becomes the
    name of the tensor.

    Raises:
        StateMismatch: No tensor has a name of the part.
        UnsupportedCheckpoint: There is no tensor, or two would have one name.
    """
    stored = {spec.name: spec for spec in specs}
    second = {
        name: first
        for name, first in metadata.items()
        if first in stored and name not in stored and name != "format"
    }
    short = names_of_part([*stored, *second], only)
    if not short:
        raise _nothing(tops_of(stored, metadata), only, path)
    if SKELETON in metadata:  # the names of a state, in which a key may have a slash
        short = {name: _unescaped(one) for name, one in short.items()}
    _check_distinct(short, path)
    chosen: dict[str, str] = {}  # stored name to name in the export
    ties: dict[str, str] = {}
    for name in short:
        first = second.get(name, name)
        if first in chosen:
            ties[short[name]] = chosen[first]
        else:
            chosen[first] = short[name]
    tensors = [
        ExportedTensor(name, spec._replace(name=chosen[name]))
        for name, spec in stored.items()
        if name in chosen
    ]
    ties.pop("format", None)  # readers take this entry as the framework of the file
    return ExportPlan(files=_named(_shards(tensors, max_shard_bytes)), ties=ties)


def _shards(tensors: Iterable[ExportedTensor], max_shard_bytes: int) -> list[Shard]:
    """Return the tensors in shards, filled in turn; a larger tensor has a shard of its own."""
    shards: list[Shard] = []
    for tensor in tensors:
        size_bytes = tensor.spec.size_bytes
        if not shards or shards[-1].size_bytes + size_bytes > max_shard_bytes:
            shards.append(Shard())
        shards[-1].add(tensor)
    return shards


def _named(shards: Sequence[Shard]) -> dict[str, Sequence[ExportedTensor]]:
    if len(shards) == 1:
        return {_ONE_NAME: shards[0].tensors}
    count = len(shards)
    return {
        f"model-{number:05d}-of-{count:05d}.safetensors": shard.tensors
        for number, shard in enumerate(shards, 1)
    }


def _unescaped(name: str) -> str:
    return name.replace("~1", "/").replace("~0", "~")


def _check_distinct(names: Mapping[str, str], path: Path) -> None:
    taken: dict[str, str] = {}
    for name, short in names.items():
        other = taken.setdefault(short, name)
        if not short or other != name:
            raise UnsupportedCheckpoint(
                f"{name!r} would have no name"
                if not short
                else f"{other!r} and {name!r} would both be called {short!r}",
                path=path,
                hint="choose a longer or a shorter part with only",
            )


def _nothing(parts: Sequence[str], only: str | None, path: Path) -> Exception:
    if only is None:
        return UnsupportedCheckpoint("holds no tensors, so there is nothing to export", path=path)
    known = f"; its parts are {', '.join(map(repr, parts[:_SHOWN]))}" if parts else ""
    return StateMismatch(
        f"the checkpoint has no tensors of a part {only!r}{known}",
        path=path,
        hint="only takes the beginning of names, up to a slash or a dot; ckptmgr inspect shows them",
    )
