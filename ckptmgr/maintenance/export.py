# SPDX-License-Identifier: Apache-2.0
"""`export_weights`: the weights in a checkpoint as a directory in the layout of the Hugging Face Hub.

```
ckptmgr.export_weights("runs/a/net-100.safetensors", "model", only="net")
```

The tensors are read, checked and decrypted in pieces of 16 MiB, of which some are in memory. The
files are written and synced in a hidden directory beside the target, which then gets its name, so
the target is whole or absent (`export_directory`).

`export_file` writes one plain file of a chosen format instead. Names stay as they are, and so do
the facts about the checkpoint, in the manifest of the new file, which is published like a save.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ckptmgr.core.arguments import check_is_bool
from ckptmgr.core.error_translation import translated_errors
from ckptmgr.core.errors import UnsafeWrite, UnsupportedCheckpoint
from ckptmgr.core.names import parse_name, stem_of
from ckptmgr.core.shard_names import is_set_name
from ckptmgr.core.urls import refuse_url
from ckptmgr.files.load.options import ReadOptions, read_options
from ckptmgr.files.load.tensors import CheckpointReader
from ckptmgr.files.load.values import MapArrays
from ckptmgr.files.open_checkpoint import open_reader
from ckptmgr.files.save.job import SaveOptions
from ckptmgr.files.save.saver import build_image
from ckptmgr.formats.image import Extent, Image
from ckptmgr.formats.safetensors_file import build_image_in_given_order
from ckptmgr.formats.tensor import MapTensors, Tensor, Text, tensor_from_array
from ckptmgr.io.filesystem import OsFileSystem
from ckptmgr.maintenance.contents import NewContent
from ckptmgr.maintenance.convert_source import open_tensors
from ckptmgr.maintenance.convert_target import check_target, private_mode, publish
from ckptmgr.maintenance.export_directory import held_directory
from ckptmgr.maintenance.export_plan import (
    INDEX_NAME,
    ExportedTensor,
    ExportPlan,
    plan_export,
    size_of,
)
from ckptmgr.maintenance.rewriting import write_beside
from ckptmgr.store.change_leases import lease_of_name
from ckptmgr.store.manifest.codec import Manifest
from ckptmgr.store.real_files import real_file
from ckptmgr.store.store import Store

if TYPE_CHECKING:  # signatures are rare, and their library is slow to import
    from ckptmgr.crypto.keys.signing import PublicKey

_FORMAT = "format"  # in the metadata of a safetensors file: the library that it is for
_ENDLESS = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedWeights:
    """Result of an export.

    Attributes:
        directory: The new directory; that of the file if another format was asked for.
        files: Its files: those of the weights, and of several the index.
        tensor_count: Number of tensors, each counted once.
        tensor_bytes: Bytes of their contents.
        ties: Further names of tensors, as tied weights have, each with the name in a file.
        left_out: Names of stored texts, which are no weights.
        parts: First parts of the names, where they have several, such as `net` and `optimizer`.
        is_verified: Whether a seal, digests or a CRC32 verified the bytes read.
        is_one_file: Whether another format was asked for, and not the layout of the Hub.
    """

    directory: Path
    files: tuple[Path, ...]
    tensor_count: int
    tensor_bytes: int
    ties: dict[str, str]
    left_out: tuple[str, ...]
    parts: tuple[str, ...]
    is_verified: bool
    is_one_file: bool = False


def export_weights(
    path: str | os.PathLike[str],
    directory: str | os.PathLike[str],
    *,
    only: str | None = None,
    max_shard_size: int | str = "5GB",
    dec_key: bytes | str | None = None,
    dec_mode: str | None = None,
    allow_unsealed: bool = False,
    allow_unencrypted: bool = False,
    trusted_keys: Iterable[str | os.PathLike[str] | PublicKey] = (),
    force: bool = False,
) -> ExportedWeights:
    """Write the weights in a checkpoint as the Hugging Face Hub has them; durable when it returns.

    The directory gets `model.safetensors`, or shards `model-00001-of-0000N.safetensors` with
    `model.safetensors.index.json`: plain files that `huggingface_hub`, `transformers` and
    `safetensors` load. Tied weights are written once, and their further names noted in the
    metadata. Files are readable by their owner only.

    Args:
        path: A `.ckpt` or `.safetensors` file, plain, compressed or encrypted.
        directory: The new directory, in one that exists.
        only: The part of the state that is exported, such as `net`: of its tensors the names lose
            this beginning and the slash or dot that follows. None exports all under their names.
        max_shard_size: Most bytes of the tensors of a file, or a text such as `5GB`. A larger
            tensor has a file of its own.
        dec_key: The key, or a source as for `CheckpointConfig`.
        dec_mode: The required cipher mode, or None for the one that the file names.
        allow_unsealed: With a key, accept encrypted files without a seal (MindSpore's own).
        allow_unencrypted: With a key, accept plain files, too.
        trusted_keys: Public keys, or their files in PEM, as for `open_checkpoint`.
        force: Replace a directory that holds an earlier export, and nothing else.

    Raises:
        TypeError, ValueError: An argument is unusable.
        CheckpointNotFound: There is no such file, or no directory for the new one.
        UnsafeWrite: The directory is not empty, or not that of an export.
        StoreLocked: Another export to this directory is under way.
        StateMismatch: The checkpoint has no such part; names those that it has.
        UnsupportedCheckpoint: It is a checkpoint of many ranks, or has values that safetensors
            cannot hold; names the tensor.
        KeyProblem: Wrong or missing key, or no seal.
        CorruptCheckpoint: The checkpoint is damaged; nothing was written.
        StoreFull, OSError: From the disk; nothing was written.
    """
    options = read_options(
        dec_key,
        dec_mode,
        trusted_keys=trusted_keys,
        allow_unsealed=check_is_bool("allow_unsealed", allow_unsealed),
        allow_unencrypted=check_is_bool("allow_unencrypted", allow_unencrypted),
    )
    return export_to(
        Path(path),
        Path(directory),
        only=_checked_part(only),
        max_shard_bytes=size_of(max_shard_size),
        options=options,
        force=check_is_bool("force", force),
    )


def export_to(
    source: Path,
    target: Path,
    *,
    only: str | None,
    max_shard_bytes: int,
    options: ReadOptions,
    force: bool,
) -> ExportedWeights:
    """Export with arguments that are checked already; otherwise as `export_weights`."""
    refuse_url(target)
    real = Path(os.path.realpath(target))
    origin = real_file(source)
    _refuse_set(source)
    with (
        held_directory(real, origin, force=force) as new,
        open_reader(source, options) as reader,
    ):
        names = reader.tensor_names()
        others = sorted({*reader.names()} - {*names})
        left_out = tuple(one.name for one in _texts_and_maps(reader, others, "safetensors", source))
        plan = _planned(reader, only, max_shard_bytes, source)
        has_crc = reader.check_crc()
        with new.filled() as fresh:
            files = _write(reader, plan, fresh, mode=private_mode(origin), source=source)
        return ExportedWeights(
            directory=target,
            files=tuple(target / name for name in files),
            tensor_count=plan.tensor_count,
            tensor_bytes=plan.size_bytes,
            ties=dict(plan.ties),
            left_out=left_out if only is None else (),
            parts=_parts(names) if only is None else (),
            is_verified=reader.is_verified or has_crc,
        )


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
    _refuse_set(source)
    with open_tensors(source, options) as (reader, manifest), translated_errors(str(source)):
        if only is not None:
            _refuse_among_run(source, target, manifest)
        found = _content_of(reader, only, format, source)
        has_crc = reader.check_crc()
        image = build_image(
            [*found.tensors, *found.others],
            options=SaveOptions(format=format),
            metadata=found.metadata or None,
        )
        done = publish(
            source,
            target,
            NewContent(image=image, format=format),
            options=options,
            manifest=manifest,
            force=force,
            clock=clock,
        )
    return ExportedWeights(
        directory=target.parent,
        files=(done.target.path,),
        tensor_count=len(found.tensors),
        tensor_bytes=sum(one.spec.size_bytes for one in found.tensors),
        ties=dict(found.ties),
        left_out=found.left_out,
        parts=(),
        is_verified=reader.is_verified or has_crc,
        is_one_file=True,
    )


def _planned(
    reader: CheckpointReader, only: str | None, max_shard_bytes: int, source: Path
) -> ExportPlan:
    return plan_export(
        [reader.spec(name) for name in reader.tensor_names()],
        reader.metadata,
        only=only,
        max_shard_bytes=max_shard_bytes,
        path=source,
    )


class _Content(NamedTuple):
    """Content of one file; `left_out` are the names of texts that its format cannot hold."""

    tensors: Sequence[Tensor]
    others: Sequence[Text | MapTensors]
    metadata: Mapping[str, str]
    ties: Mapping[str, str]
    left_out: tuple[str, ...]


def _content_of(reader: CheckpointReader, only: str | None, format: str, source: Path) -> _Content:
    if only is not None:
        plan = _planned(reader, only, _ENDLESS, source)
        tensors = [
            Tensor(spec=one.spec, content=reader.content(one.stored_name))
            for one in chain.from_iterable(plan.files.values())
        ]
        return _Content(tensors, (), plan.ties, plan.ties, ())
    names = reader.tensor_names()
    tensors = [Tensor(spec=reader.spec(name), content=reader.content(name)) for name in names]
    known = {*names}
    # MindSpore marks its int4 in the metadata; the writer does that again.
    metadata = {k: v for k, v in reader.metadata.items() if k not in known}
    ties = {k: v for k, v in metadata.items() if v in known and k != _FORMAT}
    rest = [name for name in reader.names() if name not in known]
    others = list(_texts_and_maps(reader, rest, format, source))
    if format == "safetensors":
        return _Content(tensors, (), metadata, ties, tuple(one.name for one in others))
    metadata.pop(_FORMAT, None)
    return _Content(tensors, others, metadata, ties, ())


def _texts_and_maps(
    reader: CheckpointReader, names: Iterable[str], format: str, source: Path
) -> Iterator[Text | MapTensors]:
    """Yield texts and map parameters; raise UnsupportedCheckpoint if the format cannot hold one."""
    for name in names:
        value = reader.read(name)
        if isinstance(value, str):
            yield Text(name=name, text=value)
            continue
        if format == "safetensors" or not isinstance(value, MapArrays):
            raise UnsupportedCheckpoint(
                f"{name!r} is a map parameter, which safetensors cannot hold", path=source
            )
        key, values, status = (
            tensor_from_array(part, array)
            for part, array in zip(MapArrays._fields, value, strict=True)
        )
        yield MapTensors(name=name, key=key, value=values, status=status)


def _refuse_set(source: Path) -> None:
    """Raise UnsupportedCheckpoint for a checkpoint of many ranks."""
    if is_set_name(real_file(source).name):
        raise UnsupportedCheckpoint(
            "is a checkpoint of many ranks, which has several files",
            path=source,
            hint="load it with load_checkpoint, and save its tensors with save_file",
        )


def _checked_part(only: object) -> str | None:
    if only is not None and not isinstance(only, str):
        raise TypeError(f"only must be the name of a part, but got {only!r}")
    if only == "":
        raise ValueError("only names no part of the state; leave it out to export everything")
    return only


def _parts(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name.partition("/")[0] for name in names if "/" in name))


def _write(
    reader: CheckpointReader, plan: ExportPlan, directory: Path, *, mode: int, source: Path
) -> list[str]:
    """Write the files of a plan into a directory that no one else writes; return their names."""
    store = Store(directory, fs=OsFileSystem(keeps_owner=True))
    images = {}
    for name, tensors in plan.files.items():
        with translated_errors(str(source)):
            items = [_tensor(reader, one) for one in tensors]
            images[name] = build_image_in_given_order(items, metadata=plan.metadata)
    store.publisher.check_space(sum(image.size for image in images.values()))
    if len(images) > 1:
        text = json.dumps(plan.index(), indent=2, ensure_ascii=False) + "\n"
        images[INDEX_NAME] = Image([Extent.of(text.encode())])
    for name, image in images.items():
        with lease_of_name(store, name):
            content = NewContent(image=image, format="safetensors")
            write_beside(store, name, content.write, size_bytes=image.size, mode=mode)
    return list(images)


def _tensor(reader: CheckpointReader, tensor: ExportedTensor) -> Tensor:
    if tensor.spec.dtype.name == "int4":
        raise UnsupportedCheckpoint(
            f"{tensor.stored_name!r} is MindSpore's int4, which other libraries would read as int8"
        )
    return Tensor(spec=tensor.spec, content=reader.content(tensor.stored_name))


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
