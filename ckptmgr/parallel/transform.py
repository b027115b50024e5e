# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of N ranks rewritten for M: MindSpore's `transform_checkpoints`, streaming and without its silent losses.

Same names and places: `rank_R/PREFIXR.ckpt`. Different on purpose:

* A slice is taken from any rank that holds it, so deduplicated checkpoints and missing files do no harm while a copy is left.
* What no file holds is an error before anything is written; a file whose slices do not fit the strategy is one, too.
* Step 10 is newer than step 9. bfloat16, float8 and int4 stay what they are. Every output is durable and has a manifest.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from ckptmgr.config_checks import check_cipher, check_key, check_mode
from ckptmgr.crypto.key import Key
from ckptmgr.errors import UnsupportedCheckpoint
from ckptmgr.formats.index import TensorEntry
from ckptmgr.formats.mindspore_entries import TextEntry
from ckptmgr.formats.tensor import Item, Tensor, TensorSpec, Text
from ckptmgr.loader import ReadOptions
from ckptmgr.naming import CONTAINER_SUFFIX, FORMATS
from ckptmgr.parallel.errors import LayoutError, SliceMissing
from ckptmgr.parallel.layout import (
    ParallelLayout,
    devices_per_stage,
    for_shape,
    layouts_of,
    read_layouts,
    read_strategy,
    stage_count,
    whole,
)
from ckptmgr.parallel.outputs import write_file
from ckptmgr.parallel.rank_files import RankFiles, find_rank_files
from ckptmgr.parallel.reshard import Layouts, SourcePart, byte_runs, plan_region
from ckptmgr.parallel.slices import Region, full_shape, region_of
from ckptmgr.saver import SaveOptions

StrategyFile = str | os.PathLike[str] | None

_NOT_COMPARED = ("accu_grads", "adam_v", "adam_m")


