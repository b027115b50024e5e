# SPDX-License-Identifier: Apache-2.0
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false
# (without MindSpore pyright takes this file for it)
"""Functions that take and return MindSpore's objects, over those that take and return arrays."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec

import numpy as np
from mindspore import Parameter
from mindspore.communication import get_rank
from mindspore.communication.management import get_process_group_ranks
from mindspore.nn import Cell
from mindspore.train import _utils as mindspore_utils

from ckptmgr import parallel
from ckptmgr.core.shard_names import is_set_name
from ckptmgr.files.load.mindspore_cell import to_tensor
from ckptmgr.files.load.network import load_param_into_net
from ckptmgr.files.load.values import MapArrays
from ckptmgr.files.open_checkpoint import open_checkpoint
from ckptmgr.files.serialization import load_checkpoint as load_arrays
from ckptmgr.formats.source import BytesSource

if TYPE_CHECKING:
    from ckptmgr.crypto.keys.signing import PublicKey

_P = ParamSpec("_P")


def load_checkpoint(  # noqa: D417 # it refers to the other function for the rest
    ckpt_file_name: str | os.PathLike[str] | io.BytesIO,
    net: Any = None,
    strict_load: bool = False,
    filter_prefix: str | Sequence[str] | None = None,
    dec_key: bytes | str | None = None,
    dec_mode: str = "AES-GCM",
    specify_prefix: str | Sequence[str] | None = None,
    choice_func: Callable[[str], bool] | None = None,
    crc_check: bool = False,
    remove_redundancy: bool = False,
    format: str | None = None,
    *,
    allow_unsealed: bool = False,
    allow_unencrypted: bool = False,
    trusted_keys: Iterable[str | os.PathLike[str] | PublicKey] = (),
) -> dict[str, Any]:
    """Load one file into MindSpore's parameters; a damaged one is an error, never a wrong value.

    Args:
        ckpt_file_name: As for `ckptmgr.load_checkpoint`, like all arguments that are not named here.
        net: Also load into this Cell, or whatever `ckptmgr.load_param_into_net` takes.
        choice_func: Which names to load; its exception is the cause of a ValueError, except for
            `format="safetensors"`, where it reaches the caller, as in MindSpore.
        remove_redundancy: With `net`: MindSpore broadcasts what other ranks saved. A safetensors
            file that was saved so says so itself.

    Returns:
        Name to `Parameter` or string, in file order; a map parameter is a list of three arrays.

    Raises:
        TypeError, ValueError, RuntimeError: An argument is unusable, or a value does not fit `net`;
            messages as MindSpore's.
        CkptmgrError: As `ckptmgr.load_checkpoint`.
    """
    if choice_func is not None and format != "safetensors":
        choice_func = _reporting(choice_func, ckpt_file_name)
    trusted = tuple(trusted_keys)
    values = load_arrays(
        ckpt_file_name,
        filter_prefix=filter_prefix,
        dec_key=dec_key,
        dec_mode=dec_mode,
        specify_prefix=specify_prefix,
        choice_func=choice_func,
        crc_check=crc_check,
        remove_redundancy=remove_redundancy,
        format=format,
        allow_unsealed=allow_unsealed,
        allow_unencrypted=allow_unencrypted,
        trusted_keys=trusted,
    )
    int8 = [name for name, one in values.items() if getattr(one, "dtype", None) == np.int8]
    packed: set[str] = set()
    if (int8 or net is not None) and not is_set_name(str(ckpt_file_name)):
        file = ckpt_file_name
        with open_checkpoint(
            BytesSource(file.getvalue()) if isinstance(file, io.BytesIO) else file,
            dec_key=dec_key,
            allow_unsealed=allow_unsealed,
            allow_unencrypted=allow_unencrypted,
            trusted_keys=trusted,
        ) as reader:
            packed = {name for name in int8 if reader.spec(name).dtype.name == "int4"}
            remove_redundancy |= reader.metadata.get("remove_redundancy") == "True"
    parameters = {
        name: _parameter(name, value, is_int4=name in packed) for name, value in values.items()
    }
    if net is not None:
        load_param_into_net(net, parameters, strict_load, remove_redundancy)
    return parameters


def merge_sliced_parameter(
    sliced_parameters: list[Any], strategy: Mapping[str, Any] | None = None
) -> Any:
    """Join the slices of all ranks of a parameter; see `ckptmgr.parallel`.

    Returns:
        A `Parameter` with the name and the flags of the first slice.

    Raises:
        TypeError, ValueError, KeyError: An argument is unusable; messages as MindSpore's.
    """
    merged = parallel.merge_sliced_parameter(sliced_parameters, strategy)
    first = sliced_parameters[0]
    return Parameter(
        to_tensor(merged.data),
        name=merged.name,
        requires_grad=getattr(first, "requires_grad", True),
        layerwise_parallel=getattr(first, "layerwise_parallel", False),
    )


def get_parameter_redundancy(
    layout_obj: str | os.PathLike[str] | Mapping[str, Any] | Cell, initial_rank: int | None = None
) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Return for every parameter, sorted by name, the groups of ranks that hold the same bytes.

    Args:
        layout_obj: A strategy file, a `parameter_layout_dict`, or a Cell, whose parameters all
            ranks of the process group hold.
        initial_rank: First rank of the pipeline stage; None for that of this process.

    Raises:
        LayoutError: A layout contradicts itself.
        CheckpointNotFound, CorruptCheckpoint: About the strategy file.
    """
    if isinstance(layout_obj, Cell):
        groups = (tuple(get_process_group_ranks()),)
        return dict.fromkeys(
            sorted(one.name for _, one in layout_obj.parameters_and_names()), groups
        )
    return parallel.get_parameter_redundancy(
        layout_obj,
        initial_rank,
        rank=get_rank() if initial_rank is None else None,
        group_size=mindspore_utils.get_group_size,
    )


def _with_parameters(function: Callable[_P, Any]) -> Callable[_P, Any]:
    """Return a function whose result has parameters instead of arrays."""

    @wraps(function)
    def loading(*args: _P.args, **kwargs: _P.kwargs) -> Any:
        found = function(*args, **kwargs)
        if not isinstance(found, Mapping):
            return found
        return {name: _parameter(name, value) for name, value in found.items()}

    return loading


load_segmented_checkpoints = _with_parameters(parallel.load_segmented_checkpoints)
load_distributed_checkpoint = _with_parameters(parallel.load_distributed_checkpoint)


def _parameter(name: str, value: Any, *, is_int4: bool = False) -> Any:
    if isinstance(value, MapArrays):
        return list(value)
    if not isinstance(value, np.ndarray):
        return value
    return Parameter(to_tensor(value, is_int4=is_int4), name=name)


def _reporting(choose: Callable[[str], bool], file: object) -> Callable[[str], bool]:
    """Return `choose` with its exceptions reported as MindSpore reports them."""

    def chosen(name: str) -> bool:
        try:
            return choose(name)
        except Exception as error:
            raise ValueError(
                f"{error}\nFor 'load_checkpoint', failed to load the checkpoint file {file}."
            ) from error

    return chosen
