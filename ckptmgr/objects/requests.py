# SPDX-License-Identifier: Apache-2.0
"""The requests to an object store: a Protocol, and its implementation by obstore.

Errors are those of the operating system, so that callers decide as they do for disks:
FileNotFoundError, FileExistsError, PermissionError, and ConnectionError for every other failure,
after which the state of the object is not known.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from ckptmgr.core.errors import CkptmgrError, CorruptCheckpoint, UnsupportedCheckpoint
from ckptmgr.core.printable import MOST_CHARACTERS, printable
from ckptmgr.core.urls import SCHEMES, without_secrets

_ADDRESS = re.compile(r"(?P<scheme>[a-z0-9]+)://(?P<host>[^/?#]*)(?P<path>[^?#]*)")
_ESCAPED = re.compile(r"[\x00-\x1f\x7f]|%[0-9A-Fa-f]{2}")
_NO_KEY = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")
_PASSWORD = re.compile(r"//[^/\s]*@")
_QUERY = re.compile(r"(https?://[^\s?]*)\?\S*")
_LONGEST_RANGE_BYTES = 1 << 62
_SHORTER = re.compile(r"Requested \d+\.\.\d+, got \d+\.\.(\d+)")  # the library refuses these
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_SETTINGS = ("AWS_", "AZURE_", "GOOGLE_")
_ENDPOINT = re.compile(r"https?://[^/\s]", re.IGNORECASE)
_ANSWER_501 = "501 Not Implemented"
_RETRIES: Any = {"max_retries": 5, "retry_timeout": timedelta(seconds=60)}
MOST_GOTTEN_BYTES = 64 << 20
"""Largest object that is read at once: another tool's may have the name of a manifest."""
_MOST_IN_TRACE = 4000  # characters
_PART_BYTES = 16 << 20
_MOST_PARTS = 9000  # S3 allows 10,000
_PARTS_IN_FLIGHT = 4  # times _PART_BYTES of memory
_LONGEST_PAUSE_S = 60.0
_MOST_DOUBLINGS = 64
_memory_stores: dict[str, Any] = {}


class StoredObject(NamedTuple):
    """An object: its key below the prefix, its size, when it was written, its version if it has one.

    `e_tag` changes with the content; None where the store has none.
    """

    key: str
    size_bytes: int
    modified_at: datetime
    version: str | None = None
    e_tag: str | None = None

    def is_same_as(self, other: StoredObject) -> bool:
        """Return whether two answers are about the same content, as far as the store says."""
        if self.size_bytes != other.size_bytes:
            return False
        if self.e_tag is None or other.e_tag is None:
            return self.modified_at == other.modified_at
        return self.e_tag == other.e_tag


class FetchedRange(NamedTuple):
    """The bytes of a range, and the object as it was when they were read."""

    stored: StoredObject
    data: memoryview


class Objects(Protocol):
    """The requests to the objects below one prefix."""

    @property
    def url(self) -> str:
        """The address of the prefix, without a slash at its end."""
        ...

    def put(self, key: str, pieces: Iterable[bytes], size_bytes: int) -> None:
        """Write an object from its pieces, replacing any other; it appears whole or not at all."""
        ...

    def create(self, key: str, data: bytes) -> None:
        """Write a small object in one request; raise FileExistsError if the key is taken."""
        ...

    def get(self, key: str) -> bytes:
        """Return the bytes of a small object; raise CorruptCheckpoint for any other."""
        ...

    def read(self, key: str, offset: int, length: int) -> bytes:
        """Return a range of the bytes of an object."""
        ...

    def fetch(self, key: str, offset: int, length: int) -> FetchedRange:
        """Return a range of the bytes of an object, cut at its end, and the object, in one request.

        A range that begins at the end or after it is an error.
        """
        ...

    def find(self, key: str) -> StoredObject | None:
        """Return size and time of an object, or None where there is none."""
        ...

    def list(self, folder: str = "") -> list[StoredObject]:
        """Return the objects in a folder and below it; for `""` only those in no folder."""
        ...

    def delete(self, keys: Sequence[str]) -> None:
        """Remove objects; those that are gone are no error."""
        ...