@dataclass(frozen=True, slots=True, kw_only=True)
class Resharder:
    """Makes the tensors of one layout from the files of another.

    Attributes:
        files: The source.
        source: How it is cut; None for whole tensors.
        target: What is wanted; None for whole tensors.
    """

    files: RankFiles
    source: Layouts | None
    target: Layouts | None

    def items(self, rank: int) -> list[Item]:
        """Return what a rank of the target holds; contents are read when their turn comes.

        Raises:
            SliceMissing: No file holds a part of it.
            LayoutError: A file does not fit the strategy.
        """
        devices = devices_per_stage(self.target or {})
        stage, device = divmod(rank, devices)
        found: list[Item] = []
        for name in self.files.names():
            layout = (self.target or {}).get(name)
            if layout is not None and stage not in layout.stages:
                continue
            if self.source is not None and name not in self.source and layout is None:
                found.extend(self._unlisted(name, device))
            else:
                where = 0 if layout is None else device
                found.append(self.tensor(name, layout or whole(), device=where))
        return found

    def tensor(self, name: str, target: ParallelLayout, *, device: int = 0) -> Tensor:
        """Return what a device of the target layout holds of a tensor; raises as `items`."""
        source = self._layout(name)
        spec, shape = self._whole(name, source)
        source, target = for_shape(source, shape), for_shape(target, shape)
        region = region_of(target, device, shape)
        choices = [
            (part, self._holder(name, part, spec)) for part in plan_region(source, shape, region)
        ]
        lengths = tuple(one.length for one in region)
        return Tensor(
            spec=TensorSpec(name=name, dtype=spec.dtype, shape=lengths),
            content=partial(self._read, name, region, choices, spec.dtype.item_bytes),
        )

    def unlisted(self) -> list[Item]:
        """Return the values that the source strategy does not list, as the first rank that has them holds them."""
        listed = self.source
        names = [] if listed is None else [n for n in self.files.names() if n not in listed]
        return [item for name in names for item in self._unlisted(name, 0)]

    def _layout(self, name: str) -> ParallelLayout:
        return whole() if self.source is None else self.source.get(name, whole())

    def _whole(self, name: str, source: ParallelLayout) -> tuple[TensorSpec, tuple[int, ...]]:
        """Return a stored slice of a tensor and the shape of the whole."""
        for rank in self.files.paths:
            spec = self.files.tensor(rank, name)
            if spec is not None:
                fitted = replace(for_shape(source, spec.shape), shape=source.shape)
                return spec, full_shape(fitted, spec.shape)
        raise UnsupportedCheckpoint(f"{name!r} is no tensor, so it cannot be cut or joined")

    def _holder(self, name: str, part: SourcePart, spec: TensorSpec) -> int:
        """Return a rank whose file has the slice, and check that it is the slice the layout says."""
        wanted = tuple(one.length for one in part.stored)
        holders = part.holders if self._is_cut(name) else tuple(self.files.paths)
        for rank in holders:
            stored = self.files.tensor(rank, name)
            if stored is None:
                continue
            if (stored.shape, stored.dtype) != (wanted, spec.dtype):
                raise LayoutError(
                    f"{name!r} is {stored.dtype.name}{list(stored.shape)}, but by the strategy it is"
                    f" {spec.dtype.name}{list(wanted)}",
                    path=self.files.paths[rank],
                    hint="the strategy file is that of another run, or rank directories are mixed up",
                )
            return rank
        raise SliceMissing(
            f"a slice of {name!r} is in no file: the checkpoint file of rank{holders[0]} is needed, but it is missing.",
            parameter=name,
            ranks=holders,
        )

    def _is_cut(self, name: str) -> bool:
        return self.source is not None and name in self.source

    def _unlisted(self, name: str, device: int) -> Iterator[Item]:
        """Yield a value that no strategy lists, from the file that a rank of the source would have it in."""
        ranks = [rank for rank in self.files.paths if name in self.files.file(rank).entries]
        own = device % max(1, devices_per_stage(self.source or {}))
        rank = own if own in ranks else ranks[0]
        entry = self.files.file(rank).entries[name]
        if isinstance(entry, TextEntry):
            yield Text(name=name, text=entry.text)
        elif isinstance(entry, TensorEntry):
            yield Tensor(spec=entry.spec, content=partial(self._read_whole, rank, name))
        else:
            raise UnsupportedCheckpoint(
                f"the map parameter {name!r} cannot be carried over", path=self.files.paths[rank]
            )

    def _read_whole(self, rank: int, name: str) -> memoryview:
        array = self.files.read_array(rank, name)
        flat: np.ndarray = array.reshape(-1).view(np.uint8)
        return flat.data

    def _read(
        self,
        name: str,
        region: Region,
        choices: Iterable[tuple[SourcePart, int]],
        item_bytes: int,
    ) -> memoryview:
        buffer = np.empty(int(np.prod([one.length for one in region])) * item_bytes, np.uint8)
        for part, rank in choices:
            runs = byte_runs(part.stored, part.wanted, region, item_bytes=item_bytes)
            self.files.read_runs(rank, name, runs, buffer.data)
        return buffer.data


