# SPDX-License-Identifier: Apache-2.0
"""Keys, passphrases, public and private keys by source: opening, encrypting, refusals."""

from __future__ import annotations

import struct
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey, generate_private_key
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.argon2 import Argon2id as Argon2Kdf
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

from ckptmgr.crypto.errors import DecryptionError, KeySourceError, UnsupportedSuiteError
from ckptmgr.crypto.keys.key import Key
from ckptmgr.crypto.keys.material import load_keys, load_material
from ckptmgr.crypto.keys.pem import KEY_TYPES, generate_pair, parse_pem
from ckptmgr.crypto.keys.ring import (
    KeyKind,
    KeyMaterial,
    KeyRing,
    block_key,
    keys_from_document,
    keys_to_document,
    ring_of,
    unwrap_slot,
)
from ckptmgr.crypto.keys.run_passphrase import RunPassphrase
from ckptmgr.crypto.providers.registry import open_provider
from ckptmgr.crypto.providers.run_key import RunKey
from ckptmgr.crypto.providers.wrapped_file import pack_key_file
from ckptmgr.crypto.slots import NO_KEY_ID, Slot, SlotType
from ckptmgr.crypto.slots.secret import Argon2id, Passphrase, PassphraseCost, Scrypt
from tests.crypto.container.containers import ME, OTHER, seal, unseal

DATA_KEY = Key(bytes(range(32)))
BOUND = bytes(64)
CHEAP = Argon2id(memory_kib=8, passes=1, lanes=1)


class CountedPhrase(RunPassphrase):
    """A passphrase that counts how often it is stretched."""

    def __init__(self) -> None:
        self.paid = 0
        super().__init__(_Counting(self), cost=CHEAP)


class _Counting(Passphrase):
    counter: CountedPhrase

    def __init__(self, counter: CountedPhrase) -> None:
        super().__init__("correct horse")
        object.__setattr__(self, "counter", counter)

    def stretch(self, cost: PassphraseCost, salt: bytes) -> bytes:
        self.counter.paid += 1
        return super().stretch(cost, salt)


def put(path: Path, content: bytes, *, mode: int = 0o600) -> str:
    path.write_bytes(content)
    path.chmod(mode)
    return f"file:{path}"


def phrase(text: str = "correct horse") -> RunPassphrase:
    return RunPassphrase(Passphrase(text), cost=CHEAP)


@pytest.fixture(scope="module")
def rsa() -> RSAPrivateKey:
    return generate_private_key(65537, 3072)


def test_passphrase_of_a_run_is_stretched_once_for_many_files() -> None:
    me, reader = CountedPhrase(), CountedPhrase()
    slots = [me.wrap(DATA_KEY, bound=BOUND) for _ in range(5)]
    for one in (me, reader):
        assert [one.unwrap(slot, bound=BOUND) for slot in slots] == [DATA_KEY.raw] * 5
        assert one.paid == 1


def test_passphrase_slots_of_a_run_never_share_a_wrapping_key() -> None:
    me = phrase()
    one, two = me.wrap(DATA_KEY, bound=BOUND), me.wrap(DATA_KEY, bound=BOUND)
    assert one.body[:40] == two.body[:40]
    assert one.body[40:72] != two.body[40:72]
    assert one.body[72:] != two.body[72:]
    assert (one.type, one.key_id, len(one.body)) == (SlotType.RUN_PASSPHRASE, NO_KEY_ID, 120)


def test_passphrase_slot_of_a_run_is_what_the_documentation_says() -> None:
    slot = phrase().wrap(DATA_KEY, bound=BOUND)
    head = struct.pack("<BBH8x", 8, 0, len(slot.body))
    stretched = Argon2Kdf(
        salt=slot.body[8:40], length=32, iterations=1, lanes=1, memory_cost=8
    ).derive(b"correct horse")
    key_id = HKDF(hashes.SHA256(), 8, None, b"ckptmgr/v1/key-id").derive(stretched)
    bound = BOUND + head + slot.body[:40]
    info = b"ckptmgr/v1/wrap/raw" + bound
    wrapping_key = HKDF(hashes.SHA512(), 32, slot.body[40:72], info).derive(stretched)
    raw_head = struct.pack("<BBH8s", 1, 0, 80, key_id)
    opened = AESGCM(wrapping_key).decrypt(bytes(12), slot.body[72:], bound + raw_head)
    assert opened == DATA_KEY.raw


