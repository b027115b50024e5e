# SPDX-License-Identifier: Apache-2.0
"""`contextmanager` as in `contextlib`, for blocks that exceptions of users leave.

The one of the standard library sets attributes of the exception on its way. An exception that is a
frozen dataclass refuses that, and its user would get a FrozenInstanceError instead.

>>> @contextmanager
... def opened():
...     yield "value"
>>> with opened() as value:
...     print(value)
value
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager
from functools import wraps
from types import TracebackType
from typing import Generic, ParamSpec, TypeVar, cast

_P = ParamSpec("_P")
_T = TypeVar("_T")


def contextmanager(
    function: Callable[_P, Iterator[_T]],
) -> Callable[_P, AbstractContextManager[_T]]:
    """Return a function whose results are context managers; `function` yields once."""

    @wraps(function)
    def make(*args: _P.args, **kwargs: _P.kwargs) -> AbstractContextManager[_T]:
        return _Context(cast("Generator[_T, None, None]", function(*args, **kwargs)))

    return make


class _Context(AbstractContextManager[_T], Generic[_T]):
    def __init__(self, steps: Generator[_T, None, None]) -> None:
        self._steps = steps

    def __enter__(self) -> _T:
        return next(self._steps)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None:
        if error is None:
            next(self._steps, None)
            return False
        try:
            self._steps.throw(error)
        except StopIteration as end:
            return end is not error
        except BaseException as raised:
            is_same = raised is error or (
                # PEP 479: a generator turns one that passes through it into another.
                isinstance(error, StopIteration) and raised.__cause__ is error
            )
            if not is_same:
                raise
            error.with_traceback(traceback)  # which sets no attribute in Python
            return False
        return False