def transform_checkpoints(
    src_checkpoints_dir: str | os.PathLike[str],
    dst_checkpoints_dir: str | os.PathLike[str],
    ckpt_prefix: str,
    src_strategy_file: StrategyFile = None,
    dst_strategy_file: StrategyFile = None,
    process_num: int = 1,
    output_format: str = "ckpt",
    *,
    dec_key: bytes | None = None,
    dec_mode: str = "AES-GCM",
    enc_key: bytes | None = None,
    enc_mode: str = "AES-GCM",
    allow_unsealed: bool = False,
) -> list[Path]:
    """Rewrite the checkpoints of all ranks for another strategy.

    Args:
        src_checkpoints_dir: Holds `rank_0`, `rank_1` ... with a `.ckpt` or `.safetensors` file each.
        dst_checkpoints_dir: Gets `rank_R/{ckpt_prefix}{R}.{output_format}`; made where it does not exist. Encrypted
            safetensors are containers, whose names end in `.safetensors.ckpe`.
        ckpt_prefix: Start of the file names.
        src_strategy_file: How the files are cut; None for whole tensors in `rank_0`.
        dst_strategy_file: How they are to be cut; None for whole tensors.
        process_num: Accepted; one process keeps the disk busy.
        output_format: `ckpt` or `safetensors`, whatever the source is.
        dec_key: Key of the source.
        dec_mode: Its cipher mode.
        enc_key: Encrypts the output.
        enc_mode: Its cipher mode.
        allow_unsealed: Accept source files without a seal although a key is given.

    Returns:
        The files, in the order of ranks.

    Raises:
        TypeError, ValueError: An argument is unusable; messages as MindSpore's.
        SliceMissing, LayoutError: A slice is nowhere, or does not fit; nothing was written.
        CkptmgrError: A file is damaged, or a key wrong.
    """
    if not isinstance(ckpt_prefix, str):
        raise TypeError("The ckpt_prefix should be a str.")
    if ".." in ckpt_prefix or "/" in ckpt_prefix:
        raise ValueError("ckpt_prefix contains '..' is not safe, please use a safe one.")
    if process_num < 1:
        raise ValueError(f"process_num is {process_num}; it must be 1 or more")
    options = output_options(output_format, enc_key, enc_mode)
    reading = reading_options(dec_key, dec_mode, allow_unsealed)
    paths = source_files(Path(src_checkpoints_dir), "transform_checkpoints")
    source, target, suffix = _layouts(src_strategy_file, dst_strategy_file)
    _check(paths, source, target)
    count = stage_count((target or {}).values()) * devices_per_stage(target or {})
    written = []
    with RankFiles(paths, reading) as files:
        resharder = Resharder(files=files, source=source, target=target)
        for rank in range(count):
            resharder.items(rank)  # what is missing shows before the first file is written
        for rank in range(count):
            name = f"{ckpt_prefix}{rank}{suffix}.{options.extension}"
            file = Path(dst_checkpoints_dir) / f"rank_{rank}" / name
            written.append(write_file(file, resharder.items(rank), options=options))
    return written


def transform_checkpoint_by_rank(
    rank_id: int,
    checkpoint_files_map: Mapping[int, str | os.PathLike[str]],
    save_checkpoint_file_name: str | os.PathLike[str],
    src_strategy_file: StrategyFile = None,
    dst_strategy_file: StrategyFile = None,
    *,
    dec_key: bytes | None = None,
    dec_mode: str = "AES-GCM",
    enc_key: bytes | None = None,
    enc_mode: str = "AES-GCM",
    allow_unsealed: bool = False,
) -> Path:
    """Write the checkpoint of one rank of another strategy.

    Args:
        rank_id: The rank of the destination.
        checkpoint_files_map: Source rank to file; those of `rank_list_for_transform` are always enough.
        save_checkpoint_file_name: Where to; ends in `.ckpt` or `.safetensors`, to which encryption adds `.ckpe`.
        src_strategy_file: How the files are cut; None for whole tensors.
        dst_strategy_file: How they are to be cut; None for whole tensors.
        dec_key: Key of the source.
        dec_mode: Its cipher mode.
        enc_key: Encrypts the output.
        enc_mode: Its cipher mode.
        allow_unsealed: Accept source files without a seal although a key is given.

    Raises:
        TypeError, ValueError: An argument is unusable; messages as MindSpore's.
        SliceMissing, LayoutError, CkptmgrError: As `transform_checkpoints`.
    """
    if not isinstance(checkpoint_files_map, Mapping):
        raise TypeError("The checkpoint_files_map should be a dict.")
    if not isinstance(rank_id, int):
        raise TypeError("The rank_id should be a int.")
    target_file = Path(save_checkpoint_file_name)
    stem, _, output_format = target_file.name.removesuffix(CONTAINER_SUFFIX).rpartition(".")
    if output_format not in FORMATS:
        raise ValueError(
            f"The save_checkpoint_file_name {save_checkpoint_file_name} should end with .ckpt"
        )
    for rank, path in checkpoint_files_map.items():
        if not Path(path).is_file():
            raise ValueError(f"Checkpoint file {path} in rank {rank} not exits: ")
    options = output_options(output_format, enc_key, enc_mode)
    target_file = target_file.with_name(f"{stem}.{options.extension}")
    reading = reading_options(dec_key, dec_mode, allow_unsealed)
    source = None if src_strategy_file is None else read_layouts(src_strategy_file)
    target = None if dst_strategy_file is None else read_layouts(dst_strategy_file)
    if not checkpoint_files_map:
        raise ValueError(
            "None of the parameters in checkpoint file are in either src strategy or dst strategy. Please check"
            " correctness of strategy files."
        )
    _check(checkpoint_files_map, source, target)
    with RankFiles(checkpoint_files_map, reading) as files:
        items = Resharder(files=files, source=source, target=target).items(rank_id)
        return write_file(target_file, items, options=options)


