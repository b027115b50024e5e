# SPDX-License-Identifier: Apache-2.0
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false
# (without MindSpore pyright takes this file for it)
"""Glue for MindSpore: a callback that its `Model` accepts, and parameters loaded into a Cell."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
from mindspore import Parameter, Tensor, load_param_into_net
from mindspore import dtype as mstype
from mindspore.common import np_dtype
from mindspore.nn import Cell
from mindspore.train import Callback

from ckptmgr.files.load.values import MapArrays, Value


def callback_class(base: type) -> Any:
    """Return `base`, a `ModelCheckpoint`, as a subclass of MindSpore's `Callback`, too.

    The new class has the name of its base and defines none of the old methods (`begin`, `step_end`,
    ...): `Model.fit` refuses callbacks whose own class defines them, but accepts inherited ones.
    """
    return base if issubclass(base, Callback) else _with_callback_base(base)


@cache
def _with_callback_base(base: type) -> Any:
    return type(base.__name__, (base, _IgnoresEvaluation, Callback), {"__doc__": base.__doc__})


class _IgnoresEvaluation:
    """Keeps MindSpore from calling the training methods during an evaluation."""

    def on_eval_begin(self, run_context: object) -> None: ...
    def on_eval_epoch_begin(self, run_context: object) -> None: ...
    def on_eval_step_begin(self, run_context: object) -> None: ...
    def on_eval_step_end(self, run_context: object) -> None: ...
    def on_eval_epoch_end(self, run_context: object) -> None: ...
    def on_eval_end(self, run_context: object) -> None: ...


def to_parameter(name: str, array: np.ndarray) -> Any:
    """Return a MindSpore parameter with the content of an array."""
    return Parameter(to_tensor(array), name=name, requires_grad=False)


def to_tensor(array: np.ndarray, *, is_int4: bool = False) -> Any:
    """Return a MindSpore tensor with the content of an array; of int4 an array of pairs."""
    if is_int4:
        return Tensor(array, dtype=mstype.qint4x2)
    if array.dtype.name != "bfloat16":
        return Tensor(array)
    own_bfloat16 = getattr(np_dtype, "bfloat16", None)
    if own_bfloat16 is not None:
        return Tensor(array.view(own_bfloat16))
    # Beside NumPy 2 MindSpore has no bfloat16 arrays; float32 holds every value exactly (NaNs lose
    # their payload).
    return Tensor(array.astype(np.float32)).astype(mstype.bfloat16)


def load_into_cell(
    cell: Any, values: Mapping[str, Value], *, strict: bool, remove_redundancy: bool = False
) -> tuple[list[str], list[str]]:
    """Load values into a Cell by MindSpore's rules for names, shapes, types; return its answer."""
    parameters = {
        name: to_parameter(name, value) if isinstance(value, np.ndarray) else value
        for name, value in values.items()
        if not isinstance(value, MapArrays)
    }
    _check_fits(cell, parameters, strict=strict)
    missing, unused = load_param_into_net(
        cell, parameters, strict_load=strict, remove_redundancy=remove_redundancy
    )
    return missing, unused


def _check_fits(cell: Any, parameters: Mapping[str, Any], *, strict: bool) -> None:
    """Have MindSpore refuse parameters that do not fit before it loads the others."""
    for _, mine in cell.parameters_and_names():
        theirs: Any = parameters.get(mine.name)
        if not isinstance(theirs, Parameter):
            continue
        if (mine.shape, mine.dtype) != (theirs.shape, theirs.dtype):
            trial, empty = Cell(), Tensor(np.zeros(mine.shape)).astype(mine.dtype)
            trial.insert_param_to_cell("trial", Parameter(empty, name=mine.name))
            load_param_into_net(trial, {mine.name: theirs}, strict_load=strict)
