# SPDX-License-Identifier: Apache-2.0
"""Small torch tensors that a file has side by side are joined in one call, bit by bit as alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the tensors are of torch")

from ckptmgr import load_state, save_state  # noqa: E402
from ckptmgr.formats.errors import FormatError  # noqa: E402
from ckptmgr.formats.safetensors_file import build_safetensors_image  # noqa: E402
from ckptmgr.state.tree import flatten  # noqa: E402

LONG = "x" * 20_000  # makes the header so long that it is no small part beside the tensors


def _bits(tensor: Any) -> bytes:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return bytes(plain.reshape(-1).view(torch.uint8).tolist())


def _small_tensors() -> list[Any]:
    grid = torch.arange(12.0).reshape(3, 4)
    wave = torch.tensor([1 + 2j, 3 - 4j])
    nan = torch.tensor([0x7FA00001, 0x7FC00002], dtype=torch.int32).view(torch.float32)
    return [
        *(torch.full((3,), float(n)) for n in range(4)),
        *(torch.tensor(n, dtype=torch.int32) for n in range(3)),
        grid,
        grid.t(),
        grid[:, 1],
        nan,
        wave.conj().imag,
        torch.nn.Parameter(torch.ones(2, 2)),
        torch.ones(5, dtype=torch.bfloat16),
        torch.tensor(2, dtype=torch.uint8),
    ]


@pytest.mark.parametrize(
    "others",
    [[], [torch.tensor([True, False])], [torch.tensor([1 + 1j]).conj()], [b"x" * 2000]],
    ids=["joined", "with a bool", "with a complex number", "with bytes"],
)
def test_small_tensors_come_back_bit_by_bit(tmp_path: Path, others: list[Any]) -> None:
    tensors = [*_small_tensors(), *(one for one in others if isinstance(one, torch.Tensor))]
    path = tmp_path / "state.safetensors"

    save_state({"tensors": tensors, "others": others, "note": LONG}, path)
    loaded: Any = load_state(path)

    for saved, found in zip(tensors, loaded["tensors"], strict=True):
        assert (found.dtype, found.shape, _bits(found)) == (saved.dtype, saved.shape, _bits(saved))


def test_tensor_of_another_shape_than_promised_is_refused() -> None:
    tensors = [torch.zeros(4), torch.zeros(4)]
    image = build_safetensors_image(flatten(tensors).tensors, metadata={"note": LONG})

    tensors[0].resize_(2)
    tensors[1].resize_(6)  # as many bytes in all

    with pytest.raises(FormatError, match="content has 8 bytes"):
        list(image.views(0, image.size))
