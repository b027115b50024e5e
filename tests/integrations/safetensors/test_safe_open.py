# SPDX-License-Identifier: Apache-2.0
"""`ckptmgr.safe_open`: plain files as the library opens them, and all others with the same interface."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors

import ckptmgr
from ckptmgr import (
    CheckpointNotFound,
    CorruptCheckpoint,
    KeyProblem,
    PackedArray,
    UnprovenCheckpoint,
    UnsupportedCheckpoint,
)
from tests.cli.running import key_file, run
from tests.support import api
from tests.support.saved import flip

KEY = bytes(range(32))
WEIGHT = np.arange(50, dtype=np.float32).reshape(10, 5)
TENSORS: dict[str, Any] = {
    "weight": WEIGHT,
    "bias": np.arange(3, dtype=np.float64),
    "scalar": np.array(7, np.int32),
    "empty": np.zeros((0, 5), np.float16),
}
PLAIN_INDEXES = [
    slice(None), (), slice(2), slice(2, 4), (slice(None), slice(2)), (0, slice(2)), (slice(2, None), 0),
    (slice(2, None), -1), (slice(2, None), -5), 3, -10, (3, 4), [], slice(0, 0), slice(2, 2),
]  # fmt: skip
"""What the library takes alike for every framework."""


def opened(path: Path, framework: str = "np", **options: Any) -> Any:
    return ckptmgr.safe_open(path, framework, **options)


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    path = tmp_path / "plain.safetensors"
    ckptmgr.save_file(TENSORS, path, {"model": "small"})
    return path


@pytest.fixture
def sealed(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    ckptmgr.save_file(TENSORS, path, {"model": "small"}, key=KEY)
    return path


def save(kind: str, folder: Path) -> tuple[Path, dict[str, Any]]:
    """Save TENSORS as a kind of file; return its path, and the options that open it."""
    kinds: dict[str, dict[str, Any]] = {
        "container": {"format": "safetensors", "enc_key": KEY, "metadata": {"model": "small"}},
        "compressed": {
            "format": "safetensors",
            "compression": "zstd",
            "metadata": {"model": "small"},
        },
        "both": {"format": "safetensors", "compression": "zstd", "enc_key": KEY},
        "ckpt": {},
        "encrypted ckpt": {"enc_key": KEY},
    }
    options = kinds[kind]
    saved = ckptmgr.save_checkpoint(TENSORS, folder / "x", **options)
    return saved.path, {"key": KEY} if "enc_key" in options else {}


KINDS = ("container", "compressed", "both", "ckpt", "encrypted ckpt")


def test_plain_file_is_opened_by_the_library(plain: Path) -> None:
    with opened(plain) as file:
        assert file.__class__.__name__ == "safe_open"
        assert file.metadata() == {"model": "small"}


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_of_every_kind_of_file_are_those_that_were_saved(tmp_path: Path, kind: str) -> None:
    path, options = save(kind, tmp_path)
    with opened(path, **options) as file:
        assert file.keys() == sorted(TENSORS)
        assert sorted(file.offset_keys()) == sorted(TENSORS)
        read = file.get_tensors()
    for name, array in TENSORS.items():
        assert (read[name].dtype, read[name].shape) == (array.dtype, array.shape)
        assert np.array_equal(read[name], array)


@pytest.mark.parametrize("kind", KINDS)
def test_slices_of_every_kind_of_file_say_shape_and_type(tmp_path: Path, kind: str) -> None:
    path, options = save(kind, tmp_path)
    with opened(path, **options) as file:
        part = file.get_slice("weight")
        assert (part.get_shape(), part.get_dtype()) == ([10, 5], "F32")
        assert np.array_equal(part[2:4, 1:], WEIGHT[2:4, 1:])


@pytest.mark.parametrize(
    ("kind", "metadata"),
    [
        ("container", {"format": "pt", "model": "small"}),
        ("compressed", {"format": "pt", "model": "small"}),
        ("ckpt", None),
    ],
)
def test_metadata_is_that_of_the_header(
    tmp_path: Path, kind: str, metadata: dict[str, str] | None
) -> None:
    path, options = save(kind, tmp_path)
    with opened(path, **options) as file:
        assert file.metadata() == metadata


def test_keys_of_a_ckpt_are_its_tensors_alone(tmp_path: Path) -> None:
    path = ckptmgr.save_checkpoint({"w": WEIGHT, "net": "lenet"}, tmp_path / "x.ckpt").path
    with opened(path) as file:
        assert file.keys() == ["w"]


def outcome(read: Callable[[], Any]) -> tuple[object, ...]:
    """Return the result of a read, in a form that compares."""
    try:
        value = np.asarray(read())
    except (safetensors.SafetensorError, IndexError, TypeError, ValueError) as error:
        return type(error), str(error)
    return value.dtype, value.shape, value.tobytes()


OUTSIDE = [
    (slice(2, None), -6), [0, 1], (slice(2, None), 20), slice(20), (slice(None), slice(20)), 10, -11,
    slice(10, None), slice(3, 99),
]  # fmt: skip


@pytest.mark.parametrize("index", [*PLAIN_INDEXES, *OUTSIDE], ids=str)
def test_arrays_are_indexed_as_by_the_library(plain: Path, sealed: Path, index: Any) -> None:
    with opened(plain) as theirs, opened(sealed, key=KEY) as ours:
        expected = outcome(lambda: theirs.get_slice("weight")[index])
        assert outcome(lambda: ours.get_slice("weight")[index]) == expected


@pytest.mark.parametrize(
    "index",
    [
        *PLAIN_INDEXES, *OUTSIDE, ..., (..., 1), (2, ...), (..., slice(1, 3)), slice(None, None, 3), slice(-3, None),
        (slice(1, 9, 2), slice(None, None, 2)), None, True, (0, 0, 0), slice(None, None, -1), "a", 1.5, slice(7, 3),
    ],
    ids=str,
)  # fmt: skip
def test_torch_tensors_are_indexed_as_by_the_library(plain: Path, sealed: Path, index: Any) -> None:
    pytest.importorskip("torch")
    with opened(plain, "pt") as theirs, opened(sealed, "pt", key=KEY) as ours:
        expected = outcome(lambda: theirs.get_slice("weight")[index])
        assert outcome(lambda: ours.get_slice("weight")[index]) == expected


@pytest.mark.parametrize(
    "index",
    [..., (..., 1), (2, ...), slice(None, None, 3), slice(-3, None), (slice(1, 9, 2), -1), slice(7, 3)],
    ids=str,
)  # fmt: skip
def test_arrays_take_what_the_library_ignores_or_refuses_with_numpys_meaning(
    sealed: Path, index: Any
) -> None:
    with opened(sealed, key=KEY) as file:
        assert np.array_equal(file.get_slice("weight")[index], WEIGHT[index])


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ((0, 0, 0), r"\[0, 0, 0\] with shape \[10, 5\]: more slicing indexes than dimensions"),
        (slice(None, None, -1), "steps below 1 are not implemented"),
        (None, "NoneType is neither a number nor a range"),
        (True, "bool is neither a number nor a range"),
    ],
)
def test_index_of_another_kind_is_refused(sealed: Path, index: Any, message: str) -> None:
    with (
        opened(sealed, key=KEY) as file,
        pytest.raises(safetensors.SafetensorError, match=message),
    ):
        file.get_slice("weight")[index]


def test_slice_reads_only_the_segments_that_it_needs(tmp_path: Path) -> None:
    path = tmp_path / "large.safetensors"
    large = np.arange(3 << 20, dtype=np.uint32).reshape(3, 1 << 20)  # three times 4 MiB
    ckptmgr.save_file({"large": large}, path, key=KEY)
    (tmp_path / "large.safetensors.manifest.json").unlink()  # its digests have ranges of 16 MiB
    flip(path, path.stat().st_size - (1 << 20))
    with opened(path, key=KEY) as file:
        part = file.get_slice("large")
        assert np.array_equal(part[0], large[0])
        assert np.array_equal(part[:2, 5:7], large[:2, 5:7])
        with pytest.raises(CorruptCheckpoint):
            part[2, 0]


def test_block_of_long_rows_is_read_in_parts(tmp_path: Path) -> None:
    path = tmp_path / "long.safetensors"
    array = np.arange(2 * 3 * (3 << 20), dtype=np.uint32).astype(np.uint8).reshape(2, 3, 3 << 20)
    ckptmgr.save_file({"w": array}, path, key=KEY)
    with opened(path, key=KEY) as file:
        part = file.get_slice("w")
        assert np.array_equal(part[:, 1:, 7:90], array[:, 1:, 7:90])
        assert np.array_equal(part[1, :, -5:], array[1, :, -5:])


def test_key_is_bytes_or_a_source(
    sealed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RUN_KEY", KEY.hex())
    (tmp_path / "run.key").write_text(KEY.hex())
    (tmp_path / "run.key").chmod(0o600)
    for key in (KEY, "env:RUN_KEY", f"file:{tmp_path / 'run.key'}"):
        with opened(sealed, key=key) as file:
            assert np.array_equal(file.get_tensor("weight"), WEIGHT)


def test_wrong_key_is_refused(sealed: Path) -> None:
    with pytest.raises(KeyProblem):
        opened(sealed, key=bytes(32))


@pytest.mark.parametrize("kind", ["container", "both", "encrypted ckpt"])
def test_missing_key_is_asked_for_by_its_name(tmp_path: Path, kind: str) -> None:
    path, _ = save(kind, tmp_path)
    with pytest.raises(KeyProblem, match=r"a key is needed\nhint: pass key=") as caught:
        opened(path)
    assert str(path) in str(caught.value)


def test_key_of_another_kind_is_refused_by_its_name(sealed: Path) -> None:
    key: Any = 7
    with pytest.raises((TypeError, ValueError), match="key"):
        opened(sealed, key=key)


def test_plain_file_is_refused_with_a_key_unless_allowed(plain: Path) -> None:
    with pytest.raises(KeyProblem, match="allow_unencrypted"):
        opened(plain, key=KEY)
    with opened(plain, key=KEY, allow_unencrypted=True) as file:
        assert np.array_equal(file.get_tensor("weight"), WEIGHT)


def test_file_that_no_trusted_key_signed_is_refused(plain: Path) -> None:
    with pytest.raises((UnprovenCheckpoint, KeyProblem)):
        opened(plain, trusted_keys=[api.SigningKey.generate().public_key])


def test_damaged_container_is_never_a_wrong_value(sealed: Path) -> None:
    flip(sealed, sealed.stat().st_size - 20)
    with pytest.raises(CorruptCheckpoint), opened(sealed, key=KEY) as file:
        file.get_tensors()


def test_damaged_description_is_found_at_the_opening(tmp_path: Path) -> None:
    path, _ = save("ckpt", tmp_path)
    flip(path, path.read_bytes().index(b"bias"))
    with pytest.raises(CorruptCheckpoint):
        opened(path)


def test_missing_file_is_the_librarys_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="No such file or directory"):
        opened(tmp_path / "none", key=KEY)


def test_file_that_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    for content in (b"", b"no checkpoint, but a text"):
        (tmp_path / "x").write_bytes(content)
        with pytest.raises(safetensors.SafetensorError):
            opened(tmp_path / "x")
    (tmp_path / "x").write_bytes(b"PK\x03\x04" + bytes(30))
    with pytest.raises(UnsupportedCheckpoint):
        opened(tmp_path / "x")


def test_missing_tensor_and_closed_file_are_the_librarys_errors(sealed: Path) -> None:
    with opened(sealed, key=KEY) as file:
        part = file.get_slice("weight")
        with pytest.raises(safetensors.SafetensorError, match="does not contain tensor other"):
            file.get_tensor("other")
        with pytest.raises(safetensors.SafetensorError, match="does not contain tensor other"):
            file.get_slice("other")
    file.close()
    for read in (file.keys, file.metadata, lambda: file.get_tensor("weight"), lambda: part[0]):
        with pytest.raises(safetensors.SafetensorError, match="File is closed"):
            read()


@pytest.mark.parametrize(
    "options",
    [{"framework": "x"}, {"device": "cuda:0"}, {"device": 0}, {"backend": "x"}],
    ids=str,
)
def test_unusable_option_is_the_librarys_error(
    plain: Path, sealed: Path, options: dict[str, Any]
) -> None:
    with pytest.raises(safetensors.SafetensorError) as theirs:
        opened(plain, **options)
    with pytest.raises(safetensors.SafetensorError) as ours:
        opened(sealed, key=KEY, **options)
    assert str(ours.value) == str(theirs.value)


@pytest.mark.parametrize("framework", ["tf", "mlx", "paddle"])
def test_framework_that_only_the_library_knows_is_refused_by_name(
    sealed: Path, framework: str
) -> None:
    with pytest.raises(UnsupportedCheckpoint, match=f"framework '{framework}'"):
        opened(sealed, framework, key=KEY)


def test_torch_tensors_are_made_on_the_device(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    path = tmp_path / "t.safetensors"
    value = torch.arange(4, dtype=torch.bfloat16)
    ckptmgr.save_file({"b": value}, path, key=KEY)
    for device in ("cpu", torch.device("cpu"), None):
        with opened(path, "pt", device=device, key=KEY) as file:
            assert torch.equal(file.get_tensor("b"), value)
            assert torch.equal(file.get_slice("b")[1:], value[1:])
    with opened(path, "pt", device="meta", key=KEY) as file:
        assert file.get_tensor("b").is_meta


def test_jax_arrays_are_read(sealed: Path) -> None:
    jax = pytest.importorskip("jax")
    with opened(sealed, "jax", key=KEY) as file:
        read = file.get_tensor("weight")
        assert isinstance(read, jax.Array)
        assert np.array_equal(read, WEIGHT)
        assert np.array_equal(file.get_slice("weight")[2:, 0], WEIGHT[2:, 0])


def test_packed_elements_are_torchs_where_it_has_them(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    path = tmp_path / "p.safetensors"
    packed = {
        "f4": PackedArray("F4", (2, 4), np.arange(4, dtype=np.uint8)),
        "odd": PackedArray("F4", (2, 1), np.arange(1, dtype=np.uint8)),
        "f6": PackedArray("F6_E2M3", (4,), np.arange(3, dtype=np.uint8)),
    }
    ckptmgr.save_file(packed, path, key=KEY)
    with opened(path, "pt", key=KEY) as file:
        read = file.get_tensor("f4")
        assert (read.dtype, tuple(read.shape)) == (torch.float4_e2m1fn_x2, (2, 2))
        assert file.get_slice("f4").get_shape() == [2, 4]
        part = file.get_slice("f4")[1]
        assert part.view(torch.uint8).tolist() == [2, 3]
        for name in ("odd", "f6"):
            with pytest.raises(UnsupportedCheckpoint, match=f"'{name}' is F.*pytorch has no type"):
                file.get_tensor(name)
    with opened(path, key=KEY) as file:
        assert file.get_tensor("f6").data.tolist() == [0, 1, 2]
        with pytest.raises(safetensors.SafetensorError, match="F4 cannot be sliced"):
            file.get_slice("f4")[0]
    with ckptmgr.open_checkpoint(path, dec_key=KEY) as reader:
        with pytest.raises(UnsupportedCheckpoint, match="may end within a byte"):
            reader.read_block("f4", [(0, 1)])
        with pytest.raises(CheckpointNotFound):
            reader.read_block("none", [])


def test_commands_take_a_container_of_any_name(sealed: Path, tmp_path: Path) -> None:
    result = run("verify", sealed, "--key", key_file(tmp_path))
    assert result.exit_code == 0, result.output
    loaded = ckptmgr.load_checkpoint(sealed, dec_key=KEY)
    assert np.array_equal(loaded["weight"], WEIGHT)
