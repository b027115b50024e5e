# SPDX-License-Identifier: Apache-2.0
"""SM4-CBC for sixteen chains in lock-step, if `ckptmgr[sm4]` is installed and the CPU supports it.

OpenSSL encrypts SM4 one block after the other, at 0.13 GB/s a core. One CBC chain cannot go faster,
but a file has many: Intel's Cryptography Primitives Library advances sixteen of them with AVX-512
and GFNI, at 0.9 GB/s for encryption and 1.9 for decryption. The bytes are the same.

The library is used only if it reports that the CPU suffices, gives the published result, and agrees
with OpenSSL on random chains. Otherwise (no package, another ABI, another CPU) OpenSSL does the
work.

Source: crypto_mb/sm4.h and crypto_mb/cpu_features.h of
https://github.com/intel/cryptography-primitives
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

LANES = 16

_PACKAGES = {
    # In load order; found by their files, never by a search path.
    "intel-cmplr-lib-rt": ("libintlc.so.5", "libimf.so", "libirng.so", "libsvml.so"),
    "ipp-crypto": ("libcrypto_mb.so.13",),
}
_ALGORITHM_SM4 = 10  # MBX_ALGO_SM4; the answer is a mask of widths
_AVX512F, _AVX512BW, _VBMI2, _GFNI, _IS_ENABLED = 1 << 20, 1 << 24, 1 << 37, 1 << 34, 1 << 33
_NEEDED_FEATURES = _AVX512F | _AVX512BW | _VBMI2 | _GFNI | _IS_ENABLED
_SCHEDULE_BYTES = 32 * LANES * 4
_CACHE_LINE_BYTES = 64

_Pointers = ctypes.c_void_p * LANES
_Lengths = ctypes.c_int * LANES

SetKey = Callable[[int, object], int]
CryptChains = Callable[[object, object, object, int, object], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneFunctions:
    """The three functions `mbx_sm4_*_mb16`; each returns a status of four bits per lane."""

    set_key: SetKey
    encrypt: CryptChains
    decrypt: CryptChains


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """One CBC chain without padding.

    `source` is contiguous, a multiple of 16 bytes; `target` is the same memory, or does not overlap
    it.
    """

    iv: bytes
    source: memoryview
    target: memoryview


class Sm4Lanes:
    """Encrypts and decrypts up to sixteen chains of equal length at once, without the GIL."""

    def __init__(self, functions: LaneFunctions) -> None:
        self._functions = functions

    def encrypt(self, key: bytes, chains: Sequence[Chain]) -> None:
        """Fill the target of every chain; ValueError for over sixteen, or of different lengths."""
        self._run(self._functions.encrypt, key, chains)

    def decrypt(self, key: bytes, chains: Sequence[Chain]) -> None:
        """Fill the target of every chain with plaintext; raises as `encrypt` does."""
        self._run(self._functions.decrypt, key, chains)

    def _run(self, crypt: CryptChains, key: bytes, chains: Sequence[Chain]) -> None:
        size = _common_size(chains)
        # An empty lane makes the library ten times slower: idle lanes encrypt scratch memory.
        idle = memoryview(bytearray(size)) if len(chains) < LANES else memoryview(b"")
        idle_chain = Chain(iv=bytes(16), source=idle, target=idle)
        lanes = [*chains, *[idle_chain] * (LANES - len(chains))]
        room = ctypes.create_string_buffer(_SCHEDULE_BYTES + _CACHE_LINE_BYTES)
        schedule = -(-ctypes.addressof(room) // _CACHE_LINE_BYTES) * _CACHE_LINE_BYTES
        try:
            keys = _Pointers(*[_address(memoryview(key))] * LANES)
            status = self._functions.set_key(schedule, keys)
            status |= crypt(
                _Pointers(*(_address(lane.target) for lane in lanes)),
                _Pointers(*(_address(lane.source) for lane in lanes)),
                _Lengths(*[size] * LANES),
                schedule,
                _Pointers(*(_address(memoryview(lane.iv)) for lane in lanes)),
            )
        finally:
            ctypes.memset(room, 0, len(room))  # the round keys
        if status:
            raise RuntimeError(f"the SM4 library refused its arguments (status {status:#018x})")


def _common_size(chains: Sequence[Chain]) -> int:
    sizes = {view.nbytes for chain in chains for view in (chain.source, chain.target)}
    size = min(sizes, default=0)
    if len(sizes) != 1 or size % 16 or not size or len(chains) > LANES:
        raise ValueError(f"{len(chains)} chains of {sorted(sizes)} bytes do not go in lock-step")
    if any(len(chain.iv) != 16 for chain in chains):
        raise ValueError("an IV has 16 bytes")
    return size


def _address(view: memoryview) -> int:
    # NumPy also gives the address of read-only memory, which ctypes refuses.
    return int(np.frombuffer(view, np.uint8).__array_interface__["data"][0])


def passes_self_test(lanes: Sm4Lanes) -> bool:
    """Return whether the lanes give the published result and agree with OpenSSL, both ways.

    Source: draft-ribose-cfrg-sm4-10, section A.2.2 (SM4-CBC, first example).
    """
    key = bytes.fromhex("0123456789abcdeffedcba9876543210")
    plaintext = bytes.fromhex("aaaaaaaabbbbbbbbccccccccddddddddeeeeeeeeffffffffaaaaaaaabbbbbbbb")
    answer = bytes.fromhex("78ebb11cc40b0a48312aaeb2040244cb4cb7016951909226979b0d15dc6a8f6d")
    try:
        return _both_ways(lanes, key, [(bytes(range(16)), plaintext)]) == [answer] and all(
            _agrees_with_openssl(lanes, count, size)
            for count, size in ((LANES, 4096), (LANES, 16), (LANES - 5, 1008))
        )
    except (RuntimeError, ValueError):
        return False


def _agrees_with_openssl(lanes: Sm4Lanes, count: int, size: int) -> bool:
    key = os.urandom(16)
    messages = [(os.urandom(16), os.urandom(size)) for _ in range(count)]
    expected = []
    for iv, plaintext in messages:
        encryptor = Cipher(algorithms.SM4(key), modes.CBC(iv)).encryptor()
        expected.append(encryptor.update(plaintext) + encryptor.finalize())
    return _both_ways(lanes, key, messages) == expected


def _both_ways(
    lanes: Sm4Lanes, key: bytes, messages: Sequence[tuple[bytes, bytes]]
) -> list[bytes] | None:
    """Return the ciphertexts, or None if they do not decrypt; one way in place, one way not."""
    sealed = [bytearray(plaintext) for _, plaintext in messages]
    opened = [bytearray(len(plaintext)) for _, plaintext in messages]
    lanes.encrypt(key, list(_chains(messages, sealed, sealed)))
    lanes.decrypt(key, list(_chains(messages, sealed, opened)))
    is_same = [bytes(one) for one in opened] == [plaintext for _, plaintext in messages]
    return [bytes(one) for one in sealed] if is_same else None


def _chains(
    messages: Sequence[tuple[bytes, bytes]],
    sources: Sequence[bytearray],
    targets: Sequence[bytearray],
) -> Iterator[Chain]:
    for (iv, _), source, target in zip(messages, sources, targets, strict=True):
        yield Chain(iv=iv, source=memoryview(source), target=memoryview(target))


def library_files() -> list[Path]:
    """Return the shared libraries of `ckptmgr[sm4]`, in load order, or raise FileNotFoundError."""
    return [_file_of(package, name) for package, names in _PACKAGES.items() for name in names]


def _file_of(package: str, name: str) -> Path:
    from importlib import metadata  # 20 ms that only SM4 must pay

    try:
        files = metadata.distribution(package).files or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name == name:
            return Path(str(file.locate())).resolve()
    raise FileNotFoundError(f"{name} of {package} is not installed")


def _load() -> object:
    files = library_files()
    return [ctypes.CDLL(str(file)) for file in files][-1]  # pragma: no cover - needs the package


def find_lanes(load: Callable[[], object] = _load) -> Sm4Lanes | None:
    """Return the accelerator of a library, tested, or None.

    `load` returns the library, or raises OSError.
    """
    try:
        functions = _bind(load())
    except (OSError, AttributeError):
        return None
    lanes = None if functions is None else Sm4Lanes(functions)
    return lanes if lanes is not None and passes_self_test(lanes) else None


@functools.cache
def sm4_lanes() -> Sm4Lanes | None:
    """Return the accelerator of this process, or None."""
    return find_lanes()


def _bind(library: object) -> LaneFunctions | None:
    """Return the functions, or None if the library reports that the CPU cannot run them."""
    features = _function(library, "mbx_get_cpu_features")()
    widths = _function(library, "mbx_get_algo_info", ctypes.c_int)(_ALGORITHM_SM4)
    if features & _NEEDED_FEATURES != _NEEDED_FEATURES or not widths & LANES:
        return None
    pointers, lengths, schedule = _Pointers, _Lengths, ctypes.c_void_p
    crypt = (pointers, pointers, lengths, schedule, pointers)
    return LaneFunctions(
        set_key=_function(library, "mbx_sm4_set_key_mb16", schedule, pointers),
        encrypt=_function(library, "mbx_sm4_encrypt_cbc_mb16", *crypt),
        decrypt=_function(library, "mbx_sm4_decrypt_cbc_mb16", *crypt),
    )


def _function(library: object, name: str, *arguments: object) -> Callable[..., int]:
    function = getattr(library, name)
    function.argtypes, function.restype = arguments, ctypes.c_uint64
    return function  # type: ignore[no-any-return]
