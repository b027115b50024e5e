# SPDX-License-Identifier: Apache-2.0
"""`Cut`: the death of a process after a step, for `ckptmgr prove`, which sets the variable."""

from __future__ import annotations

import logging
import os
import signal

from ckptmgr.training.companions import Companion

CUT_AT = "CKPTMGR_CUT_AT"
"""The variable with the step after which the process kills itself."""

_LOG = logging.getLogger(__name__)


class Cut(Companion):
    """Kills the process when a step has ended that is not before `step`, and before it is saved."""

    def __init__(self, step: int) -> None:
        self._step = step
        _LOG.warning(
            "%s=%d: this process kills itself after step %d, as `ckptmgr prove` asks for; unset it for a training that"
            " is to end",
            CUT_AT,
            step,
            step,
        )

    def step_ended(self, step: int) -> None:
        """Die, if it is time."""
        if step >= self._step:
            os.kill(os.getpid(), signal.SIGKILL)


def cut_asked_for(value: str) -> Cut:
    """Return the cut that the variable asks for; raise ValueError for another text than a step."""
    if not value.isdecimal():
        raise ValueError(
            f"{CUT_AT} is the step after which `ckptmgr prove` cuts a run, but is {value!r}: unset it"
        )
    return Cut(int(value))
