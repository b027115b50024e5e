# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the torch values of a state need torch")

from ckptmgr.core.errors import UnsupportedState  # noqa: E402
from ckptmgr.state import torch_values  # noqa: E402
from ckptmgr.state.tree import flatten, restore, unflatten  # noqa: E402
from tests.support.trees import reader, round_trip  # noqa: E402

DTYPES = sorted(
    {str(value)[6:] for value in vars(torch).values() if isinstance(value, torch.dtype)}
)


def bits(tensor: Any) -> Any:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8)


def same_tensor(left: Any, right: Any) -> bool:
    return bool(
        (type(left), left.dtype, left.shape, left.requires_grad)
        == (type(right), right.dtype, right.shape, right.requires_grad)
        and torch.equal(bits(left), bits(right))
    )


@pytest.mark.parametrize("name", [name for name in DTYPES if not name.startswith("q")])
def test_round_trip_of_tensor_keeps_type_and_bits(name: str) -> None:
    dtype = getattr(torch, name)
    content = torch.arange(48, dtype=torch.uint8) % (2 if name == "bool" else 48)
    tensor = content.view(dtype).reshape(3, -1)

    assert same_tensor(round_trip({"t": tensor})["t"], tensor)


def _shaped() -> list[Any]:
    grid = torch.arange(24.0).reshape(4, 6)
    waves = torch.tensor([1 + 2j, 3 - 4j])
    return [
        torch.tensor(2.5),
        torch.zeros(0),
        torch.zeros(3, 0, 2, dtype=torch.int64),
        torch.zeros(0, dtype=torch.complex64),
        grid.T,
        grid[:, ::2],
        grid[1:2],
        torch.ones(1).expand(1000, 1000),
        waves.conj(),
        waves.conj().imag,
        torch.ones(2, requires_grad=True),
        torch.nn.Parameter(grid.clone()),
        torch.nn.Parameter(torch.arange(3), requires_grad=False),
        torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
    ]


@pytest.mark.parametrize("tensor", _shaped(), ids=lambda t: f"{t.dtype}{list(t.shape)}")
def test_round_trip_of_tensor_keeps_shape_and_flags(tensor: Any) -> None:
    assert same_tensor(round_trip([tensor])[0], tensor)


def test_round_trip_of_torch_values_is_equal() -> None:
    state = [torch.Size([2, 3]), torch.float8_e5m2, torch.device("cuda:1"), torch.Size([])]

    assert round_trip(state) == state
    assert type(round_trip(state)[0]) is torch.Size


