# SPDX-License-Identifier: Apache-2.0
"""A library with the interface of Intel's crypto_mb, made of OpenSSL: the lanes of machines that have none."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from types import SimpleNamespace

from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from ckptmgr.crypto.ciphers import CipherMode
from ckptmgr.crypto.sm4_ipp import LANES, Sm4Lanes, find_lanes

FEATURES = 0xFF_0F3B_EFFF
"""The features of a CPU of 2022."""


class Library:
    """The state of the library: the round keys are the key itself.

    Attributes:
        calls: How often chains were encrypted or decrypted.
    """

    def __init__(self) -> None:
        self.calls = 0

    def functions(
        self, *, features: int = FEATURES, widths: int = LANES, status: int = 0
    ) -> SimpleNamespace:
        """Return the functions that the shared library exports."""

        def set_key(schedule: int, keys: list[int]) -> int:
            ctypes.memmove(schedule, keys[0], 16)
            return status

        # Plain functions, because argument types are set on them.
        return SimpleNamespace(
            mbx_get_cpu_features=lambda: features,
            mbx_get_algo_info=lambda algorithm: widths if algorithm == 10 else 8,
            mbx_sm4_set_key_mb16=set_key,
            mbx_sm4_encrypt_cbc_mb16=self._crypt(is_encryption=True),
            mbx_sm4_decrypt_cbc_mb16=self._crypt(is_encryption=False),
        )

    def _crypt(self, *, is_encryption: bool) -> Callable[..., int]:
        def crypt(
            targets: list[int],
            sources: list[int],
            lengths: list[int],
            schedule: int,
            ivs: list[int],
        ) -> int:
            self.calls += 1
            key = ctypes.string_at(schedule, 16)
            for target, source, length, iv in zip(targets, sources, lengths, ivs, strict=True):
                cipher = Cipher(algorithms.SM4(key), modes.CBC(ctypes.string_at(iv, 16)))
                context = cipher.encryptor() if is_encryption else cipher.decryptor()
                ctypes.memmove(target, context.update(ctypes.string_at(source, length)), length)
            return 0

        return crypt


def lanes_of(library: Library) -> Sm4Lanes:
    """Return the accelerator over `library`."""
    lanes = find_lanes(library.functions)
    assert lanes is not None
    library.calls = 0
    return lanes


def finder(library: Library) -> Callable[[CipherMode], Sm4Lanes | None]:
    """Return what sealers and sources ask for an accelerator."""
    lanes = lanes_of(library)
    return lambda mode: lanes if mode.name == "SM4-CBC" else None


def no_lanes(_: CipherMode) -> None:
    """Find no accelerator."""
