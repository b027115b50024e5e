# SPDX-License-Identifier: Apache-2.0
"""The real MindSpore loads what we seal, in all three modes, and finds the same tensors as in the plain file."""

from __future__ import annotations

import zlib
from pathlib import Path

import pytest

from tests.crypto.mindspore.sealing import KEY, MODES, seal

FILES = Path(__file__).parents[1] / "golden" / "files"


@pytest.mark.interop
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("block_bytes", [1024, 4 * 2**20 - 48])
@pytest.mark.parametrize("has_crc", [False, True])
def test_sealed_file_loads_in_mindspore(
    mode: str, block_bytes: int, has_crc: bool, tmp_path: Path
) -> None:
    import mindspore

    plain = (FILES / "slices_sync.ckpt").read_bytes()
    sealed = tmp_path / "sealed.ckpt"
    sealed.write_bytes(seal(plain, mode, block_bytes=block_bytes, has_crc=has_crc))
    expected = mindspore.load_checkpoint(str(FILES / "slices_sync.ckpt"))
    found = mindspore.load_checkpoint(
        str(sealed), dec_key=KEY.raw, dec_mode=mode, crc_check=has_crc
    )
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].asnumpy().tobytes() == tensor.asnumpy().tobytes()


@pytest.mark.interop
@pytest.mark.parametrize("mode", MODES)
def test_sealed_file_with_a_wrong_crc_is_refused_by_mindspore(mode: str, tmp_path: Path) -> None:
    # That MindSpore refuses it shows that it finds the trailer behind the seal and checks it.
    import mindspore

    from ckptmgr.crypto.mindspore.blocks import BlockSealer

    plain = (FILES / "slices_sync.ckpt").read_bytes()
    sealer = BlockSealer(KEY, mode, plaintext_size=len(plain), has_crc_trailer=True)
    record = bytearray(sealer.record_range(0)[1])
    sealer.seal_into(0, memoryview(plain), memoryview(record))
    sealed = tmp_path / "sealed.ckpt"
    sealed.write_bytes(record + sealer.finish(crc=zlib.crc32(plain) ^ 1))
    with pytest.raises(ValueError, match="checkpoint"):
        mindspore.load_checkpoint(str(sealed), dec_key=KEY.raw, dec_mode=mode, crc_check=True)
