# SPDX-License-Identifier: Apache-2.0
"""`contextmanager`: the behaviour of the standard library's, and exceptions that refuse attributes."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

import pytest

from ckptmgr.core.contexts import contextmanager


@dataclass(frozen=True)
class FrozenError(Exception):
    code: int = 0


@contextmanager
def noting(notes: list[str], *, swallows: type[Exception] = FileNotFoundError) -> Iterator[str]:
    notes.append("begin")
    try:
        with suppress(swallows):
            yield "value"
    finally:
        notes.append("end")


def test_block_gets_the_value_and_the_end_runs() -> None:
    notes: list[str] = []
    with noting(notes) as value:
        notes.append(value)
    assert notes == ["begin", "value", "end"]


@pytest.mark.parametrize("error", [ZeroDivisionError(), FrozenError(1), StopIteration(2)])
def test_exception_of_the_block_arrives_as_it_is(error: Exception) -> None:
    notes: list[str] = []
    with pytest.raises(type(error)) as caught, noting(notes):
        raise error
    assert caught.value is error
    assert notes == ["begin", "end"]
    assert [frame.name for frame in traceback.extract_tb(error.__traceback__)] == [
        "test_exception_of_the_block_arrives_as_it_is"
    ]


def test_exception_that_the_function_catches_ends_in_the_block() -> None:
    notes: list[str] = []
    with noting(notes, swallows=ZeroDivisionError):
        notes.append(f"{1 / len(notes[1:])}")
    assert notes == ["begin", "end"]


def test_exception_that_the_function_raises_instead_arrives() -> None:
    @contextmanager
    def translating() -> Iterator[None]:
        try:
            yield
        except FrozenError as error:
            raise KeyError(error.code) from error

    with pytest.raises(KeyError) as caught, translating():
        raise FrozenError(7)
    assert caught.value.args == (7,)
    assert isinstance(caught.value.__cause__, FrozenError)
