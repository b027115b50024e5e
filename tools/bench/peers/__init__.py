# SPDX-License-Identifier: Apache-2.0
"""Who takes part: one module per library, each imported only in a process of its own that has the library."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """A library that takes part.

    Attributes:
        module: The module here that knows it.
        needs: Modules that must be importable.
        is_peer: False for ours and for the bare disk; a peer that fails is reported and left out.
        has_target: Whether a target compares ours with it; the others take part in fewer rounds.
        has_background: Whether it can save in the background.
    """

    module: str
    needs: tuple[str, ...] = ()
    is_peer: bool = True
    has_target: bool = False
    has_background: bool = False


LIBRARIES: Mapping[str, Library] = {
    "raw": Library(module="raw", is_peer=False, has_target=True, has_background=True),
    "ckptmgr": Library(module="ours", is_peer=False, has_target=True, has_background=True),
    "mindspore": Library(
        module="mindspore_files", needs=("mindspore",), has_target=True, has_background=True
    ),
    "safetensors": Library(module="safetensors_files", needs=("safetensors",), has_target=True),
    "torch": Library(module="torch_files", needs=("torch",)),
    "dcp": Library(module="torch_dcp", needs=("torch",), has_background=True),
    "torchsnapshot": Library(
        module="torchsnapshot_trees", needs=("torch", "torchsnapshot"), has_background=True
    ),
    "orbax": Library(module="orbax_trees", needs=("jax", "orbax.checkpoint"), has_background=True),
    "tensorizer": Library(module="tensorizer_files", needs=("torch", "tensorizer")),
    "cryptotensors": Library(module="cryptotensors_files", needs=("cryptotensors",)),
}
"""By the name that `--libraries` takes."""