@pytest.mark.parametrize("byte", range(8, 120, 7))
def test_passphrase_slot_of_a_run_with_a_flipped_bit_does_not_open(byte: int) -> None:
    slot = phrase().wrap(DATA_KEY, bound=BOUND)
    body = bytearray(slot.body)
    body[byte] ^= 1
    with pytest.raises(DecryptionError, match="wrong, or the key slot is damaged"):
        phrase().unwrap(Slot(type=slot.type, key_id=slot.key_id, body=bytes(body)), bound=BOUND)


def test_passphrase_slot_of_a_run_opens_for_nobody_else_and_nowhere_else() -> None:
    slot = phrase().wrap(DATA_KEY, bound=BOUND)
    with pytest.raises(DecryptionError):
        phrase("battery").unwrap(slot, bound=BOUND)
    with pytest.raises(DecryptionError):
        phrase().unwrap(slot, bound=b"\1" * 64)
    assert phrase().unwrap(ME.wrap(DATA_KEY, bound=BOUND), bound=BOUND) is None


@pytest.mark.parametrize("cost", [Scrypt(log2_n=14), CHEAP])
def test_passphrase_of_a_run_opens_what_a_plain_one_wrapped(cost: Scrypt | Argon2id) -> None:
    file = seal(b"weights", recipients=[Passphrase("correct horse", cost)])
    assert unseal(file, phrase()) == b"weights"


def test_passphrase_slot_of_a_run_outside_the_limits_is_refused() -> None:
    body = Argon2id().pack()[:4] + bytes([17, 4, 0, 0]) + bytes(112)
    slot = Slot(type=SlotType.RUN_PASSPHRASE, key_id=NO_KEY_ID, body=body)
    with pytest.raises(UnsupportedSuiteError, match="argon2id"):
        phrase().unwrap(slot, bound=BOUND)


def test_passphrase_forgets_the_oldest_of_many_salts() -> None:
    reader = phrase()
    slots = [phrase().wrap(DATA_KEY, bound=BOUND) for _ in range(18)]
    assert {reader.unwrap(slot, bound=BOUND) for slot in slots} == {DATA_KEY.raw}
    assert reader.unwrap(slots[0], bound=BOUND) == DATA_KEY.raw


@pytest.mark.hpke
@pytest.mark.parametrize("key_type", KEY_TYPES)
def test_public_key_encrypts_and_private_key_opens(key_type: str, tmp_path: Path) -> None:
    private, public = generate_pair(key_type)
    writer = load_keys([put(tmp_path / "key.pub", public, mode=0o644)])
    reader = load_keys([put(tmp_path / "key", private)])
    assert isinstance(writer, KeyRing)
    assert isinstance(reader, KeyRing)
    assert (writer.can_open, reader.can_open) == (False, True)
    assert writer.labels == reader.labels
    assert writer.key_id == reader.key_id
    file = seal(b"weights", recipients=writer.recipients)
    assert unseal(file, *reader.identities) == b"weights"


def test_rsa_key_from_a_file_encrypts_and_opens(tmp_path: Path, rsa: RSAPrivateKey) -> None:
    pem = rsa.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    ring = ring_of(load_keys([put(tmp_path / "rsa.pem", pem)]))
    public = rsa.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    assert parse_pem(public)[1] is None
    assert unseal(seal(b"weights", recipients=ring.recipients), *ring.identities) == b"weights"


@pytest.mark.hpke
def test_private_key_made_by_openssl_is_read(tmp_path: Path) -> None:
    path = tmp_path / "openssl.pem"
    command = ["openssl", "genpkey", "-algorithm", "x25519", "-out", str(path)]
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        pytest.skip("openssl with X25519 is not here")
    path.chmod(0o600)
    assert ring_of(load_keys([f"file:{path}"])).can_open


