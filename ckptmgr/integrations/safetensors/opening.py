# SPDX-License-Identifier: Apache-2.0
"""`safe_open`: plain files by the safetensors library, encrypted and compressed ones by ours."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from safetensors import SafetensorError
from safetensors import safe_open as library_open

from ckptmgr.config.keys import check_given_key
from ckptmgr.core.arguments import check_is_bool
from ckptmgr.core.errors import KeyProblem
from ckptmgr.core.urls import is_url
from ckptmgr.files.load.plaintext import ENCRYPTED, kind_of
from ckptmgr.files.open_checkpoint import CheckpointReader, open_checkpoint
from ckptmgr.formats.detect import Kind
from ckptmgr.formats.source import BytesSource
from ckptmgr.integrations.safetensors.slices import LazySlice
from ckptmgr.integrations.safetensors.values import Conversion

if TYPE_CHECKING:
    from ckptmgr.crypto.keys.signing import PublicKey

_BACKENDS = ("mmap", "pread")
_OURS = (*ENCRYPTED, Kind.COMPRESSED, Kind.MINDSPORE_CKPT, Kind.ZIP_PICKLE)
_PROBE_BYTES = 16


def safe_open(
    filename: str | os.PathLike[str],
    framework: str = "pt",
    device: Any = "cpu",
    *,
    backend: str = "mmap",
    key: bytes | str | None = None,
    allow_unsealed: bool = False,
    allow_unencrypted: bool = False,
    trusted_keys: Iterable[str | os.PathLike[str] | PublicKey] = (),
) -> Any:
    """Open a file for reading single tensors or slices of them, as `safetensors.safe_open`.

    A plain safetensors file is opened by the library, unless `key` or `trusted_keys` ask for a
    proof of it. Encrypted and compressed files and `.ckpt` are read by ckptmgr, which checks every
    byte that it returns and reads only the segments of the file that a tensor or slice needs.

    Args:
        filename: The file; or its address in an object store, such as `s3://bucket/run/net.safetensors`,
            which ckptmgr reads by ranges.
        framework: Of the returned tensors: `pt`, `np` or `jax`, and for plain files every other one
            of the library.
        device: Where torch tensors are made; a string, a number or a torch device.
        backend: How the library reads plain files: `mmap` or `pread`. Ours reads the others alike.
        key: The key of encrypted files, or a source as for `CheckpointConfig`; files that are not
            authenticated as a whole are then refused, unless `allow_unsealed`.
        allow_unsealed: With a key, accept encrypted files without a seal (MindSpore's own).
        allow_unencrypted: With a key, accept plain files, too.
        trusted_keys: Public keys, or their files in PEM, as for `open_checkpoint`.

    Returns:
        An object with `keys`, `offset_keys`, `metadata`, `get_tensor`, `get_tensors` and
        `get_slice`, to be used in a `with` block.

    Raises:
        FileNotFoundError: There is no such file.
        SafetensorError: The library refuses the file or an argument.
        KeyProblem: Wrong or missing key, or no seal.
        CorruptCheckpoint: Ours found damage.
        UnsupportedCheckpoint: It is no checkpoint.
    """
    check_is_bool("allow_unsealed", allow_unsealed)
    check_is_bool("allow_unencrypted", allow_unencrypted)
    checked, trusted = check_given_key("key", key), tuple(trusted_keys)
    is_address = is_url(filename)
    kind = None if is_address else _kind_of(filename)
    if not is_address and (kind is None or (kind not in _OURS and checked is None and not trusted)):
        return library_open(filename, framework=framework, device=device, backend=backend)
    if backend not in _BACKENDS:
        raise SafetensorError(f'backend "{backend}" is invalid (expected one of: "mmap", "pread")')
    conversion = Conversion.of(framework, device)
    if kind in ENCRYPTED and checked is None:
        raise KeyProblem(
            "the file is encrypted; a key is needed",
            path=filename,
            hint="pass key=, the bytes or a source such as 'file:run.key'",
        )
    reader = open_checkpoint(
        filename,
        dec_key=checked,
        allow_unsealed=allow_unsealed,
        allow_unencrypted=allow_unencrypted,
        trusted_keys=trusted,
    )
    with contextlib.ExitStack() as stack:  # the descriptions may turn out damaged
        file = CheckedFile(stack.enter_context(reader), conversion)
        stack.pop_all()
    return file


def _kind_of(path: str | os.PathLike[str]) -> Kind | None:
    """Return the kind of a file, or None where there is none that can be read."""
    try:
        with Path(path).open("rb") as file:
            head = file.read(_PROBE_BYTES)
    except OSError:
        return None
    return kind_of(BytesSource(head), name=Path(path).name)


class CheckedFile:
    """An open file of ours, with the methods of the library's `safe_open`."""

    def __init__(self, reader: CheckpointReader, conversion: Conversion) -> None:
        self._open: CheckpointReader | None = reader
        self._names = dict.fromkeys(reader.tensor_names())
        self._conversion = conversion

    def keys(self) -> list[str]:
        """Return the names of the tensors, sorted."""
        return sorted(self.offset_keys())

    def offset_keys(self) -> list[str]:
        """Return the names of the tensors, in the order of the file."""
        self._reader()
        return list(self._names)

    def metadata(self) -> dict[str, str] | None:
        """Return the strings of the header, or None without any."""
        return dict(self._reader().metadata) or None

    def get_tensor(self, name: str) -> Any:
        """Return a tensor in the framework of the file, checked.

        Raises:
            SafetensorError: There is no such tensor, or the file is closed.
            CorruptCheckpoint: It is damaged.
        """
        reader = self._holding(name)
        return self._conversion.of_value(reader.read(name), name)

    def get_tensors(self) -> dict[str, Any]:
        """Return all tensors, by name."""
        values = self._reader().read_tensors()
        return {name: self._conversion.of_value(one, name) for name, one in values.items()}

    def get_slice(self, name: str) -> LazySlice:
        """Return a tensor that is read when it is indexed; raises SafetensorError as `get_tensor`."""
        self._holding(name)
        return LazySlice(lambda: self._holding(name), name, self._conversion)

    def close(self) -> None:
        """Close the file; tensors that were returned stay valid."""
        if self._open is not None:
            self._open.close()
        self._open = None

    def _reader(self) -> CheckpointReader:
        if self._open is None:
            raise SafetensorError("File is closed")
        return self._open

    def _holding(self, name: str) -> CheckpointReader:
        reader = self._reader()
        if name not in self._names:
            raise SafetensorError(f"File does not contain tensor {name}")
        return reader

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
