# SPDX-License-Identifier: Apache-2.0
"""`Option`: a row of the table of options that a configuration is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, Self, TypeVar, overload

_T = TypeVar("_T")


class Option(Generic[_T]):
    """An option: its check, which returns the value that counts, and what it says.

    `within` is a check that also takes the configuration with the options before this one. A plain
    option can be assigned later, as in MindSpore; all others cannot.
    """

    def __init__(
        self,
        doc: str,
        check: Callable[[Any], _T] | None = None,
        *,
        within: Callable[[Any, Any], _T] | None = None,
        is_plain: bool = False,
    ) -> None:
        self.__doc__ = doc
        self._check = check
        self._within = within
        self._is_plain = is_plain

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def take(self, config: object, value: object) -> None:
        """Check a value and store it."""
        if self._within is not None:
            value = self._within(config, value)
        elif self._check is not None:
            value = self._check(value)
        vars(config)[self._name] = value

    @overload
    def __get__(self, config: None, owner: type) -> Self: ...
    @overload
    def __get__(self, config: object, owner: type) -> _T: ...
    def __get__(self, config: object | None, owner: type) -> Self | _T:
        if config is None:
            return self
        value: _T = vars(config)[self._name]
        return value

    def __set__(self, config: object, value: _T) -> None:
        if not self._is_plain:
            raise AttributeError(f"{self._name!r} cannot be changed")
        vars(config)[self._name] = value
