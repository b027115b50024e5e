# SPDX-License-Identifier: Apache-2.0
"""Rewrite checkpoints of N ranks for M: MindSpore's `transform_checkpoints`, streaming.

Same names and places: `rank_R/PREFIXR.ckpt`. Different on purpose, so that no data are lost:

* A slice is taken from any rank that holds it: deduplicated checkpoints and missing files do no
  harm while a copy is left.
* A slice that no file holds, or that does not fit the strategy, is an error before the first write.
* All files are of one training step: the newest that all ranks have, or `step`. Step 10 is newer
  than step 9.
* bfloat16, float8 and int4 keep their types. Every output is durable and has a manifest.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ckptmgr.config.checks import check_cipher, check_cipher_mode, check_raw_key
from ckptmgr.core.names import CONTAINER_SUFFIX, FORMATS
from ckptmgr.core.trust import Trust
from ckptmgr.crypto.keys.key import Key
from ckptmgr.crypto.keys.signing import PublicKey
from ckptmgr.files.load.options import ReadOptions
from ckptmgr.files.save.job import SaveOptions
from ckptmgr.parallel.errors import LayoutError
from ckptmgr.parallel.layout import (
    Layouts,
    devices_per_stage,
    layouts_of,
    rank_count,
    read_layouts,
    read_strategy,
    stage_count,
)
from ckptmgr.parallel.mindspore.context import AutoParallelContext
from ckptmgr.parallel.mindspore.outputs import WrittenFiles, write_file
from ckptmgr.parallel.mindspore.placement import NOWHERE, MindSporePlacement, placement_of
from ckptmgr.parallel.mindspore.rank_files import OpenRankFiles, source_files
from ckptmgr.parallel.mindspore.rank_steps import checked_step
from ckptmgr.parallel.mindspore.resharder import Resharder

_logger = logging.getLogger(__name__)

StrategyFile = str | os.PathLike[str] | None
TrustedKeys = Iterable[str | os.PathLike[str] | PublicKey]

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
    allow_unencrypted: bool = False,
    step: int | str | None = None,
    trusted_keys: TrustedKeys = (),
    context: AutoParallelContext | None = None,
) -> WrittenFiles:
    """Rewrite the checkpoints of all ranks for another strategy.

    Args:
        src_checkpoints_dir: Holds `rank_0`, `rank_1` ... with `.ckpt` or `.safetensors` files.
        dst_checkpoints_dir: Gets `rank_R/{ckpt_prefix}{R}.{output_format}`; made where it does not
            exist. Encrypted safetensors are containers, whose names end in `.safetensors.ckpe`.
        ckpt_prefix: Start of the file names.
        src_strategy_file: How the files are cut; None for whole tensors in `rank_0`.
        dst_strategy_file: How they are to be cut; None for whole tensors.
        process_num: Accepted; one process keeps the disk busy.
        output_format: `ckpt` or `safetensors`, whatever the source is.
        dec_key: Key of the source.
        dec_mode: Its cipher mode.
        enc_key: Encrypts the output.
        enc_mode: Its cipher mode.
        allow_unsealed: Accept source encrypted files without a seal.
        allow_unencrypted: Accept plain source files although a key is given.
        step: The training step, or epoch and step in the epoch (`"3_40"`); ranks without it are
            left out. None for the newest that all ranks have.
        trusted_keys: Public keys, or their files in PEM: source files whose manifest none of them
            signed are refused.
        context: The parallel settings of the run that wrote the files, where no source strategy is
            given (see `docs/mindspore.md`). Default: the context that `set_auto_parallel_context`
            set.

    Returns:
        The files, in the order of ranks, with the step and notes about newer steps and missing
        ranks.

    Raises:
        TypeError, ValueError: An argument is unusable; messages as MindSpore's.
        MixedSteps: No step is there for all ranks, or their manifests contradict each other;
            nothing was written.
        SliceMissing, LayoutError: A slice is nowhere, or does not fit; nothing was written.
        CkptmgrError: A file is damaged, or a key wrong.
    """
    if not isinstance(ckpt_prefix, str):
        raise TypeError("The ckpt_prefix should be a str.")
    if ".." in ckpt_prefix or "/" in ckpt_prefix:
        raise ValueError("ckpt_prefix contains '..' is not safe, please use a safe one.")
    if process_num < 1:
        raise ValueError(f"process_num is {process_num}; it must be 1 or more")
    files = rewrite(
        Path(src_checkpoints_dir),
        Path(dst_checkpoints_dir),
        prefix=ckpt_prefix,
        strategies=(src_strategy_file, dst_strategy_file),
        placement=placement_of(context).source(src_strategy_file),
        reading=reading_options(
            dec_key,
            dec_mode,
            allow_unsealed=allow_unsealed,
            allow_unencrypted=allow_unencrypted,
            trusted_keys=trusted_keys,
        ),
        options=save_options_of(output_format, enc_key, enc_mode),
        step=checked_step(step),
    )
    log_notes(files.notes)
    return files


def rewrite(
    source_dir: Path,
    target_dir: Path,
    *,
    prefix: str,
    strategies: tuple[StrategyFile, StrategyFile],
    reading: ReadOptions,
    options: SaveOptions,
    step: str | None = None,
    placement: MindSporePlacement = NOWHERE,
) -> WrittenFiles:
    """Write `rank_R/{prefix}{R}` for all ranks of the output; raises as `transform_checkpoints`.

    `strategies` are those of the source and of the output; `placement` is that of the source, whose
    strategy counts where none is given. Without a step the newest of all ranks counts.
    """
    strategies = strategies[0] or placement.load_file, strategies[1]
    chosen = source_files(source_dir, "transform_checkpoints", reading=reading, step=step)
    source, target, suffix = _layouts(*strategies)
    _check(chosen.paths, source, target, placement)
    count = rank_count(target)
    written = []
    with OpenRankFiles(chosen.paths, reading) as files:
        global_step = files.one_step(by_lineage=step is None)
        resharder = Resharder(files=files, source=source, target=target)
        for rank in range(count):
            resharder.items(rank)  # a missing slice is an error before the first write
        for rank in range(count):
            file = target_dir / f"rank_{rank}" / f"{prefix}{rank}{suffix}.{options.extension}"
            items = resharder.items(rank)
            written.append(write_file(file, items, options=options, step=global_step))
    notes = (*chosen.notes, *unproven_strategies(strategies, reading.trust))
    return WrittenFiles(written, step=chosen.step, notes=notes)


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
    allow_unencrypted: bool = False,
    trusted_keys: TrustedKeys = (),
    context: AutoParallelContext | None = None,
) -> Path:
    """Write the checkpoint of one rank of another strategy.

    Args:
        rank_id: The rank of the destination.
        checkpoint_files_map: Source rank to file; those of `rank_list_for_transform` are always
            enough.
        save_checkpoint_file_name: The output; ends in `.ckpt` or `.safetensors`, to which
            encryption adds `.ckpe`.
        src_strategy_file: How the files are cut; None for whole tensors.
        dst_strategy_file: How they are to be cut; None for whole tensors.
        dec_key: Key of the source.
        dec_mode: Its cipher mode.
        enc_key: Encrypts the output.
        enc_mode: Its cipher mode.
        allow_unsealed: Accept source encrypted files without a seal.
        allow_unencrypted: Accept plain source files although a key is given.
        trusted_keys: As for `transform_checkpoints`.
        context: As for `transform_checkpoints`.

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
    options = save_options_of(output_format, enc_key, enc_mode)
    target_file = target_file.with_name(f"{stem}.{options.extension}")
    reading = reading_options(
        dec_key,
        dec_mode,
        allow_unsealed=allow_unsealed,
        allow_unencrypted=allow_unencrypted,
        trusted_keys=trusted_keys,
    )
    placement = placement_of(context).source(src_strategy_file)
    src_strategy_file = src_strategy_file or placement.load_file
    source = None if src_strategy_file is None else read_layouts(src_strategy_file)
    target = None if dst_strategy_file is None else read_layouts(dst_strategy_file)
    if not checkpoint_files_map:
        raise ValueError(
            "None of the parameters in checkpoint file are in either src strategy or dst strategy. Please check"
            " correctness of strategy files."
        )
    _check(checkpoint_files_map, source, target, placement)
    with OpenRankFiles(checkpoint_files_map, reading) as files:
        step = files.one_step()
        items = Resharder(files=files, source=source, target=target).items(rank_id)
        log_notes(unproven_strategies((src_strategy_file, dst_strategy_file), reading.trust))
        return write_file(target_file, items, options=options, step=step)