def _quantized() -> list[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        values = torch.linspace(-1, 1, 6).reshape(2, 3)
        kinds = (torch.qint8, torch.quint8, torch.qint32)
        scales, zeros = torch.tensor([0.1, 0.2]), torch.tensor([1, 2])
        return [
            *(torch.quantize_per_tensor(values, 0.1, 3, kind) for kind in kinds),
            *(torch.quantize_per_channel(values, scales, zeros, 0, kind) for kind in kinds),
        ]


@pytest.mark.parametrize("tensor", _quantized(), ids=lambda t: f"{t.dtype}-{t.qscheme()}")
def test_round_trip_of_quantized_tensor_keeps_integers_and_scales(tensor: Any) -> None:
    back = round_trip({"q": tensor})["q"]

    assert (back.dtype, back.qscheme()) == (tensor.dtype, tensor.qscheme())
    assert torch.equal(back.int_repr(), tensor.int_repr())
    assert torch.equal(back.dequantize(), tensor.dequantize())


@pytest.mark.parametrize("coalesced", [True, False])
def test_round_trip_of_sparse_tensor_keeps_indices_and_values(coalesced: bool) -> None:
    indices = torch.tensor([[0, 0, 1], [2, 2, 0]])
    tensor = torch.sparse_coo_tensor(indices, torch.ones(3), (2, 3), check_invariants=True)
    tensor = tensor.coalesce() if coalesced else tensor

    back = round_trip([tensor])[0]

    assert (back.layout, back.is_coalesced()) == (torch.sparse_coo, coalesced)
    assert torch.equal(back._indices(), tensor._indices())
    assert torch.equal(back.to_dense(), tensor.to_dense())


def test_tied_weights_are_stored_once_and_tied_again() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    net[1].weight = net[0].weight
    flat = flatten(net)

    back: Any = unflatten(flat.skeleton, reader(flat))

    assert flat.aliases == {"1.weight": "0.weight"}
    assert [t.spec.name for t in flat.tensors] == ["0.weight", "0.bias", "1.bias"]
    pointers = {back[key].untyped_storage().data_ptr() for key in ("0.weight", "1.weight")}
    assert len(pointers) == 1


def test_same_parameter_twice_comes_back_as_one_object() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    back = round_trip([parameter, parameter])

    assert back[0] is back[1]


def test_lone_view_of_big_storage_is_compacted() -> None:
    flat = flatten({"v": torch.zeros(100_000)[5:10]})

    assert [t.spec.size_bytes for t in flat.tensors] == [20]


def test_overlapping_views_of_several_types_share_a_storage_again() -> None:
    base = torch.arange(100, dtype=torch.float32)
    state = {"a": base[3:20], "b": base[10:40], "c": base[20:30].view(torch.uint8)[1:]}
    flat = flatten(state)

    back: Any = unflatten(flat.skeleton, reader(flat))

    assert [t.spec.name for t in flat.tensors] == ["a~storage"]
    assert all(same_tensor(back[key], state[key]) for key in state)
    back["b"][0] = -1.0
    assert back["a"][7] == -1.0


def test_flat_buffer_and_its_views_share_storage_again() -> None:
    flat_weights = torch.arange(10.0)
    state = {"flat": flat_weights, "w": flat_weights[:6].view(2, 3), "b": flat_weights[6:]}
    flat = flatten(state)

    back: Any = unflatten(flat.skeleton, reader(flat))

    assert [t.spec.name for t in flat.tensors] == ["flat"]
    back["flat"].zero_()
    assert not back["w"].any()
    assert not back["b"].any()


def test_array_and_tensor_on_one_memory_share_it_again() -> None:
    array = np.arange(4.0)
    back = round_trip({"array": array, "tensor": torch.from_numpy(array)})

    back["array"][0] = 9
    assert back["tensor"][0] == 9


def test_unaligned_tensors_on_one_memory_are_refused() -> None:
    raw = torch.zeros(64, dtype=torch.uint8)
    array = raw.numpy()
    odd = torch.from_numpy(array[1:33]).view(torch.float32)

    with pytest.raises(UnsupportedState, match="unaligned"):
        flatten([torch.from_numpy(array[2:]), raw[:40], odd])


def test_content_of_contiguous_tensor_is_its_own_memory() -> None:
    tensor = torch.zeros(3)
    [stored] = flatten([tensor]).tensors

    tensor[0] = 1.0

    assert bytes(stored.content()[:4]) == np.float32(1).tobytes()


REFUSED: list[tuple[Callable[[], Any], str]] = [
    (lambda: torch.zeros(2, device="meta"), "meta device"),
    (lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]), "nested tensor"),
    (lambda: torch.nn.UninitializedParameter(), "is a UninitializedParameter"),
    (lambda: torch.eye(2).to_sparse_csr(), "has the layout torch.sparse_csr"),
    (lambda: torch.max(torch.eye(2), 0), "is a torch.return_types.max"),
    (lambda: torch.strided, "is a torch.layout"),
]


def test_tensor_of_another_class_is_refused_and_the_hint_is_a_way_out() -> None:
    labelled = torch.arange(3.0).as_subclass(type("Labelled", (torch.Tensor,), {}))
    with pytest.raises(UnsupportedState, match=r"state\['w'\] is a Labelled") as caught:
        flatten({"w": labelled})
    assert "tensor.detach().as_subclass(torch.Tensor)" in (caught.value.hint or "")
    plain = labelled.detach().as_subclass(torch.Tensor)
    assert torch.equal(round_trip({"w": plain})["w"], torch.arange(3.0))


