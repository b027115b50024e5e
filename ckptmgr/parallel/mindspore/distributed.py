# SPDX-License-Identifier: Apache-2.0
"""Load the checkpoints of many ranks into the network of one, under MindSpore's function names.

Only the bytes of the own slices are read. A slice that no file holds, or that does not fit the
strategy, is an error.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ckptmgr.core.contexts import contextmanager
from ckptmgr.core.error_translation import translated_errors
from ckptmgr.core.errors import CheckpointFileNotFound, CheckpointNotFound
from ckptmgr.core.trust import public_keys
from ckptmgr.files.load.network import load_into
from ckptmgr.files.load.values import MapArrays, Value, tensor_value
from ckptmgr.files.serialization import load_checkpoint
from ckptmgr.formats.strict_json import parse_object, parse_strings
from ckptmgr.formats.tensor import PackedArray, Tensor, Text
from ckptmgr.parallel.errors import LayoutError
from ckptmgr.parallel.layout import (
    Layouts,
    ParallelLayout,
    devices_per_stage,
    from_layout_tuple,
    rank_count,
    read_layouts,
    whole,
)
from ckptmgr.parallel.mindspore.context import AutoParallelContext
from ckptmgr.parallel.mindspore.outputs import write_file
from ckptmgr.parallel.mindspore.placement import placement_of
from ckptmgr.parallel.mindspore.rank_files import OpenRankFiles
from ckptmgr.parallel.mindspore.resharder import Resharder
from ckptmgr.parallel.mindspore.transform import (
    StrategyFile,
    TrustedKeys,
    log_notes,
    reading_options,
    save_options_of,
    unproven_strategies,
)
from ckptmgr.parallel.mindspore.unified import HYPER_FILE, MAP_FILE

_FUNCTION = "For 'load_distributed_checkpoint',"
_MAX_MAP_BYTES = 64 << 20

Predicted = StrategyFile | Mapping[str, Any]


def load_distributed_checkpoint(
    network: Any,
    checkpoint_filenames: Sequence[str | os.PathLike[str]] | None = None,
    predict_strategy: Predicted = None,
    train_strategy_filename: StrategyFile = None,
    strict_load: bool = False,
    dec_key: bytes | None = None,
    dec_mode: str = "AES-GCM",
    format: str = "ckpt",
    unified_safetensors_dir: str | os.PathLike[str] | None = None,
    dst_safetensors_dir: str | os.PathLike[str] | None = None,
    rank_id: int | None = None,
    output_format: str = "safetensors",
    name_map: Mapping[str, str] | None = None,
    max_process_num: int = 64,
    return_param_dict: bool = False,
    *,
    allow_unsealed: bool = False,
    allow_unencrypted: bool = False,
    trusted_keys: TrustedKeys = (),
    context: AutoParallelContext | None = None,
) -> bool | dict[str, Value]:
    """Load the slices of a rank from a distributed checkpoint into its network or into files.

    Args:
        network: A mapping of names to arrays, a PyTorch module, an object with `load_state_dict()`,
            or a MindSpore Cell. None writes `rank_R/net.{output_format}` (unified source only).
        checkpoint_filenames: For `format="ckpt"`: the file of every rank, in order.
        predict_strategy: How the network is cut: a strategy file, or names with layouts; None for
            one device.
        train_strategy_filename: For `format="ckpt"`: how the files are cut; None for the
            `strategy_ckpt_load_file` of the context.
        strict_load: Refuse other element types instead of converting.
        dec_key: Key of the files.
        dec_mode: Their cipher mode.
        format: `ckpt` for the files of all ranks, `safetensors` for the output of
            `unified_safetensors`.
        unified_safetensors_dir: The directory of that output.
        dst_safetensors_dir: The directory to write to without a network.
        rank_id: The rank; None for that of this process (the `global_rank` of the context, or
            `RANK_ID` or `RANK`), and when writing for all.
        output_format: Format of the files that are written.
        name_map: Names in the network to names in the unified files.
        max_process_num: Accepted; one process keeps the disk busy.
        return_param_dict: Return the values instead of loading them.
        allow_unsealed: Accept encrypted files without a seal.
        allow_unencrypted: Accept plain files although a key is given.
        trusted_keys: For `format="ckpt"`: public keys, or their files in PEM; files whose manifest
            none of them signed are refused.
        context: Parallel settings; default: those of `set_auto_parallel_context`.

    Returns:
        True, or the values.

    Raises:
        ValueError: An argument is unusable; messages as MindSpore's.
        MixedSteps: The files are proven to be of different training steps.
        SliceMissing, LayoutError, CkptmgrError: About the files.
        RuntimeError: A value has another shape or type than the one in the network.
    """
    del max_process_num
    for one in (format, output_format):
        if one not in ("safetensors", "ckpt"):
            raise ValueError(
                f"{_FUNCTION} 'format' and 'output_format' must be 'ckpt' or 'safetensors', but got {one}."
            )
    placement = placement_of(context)
    rank = placement.own_rank if rank_id is None else rank_id
    target = _target(predict_strategy)
    if format == "ckpt":
        if network is None and not return_param_dict:
            raise ValueError(f"{_FUNCTION} 'network' can not be None when format is 'ckpt'.")
        paths = _rank_paths(checkpoint_filenames or ())
        placement = placement.source(train_strategy_filename)
        train_strategy_filename = train_strategy_filename or placement.load_file
        source = _train_layouts(train_strategy_filename, len(paths))
        placement.check_source(source, paths)
        reading = reading_options(
            dec_key,
            dec_mode,
            allow_unsealed=allow_unsealed,
            allow_unencrypted=allow_unencrypted,
            trusted_keys=trusted_keys,
        )
        with OpenRankFiles(paths, reading) as files:
            files.one_step()
            log_notes(unproven_strategies([train_strategy_filename], reading.trust))
            items = Resharder(files=files, source=source, target=target).items(rank)
            return _finish(network, items, strict=strict_load, is_returned=return_param_dict)
    trusted = list(trusted_keys) or None
    named = (
        checkpoint_filenames,
        train_strategy_filename,
        None if dec_key is None else "dec_key",
        None if trusted is None else "trusted_keys",
    )
    for argument in named:
        if argument is not None:
            raise ValueError(f"{_FUNCTION} {argument} must be None when format is 'safetensors'.")
    if unified_safetensors_dir is None:
        raise ValueError(
            f"{_FUNCTION} 'unified_safetensors_dir' can not be None when format is 'safetensors'."
        )
    with _unified_files(Path(unified_safetensors_dir)) as files:
        unified = _Unified(files, target, name_map or {})
        if network is not None or return_param_dict:
            items = unified.items(rank)
            return _finish(network, items, strict=strict_load, is_returned=return_param_dict)
        _write_unified(unified, dst_safetensors_dir, rank_id, output_format)
    return True


def _write_unified(
    unified: _Unified,
    directory: str | os.PathLike[str] | None,
    rank_id: int | None,
    output_format: str,
) -> None:
    if directory is None:
        raise ValueError(f"{_FUNCTION} 'dst_safetensors_dir' can not be None when network is None.")
    options = save_options_of(output_format, None, "AES-GCM")
    for rank in range(rank_count(unified.target)) if rank_id is None else (rank_id,):
        file = Path(directory) / f"rank_{rank}" / f"net.{output_format}"
        write_file(file, unified.items(rank), options=options)


def load_segmented_checkpoints(
    ckpt_file_dir: str,
    net: Any = None,
    strict_load: bool = False,
    filter_prefix: str | Sequence[str] | None = None,
    dec_key: bytes | None = None,
    dec_mode: str = "AES-GCM",
    specify_prefix: str | Sequence[str] | None = None,
    choice_func: Callable[[str], bool] | None = None,
    *,
    allow_unsealed: bool = False,
    allow_unencrypted: bool = False,
    trusted_keys: TrustedKeys = (),
) -> dict[str, Value]:
    """Load all `.ckpt` files of a directory, as the parts of one checkpoint.

    `net` gets the values as well; `strict_load` refuses other element types instead of converting.
    All other arguments are those of `load_checkpoint`.

    Returns:
        Name to value; an empty directory gives none.

    Raises:
        TypeError, ValueError: It is no directory; messages as MindSpore's.
        MixedSteps: The files are proven to be of different training steps.
        LayoutError: Two files have different values under one name: not the parts of one
            checkpoint.
        CkptmgrError: As `load_checkpoint`.
    """
    if not isinstance(ckpt_file_dir, str):
        raise TypeError("The ckpt_file_dir should be a str.")
    directory = Path(ckpt_file_dir)
    if not directory.is_dir():
        raise ValueError(
            f"The dst_strategy_file: {ckpt_file_dir} doesn't exist. Or it's not a directory"
        )
    trusted = public_keys(trusted_keys)
    found: dict[str, Value] = {}
    files = sorted(directory.glob("*.ckpt"))
    with OpenRankFiles(
        dict(enumerate(files)),
        reading_options(
            dec_key,
            dec_mode,
            allow_unsealed=allow_unsealed,
            allow_unencrypted=allow_unencrypted,
            trusted_keys=trusted,
        ),
    ) as parts:
        parts.one_step()
    for file in files:
        values = load_checkpoint(
            file,
            filter_prefix=filter_prefix,
            dec_key=dec_key,
            dec_mode=dec_mode,
            specify_prefix=specify_prefix,
            choice_func=choice_func,
            allow_unsealed=allow_unsealed,
            allow_unencrypted=allow_unencrypted,
            trusted_keys=trusted,
        )
        for name, value in values.items():
            if name in found and not _are_equal(found[name], value):
                raise LayoutError(
                    f"{name!r} has another value than in a file before it",
                    path=file,
                    hint="the files are not the parts of one checkpoint; move those of other steps away",
                )
            found[name] = value
    if net is not None and found:
        load_into(net, found, strict=strict_load)
    return found


class _Unified:
    """Makes the parameters of ranks from unified files."""

    def __init__(
        self, files: OpenRankFiles, target: Layouts | None, name_map: Mapping[str, str]
    ) -> None:
        self._files = files
        self.target = target
        self._names = {stored: name for name, stored in name_map.items()}
        hyper = [part for part, path in files.paths.items() if path.name == HYPER_FILE]
        self._hyper = {name for part in hyper for name in files.file(part).entries}

    def items(self, rank: int) -> list[Tensor | Text]:
        """Return the parameters of a rank by the target layout, and all unlisted values."""
        target = self.target
        resharder = Resharder(files=self._files, source=None, target=target)
        stage, device = divmod(rank, devices_per_stage(target))
        found: list[Tensor | Text] = []
        for stored in self._files.names():
            name = self._names.get(stored, stored)
            layout = whole() if target is None or stored in self._hyper else target.get(name)
            if layout is None or (layout.device_matrix and stage not in layout.stages):
                continue
            tensor = resharder.tensor(stored, layout, device=device if layout.device_matrix else 0)
            found.append(tensor._replace(spec=tensor.spec._replace(name=name)))
        return found


@contextmanager
def _unified_files(directory: Path) -> Iterator[OpenRankFiles]:
    """Open the files of the parameter map and the one of unlisted values; without a map all."""
    found = {file.name: file for file in sorted(directory.glob("*.safetensors"))}
    if not found:
        raise CheckpointNotFound("there are no safetensors files", path=directory)
    weights = _weight_map(directory / MAP_FILE)
    if weights is None:
        with OpenRankFiles(dict(enumerate(found.values()))) as files:
            files.one_step()
            yield files
        return
    missing = sorted(set(weights.values()) - set(found))
    if missing:
        raise CheckpointFileNotFound(
            "a part that the parameter map names is missing", path=directory / missing[0]
        )
    # Other files are left from an older call, or are unrelated.
    parts = [name for name in found if name == HYPER_FILE or name in weights.values()]
    paths = dict(enumerate(found[name] for name in parts))
    with OpenRankFiles(
        paths, takes=lambda part, name: weights.get(name, HYPER_FILE) == parts[part]
    ) as files:
        files.one_step()
        lacking = sorted(set(weights) - set(files.names()))
        if lacking:
            raise CheckpointNotFound(
                f"holds no parameter {lacking[0]!r}, but the parameter map says so",
                path=directory / weights[lacking[0]],
            )
        yield files


def _weight_map(file: Path) -> Mapping[str, str] | None:
    if not file.is_file():
        return None
    with translated_errors(os.fspath(file)), file.open("rb") as stream:
        top = parse_object(stream.read(_MAX_MAP_BYTES), what="parameter map", offset=0)
        return parse_strings(top.get("weight_map", top), what="weight map", offset=0)


def _rank_paths(names: Sequence[object]) -> dict[int, Path]:
    paths = {}
    for index, name in enumerate(names):
        path = Path(name) if isinstance(name, (str, os.PathLike)) else None
        if path is None or path.suffix != ".ckpt" or not path.is_file() or not path.stat().st_size:
            raise ValueError(
                f"{_FUNCTION} please check 'checkpoint_filenames', and make sure the {name} at index {index} is a valid"
                " checkpoint file, it must be a string ending with '.ckpt', and the checkpoint file it represents must be"
                " exist and not empty."
            )
        paths[index] = path
    return paths


def _train_layouts(file: StrategyFile, count: int) -> Layouts:
    if file is None:
        raise ValueError(f"{_FUNCTION} 'train_strategy_filename' is needed when format is 'ckpt'.")
    layouts = read_layouts(file)
    devices = rank_count(layouts)
    if count != devices:
        raise ValueError(
            "For 'Load_distributed_checkpoint', the length of 'checkpoint_filenames' should be equal to the device count of"
            f" training process. But got the length of 'checkpoint_filenames' is {count} and the device count is {devices}."
        )
    return layouts


def _target(strategy: Predicted) -> Layouts | None:
    if strategy is None:
        return None
    if isinstance(strategy, Mapping):
        return {
            name: one if isinstance(one, ParallelLayout) else from_layout_tuple(one)
            for name, one in strategy.items()
        }
    return read_layouts(strategy)


def _finish(
    network: Any, items: Iterable[Tensor | Text], *, strict: bool, is_returned: bool
) -> bool | dict[str, Value]:
    values = {
        item.spec.name if isinstance(item, Tensor) else item.name: _value(item) for item in items
    }
    if is_returned:
        return values
    load_into(network, values, strict=strict)
    return True


def _value(item: Tensor | Text) -> Value:
    if isinstance(item, Tensor):
        flat: np.ndarray = np.frombuffer(item.content(), np.uint8)
        array = flat.view(item.spec.dtype.to_numpy()).reshape(item.spec.shape)
        return tensor_value(item.spec, array)
    return item.text


def _are_equal(one: Value, other: Value) -> bool:
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        same_kind = (one.dtype, one.shape) == (other.dtype, other.shape)
        return same_kind and one.tobytes() == other.tobytes()
    if isinstance(one, MapArrays) and isinstance(other, MapArrays):
        return all(_are_equal(a, b) for a, b in zip(one, other, strict=True))
    if isinstance(one, PackedArray) and isinstance(other, PackedArray):
        return one[:2] == other[:2] and _are_equal(one.data, other.data)
    return isinstance(one, str) and one == other
