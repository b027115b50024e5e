# SPDX-License-Identifier: Apache-2.0
"""`ckptmgr storage probe`: its verdict on stores that do all that is needed, and on those that do not."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from ckptmgr.remote.probe import probe
from tests.cli.running import run
from tests.cli.schemas import run_with_schema
from tests.support import api
from tests.support.counted_objects import CountedObjects

pytest.importorskip("obstore")

from ckptmgr.objects.requests import StoredObject
from tests.remote.buckets import new_objects, new_url

_CHECKS = [
    "read after write",
    "conditional put",
    "list after write",
    "multipart upload",
    "interrupted upload",
    "list after delete",
    "versions",
]


class _WithoutConditions(CountedObjects):
    def create(self, key: str, data: bytes) -> None:
        self.put(key, [data], len(data))


class _OldListing(CountedObjects):
    def list(self, folder: str = "") -> list[StoredObject]:
        return super().list(folder)[1:]


class _ForgetfulRemoval(CountedObjects):
    def delete(self, keys: Sequence[str]) -> None:
        pass


class _StaleReads(CountedObjects):
    def get(self, key: str) -> bytes:
        return b"first, and longer"


class _Truncating(CountedObjects):
    def put(self, key: str, pieces: Iterable[bytes], size_bytes: int) -> None:
        data = b"".join(pieces)
        super().put(key, [data[: 1 << 20]], len(data))


class _TakingHalves(CountedObjects):
    def put(self, key: str, pieces: Iterable[bytes], size_bytes: int) -> None:
        data = b""
        try:
            for piece in pieces:
                data += piece
        finally:
            super().put(key, [data], len(data))


class _Versioned(CountedObjects):
    def find(self, key: str) -> StoredObject | None:
        found = super().find(key)
        return None if found is None else found._replace(version="1")


def test_store_that_does_everything_passes_and_nothing_remains(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/bucket"
    result = run("storage", "probe", url)
    assert result.exit_code == 0, result.output
    assert [line.partition("  ")[0] for line in result.stdout.splitlines()[1:]] == _CHECKS
    assert not [one for one in (tmp_path / "bucket").rglob("*") if one.is_file()]


def test_findings_as_json_and_quiet() -> None:
    document = run_with_schema("storage", "probe", new_url())
    assert [one["check"] for one in document["items"]] == _CHECKS
    assert document["summary"] == {"is_ok": True, "failed": []}
    assert run("storage", "probe", new_url(), "-q").stdout == ""


@pytest.mark.parametrize(
    ("store", "failed", "detail"),
    [
        (_WithoutConditions, "conditional put", "8 of 8 writers were told"),
        (_OldListing, "list after write", "2 of 3 objects are listed"),
        (_ForgetfulRemoval, "list after delete", "3 are still listed"),
        (_StaleReads, "read after write", "read b'first"),
        (_Truncating, "multipart upload", "not what was sent"),
        (_TakingHalves, "interrupted upload", "an object of it appears"),
    ],
)
def test_what_a_store_lacks_is_found(store: type[CountedObjects], failed: str, detail: str) -> None:
    findings = {one.check: one for one in probe(store(new_objects()))}
    assert findings[failed].is_ok is False
    assert detail in findings[failed].detail


def test_versions_are_told_and_are_no_fault() -> None:
    *_, versions = probe(_Versioned(new_objects()))
    assert versions.is_ok is None
    assert "lifecycle rule" in versions.detail


def test_generation_that_every_object_of_google_has_is_no_sign_of_versions() -> None:
    objects = _Versioned(new_objects())
    objects.url = "gs://bucket/run"
    *_, versions = probe(objects)
    assert versions.is_ok is None
    assert versions.detail.startswith("not known: see whether the bucket has object versioning")


def test_missing_guarantee_is_the_answer_no(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "ckptmgr.objects.requests.open_objects",
        lambda url: _WithoutConditions(api.open_objects(url)),
    )
    assert run("storage", "probe", new_url()).exit_code == 1
    result = run("storage", "probe", new_url(), "-q")
    assert result.stdout == "conditional put\n"


def test_path_is_no_store() -> None:
    result = run("storage", "probe", "runs")
    assert result.exit_code == 2
    assert "no address of an object store" in result.stderr
