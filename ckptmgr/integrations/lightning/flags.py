# SPDX-License-Identifier: Apache-2.0
"""What a module trains: the flags of its parameters and layers, and groups that were added to an optimizer.

Lightning saves none of it. Its finetuning callbacks freeze at each start, and unfreeze at an epoch
that a resumed run may be past; they add their groups again, other callbacks do not.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Any

_LOG = logging.getLogger(__name__)
_FINETUNING = "BaseFinetuning"
_SHOWN = 8
_TRACKS = "track_running_stats"


def flags_of(module: Any) -> dict[str, list[str]]:
    """Return the names of what does not train."""
    return {
        "requires_grad": [name for name, one in module.named_parameters() if not one.requires_grad],
        "training": [name for name, one in module.named_modules() if not one.training],
        _TRACKS: [name for name, one in module.named_modules() if not getattr(one, _TRACKS, True)],
    }


def restore_flags(
    trainer: Any, stored: Mapping[str, Any], may_differ: Collection[str] = ()
) -> None:
    """Set the flags of the saved step; warn of those that differ, if no callback sets them.

    `requires_grad` and `training` may differ: then they stay those of the program.
    """
    module = trainer.lightning_module
    before = flags_of(module)
    stored = {name: before[name] if name in may_differ else one for name, one in stored.items()}
    for name, one in module.named_parameters():
        one.requires_grad_(name not in stored["requires_grad"])
    for name, one in module.named_modules():
        one.training = name not in stored["training"]
        if hasattr(one, _TRACKS):
            setattr(one, _TRACKS, name not in stored[_TRACKS])
    if not any(_is_finetuning(one) for one in trainer.callbacks):
        _warn(before, stored)


def _warn(before: Mapping[str, Any], stored: Mapping[str, Any]) -> None:
    changed = [
        f"{name or 'the module'}.{flag} = {name not in stored[flag]}"
        for flag in ("requires_grad", "training")
        for name in sorted({*before[flag]} ^ {*stored[flag]})
    ]
    if changed:
        shown = ", ".join(changed[:_SHOWN])
        _LOG.warning(
            "the flags of the saved step differ from those of this program, and are restored: %s%s; to keep those of the"
            " program: resume=Resume(may_differ=['requires_grad', 'training'])",
            shown,
            f" and {len(changed) - _SHOWN} more" if len(changed) > _SHOWN else "",
        )


def _is_finetuning(callback: Any) -> bool:
    return any(one.__name__ == _FINETUNING for one in type(callback).__mro__)


class OptimizerGroups:
    """The groups of the optimizers: how many are configured, and which were added since."""

    def __init__(self) -> None:
        self._configured: list[int] = []

    def begin(self, trainer: Any) -> None:
        """Note the groups that `configure_optimizers` made."""
        self._configured = [len(one.param_groups) for one in trainer.optimizers]

    def to_state(self, trainer: Any) -> list[dict[str, Any]]:
        """Return for each optimizer the number of its configured groups, and what was added by name."""
        names = {id(one): name for name, one in trainer.lightning_module.named_parameters()}
        return [
            {
                "configured": count,
                "added": [
                    [names.get(id(one), "") for one in group["params"]]
                    for group in optimizer.param_groups[count:]
                ],
            }
            for optimizer, count in zip(trainer.optimizers, self._configured, strict=False)
        ]

    def add_again(self, trainer: Any, stored: list[dict[str, Any]]) -> None:
        """Add the groups that the saved run added; a parameter that is no more leaves out the rest."""
        self._configured = [one["configured"] for one in stored]
        parameters = dict(trainer.lightning_module.named_parameters())
        for optimizer, one in zip(trainer.optimizers, stored, strict=False):
            if len(optimizer.param_groups) != one["configured"]:
                continue  # a callback has added them
            for names in one["added"]:
                if not parameters.keys() >= {*names}:
                    break
                optimizer.add_param_group({"params": [parameters[name] for name in names]})
