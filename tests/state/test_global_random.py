# SPDX-License-Identifier: Apache-2.0
"""`GlobalRandom`: its generators, and that draws after a restore are those after the save."""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptmgr import GlobalRandom, StateMismatch, load_state, save_state
from ckptmgr.state.packed import pack, unpack
from ckptmgr.state.paths import TreeError


@pytest.fixture(autouse=True)
def _generators_as_before() -> Iterator[None]:
    before = GlobalRandom().state_dict()
    yield
    GlobalRandom().load_state_dict(before)


def drawn() -> list[float]:
    found = [random.random(), random.gauss(0, 1), float(np.random.random())]
    if "torch" in sys.modules:
        found.append(float(sys.modules["torch"].rand(())))
    return found


def test_global_generators_go_on_where_the_state_was_saved(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    random.gauss(0, 1)  # of each pair of normal numbers, the second is kept for the next call
    state = {"random": GlobalRandom(), "step": 1}
    save_state(state, tmp_path / "s.safetensors")
    expected = drawn()
    drawn()
    load_state(tmp_path / "s.safetensors", into=state)
    assert drawn() == expected


def test_global_generators_are_set_after_objects_that_draw_when_they_load(tmp_path: Path) -> None:
    class Drawing:
        def state_dict(self) -> dict[str, int]:
            return {"n": 1}

        def load_state_dict(self, state: object) -> None:
            random.random()

    state = {"random": GlobalRandom(), "z": Drawing()}
    save_state(state, tmp_path / "s.safetensors")
    expected = random.random()
    load_state(tmp_path / "s.safetensors", into=state)
    assert random.random() == expected


def test_repr_names_what_is_covered() -> None:
    covered = ["python", "numpy", *(["torch"] if "torch" in sys.modules else [])]
    assert repr(GlobalRandom()).startswith(f"GlobalRandom({', '.join(covered)}")
    assert repr(GlobalRandom({"dropout": np.zeros(2)})).endswith("keys=['dropout'])")


def test_keys_of_jax_come_back_in_kind(tmp_path: Path) -> None:
    jax: Any = pytest.importorskip("jax")
    generators = GlobalRandom({"typed": jax.random.key(3), "raw": jax.random.PRNGKey(4)})
    save_state({"random": generators}, tmp_path / "s.safetensors")
    expected = [float(jax.random.normal(key)) for key in generators.keys.values()]
    fresh = GlobalRandom({"typed": jax.random.key(0), "raw": jax.random.PRNGKey(0)})
    load_state(tmp_path / "s.safetensors", into={"random": fresh})
    assert [float(jax.random.normal(key)) for key in fresh.keys.values()] == expected


@pytest.mark.parametrize(
    ("stored", "problem"),
    [
        (5, "is a GlobalRandom, stored is no state of one"),
        ({"fortran": 1}, "is a GlobalRandom, stored is no state of one"),
        ({"keys": {"dropout": np.zeros(2)}}, "has the keys [], stored are ['dropout']"),
        ({"keys": 5}, "has the keys [], stored are []"),
        ({"python": {"version": 3, "words": [1], "gauss": None}}, "Python's generator is damaged"),
        ({"numpy": {"bit_generator": "MT19937"}}, "NumPy's generator is damaged"),
    ],
    ids=["number", "library", "keys", "no keys", "python", "numpy"],
)
def test_state_of_other_generators_is_refused_and_changes_nothing(
    stored: object, problem: str, tmp_path: Path
) -> None:
    save_state({"random": stored}, tmp_path / "s.safetensors")
    generators, before = GlobalRandom(), random.getstate()
    with pytest.raises(StateMismatch, match=re.escape("state['random']")) as caught:
        load_state(tmp_path / "s.safetensors", into={"random": generators})
    assert problem in str(caught.value) or "is a GlobalRandom, stored is" in str(caught.value)
    if isinstance(stored, dict):
        with pytest.raises(ValueError, match=re.escape(problem)):
            generators.load_state_dict(stored)
    assert random.getstate() == before


def test_damaged_state_of_torch_is_refused() -> None:
    torch: Any = pytest.importorskip("torch")
    with pytest.raises(ValueError, match="the state of torch's generator is damaged"):
        GlobalRandom().load_state_dict({"torch": torch.zeros(3, dtype=torch.uint8)})


def test_raw_key_of_another_shape_is_refused() -> None:
    jax: Any = pytest.importorskip("jax")
    generators = GlobalRandom({"k": jax.random.PRNGKey(4)})
    with pytest.raises(ValueError, match=r"has the key 'k' as uint32\[2\], stored is another"):
        generators.load_state_dict({"keys": {"k": np.zeros(3, np.uint32)}})


def test_another_number_of_cuda_devices_is_said(caplog: pytest.LogCaptureFixture) -> None:
    torch: Any = pytest.importorskip("torch")
    here = torch.cuda.device_count()
    state = GlobalRandom().state_dict()
    state["cuda"] = [torch.zeros(16, dtype=torch.uint8)] * (here + 2)
    expected = random.random()
    GlobalRandom().load_state_dict(state)
    assert random.random() == expected
    said = f"the random states of {here + 2} CUDA devices were saved, and {here} devices are here"
    assert said in caplog.text


def test_generators_of_real_devices_go_on() -> None:
    torch: Any = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs CUDA")
    torch.rand(1, device="cuda")
    generators = GlobalRandom()
    assert f"cuda x {torch.cuda.device_count()}" in repr(generators)
    stored = unpack(pack(generators.state_dict()))
    expected = torch.rand(3, device="cuda").tolist()
    assert isinstance(stored, dict)
    generators.load_state_dict(stored)
    assert torch.rand(3, device="cuda").tolist() == expected


_TEXT = pack({"a": np.arange(3), "b": [1, None]})


@pytest.mark.parametrize(
    "damaged",
    ["", _TEXT[:-1], _TEXT.replace("int64", "int32"), "00000000{}", "a\ud800"],
    ids=["empty", "cut", "changed", "crc", "surrogate"],
)
def test_damaged_packed_state_is_refused(damaged: str) -> None:
    with pytest.raises(TreeError):
        unpack(damaged)


@pytest.mark.parametrize(
    "body",
    [
        "{}",
        '{"skeleton":"","tensors":5}',
        '{"skeleton":"","tensors":{"a":["int64",[1],"?"]}}',
        '{"skeleton":"","tensors":{"a":["int65",[1],""]}}',
        '{"skeleton":"","tensors":{"a":["int64",[2],"AAAAAAAAAAA="]}}',
        '{"skeleton":"{}","tensors":{}}',
    ],
    ids=["nothing", "no dict", "base64", "type", "shape", "skeleton"],
)
def test_packed_state_that_is_none_is_refused(body: str) -> None:
    from ckptmgr.formats.file_crc import crc32

    with pytest.raises(TreeError):
        unpack(f"{crc32(body.encode()):08x}{body}")