@pytest.mark.hpke
def test_single_key_is_loaded_as_a_key_and_several_as_a_ring(tmp_path: Path) -> None:
    source = put(tmp_path / "run.key", bytes(range(32)).hex().encode() + b"\n")
    assert load_keys([source]) == Key(bytes(range(32)))
    _, public = generate_pair("x25519")
    ring = load_keys([source], also_for=[put(tmp_path / "a.pub", public, mode=0o644)])
    assert isinstance(ring, KeyRing)
    assert (len(ring.recipients), len(ring.identities)) == (2, 1)
    assert ring.sole_key is None
    with pytest.raises(KeySourceError, match="one key and nothing else"):
        block_key(ring)
    assert load_keys([source, source]) == Key(bytes(range(32)))


@pytest.mark.hpke
def test_private_key_of_a_recipient_is_not_used_for_opening(tmp_path: Path) -> None:
    private, _ = generate_pair("x25519")
    ring = load_keys([], also_for=[put(tmp_path / "key", private)])
    assert isinstance(ring, KeyRing)
    assert not ring.can_open


def test_passphrase_source_gives_the_text_of_another_source(tmp_path: Path) -> None:
    source = put(tmp_path / "phrase", "caf\u00e9 9\n".encode())
    material = load_material(f"passphrase:{source}")
    assert material == KeyMaterial(KeyKind.PHRASE, "caf\u00e9 9".encode())
    assert "caf" not in repr(material)


def test_wrapped_key_is_unwrapped_by_its_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = f"local:cmd:echo {bytes(32).hex()}"
    monkeypatch.setenv("CKPTMGR_KEY_SERVICE", service)
    run_key = RunKey(open_provider(service), {"run": "7f"}).take()
    put(tmp_path / "run.wrapped", pack_key_file(run_key))
    assert load_material(f"wrapped:{tmp_path}/run.wrapped") == KeyMaterial.of_key(run_key.key)


def test_passphrase_prompt_asks_for_a_passphrase() -> None:
    questions = []

    def answer(question: str) -> str:
        questions.append(question)
        return "horse"

    assert load_material("passphrase:prompt:", prompt=answer).content == b"horse"
    assert questions == ["Passphrase: "]


@pytest.mark.parametrize(
    ("source", "what"),
    [("passphrase:prompt:", "Passphrase"), ("prompt:", "Key (hex or base64)")],
)
def test_new_secret_is_asked_for_twice_and_by_name(source: str, what: str) -> None:
    questions = []

    def answer(question: str) -> str:
        questions.append(question)
        return "00112233445566778899aabbccddeeff"

    load_material(source, asked_for="--add", is_new=True, prompt=answer)
    assert questions == [f"{what} for --add: ", f"{what} for --add, once more: "]


@pytest.mark.parametrize("role", ["own", "also_for"])
def test_new_passphrase_with_a_slip_is_refused_and_not_shown(role: str) -> None:
    answers = iter(["correct horse", "corect horse"])
    sources = {"own": (["passphrase:prompt:"], []), "also_for": ([], ["passphrase:prompt:"])}
    own, also_for = sources[role]
    with pytest.raises(KeySourceError, match="two answers differ") as caught:
        load_keys(own, also_for=also_for, is_new=True, prompt=lambda _: next(answers))
    assert "horse" not in f"{caught.value}{caught.value.hint}"


@pytest.mark.parametrize(
    "source", ["horse", "passphrase:horse", "passphrase:wrapped:x", "passphrase:", "pass:env:X"]
)
def test_source_that_is_none_is_refused_and_not_repeated(source: str) -> None:
    with pytest.raises(KeySourceError, match="not a key source") as caught:
        load_material(source)
    assert "horse" not in f"{caught.value} {caught.value.hint}"


@pytest.mark.hpke
@pytest.mark.parametrize(
    ("mode", "is_private", "accepted"),
    [(0o644, False, True), (0o664, False, False), (0o600, True, True), (0o644, True, False)],
)
def test_private_files_are_private_and_public_ones_unchangeable(
    mode: int, is_private: bool, accepted: bool, tmp_path: Path
) -> None:
    content = generate_pair("x25519")[0 if is_private else 1]
    source = put(tmp_path / "file", content, mode=mode)
    if accepted:
        load_material(source)
        return
    with pytest.raises(KeySourceError, match=r"can be (used|changed) by others"):
        load_material(source)


def _begin(kind: str) -> bytes:
    return f"-----BEGIN {kind} KEY-----\n".encode()


def _signing_key(public: bool) -> bytes:
    key = Ed25519PrivateKey.generate()
    if public:
        return key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