def output_options(output_format: str, enc_key: bytes | None, enc_mode: str) -> SaveOptions:
    """Return how outputs are written.

    Raises:
        TypeError, ValueError: Format, key or mode is unusable.
    """
    if output_format not in FORMATS:
        raise ValueError(
            "For 'transform_safetensors', the output_format must be 'safetensors' or 'ckpt', but got"
            f" {output_format}."
        )
    check_key("enc_key", enc_key)
    check_mode("enc_mode", enc_mode)
    check_cipher(enc_key, enc_mode, format=output_format)
    key = None if enc_key is None else Key(enc_key)
    return SaveOptions(format=output_format, key=key, mode=enc_mode)


def reading_options(dec_key: bytes | None, dec_mode: str, allow_unsealed: bool) -> ReadOptions:
    """Return how sources are read.

    Raises:
        TypeError, ValueError: Key or mode is unusable.
    """
    check_key("dec_key", dec_key)
    check_mode("dec_mode", dec_mode)
    key = None if dec_key is None else Key(dec_key)
    return ReadOptions(
        key=key, mode=None if key is None else dec_mode, allow_unsealed=allow_unsealed
    )


def source_files(directory: Path, function: str, file_suffix: str | None = None) -> dict[int, Path]:
    """Return the files of all ranks, of one format.

    Raises:
        ValueError: There are none, or of both formats.
    """
    ckpt = find_rank_files(directory, format="ckpt") if file_suffix is None else {}
    safetensors = find_rank_files(directory, format="safetensors", file_suffix=file_suffix)
    if ckpt and safetensors:
        raise ValueError(
            f"For '{function}', the 'src_checkpoints_dir' cannot contain both ckpt file and safetensors file"
            " simultaneously"
        )
    if not ckpt and not safetensors:
        raise ValueError(f"For '{function}', the 'src_checkpoints_dir' can not be empty.")
    return ckpt or safetensors


def _layouts(
    src_strategy_file: StrategyFile, dst_strategy_file: StrategyFile
) -> tuple[Layouts | None, Layouts | None, str]:
    """Return both layouts, and what MindSpore adds to file names when the source is one stage of the destination."""
    target = None if dst_strategy_file is None else read_layouts(dst_strategy_file)
    if src_strategy_file is None:
        return None, target, ""
    strategy = read_strategy(src_strategy_file)
    source = layouts_of(strategy)
    if target is None or max(stage_count(source.values()), stage_count(target.values())) > 1:
        return source, target, ""
    ours, theirs = _compared(source), _compared(target)
    if not ours < theirs:
        return source, target, ""
    staged = {name: replace(one, stages=(strategy.stage,)) for name, one in source.items()}
    return staged, {n: one for n, one in target.items() if n in source}, f"_part{strategy.stage}"


def _compared(layouts: Layouts) -> set[str]:
    return {name for name in layouts if not name.startswith(_NOT_COMPARED)}


def _check(paths: Mapping[int, object], source: Layouts | None, target: Layouts | None) -> None:
    if source is None and len(paths) > 1:
        raise LayoutError(
            f"there are files of {len(paths)} ranks, but no strategy says how they are cut",
            hint="pass src_strategy_file, or leave only the file of rank 0 if it holds whole tensors",
        )
    for layouts in (source, target):
        devices_per_stage(layouts or {})
