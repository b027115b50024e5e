# SPDX-License-Identifier: Apache-2.0
"""A run calls its key service once, and the service being away stops nothing that it need not stop."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import pytest

from ckptmgr.crypto.errors import KeySourceError
from ckptmgr.crypto.keys.key import Key
from ckptmgr.crypto.providers.local import LocalProvider
from ckptmgr.crypto.providers.provider import (
    GeneratedKey,
    ProviderAnswerError,
    ProviderUnavailableError,
)
from ckptmgr.crypto.providers.run_key import KeyLimits, RunKey, RunKeyReader

CONTEXT = {"run": "7f"}
OWN = LocalProvider(Key(bytes(range(32))))


class CountingService:
    """A key service that counts its calls and can be switched off."""

    name = "counting"
    key_id = "the-key"

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.is_away = False

    def wrap(self, key: bytes, context: Mapping[str, str]) -> bytes:
        self._called("wrap")
        return OWN.wrap(key, context)

    def unwrap(self, blob: bytes, context: Mapping[str, str]) -> bytes:
        self._called("unwrap")
        return OWN.unwrap(blob, context)

    def _called(self, action: str) -> None:
        self.calls.append(action)
        if self.is_away:
            raise ProviderUnavailableError("the service is away")


class GeneratingService(CountingService):
    """A key service that makes keys itself."""

    def __init__(self, *, size_bytes: int = 32) -> None:
        super().__init__()
        self.size_bytes = size_bytes

    def generate(self, context: Mapping[str, str]) -> GeneratedKey:
        self._called("generate")
        return GeneratedKey(key=bytes(self.size_bytes), blob=OWN.wrap(bytes(32), context))


class Clock:
    """A clock that stands still until it is set."""

    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def test_run_of_many_saves_calls_the_service_once() -> None:
    service = CountingService()
    run_key = RunKey(service, CONTEXT)
    assert service.calls == []
    wrapped = [run_key.take() for _ in range(100)]
    assert service.calls == ["wrap"]
    assert all(each is wrapped[0] for each in wrapped)


def test_run_of_many_threads_calls_the_service_once() -> None:
    service = CountingService()
    run_key = RunKey(service, CONTEXT)
    with ThreadPoolExecutor(8) as pool:
        wrapped = list(pool.map(lambda _: run_key.take(), range(64)))
    assert service.calls == ["wrap"]
    assert len({each.blob for each in wrapped}) == 1


def test_service_that_goes_away_after_the_first_save_is_not_missed() -> None:
    service = CountingService()
    run_key = RunKey(service, CONTEXT)
    first = run_key.take()
    service.is_away = True
    assert run_key.take() == first


def test_service_that_is_away_at_first_is_asked_again() -> None:
    service = CountingService()
    service.is_away = True
    run_key = RunKey(service, CONTEXT)
    with pytest.raises(ProviderUnavailableError):
        run_key.take()
    service.is_away = False
    assert run_key.take().blob
    assert service.calls == ["wrap", "wrap"]


def test_wrapped_key_tells_all_that_opens_it() -> None:
    wrapped = RunKey(CountingService(), CONTEXT).take()
    assert (wrapped.provider, wrapped.provider_key_id) == ("counting", "the-key")
    assert Key(OWN.unwrap(wrapped.blob, wrapped.context)) == wrapped.key


def test_wrapped_key_shown_hides_the_key() -> None:
    wrapped = RunKey(CountingService(), CONTEXT, random=lambda size: b"\xc0" * size).take()
    assert "c0c0" not in repr(wrapped)
    assert r"\xc0" not in repr(wrapped)
    assert "key" not in repr(GeneratedKey(key=bytes(32), blob=b"")).replace("GeneratedKey", "")


def test_runs_get_different_keys() -> None:
    service = CountingService()
    assert RunKey(service, CONTEXT).take().key != RunKey(service, CONTEXT).take().key


def test_context_changed_by_its_owner_does_not_change_the_run() -> None:
    context = {"run": "7f"}
    run_key = RunKey(CountingService(), context)
    context["run"] = "80"
    assert run_key.take().context == CONTEXT


def test_context_that_is_no_context_is_refused_before_training() -> None:
    with pytest.raises(KeySourceError):
        RunKey(CountingService(), {"run": "7" * 9000})


def test_limit_on_files_brings_a_new_key() -> None:
    service = CountingService()
    run_key = RunKey(service, CONTEXT, limits=KeyLimits(max_files=2))
    first, second, third = (run_key.take() for _ in range(3))
    assert first is second
    assert third.key != second.key
    assert service.calls == ["wrap", "wrap"]


def test_limit_on_age_brings_a_new_key_when_it_is_reached() -> None:
    service, clock = CountingService(), Clock()
    run_key = RunKey(service, CONTEXT, limits=KeyLimits(max_age_s=60), clock=clock)
    first = run_key.take()
    clock.now_s += 59.9
    assert run_key.take() is first
    clock.now_s += 0.1
    assert run_key.take().key != first.key


def test_limit_that_is_reached_while_the_service_is_away_is_kept() -> None:
    service = CountingService()
    run_key = RunKey(service, CONTEXT, limits=KeyLimits(max_files=1))
    run_key.take()
    service.is_away = True
    with pytest.raises(ProviderUnavailableError):
        run_key.take()


@pytest.mark.parametrize(("max_age_s", "max_files"), [(0, 1), (-1, 1), (float("nan"), 1), (1, 0)])
def test_limit_that_allows_nothing_is_refused(max_age_s: float, max_files: int) -> None:
    with pytest.raises(KeySourceError):
        KeyLimits(max_age_s=max_age_s, max_files=max_files)


def test_service_that_makes_keys_makes_the_key_of_the_run() -> None:
    service = GeneratingService()
    wrapped = RunKey(service, CONTEXT).take()
    assert service.calls == ["generate"]
    assert wrapped.key == Key(bytes(32))
    assert RunKeyReader(service).unwrap(wrapped.blob, CONTEXT) == wrapped.key


@pytest.mark.parametrize("size", [16, 24])
def test_service_that_makes_keys_wraps_one_of_another_length(size: int) -> None:
    service = GeneratingService()
    wrapped = RunKey(service, CONTEXT, size_bytes=size).take()
    assert service.calls == ["wrap"]
    assert len(RunKeyReader(service).unwrap(wrapped.blob, CONTEXT).raw) == size


def test_run_key_of_a_length_that_keys_do_not_have_is_refused() -> None:
    with pytest.raises(KeySourceError, match="not of 20"):
        RunKey(CountingService(), CONTEXT, size_bytes=20).take()


def test_service_that_makes_something_else_is_refused() -> None:
    with pytest.raises(ProviderAnswerError, match="counting unwrapped 8 bytes"):
        RunKey(GeneratingService(size_bytes=8), CONTEXT).take()


def test_reader_of_many_files_calls_the_service_once_for_each_key() -> None:
    service = CountingService()
    keys = [RunKey(service, CONTEXT).take() for _ in range(2)]
    service.calls.clear()
    reader = RunKeyReader(service)
    for _ in range(10):
        assert [reader.unwrap(key.blob, CONTEXT) for key in keys] == [key.key for key in keys]
    assert service.calls == ["unwrap", "unwrap"]


def test_reader_with_another_context_asks_again_and_is_refused() -> None:
    wrapped = RunKey(OWN, CONTEXT).take()
    reader = RunKeyReader(OWN)
    reader.unwrap(wrapped.blob, CONTEXT)
    with pytest.raises(KeySourceError):
        reader.unwrap(wrapped.blob, {"run": "80"})


def test_reader_remembers_no_failure() -> None:
    service = CountingService()
    wrapped = RunKey(service, CONTEXT).take()
    service.is_away = True
    reader = RunKeyReader(service)
    with pytest.raises(ProviderUnavailableError):
        reader.unwrap(wrapped.blob, CONTEXT)
    service.is_away = False
    assert reader.unwrap(wrapped.blob, CONTEXT) == wrapped.key


def test_reader_of_very_many_keys_forgets_the_oldest() -> None:
    service = CountingService()
    blobs = [OWN.wrap(bytes(31) + bytes([number]), CONTEXT) for number in range(65)]
    reader = RunKeyReader(service)
    for blob in [*blobs, blobs[-1], blobs[0]]:
        reader.unwrap(blob, CONTEXT)
    assert len(service.calls) == 66