@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(("make", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_flatten_of_tensor_without_plain_bytes_is_refused(
    make: Callable[[], Any], message: str
) -> None:
    with pytest.raises(UnsupportedState, match=rf"state\['t'\] .*{message}"):
        flatten({"t": make()})


@pytest.mark.filterwarnings("ignore:.*quantize")
def test_flatten_of_packed_quantized_tensor_is_refused() -> None:
    scales, zeros = torch.ones(2), torch.zeros(2)
    packed = torch.quantize_per_channel(torch.ones(2, 2), scales, zeros, 0, torch.quint4x2)

    with pytest.raises(UnsupportedState, match="quantized as quint4x2"):
        flatten([packed])


def test_torch_generator_continues_its_sequence() -> None:
    generator = torch.Generator().manual_seed(7)
    torch.rand(3, generator=generator)
    back = round_trip({"g": generator})["g"]

    assert torch.equal(torch.rand(4, generator=back), torch.rand(4, generator=generator))


def test_torch_generator_state_value_is_accepted_by_its_setter() -> None:
    source, fresh = torch.Generator().manual_seed(3), torch.Generator()
    fresh.set_state(round_trip([source.get_state()])[0])

    assert torch.equal(torch.rand(2, generator=fresh), torch.rand(2, generator=source))


class Training:
    """A tiny model with everything that has a state: AdamW, schedulers, dropout."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.net = torch.nn.Sequential(
            torch.nn.Linear(4, 8),
            torch.nn.BatchNorm1d(8),
            torch.nn.Dropout(0.5),
            torch.nn.Linear(8, 1),
        )
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.01, amsgrad=True)
        steps = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [2, 2, 5], gamma=0.5)
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 20)
        self.scheduler = torch.optim.lr_scheduler.ChainedScheduler([steps, cosine])
        self.data = torch.Generator().manual_seed(seed)
        self.progress: dict[str, Any] = {"step": 0, "losses": [], "best": None}

    def state(self) -> dict[str, Any]:
        return {
            "net": self.net,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "data": self.data,
            "progress": self.progress,
            "rng": torch.get_rng_state(),
        }

    def run(self, steps: int) -> None:
        for _ in range(steps):
            batch = torch.rand(5, 4, generator=self.data)
            loss = (self.net(batch) - batch.sum(1, keepdim=True)).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            self.progress["step"] += 1
            self.progress["losses"].append(loss.item())
            self.progress["best"] = min(self.progress["losses"])


def test_training_resumed_from_flat_state_equals_training_without_a_break() -> None:
    whole = Training(1)
    whole.run(9)

    first = Training(1)
    first.run(4)
    flat = flatten(first.state())
    read = reader(flat)
    second = Training(2)
    restored: Any = restore(second.state(), flat.skeleton, read)
    torch.set_rng_state(restored["rng"])
    second.run(5)

    assert second.progress == whole.progress
    for key, value in whole.net.state_dict().items():
        assert torch.equal(second.net.state_dict()[key], value)
    assert flatten(second.state()).skeleton == flatten(whole.state()).skeleton


def test_memory_of_tensors_that_are_gone_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_values, "_exclusive", {})
    monkeypatch.setattr(torch_values, "_checked_at", 10)
    adopt = torch_values.adopter("float32")
    gone = [adopt(np.ones(4, np.float32)) for _ in range(9)]
    arrays = [np.ones(4, np.float32) for _ in range(3)]

    gone.clear()
    kept = [adopt(array) for array in arrays]

    assert set(torch_values._exclusive) == {one.data_ptr() for one in kept}
    assert all(map(torch_values.is_change_counted, kept))
