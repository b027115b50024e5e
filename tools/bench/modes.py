# SPDX-License-Identifier: Apache-2.0
"""The ways of writing a file that ckptmgr has, most of which MindSpore has, too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tools.bench.contestant import KEY

_SM4_KEY = bytes(range(16))
_SAFETENSORS = {"format": "safetensors"}
_CHECKED = {"crc_check": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """One way of writing a file.

    Attributes:
        name: For the tables and `--modes`.
        save_options: Arguments of both `save_checkpoint`.
        load_options: Arguments of both `load_checkpoint`.
        suffix: Of the file name.
        is_in_mindspore: Whether MindSpore can do it with this model.
        is_rare: Whether it takes part in as few rounds as libraries that no target names.
    """

    name: str
    save_options: Mapping[str, Any]
    load_options: Mapping[str, Any]
    suffix: str = ".ckpt"
    is_in_mindspore: bool = True
    is_rare: bool = False

    @property
    def is_encrypted(self) -> bool:
        """Whether it takes a key."""
        return "enc_key" in self.save_options

    @property
    def is_slow(self) -> bool:
        """Whether it is measured with a smaller model: MindSpore needs 20 seconds for 1 GiB."""
        return self.save_options.get("enc_mode") == "SM4-CBC"


def _cipher(name: str, mode: str, key: bytes) -> Mode:
    return Mode(
        name=name,
        save_options={"enc_key": key, "enc_mode": mode},
        load_options={"dec_key": key, "dec_mode": mode},
    )


def _container(name: str, mode: str, *, is_rare: bool = False) -> Mode:
    return Mode(
        name=name,
        save_options={**_SAFETENSORS, "enc_key": KEY, "enc_mode": mode},
        load_options={**_SAFETENSORS, "dec_key": KEY, "dec_mode": mode},
        suffix=".safetensors.ckpe",
        is_in_mindspore=False,
        is_rare=is_rare,
    )


MODES = (
    Mode(name="ckpt", save_options={}, load_options={}),
    Mode(name="ckpt-crc", save_options=_CHECKED, load_options=_CHECKED),
    _cipher("ckpt-gcm", "AES-GCM", KEY),
    _cipher("ckpt-cbc", "AES-CBC", KEY),
    _cipher("ckpt-sm4", "SM4-CBC", _SM4_KEY),
    Mode(
        name="safetensors",
        save_options=_SAFETENSORS,
        load_options=_SAFETENSORS,
        suffix=".safetensors",
    ),
    Mode(
        name="safetensors-crc",
        save_options=_SAFETENSORS | _CHECKED,
        load_options=_SAFETENSORS | _CHECKED,
        suffix=".safetensors",
        is_in_mindspore=False,  # its CRC stops at bfloat16
    ),
    _container("container-gcm", "AES-GCM"),
    _container("container-cbc", "AES-CBC", is_rare=True),
    _container("container-sm4", "SM4-CBC", is_rare=True),
)
