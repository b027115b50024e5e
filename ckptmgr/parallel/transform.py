# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of N ranks rewritten for M: MindSpore's `transform_checkpoints`, streaming and without its silent losses.

Same names and places: `rank_R/PREFIXR.ckpt`. Different on purpose:

* A slice is taken from any rank that holds it, so deduplicated checkpoints and missing files do no harm while a copy is left.
* What no file holds is an error before anything is written; a file whose slices do not fit the strategy is one, too.
* Step 10 is newer than step 9. bfloat16, float8 and int4 stay what they are. Every output is durable and has a manifest.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from ckptmgr.config_checks import check_cipher, check_key, check_mode
from ckptmgr.crypto.key import Key
from ckptmgr.loader import ReadOptions
from ckptmgr.naming import CONTAINER_SUFFIX, FORMATS
from ckptmgr.parallel.errors import LayoutError
from ckptmgr.parallel.layout import (
    devices_per_stage,
    layouts_of,
    read_layouts,
    read_strategy,
    stage_count,
)
from ckptmgr.parallel.outputs import write_file
from ckptmgr.parallel.rank_files import RankFiles, find_rank_files
from ckptmgr.parallel.reshard import Layouts
from ckptmgr.parallel.resharder import Resharder
from ckptmgr.saver import SaveOptions

StrategyFile = str | os.PathLike[str] | None

_NOT_COMPARED = ("accu_grads", "adam_v", "adam_m")


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
    return rewrite(
        Path(src_checkpoints_dir),
        Path(dst_checkpoints_dir),
        prefix=ckpt_prefix,
        strategies=(src_strategy_file, dst_strategy_file),
        reading=reading_options(dec_key, dec_mode, allow_unsealed),
        options=output_options(output_format, enc_key, enc_mode),
    )


def rewrite(
    source_dir: Path,
    target_dir: Path,
    *,
    prefix: str,
    strategies: tuple[StrategyFile, StrategyFile],
    reading: ReadOptions,
    options: SaveOptions,
) -> list[Path]:
    """Rewrite the checkpoints of all ranks; raises as `transform_checkpoints`.

    Args:
        source_dir: Holds `rank_0`, `rank_1` ...
        target_dir: Gets `rank_R/{prefix}{R}` with the extension of the options.
        prefix: Start of the file names.
        strategies: How the files are cut, and how they are to be cut.
        reading: Key of the source.
        options: Format and key of the output.
    """
    paths = source_files(source_dir, "transform_checkpoints")
    source, target, suffix = _layouts(*strategies)
    _check(paths, source, target)
    count = stage_count((target or {}).values()) * devices_per_stage(target or {})
    written = []
    with RankFiles(paths, reading) as files:
        resharder = Resharder(files=files, source=source, target=target)
        for rank in range(count):
            resharder.items(rank)  # what is missing shows before the first file is written
        for rank in range(count):
            file = target_dir / f"rank_{rank}" / f"{prefix}{rank}{suffix}.{options.extension}"
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
