# SPDX-License-Identifier: Apache-2.0
"""cryptotensors: safetensors with AES-256-GCM for each tensor and an Ed25519 signature."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptotensors import numpy as cryptotensors_numpy
from cryptotensors import register_direct_key_provider

from tools.bench.contestant import KEY, Contestant, touch
from tools.bench.disk import sync
from tools.bench.workload import State

NAME = "cryptotensors"


class Library:
    """It, plain and encrypted; each save is followed by a sync."""

    def __init__(self, state: State, size_bytes: int, *, directory: Path, rest_s: float) -> None:
        del size_bytes, directory, rest_s
        self.about = {"cryptotensors": metadata.version("cryptotensors")}
        # Its NumPy half does not load bfloat16; the same bytes as uint16 cost it the same.
        self._bits = {
            name: array.view(np.uint16) if array.dtype.name == "bfloat16" else array
            for name, array in state.items()
        }

    def contestants(self) -> list[Contestant]:
        """Return it plain and encrypted."""
        return [self._contestant("plain", None), self._contestant("encrypted", _keys())]

    def _contestant(self, mode: str, config: Mapping[str, object] | None) -> Contestant:
        options = {} if config is None else {"config": config}
        if config is not None:
            register_direct_key_provider(
                keys=list(config.values())
            )  # loads look keys up by their id

        def save(path: Path) -> None:
            cryptotensors_numpy.save_file(self._bits, path, **options)
            sync(path)

        def load(path: Path) -> None:
            touch(cryptotensors_numpy.load_file(path))

        return Contestant(
            name=NAME, mode=mode, suffix=".safetensors", actions={"save": save, "load": load}
        )


def _keys() -> dict[str, object]:
    signing = Ed25519PrivateKey.from_private_bytes(KEY)
    return {
        "enc_key": {"kty": "oct", "alg": "aes256gcm", "kid": "bench", "k": _base64(KEY)},
        "sign_key": {
            "kty": "okp",
            "alg": "ed25519",
            "kid": "bench-sign",
            "d": _base64(KEY),
            "x": _base64(signing.public_key().public_bytes_raw()),
        },
    }


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")