def unproven_strategies(strategies: Sequence[StrategyFile], trust: Trust) -> tuple[str, ...]:
    """Return a note about strategy files beside keys: no manifest or seal covers them."""
    named = [os.fspath(one) for one in strategies if one is not None]
    if not named or (trust.keys is None and not trust.trusted_keys):
        return ()
    return (f"not proven by any key: the strategy in {', '.join(named)}; it is used as it is",)


def log_notes(notes: Sequence[str]) -> None:
    """Log notes for callers that drop the result."""
    for note in notes:
        _logger.warning("%s", note)


def save_options_of(output_format: str, enc_key: bytes | None, enc_mode: str) -> SaveOptions:
    """Return the save options of outputs; raise TypeError or ValueError for unusable arguments."""
    if output_format not in FORMATS:
        raise ValueError(
            "For 'transform_safetensors', the output_format must be 'safetensors' or 'ckpt', but got"
            f" {output_format}."
        )
    check_raw_key("enc_key", enc_key)
    check_cipher_mode("enc_mode", enc_mode)
    check_cipher(enc_key, enc_mode, format=output_format)
    key = None if enc_key is None else Key(enc_key)
    return SaveOptions(format=output_format, key=key, mode=enc_mode)


def reading_options(
    dec_key: bytes | None,
    dec_mode: str,
    *,
    allow_unsealed: bool,
    allow_unencrypted: bool,
    trusted_keys: TrustedKeys = (),
) -> ReadOptions:
    """Return the read options of sources; raise TypeError or ValueError for unusable arguments."""
    check_raw_key("dec_key", dec_key)
    check_cipher_mode("dec_mode", dec_mode)
    key = None if dec_key is None else Key(dec_key)
    return ReadOptions(
        trust=Trust(
            keys=key,
            trusted_keys=trusted_keys,
            allow_unsealed=allow_unsealed,
            allow_unencrypted=allow_unencrypted,
        ),
        mode=None if key is None else dec_mode,
    )