@pytest.mark.hpke
@pytest.mark.parametrize(
    "content",
    [
        lambda: _signing_key(public=True),
        lambda: _signing_key(public=False),
        lambda: _begin("PRIVATE") + b"AAAA\n" + _begin("PRIVATE").replace(b"BEGIN", b"END"),
        lambda: _begin("PUBLIC") + b"AAAA\n" + _begin("PUBLIC").replace(b"BEGIN", b"END"),
        lambda: _begin("PUBLIC"),
        lambda: _begin("PRIVATE"),
        lambda: generate_pair("x25519")[0] * 2,
        lambda: generate_pair("mlkem768-x25519")[0].split(b"-----END")[0],
    ],
)
def test_pem_of_another_kind_is_refused_without_showing_it(
    content: Callable[[], bytes], tmp_path: Path
) -> None:
    pem = content()
    with pytest.raises(KeySourceError) as caught:
        load_material(put(tmp_path / "file", pem))
    body = pem.split(b"\n")[1].decode()
    assert not body or body not in f"{caught.value} {caught.value.hint}"


def test_material_that_is_no_text_is_no_passphrase() -> None:
    with pytest.raises(KeySourceError, match="no text"):
        KeyMaterial(KeyKind.PHRASE, b"\xff").parties()


def test_ring_of_nobody_is_refused() -> None:
    with pytest.raises(KeySourceError, match="nobody"):
        KeyRing([])


def test_ring_without_a_key_is_none_for_files_that_take_one() -> None:
    ring = KeyRing([KeyMaterial(KeyKind.PHRASE, b"horse")])
    with pytest.raises(KeySourceError, match="takes a key"):
        block_key(ring)
    assert ring.sole_key is None
    assert block_key(ME.key) == ME.key


def test_ring_knows_its_slots() -> None:
    ring = ring_of(ME.key)
    assert ring.opens(ME.wrap(DATA_KEY, bound=BOUND), bound=BOUND)
    assert not ring.opens(OTHER.wrap(DATA_KEY, bound=BOUND), bound=BOUND)
    slot = phrase().wrap(DATA_KEY, bound=BOUND)
    assert not ring.opens(slot, bound=BOUND)
    assert unwrap_slot(slot, [phrase("wrong"), phrase()], bound=BOUND) == DATA_KEY.raw
    assert (ring.key_ids, ring.key_id) == ((ME.key.key_id,), ME.key.key_id)


@pytest.mark.hpke
def test_ring_tells_whether_slots_are_for_it_and_for_nobody_else() -> None:
    private, public = generate_pair("x25519")
    pair, horse = KeyMaterial(KeyKind.PEM, private), KeyMaterial(KeyKind.PHRASE, b"horse")
    ring = KeyRing([KeyMaterial.of_key(ME.key), pair, horse])
    slots = [one.wrap(DATA_KEY, bound=BOUND) for one in ring.recipients]
    assert ring.is_exactly_for(slots, bound=BOUND)
    assert KeyRing([*ring.own[::2], KeyMaterial(KeyKind.PEM, public)]).is_exactly_for(
        slots, bound=BOUND
    )
    for left in range(3):
        fewer = [one for number, one in enumerate(ring.own) if number != left]
        assert not KeyRing(fewer).is_exactly_for(slots, bound=BOUND)
        rest = [one for number, one in enumerate(slots) if number != left]
        assert not ring.is_exactly_for(rest, bound=BOUND)


def test_secrets_are_never_shown() -> None:
    ring = KeyRing([KeyMaterial.of_key(ME.key), KeyMaterial(KeyKind.PHRASE, b"horse")])
    shown = f"{ring!r} {ring.own!r} {phrase()!r} {ring.recipients!r}"
    assert "horse" not in shown
    assert ME.key.raw.hex() not in shown


@pytest.mark.hpke
def test_keys_survive_the_way_to_another_process() -> None:
    ring = KeyRing(
        [KeyMaterial.of_key(ME.key)], [KeyMaterial(KeyKind.PEM, generate_pair("x25519")[1])]
    )
    again = keys_from_document(keys_to_document(ring))
    assert isinstance(again, KeyRing)
    assert (again.own, again.also_for) == (ring.own, ring.also_for)
    assert keys_from_document(keys_to_document(ME.key)) == ME.key
    assert keys_from_document(None) is None
