# SPDX-License-Identifier: Apache-2.0
"""An object store that counts its requests, and ends or fails one of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TypeVar

from ckptmgr.objects.requests import FetchedRange, Objects, StoredObject

_Done = TypeVar("_Done")


class Died(Exception):
    """The process ended at a request."""


class CountedObjects:
    """Passes requests on until number `last`, which raises `error` instead of, or after, its effect."""

    def __init__(
        self,
        objects: Objects,
        *,
        last: int | None = None,
        is_done: bool = False,
        error: Callable[[], Exception] = Died,
        is_over: bool = True,
    ) -> None:
        self.url = objects.url
        self.requests: list[str] = []
        self.ranges: list[tuple[str, int, int]] = []
        self._objects = objects
        self._last = last
        self._is_done = is_done
        self._error = error
        self._is_over = is_over

    def put(self, key: str, pieces: Iterable[bytes], size_bytes: int) -> None:
        self._request("put", key, lambda: self._objects.put(key, pieces, size_bytes))

    def create(self, key: str, data: bytes) -> None:
        self._request("create", key, lambda: self._objects.create(key, data))

    def get(self, key: str) -> bytes:
        return self._request("get", key, lambda: self._objects.get(key))

    def read(self, key: str, offset: int, length: int) -> bytes:
        return self._request("read", key, lambda: self._objects.read(key, offset, length))

    def fetch(self, key: str, offset: int, length: int) -> FetchedRange:
        found = self._request("fetch", key, lambda: self._objects.fetch(key, offset, length))
        self.ranges.append((key, offset, found.data.nbytes))
        return found

    @property
    def fetched_bytes(self) -> int:
        """Bytes of all ranges that were fetched."""
        return sum(length for _, _, length in self.ranges)

    def find(self, key: str) -> StoredObject | None:
        return self._request("find", key, lambda: self._objects.find(key))

    def list(self, folder: str = "") -> list[StoredObject]:
        return self._request("list", folder, lambda: self._objects.list(folder))

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:  # a store may stop between any two of them
            self._request("delete", key, partial(self._objects.delete, [key]))

    def _request(self, kind: str, key: str, carry_out: Callable[[], _Done]) -> _Done:
        self.requests.append(f"{kind} {key}")
        number = len(self.requests)
        is_last = number == self._last
        if self._last is not None and (is_last or (number > self._last and self._is_over)):
            if is_last and self._is_done:
                with contextlib.suppress(OSError):
                    carry_out()
            raise self._error()
        return carry_out()


class AwayObjects(CountedObjects):
    """An object store that the first `count` requests do not reach."""

    def __init__(self, objects: Objects, count: int) -> None:
        super().__init__(objects)
        self._count = count

    def _request(self, kind: str, key: str, carry_out: Callable[[], _Done]) -> _Done:
        if len(self.requests) < self._count:
            self.requests.append(f"{kind} {key}")
            raise ConnectionError("no route to the store")
        return super()._request(kind, key, carry_out)
