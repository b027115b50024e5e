# SPDX-License-Identifier: Apache-2.0
"""Functions that are called after hooks of a module, which Lightning calls after the callbacks'."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


class ModuleHooks:
    """Stands in for hooks of a module, until `uninstall`."""

    def __init__(self, module: Any, after: Mapping[str, Callable[[], None]]) -> None:
        self._module = module
        self._own = {name: vars(module)[name] for name in after if name in vars(module)}
        self._names = tuple(after)
        vars(module).update({name: _Hook(module, name, then) for name, then in after.items()})

    def uninstall(self) -> None:
        """Give the module its hooks back."""
        for name in self._names:
            vars(self._module).pop(name, None)
        vars(self._module).update(self._own)


class _Hook:
    """A hook, and what follows it; a copy of the module has the hook alone."""

    def __init__(self, module: Any, name: str, then: Callable[[], None]) -> None:
        self._hook = getattr(module, name)
        self._of_class = getattr, (module, name)
        self._then = then

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self._hook(*args, **kwargs)
        self._then()
        return result

    def __reduce__(self) -> Any:
        return self._of_class
