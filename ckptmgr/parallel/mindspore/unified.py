# SPDX-License-Identifier: Apache-2.0
"""Join the checkpoints of all ranks into one: MindSpore's `unified_safetensors`.

```
part0.safetensors, part1.safetensors ...   whole tensors, about 3 GiB each
hyper_param.safetensors                    values that no strategy lists (learning rate, counters)
param_name_map.json                        {"metadata": {"total_size"}, "weight_map": {name: file}}
```
All parts are written before the first gets its name, so a call that fails leaves the earlier
result. A call that is killed while it renames leaves a map that no loader accepts. Both results
need disk space at the same time.

Deduplicated sources need no argument: a slice is taken from any rank that saved it. Memory holds a
few tensors at a time.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from ckptmgr.files.load.options import ReadOptions
from ckptmgr.formats.tensor import Item, Tensor
from ckptmgr.parallel.layout import devices_per_stage, read_layouts, whole
from ckptmgr.parallel.mindspore.context import AutoParallelContext
from ckptmgr.parallel.mindspore.outputs import (
    WrittenFiles,
    move_files,
    remove_file,
    staging_folder,
    write_file,
    write_small_file,
)
from ckptmgr.parallel.mindspore.placement import NOWHERE, MindSporePlacement, placement_of
from ckptmgr.parallel.mindspore.rank_files import OpenRankFiles, source_files
from ckptmgr.parallel.mindspore.rank_steps import checked_step
from ckptmgr.parallel.mindspore.resharder import Resharder
from ckptmgr.parallel.mindspore.transform import (
    StrategyFile,
    TrustedKeys,
    log_notes,
    reading_options,
    save_options_of,
    unproven_strategies,
)

PART_BYTES = 3 << 30
HYPER_FILE = "hyper_param.safetensors"
MAP_FILE = "param_name_map.json"

_NOT_MERGED = "accu_grads"
_INTERRUPTED = "unify was interrupted: run it again"
_UNFINISHED = {"weight_map": {_INTERRUPTED: f"({_INTERRUPTED}).safetensors"}}

ChooseNames = Callable[[str], bool | str]


def unified_safetensors(
    src_dir: str | os.PathLike[str],
    src_strategy_file: StrategyFile,
    dst_dir: str | os.PathLike[str],
    merge_with_redundancy: bool = True,
    file_suffix: str | None = None,
    max_process_num: int = 64,
    choice_func: ChooseNames | None = None,
    split_dst_file: tuple[int, int] | tuple[()] = (),
    *,
    dec_key: bytes | None = None,
    dec_mode: str = "AES-GCM",
    allow_unsealed: bool = False,
    allow_unencrypted: bool = False,
    step: int | str | None = None,
    trusted_keys: TrustedKeys = (),
    context: AutoParallelContext | None = None,
) -> WrittenFiles:
    """Join the checkpoints of all ranks.

    Args:
        src_dir: Holds `rank_0`, `rank_1` ...
        src_strategy_file: How the files are cut; None for whole tensors in `rank_0`.
        dst_dir: Gets the parts, in plain text even when the source is encrypted; made where it does
            not exist. A `hyper_param.safetensors` of an earlier call is replaced, or removed when
            all parameters are listed.
        merge_with_redundancy: Accepted; the index of each file decides.
        file_suffix: Only files whose name ends so, before the dot.
        max_process_num: Accepted; one process keeps the disk busy.
        choice_func: Takes the name of a parameter; returns False to leave it out, or the name to
            store it under.
        split_dst_file: `(number, count)`: write only the parts of this one of `count` machines,
            from 1. While the ranks still save, give all machines the same `step`: parts of
            different steps are refused when they are loaded.
        dec_key: Key of the source.
        dec_mode: Its cipher mode.
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
        The files, with the step and notes about newer steps and missing ranks.

    Raises:
        MixedSteps: No step is there for all ranks, or their manifests contradict each other;
            nothing was written.
        ValueError: An argument is unusable; messages as MindSpore's.
        SliceMissing, LayoutError: A slice is nowhere, or does not fit; nothing was written.
        CkptmgrError: A file is damaged, or a key wrong.
    """
    del merge_with_redundancy, max_process_num
    source_dir = Path(src_dir)
    if source_dir.is_file():
        raise ValueError("For 'unified_safetensors', the 'src_dir' can not be a file.")
    number, count = split_dst_file or (1, 1)
    if not 1 <= number <= count:
        raise ValueError(f"split_dst_file is {split_dst_file}; it counts machines from 1")
    files = unify(
        source_dir,
        Path(dst_dir),
        strategy=src_strategy_file,
        placement=placement_of(context).source(src_strategy_file),
        reading=reading_options(
            dec_key,
            dec_mode,
            allow_unsealed=allow_unsealed,
            allow_unencrypted=allow_unencrypted,
            trusted_keys=trusted_keys,
        ),
        file_suffix=file_suffix,
        choose=choice_func,
        share=(number, count),
        step=checked_step(step),
    )
    log_notes(files.notes)
    return files


def unify(
    source_dir: Path,
    target_dir: Path,
    *,
    strategy: StrategyFile,
    reading: ReadOptions,
    file_suffix: str | None = None,
    choose: ChooseNames | None = None,
    share: tuple[int, int] = (1, 1),
    step: str | None = None,
    placement: MindSporePlacement = NOWHERE,
) -> WrittenFiles:
    """Join the checkpoints of all ranks in plain files; otherwise as `unified_safetensors`.

    `placement` is that of the source, whose strategy counts where none is given.
    """
    strategy = strategy or placement.load_file
    source = None if strategy is None else read_layouts(strategy)
    chosen = source_files(
        source_dir,
        "unified_safetensors",
        reading=reading,
        file_suffix=file_suffix,
        step=step,
        is_whole=source is None and not placement.is_replicated,
    )
    placement.check_source(source, chosen.paths)
    notes = (*chosen.notes, *unproven_strategies([strategy], reading.trust))
    devices_per_stage(source)
    files: dict[str, Sequence[Item]] = {}
    with OpenRankFiles(chosen.paths, reading) as sources:
        global_step = sources.one_step(by_lineage=step is None)
        resharder = Resharder(files=sources, source=source, target=None)
        names = [name for name in sources.names() if source is None or name in source]
        tensors = _chosen(resharder, names, choose)
        parts = {f"part{n}.safetensors": part for n, part in enumerate(_parts(tensors))}
        first, last = _share(len(parts), *share)
        files.update(list(parts.items())[first:last])
        hyper = resharder.unlisted() if share[0] == 1 else []
        if hyper:
            files[HYPER_FILE] = hyper
        options = save_options_of("safetensors", None, "AES-GCM")
        with staging_folder(target_dir, "unify-{}-of-{}".format(*share)) as staging:
            for name, items in files.items():
                write_file(
                    staging.path / name,
                    items,
                    options=options,
                    step=global_step,
                    fs=staging.fs,
                )
            if share[0] == 1:
                # From here on an interruption leaves parts of both calls, for no loader to accept.
                write_small_file(target_dir / MAP_FILE, json.dumps(_UNFINISHED).encode())
            written = move_files(staging, [*files])
    if share[0] > 1:
        return WrittenFiles(written, step=chosen.step, notes=notes)
    if not hyper:
        # A file of an earlier call would be loaded with these parts, as no map names it.
        remove_file(target_dir / HYPER_FILE)
    weights = {one.spec.name: name for name, part in parts.items() for one in part}
    total = sum(one.spec.size_bytes for one in tensors)
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": weights}, indent=4)
    write_small_file(target_dir / MAP_FILE, text.encode())
    return WrittenFiles([*written, target_dir / MAP_FILE], step=chosen.step, notes=notes)


def _chosen(
    resharder: Resharder, names: Sequence[str], choice_func: ChooseNames | None
) -> list[Tensor]:
    chosen: dict[str, Tensor] = {}
    for name in names:
        choice = True if choice_func is None else choice_func(name)
        if name.startswith(_NOT_MERGED) or choice is False:
            continue
        stored = choice if isinstance(choice, str) else name
        if stored in chosen:
            raise ValueError(f"choice_func gives two parameters the name {stored!r}")
        tensor = resharder.tensor(name, whole())
        chosen[stored] = tensor._replace(spec=tensor.spec._replace(name=stored))
    return list(chosen.values())


def _parts(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Deal tensors out to parts of about `PART_BYTES`: largest first, to the smallest part."""
    total = sum(one.spec.size_bytes for one in tensors)
    parts: list[list[Tensor]] = [[] for _ in range(min(-(-total // PART_BYTES), len(tensors)))]
    if tensors and not parts:
        return [list(tensors)]  # all tensors are empty
    sizes = [0] * len(parts)
    for one in sorted(tensors, key=lambda one: (-one.spec.size_bytes, one.spec.name)):
        smallest = sizes.index(min(sizes))
        parts[smallest].append(one)
        sizes[smallest] += one.spec.size_bytes
    return parts


def _share(parts: int, number: int, count: int) -> tuple[int, int]:
    """Return the range of parts of machine `number` of `count`; the first take the remainder."""
    size, more = divmod(parts, count)
    first = size * (number - 1) + min(number - 1, more)
    return first, first + size + (number <= more)
