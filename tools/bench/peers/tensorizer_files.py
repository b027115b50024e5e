# SPDX-License-Identifier: Apache-2.0
"""CoreWeave's tensorizer, plain and with a key (XSalsa20-Poly1305 by libsodium)."""

from __future__ import annotations

import os
from importlib import metadata
from pathlib import Path

import torch
from tensorizer import DecryptionParams, EncryptionParams, TensorDeserializer, TensorSerializer

from tools.bench.contestant import KEY, Contestant
from tools.bench.disk import sync
from tools.bench.peers.torch_tensors import tensors_of, touch_tensors
from tools.bench.workload import State

NAME = "tensorizer"


class Library:
    """Tensorizer with as many readers as there are cores; each save is followed by a sync."""

    def __init__(self, state: State, size_bytes: int, *, directory: Path, rest_s: float) -> None:
        del size_bytes, directory, rest_s
        self.about = {"tensorizer": metadata.version("tensorizer")}
        self._tensors = tensors_of(state)

    def contestants(self) -> list[Contestant]:
        """Return it plain and encrypted."""
        return [self._contestant("plain", None), self._contestant("encrypted", KEY)]

    def _contestant(self, mode: str, key: bytes | None) -> Contestant:
        encryption = None if key is None else EncryptionParams(key=key)
        decryption = None if key is None else DecryptionParams.from_key(key)

        def save(path: Path) -> None:
            serializer = TensorSerializer(str(path), encryption=encryption)
            serializer.write_state_dict(self._tensors)
            serializer.close()
            sync(path)

        def load(path: Path) -> None:
            with TensorDeserializer(
                str(path),
                device=torch.device("cpu"),
                encryption=decryption,
                num_readers=os.cpu_count() or 1,
            ) as loaded:
                touch_tensors(dict(loaded.items()))

        return Contestant(
            name=NAME, mode=mode, suffix=".tensors", actions={"save": save, "load": load}
        )
