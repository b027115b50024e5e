# SPDX-License-Identifier: Apache-2.0
"""Options of a `CheckpointConfig` that a surface which takes one cannot honour.

An option has its effect on a surface, or the surface refuses it by name at construction. An
option at its default is never refused.
"""

from __future__ import annotations

from collections.abc import Iterator

from ckptmgr.config.config import CheckpointConfig
from ckptmgr.config.failure import parse_on_error
from ckptmgr.io.permissions import DEFAULT_FILE_MODE

_Refusal = tuple[str, str]
"""The option, and why it has no effect and what to do instead."""


def check_for_manager(config: CheckpointConfig, *, is_many: bool, has_layout: bool) -> None:
    """Raise ValueError for an option without effect in a `CheckpointManager`.

    `is_many` says whether there is a coordinator, `has_layout` whether there is a layout.
    """
    refused = [*_of_training(config, has_layout=has_layout)]
    if config.saved_network is not None:
        refused.append(
            ("saved_network", "it saves the state that step_end gets: put the network into that")
        )
    if config.remove_redundancy and not is_many:
        refused.append(
            ("remove_redundancy", "one process has no copies on other ranks: give a coordinator")
        )
    _refuse("CheckpointManager", refused)


def check_for_address(config: CheckpointConfig) -> None:
    """Raise ValueError for an option without effect in a run that saves to an object store."""
    if config.file_mode != DEFAULT_FILE_MODE:
        why = "an object has no permission bits: the policy of the bucket says who may read it"
        _refuse("a run that saves to an address", [("file_mode", why)])


def check_for_callback(
    config: CheckpointConfig, *, has_layout: bool, is_numbered: bool = True
) -> None:
    """Raise ValueError for an option without effect in a `ModelCheckpoint`.

    `is_numbered` says whether its files have numbers, so that retention counts them.
    """
    refused = [*_of_training(config, has_layout=has_layout)]
    if config.only_kept is not None and not is_numbered:
        refused.append(("save_only_kept", "no rule counts files whose names a function returns"))
    _refuse("ModelCheckpoint", refused)


def check_for_dcp(config: CheckpointConfig) -> None:
    """Raise ValueError for an option without effect in the storage of DCP."""
    refused = [*_of_training(config, has_layout=True)]
    if config.only_kept is not None:
        refused.append(
            ("save_only_kept", "it saves when dcp.save is called: compare the metric there")
        )
    if config.exception_save:
        refused.append(("exception_save", "it sees no loop: call dcp.save where training fails"))
    if config.append_dict is not None:
        refused.append(("append_info", "put the values into the state_dict"))
    if config.saved_network is not None:
        refused.append(("saved_network", "it saves the state_dict that dcp.save gets"))
    if config.memory is not None:
        refused.append(("memory", "dcp.async_save stages the state by itself"))
    if config.back_pressure != "wait":
        refused.append(("back_pressure", "the loop decides when dcp.async_save runs"))
    if parse_on_error(config.on_error).action != "raise":
        refused.append(("on_error", "dcp.save raises, and so does the future of dcp.async_save"))
    _refuse("the storage of DCP", refused)


def _of_training(config: CheckpointConfig, *, has_layout: bool) -> Iterator[_Refusal]:
    if config.map_param_inc:
        yield (
            "incremental",
            "a file with the changes of map parameters alone cannot be resumed from; every "
            "checkpoint holds all of them",
        )
    if config.enable_redundance:
        yield "enable_redundance", "it is a switch of MindSpore's AITURBO store, which is not used"
    if config.asks_for_integrated_save and has_layout:
        yield "integrated_save", WHOLE_TENSORS


WHOLE_TENSORS = (
    "each rank writes the slices that it holds, with their layout; leave it out: load_checkpoint "
    "of the .shards name returns whole tensors, and save_checkpoint writes them to one file"
)
"""Why split tensors are not merged by a save, and how to merge them."""


def _refuse(surface: str, refused: list[_Refusal]) -> None:
    if refused:
        option, why = refused[0]
        raise ValueError(f"{option} has no effect in {surface}: {why}")
