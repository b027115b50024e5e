# SPDX-License-Identifier: Apache-2.0
"""Options of a `CheckpointConfig` that a surface which takes one cannot honour.

An option has its effect on a surface, or the surface refuses it by name at construction. An
option at its default is never refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ckptmgr.config.config import CheckpointConfig
from ckptmgr.config.failure import parse_on_error
from ckptmgr.core.arguments import no_effect
from ckptmgr.io.permissions import DEFAULT_FILE_MODE

MANAGER = "CheckpointManager"
CALLBACK = "ModelCheckpoint"
DCP = "the storage of DCP"
ADDRESS = "a run that saves to an address"
ONE_PROCESS, SLICED, UNNUMBERED = "one process", "slices", "names from a function"
"""Further properties of a surface: who saves, what the state holds, how files are named."""

WHOLE_TENSORS = (
    "each rank writes the slices that it holds, with their layout; leave it out: load_checkpoint "
    "of the .shards name returns whole tensors, and save_checkpoint writes them to one file"
)
"""Why split tensors are not merged by a save, and how to merge them."""

_CHANGES = (
    "a file with the changes of map parameters alone cannot be resumed from; every checkpoint holds "
    "all of them"
)
_AITURBO = "it is a switch of MindSpore's AITURBO store, which is not used"
_NO_COPIES = "one process has no copies on other ranks: give a coordinator"
_Row = tuple[str, Callable[[CheckpointConfig], bool], Mapping[str, str]]
"""An option, whether it was given, and where it is refused: why, and what to do instead."""
_REFUSED: tuple[_Row, ...] = (
    (
        "incremental",
        lambda config: bool(config.incremental),
        dict.fromkeys((MANAGER, CALLBACK, DCP), _CHANGES),
    ),
    (
        "enable_redundance",
        lambda config: bool(config.enable_redundance),
        dict.fromkeys((MANAGER, CALLBACK, DCP), _AITURBO),
    ),
    ("integrated_save", lambda config: config.asks_for_integrated_save, {SLICED: WHOLE_TENSORS}),
    (
        "save_only_kept",
        lambda config: config.only_kept is not None,
        {
            UNNUMBERED: "no rule counts files whose names a function returns",
            DCP: "it saves when dcp.save is called: compare the metric there",
        },
    ),
    (
        "save_when_measured",
        lambda config: config.save_when_measured is not None,
        {
            CALLBACK: "Model.fit measures after the step is saved: use MindSporeCheckpoints, or a CheckpointManager",
            DCP: "it saves when dcp.save is called: call it where the metric is measured",
        },
    ),
    (
        "exception_save",
        lambda config: config.exception_save,
        {DCP: "it sees no loop: call dcp.save where training fails"},
    ),
    (
        "append_info",
        lambda config: config.append_dict is not None,
        {DCP: "put the values into the state_dict"},
    ),
    (
        "saved_network",
        lambda config: config.saved_network is not None,
        {
            MANAGER: "it saves the state that step_end gets: put the network into that",
            DCP: "it saves the state_dict that dcp.save gets",
        },
    ),
    ("remove_redundancy", lambda config: config.remove_redundancy, {ONE_PROCESS: _NO_COPIES}),
    (
        "memory",
        lambda config: config.memory is not None,
        {DCP: "dcp.async_save stages the state by itself"},
    ),
    (
        "back_pressure",
        lambda config: config.back_pressure != "wait",
        {DCP: "the loop decides when dcp.async_save runs"},
    ),
    (
        "on_error",
        lambda config: parse_on_error(config.on_error).action != "raise",
        {DCP: "dcp.save raises, and so does the future of dcp.async_save"},
    ),
    (
        "file_mode",
        lambda config: config.file_mode != DEFAULT_FILE_MODE,
        {
            ADDRESS: "an object has no permission bits: the policy of the bucket says who may read it"
        },
    ),
)


def check_surface(
    config: CheckpointConfig, surface: str, has: Mapping[str, bool] | None = None
) -> None:
    """Raise ValueError for an option without effect on a surface, which has the true properties."""
    places = [surface, *(name for name, is_so in (has or {}).items() if is_so)]
    for option, is_given, reasons in _REFUSED:
        why = next((reasons[one] for one in places if one in reasons), None)
        if why is not None and is_given(config):
            raise no_effect(option, f"in {surface}", why)
