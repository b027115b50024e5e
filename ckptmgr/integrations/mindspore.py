# SPDX-License-Identifier: Apache-2.0
"""What MindSpore itself needs: a callback that its `Model` accepts, and parameters put back into a Cell."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
from mindspore import Parameter, Tensor, load_param_into_net
from mindspore import dtype as mstype
from mindspore.train import Callback

from ckptmgr.callback import ModelCheckpoint
from ckptmgr.loader import Value


@cache
def callback_class() -> Any:
    """Return `ModelCheckpoint` as a subclass of MindSpore's `Callback`.

    The subclass defines no method of its own: `Model.fit` refuses callbacks whose class defines the old names
    (`begin`, `step_end`, ...), and inherited ones pass.
    """
    return type(
        "ModelCheckpoint", (ModelCheckpoint, Callback), {"__doc__": ModelCheckpoint.__doc__}
    )


def to_parameter(name: str, array: np.ndarray) -> Any:
    """Return a MindSpore parameter with the content of an array."""
    # MindSpore does not know ml_dtypes; float32 holds every bfloat16 exactly.
    is_bf16 = array.dtype.name == "bfloat16"
    tensor = Tensor(array.astype(np.float32)).astype(mstype.bfloat16) if is_bf16 else Tensor(array)
    return Parameter(tensor, name=name, requires_grad=False)


def load_into_cell(cell: Any, values: Mapping[str, Value], *, strict: bool) -> None:
    """Put loaded values into a Cell with MindSpore's own rules for names, shapes and types."""
    parameters = {
        name: to_parameter(name, value)
        for name, value in values.items()
        if isinstance(value, np.ndarray)
    }
    load_param_into_net(cell, parameters, strict_load=strict)
