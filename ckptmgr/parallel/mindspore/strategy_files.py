# SPDX-License-Identifier: Apache-2.0
"""Strategy files under MindSpore's function names: merge stages, read layouts and groups."""

from __future__ import annotations

import os
from pathlib import Path

from ckptmgr.core.error_translation import translated_errors
from ckptmgr.core.errors import CheckpointNotFound
from ckptmgr.formats.strategy import encode_strategy, merge_stages, read_restore_ranks
from ckptmgr.parallel.errors import LayoutError
from ckptmgr.parallel.layout import ParallelLayout, from_strategy_layout, read_strategy
from ckptmgr.parallel.mindspore.outputs import write_small_file


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