def retry_pause_s(failures: int, *, first_s: float) -> float:
    """Return the pause after so many failures in a row, in seconds: it doubles up to a minute.

    >>> [retry_pause_s(failures, first_s=1.0) for failures in (1, 2, 3, 9999)]
    [1.0, 2.0, 4.0, 60.0]
    """
    # A store may be away for days, and 2 ** 1024 is too large for a float.
    doublings = min(failures - 1, _MOST_DOUBLINGS)
    return min(first_s * 2.0**doublings, _LONGEST_PAUSE_S)


def checked_url(url: object) -> str:
    """Return an address without the slash at its end.

    Raises:
        TypeError, ValueError: It is no address of an object store.
    """
    if not isinstance(url, str):
        raise TypeError(f"the address of an object store is a string, but got {url!r}")
    found = _ADDRESS.fullmatch(url)
    wanted = ", ".join(f"{scheme}://" for scheme in SCHEMES)
    if found is None or found["scheme"] not in SCHEMES:
        raise ValueError(
            f"{without_secrets(url)!r} is no address of an object store; write {wanted} and the place, such as "
            "s3://bucket/run, without ? and #; an endpoint of your own is named by AWS_ENDPOINT_URL"
        )
    if "@" in found["host"] or ":" in found["host"]:
        raise ValueError(
            "the address has a user, a password or a port (not shown): an endpoint of your own is named by "
            "AWS_ENDPOINT_URL, and credentials come from the environment, such as "
            "AWS_ACCESS_KEY_ID, or from the machine's role"
        )
    if not found["host"] and found["scheme"] not in ("file", "memory"):
        raise ValueError(f"{url!r} names no bucket; write {found['scheme']}://bucket/run")
    path = found["path"].strip("/")
    if path and any(part in ("", ".", "..") for part in path.split("/")):
        raise ValueError(f"{url!r} has an empty part, . or .. in its path")
    if _ESCAPED.search(url):  # the library would take it for another place than messages name
        raise ValueError(
            f"{url!r} has a control character or a %XX in it; write the characters themselves, as in s3://bucket/my run"
        )
    return url.rstrip("/") if found["path"] != "/" or found["host"] else url


def _check_settings(url: str) -> None:
    """Raise CkptmgrError for settings with which the library would stop in the middle of its code."""
    for name, value in os.environ.items():
        if not name.startswith(_SETTINGS):
            continue
        if _CONTROL.search(value):
            problem = "has a line end or another control character (its value is not shown)"
        elif "ENDPOINT" in name and value and not _ENDPOINT.match(value):
            problem = (
                f"is {without_secrets(value)!r}, and an endpoint begins with http:// or https://"
            )
        else:
            continue
        raise CkptmgrError(
            f"the environment variable {name} {problem}", path=url, hint=f"set {name} without it"
        )


def open_objects(url: str) -> Objects:
    """Return the objects below an address; nothing is requested yet.

    Raises:
        TypeError, ValueError: It is no address of an object store.
        CkptmgrError: obstore is not installed, or refuses its configuration.
    """
    url = checked_url(url)
    obstore = _library(url)
    stores = obstore.store
    found = _ADDRESS.fullmatch(url)
    scheme = "" if found is None else found["scheme"]
    if scheme == "memory":
        return ObstoreObjects(url, _memory_stores.setdefault(url, stores.MemoryStore()))
    if scheme == "file":
        return _LocalObjects(url, Path(url.removeprefix("file://")))
    _check_settings(url)
    try:
        return ObstoreObjects(url, stores.from_url(url, retry_config=_RETRIES))
    except (obstore.exceptions.BaseError, ValueError) as error:
        raise CkptmgrError(_first_line(error), path=url) from _safe(error)


def _library(url: str) -> Any:
    try:
        import obstore
    except ModuleNotFoundError:
        raise CkptmgrError(
            "object stores need obstore", path=url, hint="pip install 'ckptmgr[s3]'"
        ) from None
    return obstore


