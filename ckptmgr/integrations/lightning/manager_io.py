# SPDX-License-Identifier: Apache-2.0
"""The `CheckpointIO` of a strategy while a `LightningCheckpoints` is at work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ckptmgr.core.errors import UnsupportedState
from ckptmgr.integrations.lightning.checkpoint_io import register

SCHEME = "ckptmgr:"


class ManagerIO:
    """The `CheckpointIO` of a strategy during a fit: `ckptmgr:` is the manager, all else as before."""

    def __init__(self, load: Callable[[str], dict[str, Any]], inner: Any) -> None:
        self.inner = inner
        self._load = load
        self._taken: dict[str, Any] | None = None
        register(type(self))

    def taken(self, trainer: Any) -> dict[str, Any]:
        """Return the checkpoint that the trainer saves."""
        try:
            trainer.save_checkpoint(SCHEME, weights_only=False)
            if self._taken is None:
                raise UnsupportedState(
                    f"{type(trainer.strategy).__name__} saves without its CheckpointIO, so LightningCheckpoints cannot",
                    hint="use a strategy that saves one state",
                )
            return self._taken
        finally:
            self._taken = None

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, *args: Any, **options: Any
    ) -> None:
        """Keep the checkpoint that the manager asked for; write all others."""
        if str(path) == SCHEME:
            self._taken = checkpoint
        else:
            self.inner.save_checkpoint(checkpoint, path, *args, **options)

    def load_checkpoint(self, path: Any, *args: Any, **options: Any) -> Any:
        """Return the checkpoint of the manager, or that of another path."""
        if str(path).startswith(SCHEME):
            return self._load(str(path).removeprefix(SCHEME))
        return self.inner.load_checkpoint(path, *args, **options)

    def remove_checkpoint(self, path: Any) -> None:
        """Remove a file of another callback."""
        self.inner.remove_checkpoint(path)

    def teardown(self) -> None:
        """End the other saves."""
        self.inner.teardown()
