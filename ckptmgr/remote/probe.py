# SPDX-License-Identifier: Apache-2.0
"""Find out the guarantees of an object store: try them in a prefix that is removed afterwards."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ckptmgr.core.errors import CkptmgrError
from ckptmgr.objects.requests import Objects

_RACERS = 8
_MULTIPART_BYTES = 17 << 20  # more than one part
_PIECE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResult:
    """The result of one check.

    Attributes:
        check: Its name.
        is_ok: Whether the store behaves as needed; None where either answer will do.
        detail: The observation.
    """

    check: str
    is_ok: bool | None
    detail: str


def probe(objects: Objects) -> list[ProbeResult]:
    """Return the findings; the objects are removed again, as far as the store allows.

    A request that fails is the finding of its check, but for the first one.

    Raises:
        OSError: The store cannot be reached, or does not let us write.
    """
    folder = f".ckptmgr-probe-{secrets.token_hex(8)}/"
    try:
        return [_reads_back(objects, folder), *(_tried(one, objects, folder) for one in _CHECKS)]
    finally:
        with contextlib.suppress(CkptmgrError, OSError):
            objects.delete([one.key for one in objects.list(folder)])


def _tried(check: str, objects: Objects, folder: str) -> ProbeResult:
    try:
        return _CHECKS[check](objects, folder)
    except (CkptmgrError, OSError) as error:
        message = error.message if isinstance(error, CkptmgrError) else error.strerror or str(error)
        return ProbeResult(check=check, is_ok=False, detail=message)


def _put(objects: Objects, key: str, data: bytes) -> None:
    objects.put(key, [data], len(data))


def _reads_back(objects: Objects, folder: str) -> ProbeResult:
    key = f"{folder}whole"
    _put(objects, key, b"first, and longer")
    _put(objects, key, b"0123456789")
    whole, part = objects.get(key), objects.read(key, 3, 4)
    is_ok = whole == b"0123456789" and part == b"3456"
    detail = (
        "the last write is read, whole and by ranges"
        if is_ok
        else f"read {whole[:40]!r}, {part[:40]!r}"
    )
    return ProbeResult(check="read after write", is_ok=is_ok, detail=detail)


def _creates_once(objects: Objects, folder: str) -> ProbeResult:
    key = f"{folder}created"

    def create(number: int) -> bool:
        try:
            objects.create(key, b"racer %d" % number)
        except FileExistsError:
            return False
        return True

    with ThreadPoolExecutor(_RACERS) as pool:
        won = [number for number, has_won in enumerate(pool.map(create, range(_RACERS))) if has_won]
    is_ok = len(won) == 1 and objects.get(key) == b"racer %d" % won[0] and not create(_RACERS)
    detail = (
        f"one of {_RACERS} writers won, the others were refused"
        if is_ok
        else f"{len(won)} of {_RACERS} writers were told that they created the same object: two runs that share an "
        "address can replace each other's manifests; give each an address of its own"
    )
    return ProbeResult(check="conditional put", is_ok=is_ok, detail=detail)


def _lists_what_was_written(objects: Objects, folder: str) -> ProbeResult:
    keys = [f"{folder}list/{number}" for number in range(3)]
    for key in keys:
        _put(objects, key, b"x")
    found = sorted(one.key for one in objects.list(f"{folder}list/"))
    is_ok = found == keys
    detail = "complete at once" if is_ok else f"{len(found)} of {len(keys)} objects are listed"
    return ProbeResult(check="list after write", is_ok=is_ok, detail=detail)


def _sends_parts(objects: Objects, folder: str) -> ProbeResult:
    key, piece = f"{folder}parts", bytes(range(256)) * (_PIECE_BYTES // 256)
    objects.put(key, (piece for _ in range(_MULTIPART_BYTES // _PIECE_BYTES)), _MULTIPART_BYTES)
    found = objects.find(key)
    is_ok = found is not None and found.size_bytes == _MULTIPART_BYTES
    is_ok = is_ok and objects.read(key, _MULTIPART_BYTES - 256, 256) == piece[:256]
    detail = "an upload in parts is whole" if is_ok else "an upload in parts is not what was sent"
    return ProbeResult(check="multipart upload", is_ok=is_ok, detail=detail)


class _StopUpload(Exception):
    """The end of an upload that is meant to fail."""


def _leaves_no_part_of_an_upload(objects: Objects, folder: str) -> ProbeResult:
    key = f"{folder}stopped"

    def pieces() -> Iterator[bytes]:
        yield bytes(_MULTIPART_BYTES)
        raise _StopUpload

    try:
        objects.put(key, pieces(), 2 * _MULTIPART_BYTES)
    except Exception as error:
        stopped: Exception | None = error
    else:
        stopped = None
    is_ok = stopped is not None and objects.find(key) is None
    detail = "no object of it appears" if is_ok else "an object of it appears"
    return ProbeResult(check="interrupted upload", is_ok=is_ok, detail=detail)


def _removes(objects: Objects, folder: str) -> ProbeResult:
    keys = [f"{folder}list/{number}" for number in range(3)]
    objects.delete(keys)
    objects.delete(keys[:1])  # a second removal is no error
    found = objects.list(f"{folder}list/")
    detail = "removed objects are gone at once" if not found else f"{len(found)} are still listed"
    return ProbeResult(check="list after delete", is_ok=not found, detail=detail)


def _keeps_versions(objects: Objects, folder: str) -> ProbeResult:
    if objects.url.startswith("gs:"):  # every object has a generation, in any bucket
        detail = "not known: see whether the bucket has object versioning or soft delete"
        return ProbeResult(check="versions", is_ok=None, detail=detail)
    found = objects.find(f"{folder}whole")
    has_versions = found is not None and found.version is not None
    detail = (
        "kept: what prune removes still takes space; expire old versions by a lifecycle rule"
        if has_versions
        else "none: what is removed is gone"
    )
    return ProbeResult(check="versions", is_ok=None, detail=detail)


_CHECKS: dict[str, Callable[[Objects, str], ProbeResult]] = {
    "conditional put": _creates_once,
    "list after write": _lists_what_was_written,
    "multipart upload": _sends_parts,
    "interrupted upload": _leaves_no_part_of_an_upload,
    "list after delete": _removes,
    "versions": _keeps_versions,
}
