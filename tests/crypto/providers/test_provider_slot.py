# SPDX-License-Identifier: Apache-2.0
"""Containers for a key service: one call for many files, nothing from a file decides whom to call, and all of it is bound."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Mapping

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA512
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from hypothesis import given
from hypothesis import strategies as st

from ckptmgr.crypto.container.rekey import rewrite_header
from ckptmgr.crypto.errors import CryptoError, DecryptionError, KeySourceError, TamperedError
from ckptmgr.crypto.keys.key import Key
from ckptmgr.crypto.providers.local import LocalProvider
from ckptmgr.crypto.providers.provider import ProviderRefusedError, ProviderUnavailableError
from ckptmgr.crypto.providers.run_key import KeyLimits, RunKey, RunKeyReader
from ckptmgr.crypto.slots import Slot, SlotType
from ckptmgr.crypto.slots.service import KeyServiceIdentity, KeyServiceRecipient
from tests.crypto.container.containers import ME, opened, seal, unseal

CONTEXT = {"run": "7f"}
DATA_KEY = Key(bytes(range(32)))
BOUND = bytes(range(64))
PREFIX_BYTES = 1 + 5 + 2 + 16 + 2 + 12 + 2 + 40


class Service:
    """A key service that counts its calls and can be switched off."""

    def __init__(self, *, name: str = "local", key_id: str | None = None) -> None:
        self._own = LocalProvider(Key(bytes(range(32))))
        self.name = name
        self.key_id = self._own.key_id if key_id is None else key_id
        self.calls = 0
        self.is_away = False

    def wrap(self, key: bytes, context: Mapping[str, str]) -> bytes:
        self._called()
        return self._own.wrap(key, context)

    def unwrap(self, blob: bytes, context: Mapping[str, str]) -> bytes:
        self._called()
        return self._own.unwrap(blob, context)

    def _called(self) -> None:
        self.calls += 1
        if self.is_away:
            raise ProviderUnavailableError("the service is away")


def recipient(service: Service, context: Mapping[str, str] = CONTEXT) -> KeyServiceRecipient:
    return KeyServiceRecipient(RunKey(service, context))


def identity(service: Service) -> KeyServiceIdentity:
    return KeyServiceIdentity(RunKeyReader(service))


def with_body(slot: Slot, body: bytes) -> Slot:
    return Slot(type=slot.type, key_id=slot.key_id, body=body)


def test_many_containers_of_a_run_cost_one_call_to_write_and_one_to_read() -> None:
    service = Service()
    to = recipient(service)
    files = [seal(bytes([number]) * 500, recipients=[to]) for number in range(5)]
    assert service.calls == 1
    me = identity(service)
    assert [unseal(file, me)[0] for file in files] == list(range(5))
    assert service.calls == 2


def test_containers_of_a_run_have_different_data_keys() -> None:
    service = Service()
    to = recipient(service)
    files = [opened(seal(b"x", recipients=[to]), identity(service)) for _ in range(2)]
    assert files[0].unlocked.data_key != files[1].unlocked.data_key


def test_slots_for_one_data_key_have_different_salts() -> None:
    to = recipient(Service())
    slots = [to.wrap(DATA_KEY, bound=BOUND).body[PREFIX_BYTES:] for _ in range(2)]
    assert slots[0] != slots[1]


def test_limit_on_files_is_kept_by_containers() -> None:
    service = Service()
    to = KeyServiceRecipient(RunKey(service, CONTEXT, limits=KeyLimits(max_files=2)))
    files = [seal(b"x", recipients=[to]) for _ in range(4)]
    assert service.calls == 2
    me = identity(service)
    assert [unseal(file, me) for file in files] == [b"x"] * 4
    assert service.calls == 4


def test_slot_is_laid_out_as_documented() -> None:
    service = Service()
    slot = recipient(service).wrap(DATA_KEY, bound=BOUND)
    fields = (b"local", service.key_id.encode(), b'{"run":"7f"}')
    start = b"".join(
        struct.pack(form, len(field)) + field
        for form, field in zip(("<B", "<H", "<H"), fields, strict=True)
    )
    assert slot.body.startswith(start + struct.pack("<H", 40))
    blob = slot.body[len(start) + 2 :][:40]
    prefix, salt = slot.body[:PREFIX_BYTES], slot.body[PREFIX_BYTES:][:32]
    run_key = Key(service.unwrap(blob, CONTEXT))
    assert slot.key_id.hex() == run_key.key_id
    head = struct.pack("<BBH", 7, 0, len(slot.body)) + slot.key_id
    bound = BOUND + head + prefix
    kdf = HKDF(algorithm=SHA512(), length=32, salt=salt, info=b"ckptmgr/v1/wrap/raw" + bound)
    inner_head = struct.pack("<BBH", 1, 0, 80) + slot.key_id
    wrapped = slot.body[PREFIX_BYTES + 32 :]
    opened_key = AESGCM(kdf.derive(run_key.raw)).decrypt(bytes(12), wrapped, bound + inner_head)
    assert opened_key == DATA_KEY.raw


def test_container_opens_with_a_key_and_with_a_service() -> None:
    service = Service()
    file = seal(b"weights", recipients=[recipient(service), ME])
    assert unseal(file, ME) == unseal(file, identity(service)) == b"weights"


def test_container_with_a_key_opens_while_the_service_is_away() -> None:
    service = Service()
    file = seal(b"weights", recipients=[recipient(service), ME])
    service.is_away = True
    with pytest.raises(ProviderUnavailableError):
        unseal(file, identity(service))
    assert unseal(file, identity(service), ME) == b"weights"


def test_service_is_added_and_taken_away_without_touching_the_payload() -> None:
    service = Service()
    file = bytearray(seal(b"weights", recipients=[ME]))
    for write in rewrite_header(
        opened(bytes(file), ME).unlocked,
        add=[recipient(service)],
        remove=lambda slot: slot.type == SlotType.RAW,
    ):
        file[write.offset : write.offset + len(write.data)] = write.data
    assert unseal(bytes(file), identity(service)) == b"weights"
    with pytest.raises(DecryptionError, match="another key") as caught:
        unseal(bytes(file), ME)
    assert "key service" in str(caught.value.hint)


def test_file_of_another_kind_of_service_calls_nobody() -> None:
    theirs, ours = Service(name="exec"), Service()
    file = seal(b"weights", recipients=[recipient(theirs)])
    with pytest.raises(DecryptionError, match="another key"):
        unseal(file, identity(ours))
    assert ours.calls == 0


def test_slot_of_another_type_is_not_tried() -> None:
    assert identity(Service()).unwrap(ME.wrap(DATA_KEY, bound=BOUND), bound=BOUND) is None


def test_slot_in_another_file_is_damaged() -> None:
    service = Service()
    slot = recipient(service).wrap(DATA_KEY, bound=BOUND)
    with pytest.raises(TamperedError, match="the slot is damaged"):
        identity(service).unwrap(slot, bound=bytes(64))


def test_slot_with_any_flipped_byte_never_opens() -> None:
    service = Service()
    slot = recipient(service).wrap(DATA_KEY, bound=BOUND)
    me = identity(service)
    for offset in range(len(slot.body)):
        body = bytearray(slot.body)
        body[offset] ^= 1
        try:
            assert me.unwrap(with_body(slot, bytes(body)), bound=BOUND) is None
            assert 1 <= offset < 6, "only the name of the service makes it somebody else's"
        except CryptoError:
            pass


def test_slot_that_is_cut_anywhere_is_damaged() -> None:
    service = Service()
    slot = recipient(service).wrap(DATA_KEY, bound=BOUND)
    for size in range(len(slot.body)):
        with pytest.raises(TamperedError, match="do not add up"):
            identity(service).unwrap(with_body(slot, slot.body[:size]), bound=BOUND)
    with pytest.raises(TamperedError):
        identity(service).unwrap(with_body(slot, slot.body + b"\0"), bound=BOUND)


def test_slot_with_the_id_of_another_run_key_is_damaged() -> None:
    service = Service()
    slot = recipient(service).wrap(DATA_KEY, bound=BOUND)
    other = Slot(type=slot.type, key_id=bytes(8), body=slot.body)
    with pytest.raises(TamperedError, match="the slot is damaged"):
        identity(service).unwrap(other, bound=BOUND)


def test_slot_with_the_wrapped_key_of_another_run_is_refused() -> None:
    service = Service()
    slot = recipient(service).wrap(DATA_KEY, bound=BOUND)
    other = recipient(service, {"run": "80"}).wrap(DATA_KEY, bound=BOUND)
    start = PREFIX_BYTES - 40
    body = slot.body[:start] + other.body[start:PREFIX_BYTES] + slot.body[PREFIX_BYTES:]
    with pytest.raises(ProviderRefusedError):
        identity(service).unwrap(with_body(slot, body), bound=BOUND)


@pytest.mark.parametrize(
    "context",
    [
        b"",
        b"{",
        b"[]",
        b'{"run": "7f"}',
        b'{"run":7}',
        b'{"run":"7f","run":"7f"}',
        b'{"b":"","a":""}',
        b"[" * 60_000,
        b'{"run":"\xff"}',
    ],
    ids=lambda context: repr(context[:16]),
)
def test_slot_with_a_context_that_is_none_is_damaged(context: bytes) -> None:
    service = Service()
    slot = recipient(service).wrap(DATA_KEY, bound=BOUND)
    start = slot.body.index(b'{"run"') - 2
    end = start + 2 + 12
    body = slot.body[:start] + struct.pack("<H", len(context)) + context + slot.body[end:]
    with pytest.raises(TamperedError, match="context"):
        identity(service).unwrap(with_body(slot, body), bound=BOUND)
    assert service.calls == 1


@given(body=st.binary(max_size=300), start=st.sampled_from((b"", b"\x05local", b"\x04exec")))
def test_slot_of_any_bytes_never_opens(body: bytes, start: bytes) -> None:
    slot = Slot(type=SlotType.KEY_SERVICE, key_id=bytes(8), body=start + body)
    with contextlib.suppress(CryptoError):
        assert identity(Service()).unwrap(slot, bound=BOUND) is None


def test_service_whose_name_is_too_long_makes_no_slot() -> None:
    with pytest.raises(KeySourceError, match="too long"):
        recipient(Service(name="n" * 256)).wrap(DATA_KEY, bound=BOUND)
    with pytest.raises(KeySourceError, match="too long"):
        recipient(Service(key_id="k" * 65536)).wrap(DATA_KEY, bound=BOUND)
