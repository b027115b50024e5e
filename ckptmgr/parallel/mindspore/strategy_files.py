# SPDX-License-Identifier: Apache-2.0
"""Strategy files under MindSpore's function names: merge stages, read layouts and groups."""

from __future__ import annotations

import os
from pathlib import Path

from ckptmgr.core.error_translation import translated_errors
from ckptmgr.core.errors import CheckpointNotFound
from ckptmgr.formats.strategy import (
    Strategy,
    StrategyKind,
    StrategyLayout,
    encode_strategy,
    merge_stages,
    read_restore_ranks,
)
from ckptmgr.io.filesystem import FileSystem
from ckptmgr.parallel.errors import LayoutError
from ckptmgr.parallel.layout import (
    Layouts,
    ParallelLayout,
    from_strategy_layout,
    read_strategy,
    stage_count,
)
from ckptmgr.parallel.mindspore.outputs import write_small_file
from ckptmgr.parallel.mindspore.slices import equal_groups


def merge_pipeline_strategys(
    src_strategy_dirs: str | os.PathLike[str], dst_strategy_file: str | os.PathLike[str]
) -> None:
    """Join the strategy files of all pipeline stages in a directory into one.

    Args:
        src_strategy_dirs: Holds `.ckpt` or `.json` files; several of one stage must be equal.
        dst_strategy_file: The output; JSON when the sources are.

    Raises:
        NotADirectoryError: There is no such directory.
        CheckpointNotFound: It holds no strategy files.
        LayoutError: It holds files of both kinds, or an empty one.
        CorruptCheckpoint: A file is damaged, or two files of a stage differ.
    """
    directory = Path(src_strategy_dirs)
    if not directory.is_dir():
        raise NotADirectoryError(f"src_strategy_dirs {directory} is not a directory.")
    protobuf, json = sorted(directory.glob("*.ckpt")), sorted(directory.glob("*.json"))
    if protobuf and json:
        raise LayoutError(
            "The strategys format should be all '.ckpt' or all '.json'", path=directory
        )
    if not protobuf and not json:
        raise CheckpointNotFound(
            "there are no strategy files here",
            path=directory,
            hint="name the directory that holds one .ckpt or .json strategy file for each stage",
        )
    strategies = []
    for file in protobuf or json:
        strategy = read_strategy(file)
        if not strategy.operators or not strategy.layouts:
            raise LayoutError(f"The strategy file {file} is empty")
        strategies.append(strategy)
    with translated_errors(os.fspath(directory)):
        encoded = encode_strategy(merge_stages(strategies), kind="json" if json else "protobuf")
    write_small_file(Path(dst_strategy_file).absolute(), encoded)


def build_searched_strategy(
    strategy_filename: str | os.PathLike[str] | None,
) -> dict[str, ParallelLayout] | None:
    """Return the layouts in a strategy file by their names in it; None for None.

    Raises:
        TypeError, CheckpointNotFound, CorruptCheckpoint: As `read_strategy`.
    """
    if strategy_filename is None:
        return None
    return {one.name: from_strategy_layout(one) for one in read_strategy(strategy_filename).layouts}


def restore_group_info_list(group_info_file_name: str | os.PathLike[str]) -> list[int]:
    """Return the ranks of a group file (`group_ckpt_save_file`), which hold the same checkpoint.

    Raises:
        TypeError, ValueError: No file name, no such file, or an empty one; messages as MindSpore's.
        CorruptCheckpoint: It is no group file.
    """
    name = group_info_file_name
    function = "For 'restore_group_info_list',"
    if not isinstance(name, (str, os.PathLike)):
        raise TypeError(
            f"{function} the argument 'group_info_file_name' should be str, but got {type(name)}."
        )
    file = Path(name)
    if not file.is_file():
        raise ValueError(f"{function} no such group information file: {name}.")
    data = file.read_bytes()
    if not data:
        raise ValueError(f"{function} the group information file should not be empty.")
    with translated_errors(os.fspath(name)):
        return list(read_restore_ranks(data))


class StrategyOutput:
    """A strategy file that is written beside checkpoints, once for each directory of them."""

    def __init__(self, path: Path, content: bytes) -> None:
        self._path = path
        self._content = content
        self._written: set[Path] = set()

    def write(self, directory: Path, *, fs: FileSystem) -> None:
        """Write the file durably; a relative path starts at the directory of the checkpoints."""
        file = directory.absolute() / self._path
        if file not in self._written:
            write_small_file(file, self._content, fs=fs)
            self._written.add(file)


def strategy_output(
    path: str, layouts: Layouts | None, *, source: str | None = None
) -> StrategyOutput:
    """Return the strategy file for `strategy_ckpt_save_file`; JSON where the name ends in `.json`.

    It has the content of the strategy file `source`, or that of the layouts.

    Raises:
        ValueError: There is neither, or a strategy file cannot express a layout.
        CkptmgrError: About the source.
    """
    kind: StrategyKind = "json" if path.endswith(".json") else "protobuf"
    if source is not None:
        strategy = read_strategy(source)
    elif layouts is not None:
        strategy = _strategy_of(layouts)
    else:
        raise ValueError(
            f"strategy_ckpt_save_file={path!r}: nothing says how the tensors are cut; give a layout with a coordinator, or "
            "strategy_ckpt_load_file"
        )
    return StrategyOutput(Path(path), encode_strategy(strategy, kind=kind))


def _strategy_of(layouts: Layouts) -> Strategy:
    is_staged = stage_count(layouts) > 1
    return Strategy(
        layouts=tuple(
            _strategy_layout(f"{stage}-{name}" if is_staged else name, layout)
            for name, layout in layouts.items()
            for stage in layout.stages
        ),
        current_stage=int(is_staged),
    )


def _strategy_layout(name: str, layout: ParallelLayout) -> StrategyLayout:
    if layout.ranks is not None or layout.is_uneven:
        raise ValueError(
            f"strategy_ckpt_save_file: a strategy file cannot express the layout of {name!r}, with ranks or uneven cuts of "
            "its own; leave it out, the checkpoints hold their layout"
        )
    maps = layout.tensor_map
    if all(len(axes) <= 1 for axes in maps):
        maps = (tuple(axes[0] if axes else -1 for axes in maps),)
    else:
        maps = tuple(axes or (-1,) for axes in maps)
    return StrategyLayout(
        name=name,
        device_matrix=layout.device_matrix,
        tensor_maps=maps,
        param_split_shape=layout.split_rows,
        field=layout.field_size,
        opt_weight_shard_step=layout.opt_shard_step or _shard_step(layout),
        opt_weight_shard_size=layout.opt_shard_size,
    )


def _shard_step(layout: ParallelLayout) -> int:
    """Return the stride of an optimizer shard in device numbers; MindSpore takes 0 for no shard."""
    if not layout.opt_shard_size or layout.replica_count == 1:
        return 0
    axes = frozenset(axis for one in layout.tensor_map for axis in one)
    first, second, *_ = equal_groups(layout.device_matrix, axes)[0].tolist()
    return int(second - first)
