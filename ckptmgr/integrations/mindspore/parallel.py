# SPDX-License-Identifier: Apache-2.0
"""`mindspore.parallel`, where what `ckptmgr.integrations.mindspore` has is ours."""

from __future__ import annotations

from mindspore import parallel as _library

import ckptmgr.integrations.mindspore as _ours


def __getattr__(name: str) -> object:
    return getattr(_ours if name in _ours.__all__ else _library, name)
