# SPDX-License-Identifier: Apache-2.0
"""The accelerator of SM4 is used only where it is right, and then says the same as OpenSSL."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptmgr.crypto import sm4_ipp as sm4_lanes
from ckptmgr.crypto.cbc_batches import batch_of, lanes_for
from ckptmgr.crypto.ciphers import MODES
from ckptmgr.crypto.sm4_ipp import LANES, Chain, Sm4Lanes, find_lanes, library_files
from tests.crypto.lanes import FEATURES, Library, lanes_of

REAL = sm4_lanes.sm4_lanes()
KEY = bytes(range(16))

needs_accelerator = pytest.mark.skipif(
    REAL is None, reason="needs ckptmgr[sm4] and a CPU with AVX-512 and GFNI"
)


@pytest.fixture(
    params=[pytest.param("real", marks=needs_accelerator), pytest.param("stand-in")], scope="module"
)
def lanes(request: pytest.FixtureRequest) -> Sm4Lanes:
    return REAL if request.param == "real" and REAL is not None else lanes_of(Library())


def openssl(key: bytes, iv: bytes, plaintext: bytes) -> bytes:
    encryptor = Cipher(algorithms.SM4(key), modes.CBC(iv)).encryptor()
    return encryptor.update(plaintext) + encryptor.finalize()


def chains(ivs: list[bytes], sources: list[bytes], targets: list[bytearray]) -> list[Chain]:
    return [
        Chain(iv=iv, source=memoryview(source), target=memoryview(target))
        for iv, source, target in zip(ivs, sources, targets, strict=True)
    ]


@settings(max_examples=30)
@given(
    count=st.integers(1, LANES), blocks=st.integers(1, 70), key=st.binary(min_size=16, max_size=16)
)
def test_lanes_say_what_openssl_says_both_ways(
    lanes: Sm4Lanes, count: int, blocks: int, key: bytes
) -> None:
    size = 16 * blocks
    ivs = [os.urandom(16) for _ in range(count)]
    plaintexts = [os.urandom(size) for _ in range(count)]
    sealed, opened = ([bytearray(size) for _ in range(count)] for _ in range(2))
    lanes.encrypt(key, chains(ivs, plaintexts, sealed))
    expected = [openssl(key, iv, text) for iv, text in zip(ivs, plaintexts, strict=True)]
    assert [bytes(one) for one in sealed] == expected
    lanes.decrypt(key, chains(ivs, expected, opened))
    assert [bytes(one) for one in opened] == plaintexts


def test_lanes_encrypt_in_place(lanes: Sm4Lanes) -> None:
    plaintext = os.urandom(4096)
    memory = memoryview(bytearray(plaintext))
    lanes.encrypt(KEY, [Chain(iv=bytes(16), source=memory, target=memory)])
    assert bytes(memory) == openssl(KEY, bytes(16), plaintext)


def test_lanes_read_memory_that_cannot_be_written(lanes: Sm4Lanes) -> None:
    target = bytearray(32)
    lanes.encrypt(KEY, chains([bytes(16)], [bytes(32)], [target]))
    assert bytes(target) == openssl(KEY, bytes(16), bytes(32))


def test_lanes_give_the_answer_of_the_standard(lanes: Sm4Lanes) -> None:
    # GB/T 32907-2016, A.1: with an IV of zeros the first block of a chain is the block cipher itself.
    key = bytes.fromhex("0123456789abcdeffedcba9876543210")
    target = bytearray(16)
    lanes.encrypt(key, chains([bytes(16)], [key], [target]))
    assert target.hex() == "681edf34d206965e86b3e94f536e4246"


@pytest.mark.parametrize("ivs", [[bytes(16)], [bytes(range(16))] * LANES])
@needs_accelerator
def test_real_lanes_agree_with_published_vectors(ivs: list[bytes]) -> None:
    # draft-ribose-cfrg-sm4-10, A.2.2: the second example, with its key.
    assert REAL is not None
    key = bytes.fromhex("fedcba98765432100123456789abcdef")
    text = bytes.fromhex("aaaaaaaabbbbbbbbccccccccddddddddeeeeeeeeffffffffaaaaaaaabbbbbbbb")
    targets = [bytearray(32) for _ in ivs]
    REAL.encrypt(key, chains(ivs, [text] * len(ivs), targets))
    if len(ivs) == LANES:
        answer = "0d3a6ddc2d21c698857215587b7bb59a91f2c147911a4144665e1fa1d40bae38"
        assert {one.hex() for one in targets} == {answer}
    assert {bytes(one) for one in targets} == {openssl(key, ivs[0], text)}


@pytest.mark.parametrize(
    ("sizes", "iv"),
    [
        pytest.param([], bytes(16), id="no chain"),
        pytest.param([0], bytes(16), id="empty"),
        pytest.param([24], bytes(16), id="part of a block"),
        pytest.param([16, 32], bytes(16), id="different lengths"),
        pytest.param([16] * (LANES + 1), bytes(16), id="too many"),
        pytest.param([16], bytes(15), id="short IV"),
    ],
)
def test_chains_that_do_not_go_in_lock_step_are_refused(sizes: list[int], iv: bytes) -> None:
    library = Library()
    lanes = lanes_of(library)
    with pytest.raises(ValueError, match=r"lock-step|IV"):
        lanes.encrypt(
            KEY, chains([iv] * len(sizes), [bytes(n) for n in sizes], [bytearray(n) for n in sizes])
        )
    assert library.calls == 0


def test_target_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="lock-step"):
        lanes_of(Library()).decrypt(KEY, chains([bytes(16)], [bytes(32)], [bytearray(16)]))


def test_refusal_of_the_library_is_an_error_and_shows_no_key() -> None:
    functions = Library().functions()
    lanes = find_lanes(lambda: functions)
    assert lanes is not None
    broken = Library().functions(status=0x2)
    stuck = Sm4Lanes(
        sm4_lanes.LaneFunctions(
            set_key=broken.mbx_sm4_set_key_mb16,
            encrypt=functions.mbx_sm4_encrypt_cbc_mb16,
            decrypt=functions.mbx_sm4_decrypt_cbc_mb16,
        )
    )
    with pytest.raises(RuntimeError, match=r"status 0x0+2\)") as caught:
        stuck.encrypt(KEY, chains([bytes(16)], [bytes(16)], [bytearray(16)]))
    assert KEY.hex() not in str(caught.value)


def without(functions: SimpleNamespace, name: str) -> SimpleNamespace:
    delattr(functions, name)
    return functions


def swapped(functions: SimpleNamespace) -> SimpleNamespace:
    functions.mbx_sm4_encrypt_cbc_mb16 = functions.mbx_sm4_decrypt_cbc_mb16
    return functions


def one_sided(functions: SimpleNamespace) -> SimpleNamespace:
    functions.mbx_sm4_decrypt_cbc_mb16 = functions.mbx_sm4_encrypt_cbc_mb16
    return functions


def wrong_in_the_last_lane(functions: SimpleNamespace) -> SimpleNamespace:
    encrypt = functions.mbx_sm4_encrypt_cbc_mb16

    def encrypt_wrongly(*arguments: list[int]) -> int:
        targets, sources, lengths, schedule, ivs = arguments
        fifteen = (one[: LANES - 1] for one in (targets, sources, lengths))
        return int(encrypt(*fifteen, schedule, ivs[: LANES - 1]))

    functions.mbx_sm4_encrypt_cbc_mb16 = encrypt_wrongly
    return functions


@pytest.mark.parametrize(
    "functions",
    [
        pytest.param(Library().functions(features=FEATURES & ~(1 << 34)), id="no GFNI"),
        pytest.param(
            Library().functions(features=FEATURES & ~(1 << 33)), id="AVX-512 switched off"
        ),
        pytest.param(Library().functions(features=FEATURES & ~(1 << 20)), id="no AVX-512"),
        pytest.param(Library().functions(widths=0), id="no SM4"),
        pytest.param(Library().functions(widths=8), id="eight lanes"),
        pytest.param(Library().functions(status=0x8888), id="refuses every call"),
        pytest.param(without(Library().functions(), "mbx_get_algo_info"), id="another ABI"),
        pytest.param(without(Library().functions(), "mbx_sm4_set_key_mb16"), id="no function"),
        pytest.param(swapped(Library().functions()), id="encrypts wrongly"),
        pytest.param(one_sided(Library().functions()), id="decrypts wrongly"),
        pytest.param(wrong_in_the_last_lane(Library().functions()), id="wrong in one lane"),
    ],
)
def test_library_that_is_not_right_is_not_used(functions: SimpleNamespace) -> None:
    assert find_lanes(lambda: functions) is None


@pytest.mark.parametrize("error", [FileNotFoundError("none"), OSError("undefined symbol")])
def test_library_that_cannot_be_loaded_is_not_used(error: OSError) -> None:
    def load() -> object:
        raise error

    assert find_lanes(load) is None


def installed(site: Path, package: str, names: tuple[str, ...]) -> None:
    """Put a package with these files where Python looks for packages, as pip does."""
    info = site / f"{package.replace('-', '_')}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (info / "RECORD").write_text("".join(f"../lib/{name},,\n" for name in names))


NEEDED = ("libintlc.so.5", "libimf.so", "libirng.so", "libsvml.so")


def test_libraries_are_those_of_the_installed_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (site := tmp_path / "site").mkdir()
    installed(site, "intel-cmplr-lib-rt", ("licence", *reversed(NEEDED)))
    installed(site, "ipp-crypto", ("libippcp.so.13", "libcrypto_mb.so.13"))
    monkeypatch.syspath_prepend(str(site))
    expected = [tmp_path / "lib" / name for name in (*NEEDED, "libcrypto_mb.so.13")]
    assert library_files() == expected
    assert find_lanes() is None  # there is nothing in them


@pytest.mark.parametrize("names", [(), ("libcrypto_mb.so.12",)])
def test_library_of_another_abi_is_not_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...]
) -> None:
    installed(tmp_path, "intel-cmplr-lib-rt", NEEDED)
    installed(tmp_path, "ipp-crypto", names)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"libcrypto_mb\.so\.13 of ipp-crypto"):
        library_files()


def test_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    with pytest.raises(FileNotFoundError, match="intel-cmplr-lib-rt is not installed"):
        library_files()


def test_only_sm4_is_accelerated() -> None:
    assert [lanes_for(mode) for mode in MODES] == [None, None, REAL]
    assert batch_of(lanes_for(MODES[2])) == (1 if REAL is None else LANES)
