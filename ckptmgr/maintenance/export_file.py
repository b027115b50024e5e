# SPDX-License-Identifier: Apache-2.0
"""Write the content of a checkpoint as one plain file of a chosen format.

The tensors are read, checked and decrypted in pieces of 16 MiB, of which some are in memory. Names
stay as they are, and so do the facts about the checkpoint, in the manifest of the new file. It is
published like a save: whole or absent.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from ckptmgr.core.error_translation import translated_errors
from ckptmgr.core.errors import UnsafeWrite, UnsupportedCheckpoint
from ckptmgr.core.names import parse_name, stem_of
from ckptmgr.files.load.options import ReadOptions
from ckptmgr.files.load.tensors import CheckpointReader
from ckptmgr.files.load.values import MapArrays
from ckptmgr.files.save.job import SaveOptions
from ckptmgr.files.save.saver import build_image
from ckptmgr.formats.image import Image
from ckptmgr.formats.tensor import Item, MapTensors, Tensor, Text, tensor_from_array
from ckptmgr.maintenance.convert_source import open_tensors
from ckptmgr.maintenance.convert_target import ConversionOutput, check_target, publish
from ckptmgr.maintenance.export import ExportedWeights, refuse_set
from ckptmgr.maintenance.export_plan import plan_export
from ckptmgr.store.manifest.codec import Manifest

_FORMAT = "format"  # in the metadata of a safetensors file: the library that it is for
_ENDLESS = 1 << 62


def export_file(
    source: Path,
    target: Path,
    *,
    format: str,
    only: str | None,
    options: ReadOptions,
    force: bool,
    clock: Callable[[], float] = time.time,
) -> ExportedWeights:
    """Write a checkpoint, or a part of it, as one plain file; durable when this returns.

    `only` names the part of the state that is written, whose name its tensors lose; None writes all
    values under their names, with the metadata to load the state again. With `force` an existing
    target is replaced. `clock` stamps the manifest of a checkpoint that had none.

    Raises:
        UnsafeWrite: The target is the input, exists, has another ending, or holds a part beside
            the checkpoints of the run.
        StoreLocked: A live process writes the target, or its series in that directory.
        StateMismatch: There is no such part.
        UnsupportedCheckpoint: The format cannot hold a value, or it is a checkpoint of many ranks.
        CkptmgrError: As `open_checkpoint`.
        OSError: From the disk; nothing was changed.
    """
    check_target(source, target, force=force)
    if Path(target.name).suffix != f".{format}":
        raise UnsafeWrite(
            f"the name must end in .{format}", path=target, hint="choose another name"
        )
    refuse_set(source)
    with open_tensors(source, options) as (reader, manifest), translated_errors(str(source)):
        if only is not None:
            _refuse_among_run(source, target, manifest)
        content = _Content(reader, only=only, format=format, path=source)
        has_crc = reader.check_crc()
        done = publish(
            source,
            target,
            ConversionOutput(image=content.image(), format=format),
            options=options,
            manifest=manifest,
            force=force,
            clock=clock,
        )
    return ExportedWeights(
        directory=target.parent,
        files=(done.target.path,),
        tensor_count=len(content.tensors),
        tensor_bytes=sum(one.spec.size_bytes for one in content.tensors),
        ties=dict(content.ties),
        left_out=tuple(content.left_out),
        parts=(),
        is_verified=reader.is_verified or has_crc,
        is_one_file=True,
    )


class _Content:
    """Items and metadata of the new file."""

    def __init__(
        self, reader: CheckpointReader, *, only: str | None, format: str, path: Path
    ) -> None:
        self._reader = reader
        self._format = format
        self.tensors: list[Tensor] = []
        self.left_out: list[str] = []
        self.ties: Mapping[str, str] = {}
        self._others: list[Item] = []
        names = reader.tensor_names()
        specs = [reader.spec(name) for name in names]
        if only is None:
            known = {*names}
            # MindSpore marks its int4 in the metadata; the writer does that again.
            self._metadata = {k: v for k, v in reader.metadata.items() if k not in known}
            self.ties = {k: v for k, v in self._metadata.items() if v in known and k != _FORMAT}
            self.tensors = [Tensor(spec=one, content=reader.content(one.name)) for one in specs]
            self._others = list(self._read_others(known, path))
        else:
            plan = plan_export(
                specs, reader.metadata, only=only, max_shard_bytes=_ENDLESS, path=path
            )
            self.ties, self._metadata = plan.ties, dict(plan.ties)
            self.tensors = [
                Tensor(spec=one.spec, content=reader.content(one.stored_name))
                for tensors in plan.files.values()
                for one in tensors
            ]

    def _read_others(self, tensors: set[str], path: Path) -> Iterator[Item]:
        """Yield texts and map parameters, which safetensors cannot hold."""
        for name in self._reader.names():
            if name in tensors:
                continue
            value = self._reader.read(name)
            if isinstance(value, MapArrays):
                if self._format == "safetensors":
                    raise UnsupportedCheckpoint(
                        f"{name!r} is a map parameter, which safetensors cannot hold", path=path
                    )
                key, values, status = (
                    tensor_from_array(part, array)
                    for part, array in zip(MapArrays._fields, value, strict=True)
                )
                yield MapTensors(name=name, key=key, value=values, status=status)
            elif self._format == "safetensors":
                self.left_out.append(name)
            else:
                yield Text(name=name, text=value)

    def image(self) -> Image:
        """Return the bytes of the file."""
        metadata = self._metadata
        if self._format == "ckpt":
            metadata.pop(_FORMAT, None)
        return build_image(
            [*self.tensors, *self._others],
            options=SaveOptions(format=self._format),
            metadata=metadata or None,
        )


def _refuse_among_run(source: Path, target: Path, manifest: Manifest | None) -> None:
    """Raise UnsafeWrite if a part would be listed among the whole checkpoints of its run."""
    parsed = parse_name(target.name)
    series = stem_of(target.name) if parsed is None else parsed.prefix
    is_beside = os.path.realpath(source.parent) == os.path.realpath(target.parent)
    if is_beside and manifest is not None and series == manifest.series:
        raise UnsafeWrite(
            f"would be a checkpoint of {series!r} that holds only a part of its state",
            path=target,
            hint="choose another directory, or another name",
        )