def _layouts(
    src_strategy_file: StrategyFile, dst_strategy_file: StrategyFile
) -> tuple[Layouts | None, Layouts | None, str]:
    """Return both layouts, and the infix of names where the source is one stage of the target."""
    target = None if dst_strategy_file is None else read_layouts(dst_strategy_file)
    if src_strategy_file is None:
        return None, target, ""
    strategy = read_strategy(src_strategy_file)
    source = layouts_of(strategy)
    if target is None or max(stage_count(source), stage_count(target)) > 1:
        return source, target, ""
    ours, theirs = _compared(source), _compared(target)
    if not ours < theirs:
        return source, target, ""
    staged = {name: replace(one, stages=(strategy.stage,)) for name, one in source.items()}
    return staged, {n: one for n, one in target.items() if n in source}, f"_part{strategy.stage}"


def _compared(layouts: Layouts) -> set[str]:
    return {name for name in layouts if not name.startswith(_NOT_COMPARED)}


def _check(
    paths: Mapping[int, object],
    source: Layouts | None,
    target: Layouts | None,
    placement: MindSporePlacement,
) -> None:
    placement.check_source(source, paths)
    if source is None and len(paths) > 1 and not placement.is_replicated:
        raise LayoutError(
            f"there are files of {len(paths)} ranks, but no strategy says how they are cut",
            hint="pass src_strategy_file (CLI: --from), or leave only the file of rank 0 if it holds whole tensors",
        )
    for layouts in (source, target):
        devices_per_stage(layouts)