class ObstoreObjects:
    """The objects below one prefix, by obstore."""

    def __init__(self, url: str, store: Any) -> None:
        self.url = url
        self._store = store
        self._obstore = _library(url)
        self._most_ranged_bytes = _LONGEST_RANGE_BYTES

    def put(self, key: str, pieces: Iterable[bytes], size_bytes: int) -> None:
        """Write an object from its pieces, replacing any other; several parts are sent at a time."""
        part_bytes = max(_PART_BYTES, -(-size_bytes // _MOST_PARTS))
        with self._errors(key):
            self._obstore.put(
                self._store,
                key,
                iter(pieces),
                use_multipart=size_bytes > part_bytes,
                chunk_size=part_bytes,
                max_concurrency=_PARTS_IN_FLIGHT,
            )

    def create(self, key: str, data: bytes) -> None:
        """Write a small object in one request; raise FileExistsError if the key is taken."""
        with self._errors(key):
            self._obstore.put(self._store, key, data, mode="create", use_multipart=False)

    def get(self, key: str) -> bytes:
        """Return the bytes of a small object; raise CorruptCheckpoint for any other."""
        with self._errors(key):
            found = self._obstore.get(self._store, key)
            if found.meta["size"] <= MOST_GOTTEN_BYTES:
                return bytes(found.bytes())
        raise CorruptCheckpoint(
            f"has {found.meta['size']} bytes, a manifest at most {MOST_GOTTEN_BYTES}",
            path=f"{self.url}/{key}",
        )

    def read(self, key: str, offset: int, length: int) -> bytes:
        """Return a range of the bytes of an object."""
        return bytes(self.fetch(key, offset, length).data) if length else b""

    def fetch(self, key: str, offset: int, length: int) -> FetchedRange:
        """Return a range of the bytes of an object, cut at its end, and the object.

        A server or a proxy may give less than was asked for, which is no damage: the rest is asked
        for again. Where the object is another one meanwhile, that one is returned.
        """
        found = self._fetch(key, offset, length)
        stop = min(offset + length, found.stored.size_bytes)
        if found.data.nbytes >= stop - offset:
            return found
        pieces = [found.data]
        at = offset + found.data.nbytes
        while at < stop:
            more = self._fetch(key, at, stop - at)
            if not more.stored.is_same_as(found.stored):
                return more
            if not more.data.nbytes:
                raise ConnectionError(
                    errno.ECONNABORTED,
                    f"the answer has no byte of {stop - at} from {at} on",
                    f"{self.url}/{key}",
                )
            pieces.append(more.data)
            at += more.data.nbytes
        return FetchedRange(found.stored, memoryview(b"".join(pieces)))

    def _fetch(self, key: str, offset: int, length: int) -> FetchedRange:
        length = min(length, self._most_ranged_bytes)
        with self._errors(key):
            try:
                found = self._obstore.get(
                    self._store, key, options={"range": (offset, offset + length)}
                )
                return FetchedRange(self._stored(found.meta), memoryview(found.bytes())[:length])
            except self._obstore.exceptions.BaseError as error:
                given = _SHORTER.search(str(error))
                if given is None or not 0 < int(given[1]) - offset < length:
                    raise
                self._most_ranged_bytes = int(given[1]) - offset
        return self._fetch(key, offset, length)

    def find(self, key: str) -> StoredObject | None:
        """Return size and time of an object, or None where there is none."""
        try:
            with self._errors(key):
                return self._stored(self._obstore.head(self._store, key))
        except FileNotFoundError:
            return None

    def list(self, folder: str = "") -> list[StoredObject]:
        """Return the objects in a folder and below it; for `""` only those in no folder."""
        with self._errors(folder):
            if not folder:
                found = self._obstore.list_with_delimiter(self._store)["objects"]
                return [self._stored(one) for one in found]
            chunks = self._obstore.list(self._store, prefix=folder)
            return [self._stored(one) for chunk in chunks for one in chunk]

    def delete(self, keys: Sequence[str]) -> None:
        """Remove objects; those that are gone are no error."""
        if not keys:
            return
        try:
            with self._errors(keys[0]):
                self._obstore.delete(self._store, list(keys))
        except FileNotFoundError:
            if len(keys) > 1:  # a local folder stops at the first that is gone
                for key in keys:
                    self.delete([key])

    @staticmethod
    def _stored(meta: Any) -> StoredObject:
        return StoredObject(
            meta["path"],
            meta["size"],
            meta["last_modified"],
            meta.get("version"),
            meta.get("e_tag"),
        )

    @contextmanager
    def _errors(self, key: str) -> Iterator[None]:
        errors = self._obstore.exceptions
        place = f"{self.url}/{key}"
        if _NO_KEY.search(key):
            raise UnsupportedCheckpoint(
                "no object can have a name with control characters, or one that is not UTF-8",
                path=place,
                hint="save with another prefix",
            )
        try:
            yield
        except (errors.NotFoundError, FileNotFoundError) as error:
            raise FileNotFoundError(errno.ENOENT, "no such object or bucket", place) from _safe(
                error
            )
        except (errors.AlreadyExistsError, errors.PreconditionError, FileExistsError) as error:
            raise FileExistsError(
                errno.EEXIST, "there is such an object already", place
            ) from _safe(error)
        except (errors.PermissionDeniedError, errors.UnauthenticatedError) as error:
            raise PermissionError(errno.EACCES, _first_line(error), place) from _safe(error)
        except errors.InvalidPathError as error:
            what = f"{_first_line(error)}; remove or rename that object with the tool of the store"
            raise ConnectionError(errno.ECONNABORTED, what, place) from _safe(error)
        except NotImplementedError as error:
            raise _not_implemented(error, place) from _safe(error)
        except errors.BaseError as error:
            if _ANSWER_501 in str(error):
                raise _not_implemented(error, place) from _safe(error)
            raise ConnectionError(errno.ECONNABORTED, _first_line(error), place) from _safe(error)
        except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
            if type(error).__module__ != "builtins":  # of those who give the pieces
                raise
            raise ConnectionError(errno.ECONNABORTED, _first_line(error), place) from _safe(error)
        except BaseException as error:
            if type(error).__name__ != "PanicException":
                raise
            # Of Rust code, such as by an endpoint that is no URL; no Exception, so it would end threads.
            raise ConnectionError(errno.ECONNABORTED, _first_line(error), place) from None


class _LocalObjects(ObstoreObjects):
    """The objects below a folder. The first write makes it; until then there are none."""

    def __init__(self, url: str, place: Path) -> None:
        self._place = place
        self._local: Any = None
        super().__init__(url, None)

    def put(self, key: str, pieces: Iterable[bytes], size_bytes: int) -> None:
        self._make(key)
        super().put(key, pieces, size_bytes)

    def create(self, key: str, data: bytes) -> None:
        self._make(key)
        super().create(key, data)

    def _make(self, key: str) -> None:
        if self._local is None:
            with self._errors(key):
                self._local = self._obstore.store.LocalStore(prefix=self._place, mkdir=True)

    @property
    def _store(self) -> Any:
        if self._local is None and self._place.is_dir():
            self._local = self._obstore.store.LocalStore(prefix=self._place)
        return self._obstore.store.MemoryStore() if self._local is None else self._local

    @_store.setter
    def _store(self, _: None) -> None:
        """Ignore the store that the base class sets."""


def _not_implemented(error: Exception, place: str) -> UnsupportedCheckpoint:
    """Return the error for a request that the store, or the library as it is set, does not know."""
    return UnsupportedCheckpoint(
        "the store, or the library with AWS_CONDITIONAL_PUT as it is set, does not do what is needed: "
        f"{_first_line(error)}",
        path=place,
        hint="a commit needs a PUT that fails if the key is taken (If-None-Match: *): unset AWS_CONDITIONAL_PUT if it is "
        "disabled, or take another store; ckptmgr storage probe URL tries what a store does",
    )


def _first_line(error: BaseException) -> str:
    """Return the first line of an error, without the password and the query of an endpoint.

    The server wrote a part of it: control characters are spelled out, and its length is limited.
    """
    text = str(error).strip().splitlines()
    if not text:
        return type(error).__name__
    return printable(_PASSWORD.sub("//...@", _QUERY.sub(r"\1", text[0])), MOST_CHARACTERS)


def _safe(error: Exception) -> Exception | None:
    """Return an error that a traceback may show; None for one with a password or a query.

    None also where the text of the server could steer a terminal or fill a log.
    """
    text = str(error)
    is_plain = len(text) <= _MOST_IN_TRACE and all(map(str.isprintable, text.splitlines()))
    return None if not is_plain or _PASSWORD.search(text) or _QUERY.search(text) else error
