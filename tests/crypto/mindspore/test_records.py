# SPDX-License-Identifier: Apache-2.0
"""Record heads: the bytes MindSpore accepts, and a place and a class for every way they can be wrong."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptmgr.crypto.ciphers import mode_of
from ckptmgr.crypto.errors import (
    CryptoError,
    DecryptionError,
    TamperedError,
    TruncatedCiphertextError,
    UnsupportedSuiteError,
)
from ckptmgr.crypto.mindspore.records import (
    RecordHead,
    find_records,
    head_size,
    pack_head,
    parse_head,
    record_size,
    sniff_mode,
)
from ckptmgr.formats.source import BytesSource

from .sealing import KEY, MODES, unseal

ENTRY = bytes.fromhex("0a160a0177121108011207466c6f617433321a040000803f")
# One 24-byte entry under the key 00..0f with the IV a0..af; MindSpore 2.10.0 loads all three.
ACCEPTED = {
    "AES-GCM": "d85e3a7f107f6fc261ed8c079bcdc253b22a87db3000000010000000"
    "a0a1a2a3a4a5a6a7a8a9aaabacadaeaf18000000a09032ba099b22028b6ab2462a7dd11460dc390c8317bd90",
    "AES-CBC": "d95e3a7f3800000010000000a0a1a2a3a4a5a6a7a8a9aaabacadaeaf20000000"
    "393dded45f73ca9adad21d7314556f2ef07b8c950c150f82e00c6e8ecf76ba1e",
    "SM4-CBC": "da5e3a7f3800000010000000a0a1a2a3a4a5a6a7a8a9aaabacadaeaf20000000"
    "6f52745b3a98dccc67dd48ce5233423a3a0ccd8500fe76e23c9a42b1e00d5f65",
}
MAX_CIPHER = 67108890


def head_with(mode: str, *, block: int, iv: int, cipher: int) -> bytes:
    tag = bytes(mode_of(mode).tag_bytes)
    magic = bytes.fromhex(ACCEPTED[mode])[:4]
    return magic + tag + struct.pack("<II16sI", block, iv, bytes(16), cipher)


@pytest.mark.parametrize("mode", MODES)
def test_record_that_mindspore_accepts_decrypts_to_its_entry(mode: str) -> None:
    record = bytes.fromhex(ACCEPTED[mode])
    assert unseal(record, mode, allow_unsealed=True) == ENTRY


@pytest.mark.parametrize("mode", MODES)
def test_record_that_we_encrypt_is_the_one_mindspore_accepts(mode: str) -> None:
    suite, iv = mode_of(mode), bytes(range(0xA0, 0xB0))
    ciphertext = bytearray(suite.ciphertext_size(len(ENTRY)))
    tag = suite.encrypt_into(
        KEY, iv=iv, plaintext=memoryview(ENTRY), ciphertext=memoryview(ciphertext)
    )
    head = pack_head(suite, RecordHead(tag=tag, iv=iv, cipher_size=len(ciphertext)))
    assert (head + ciphertext).hex() == ACCEPTED[mode]
    assert record_size(suite, len(ENTRY)) == len(head + ciphertext)
    assert head_size(suite) == len(head)


@pytest.mark.parametrize("mode", MODES)
def test_sniff_mode_knows_the_magic(mode: str) -> None:
    assert sniff_mode(bytes.fromhex(ACCEPTED[mode])) == mode


@pytest.mark.parametrize("first", [b"", b"\xd8\x5e\x3a", b"\x0a\x16\x0a\x01", b"\xdb\x5e\x3a\x7f"])
def test_sniff_mode_of_anything_else_is_none(first: bytes) -> None:
    assert sniff_mode(first) is None


LENGTHS = (0, 1, 12, 15, 17, 2**31 - 1, 2**31, 2**32 - 1)
IMPOSSIBLE = [
    (mode, field, value)
    for mode in MODES
    for field in ("iv", "cipher", "block")
    for value in (*LENGTHS, MAX_CIPHER + 1)
    # AES-GCM has ciphertexts of any length.
    if (mode, field) != ("AES-GCM", "cipher") or value == 0 or value > MAX_CIPHER
]


@pytest.mark.parametrize(("mode", "field", "value"), IMPOSSIBLE)
def test_head_with_one_impossible_length_is_tampered(mode: str, field: str, value: int) -> None:
    fields = {"block": 56, "iv": 16, "cipher": 32} | {field: value}
    if field == "cipher":
        fields["block"] = (24 + value) % 2**32
    with pytest.raises(TamperedError) as caught:
        parse_head(mode_of(mode), head_with(mode, **fields), offset=7)
    assert caught.value.offset == 7


@pytest.mark.parametrize("mode", MODES)
def test_head_at_the_largest_length_is_parsed(mode: str) -> None:
    cipher = MAX_CIPHER // 16 * 16
    head = head_with(mode, block=24 + cipher, iv=16, cipher=cipher)
    assert parse_head(mode_of(mode), head, offset=0).cipher_size == cipher


@pytest.mark.parametrize("mode", MODES)
def test_head_of_a_huge_record_in_a_small_file_is_truncated(mode: str) -> None:
    cipher = MAX_CIPHER // 16 * 16
    file = head_with(mode, block=24 + cipher, iv=16, cipher=cipher)
    with pytest.raises(TruncatedCiphertextError, match="before the end of record 0"):
        find_records(BytesSource(file), mode_of(mode))


@pytest.mark.parametrize("mode", MODES)
def test_walk_of_every_prefix_is_truncated(mode: str) -> None:
    record = bytes.fromhex(ACCEPTED[mode])
    for cut in range(len(record)):
        with pytest.raises(TruncatedCiphertextError):
            find_records(BytesSource(record[:cut]), mode_of(mode))


@pytest.mark.parametrize("mode", MODES)
def test_walk_of_two_records_finds_both(mode: str) -> None:
    record = bytes.fromhex(ACCEPTED[mode])
    records = find_records(BytesSource(record * 2), mode_of(mode))
    assert list(records.starts) == [0, len(record), 2 * len(record)]
    assert (records.count, records.has_crc_trailer) == (2, False)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("junk", [b"crc_num" + bytes(9), b"crc_num" + bytes(11), bytes(4)])
def test_walk_over_something_that_is_no_record_is_tampered(mode: str, junk: bytes) -> None:
    record = bytes.fromhex(ACCEPTED[mode])
    with pytest.raises(TamperedError) as caught:
        find_records(BytesSource(record + junk), mode_of(mode))
    assert caught.value.offset == len(record)


@pytest.mark.parametrize("mode", MODES)
def test_walk_finds_the_crc_trailer_of_a_broken_save(mode: str) -> None:
    record = bytes.fromhex(ACCEPTED[mode])
    records = find_records(BytesSource(record + b"crc_num" + bytes(10)), mode_of(mode))
    assert (records.count, records.has_crc_trailer) == (1, True)


def test_walk_of_a_lone_crc_trailer_says_not_encrypted() -> None:
    with pytest.raises(DecryptionError, match="not an encrypted MindSpore checkpoint"):
        find_records(BytesSource(b"crc_num" + bytes(10)), mode_of("AES-GCM"))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("asked", MODES)
def test_walk_in_another_mode_names_the_mode_of_the_file(mode: str, asked: str) -> None:
    source = BytesSource(bytes.fromhex(ACCEPTED[mode]))
    if mode == asked:
        assert find_records(source, mode_of(asked)).count == 1
        return
    with pytest.raises(DecryptionError, match=f"the file says {mode}, not {asked}") as caught:
        find_records(source, mode_of(asked))
    assert caught.value.hint == f"open it with mode {mode}"


def test_walk_of_a_plain_file_says_not_encrypted() -> None:
    with pytest.raises(DecryptionError, match="not an encrypted MindSpore checkpoint") as caught:
        find_records(BytesSource(ENTRY), mode_of("AES-GCM"))
    assert caught.value.hint is not None


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("cipher", [16, 24])
def test_walk_of_a_legacy_file_says_unsupported(mode: str, cipher: int) -> None:
    magic = bytes.fromhex("d85e3a7f")
    legacy = magic + struct.pack("<II16sI", 24 + cipher, 16, bytes(16), cipher) + bytes(cipher)
    with pytest.raises(UnsupportedSuiteError, match=r"as MindSpore 1\.x did"):
        find_records(BytesSource(legacy), mode_of(mode))


@pytest.mark.parametrize("mode", MODES)
@given(data=st.data())
def test_walk_of_any_bytes_behind_a_magic_raises_only_crypto_errors(
    mode: str, data: st.DataObject
) -> None:
    record = bytearray(bytes.fromhex(ACCEPTED[mode]) * 2)
    for _ in range(data.draw(st.integers(1, 4))):
        record[data.draw(st.integers(0, len(record) - 1))] = data.draw(st.integers(0, 255))
    tail = data.draw(st.binary(max_size=20))
    try:
        records = find_records(BytesSource(bytes(record) + tail), mode_of(mode))
    except CryptoError:
        return
    assert records.starts[-1] in (len(record) + len(tail), len(record) + len(tail) - 17)
