# SPDX-License-Identifier: Apache-2.0
"""Open a checkpoint file: raw bytes -> checked -> decrypted -> indexed, all through one descriptor.

Each stage is a source over the one below; no byte leaves a stage unchecked, and nothing is read that is not needed. Errors of
the lower layers are turned once, here, into `CkptmgrError`s that name the file.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ckptmgr.crypto import errors as crypto_errors
from ckptmgr.crypto.key import Key
from ckptmgr.crypto.mindspore_blocks import open_blocks, sniff_mode
from ckptmgr.digest import VerifyingSource
from ckptmgr.errors import (
    ChecksumMismatch,
    CkptmgrError,
    CorruptCheckpoint,
    KeyProblem,
    TamperedCheckpoint,
    TruncatedCheckpoint,
    UnsealedCheckpoint,
    UnsupportedCheckpoint,
)
from ckptmgr.formats import errors as format_errors
from ckptmgr.formats import mindspore_reader, safetensors_file
from ckptmgr.formats.detect import Kind, detect
from ckptmgr.formats.index import TensorEntry, read_tensor_into
from ckptmgr.formats.index import check_crc as check_stored_crc
from ckptmgr.formats.mindspore_entries import MapEntry, TextEntry
from ckptmgr.formats.mindspore_reader import CkptIndex
from ckptmgr.formats.safetensors_file import SafetensorsIndex
from ckptmgr.formats.source import Source, read_bytes
from ckptmgr.manifest import Manifest

_HEAD_BYTES = 16
_ALLOW_HINT = (
    "pass allow_unsealed=True (CLI: --allow-unsealed) if you trust where the file comes from"
)


class MapArrays(NamedTuple):
    """The arrays of a MindSpore MapParameter."""

    key: np.ndarray
    value: np.ndarray
    status: np.ndarray


Value = np.ndarray | str | MapArrays


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """How to read a file.

    Attributes:
        key: The key, or None. Given a key, files that are not authenticated as a whole are refused.
        mode: The cipher mode to insist on, or None to take the one the file names.
        allow_unsealed: Accept plain and unsealed files although a key is given.
    """

    key: Key | None = None
    mode: str | None = None
    allow_unsealed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenCheckpoint:
    """A checkpoint file that was opened, checked as far as it was read, and indexed.

    Attributes:
        path: For messages.
        source: The plaintext.
        index: What it holds and where.
        cipher: The cipher mode, or None for a plain file.
        is_sealed: Whether the file as a whole is authenticated.
        has_digests: Whether a manifest vouches for every byte that is read.
    """

    path: str
    source: Source
    index: CkptIndex | SafetensorsIndex
    cipher: str | None
    is_sealed: bool
    has_digests: bool

    @property
    def format(self) -> str:
        """`ckpt` or `safetensors`."""
        return "ckpt" if isinstance(self.index, CkptIndex) else "safetensors"

    @property
    def metadata(self) -> dict[str, str]:
        """The metadata strings of the file."""
        return dict(self.index.metadata or {})


def open_source(
    raw: Source, *, path: str, options: ReadOptions, manifest: Manifest | None = None
) -> OpenCheckpoint:
    """Open a checkpoint over raw bytes.

    Args:
        raw: The bytes as stored.
        path: For messages.
        options: Key and what to accept.
        manifest: Checks every byte that is read against its digests.

    Raises:
        CorruptCheckpoint, KeyProblem, UnsupportedCheckpoint: See `ckptmgr.errors`.
    """
    with translated_errors(path):
        checked = raw if manifest is None else VerifyingSource(raw, manifest.file.digest, path=path)
        plain, cipher, is_sealed = _decrypted(checked, path=path, options=options)
        return OpenCheckpoint(
            path=path,
            source=plain,
            index=_index(plain, path),
            cipher=cipher,
            is_sealed=is_sealed,
            has_digests=manifest is not None,
        )


def _decrypted(
    source: Source, *, path: str, options: ReadOptions
) -> tuple[Source, str | None, bool]:
    kind = detect(source)
    if kind is not Kind.MINDSPORE_ENCRYPTED:
        _refuse_unreadable(kind, path)
        if options.key is not None and not options.allow_unsealed:
            raise UnsealedCheckpoint(
                "a key was given, but the file is not encrypted, so nothing proves who wrote it",
                path=path,
                hint=_ALLOW_HINT,
            )
        return source, None, False
    mode = sniff_mode(read_bytes(source, 0, min(_HEAD_BYTES, source.size)))
    if options.key is None:
        raise KeyProblem(
            f"the file is encrypted ({mode}); a key is needed",
            path=path,
            hint="pass dec_key or --key",
        )
    blocks = open_blocks(
        source, options.key, options.mode or str(mode), allow_unsealed=options.allow_unsealed
    )
    return blocks, mode, blocks.is_sealed


def _refuse_unreadable(kind: Kind, path: str) -> None:
    if kind is Kind.ZIP_PICKLE:
        raise UnsupportedCheckpoint(
            "this is a torch.save file (zip with pickled code), which is never loaded here",
            path=path,
            hint="convert it with torch.load(weights_only=True) and ckptmgr.save_checkpoint",
        )
    if kind is Kind.CKPTMGR_CONTAINER:
        raise UnsupportedCheckpoint(
            "encrypted containers are not supported by this version", path=path
        )
    if kind is Kind.EMPTY:
        raise TruncatedCheckpoint(
            "the file is empty; The loaded parameter dict is empty after filter or specify, please check whether "
            "'filter_prefix' or 'specify_prefix' are set correctly.",
            path=path,
            offset=0,
        )


def _index(source: Source, path: str) -> CkptIndex | SafetensorsIndex:
    if detect(source) is Kind.SAFETENSORS:
        return safetensors_file.read_safetensors_index(source)
    if path.endswith(".safetensors"):
        return safetensors_file.read_safetensors_index(source)
    return mindspore_reader.read_ckpt_index(source)


def read_values(
    opened: OpenCheckpoint,
    *,
    choose: Callable[[str], bool] = lambda _: True,
    check_crc: bool = False,
) -> dict[str, Value]:
    """Read tensors straight into new arrays, in file order.

    Args:
        opened: The checkpoint.
        choose: Which names to read.
        check_crc: Compare the CRC32 of the whole file with the stored one.

    Raises:
        CorruptCheckpoint: Damage was found; nothing is returned.
        ChecksumMismatch: The CRC differs, or a plain `.ckpt` that nothing else vouches for has none: its end may be cut off.
    """
    with translated_errors(opened.path):
        arrays: dict[int, np.ndarray] = {}

        def buffer_for(entry: TensorEntry) -> memoryview:
            array = arrays[id(entry)] = np.empty(entry.spec.shape, entry.spec.dtype.to_numpy())
            return _bytes_of(array)

        if check_crc:
            _read_checking_crc(opened, buffer_for, choose)
        else:
            for entry in _chosen_tensors(opened, choose):
                read_tensor_into(opened.source, entry, buffer_for(entry))
        return dict(_values(opened, arrays, choose))


def _read_checking_crc(
    opened: OpenCheckpoint,
    buffer_for: Callable[[TensorEntry], memoryview],
    choose: Callable[[str], bool],
) -> None:
    wanted = {id(entry) for entry in _chosen_tensors(opened, choose)}
    index = opened.index

    def wanted_buffer(entry: TensorEntry) -> memoryview | None:
        return buffer_for(entry) if id(entry) in wanted else None

    if isinstance(index, CkptIndex):
        if index.crc is None and not (opened.cipher is not None or opened.has_digests):
            raise ChecksumMismatch(
                "crc_check was asked for, but the file has no CRC32: it was saved without one, or its end was cut off",
                path=opened.path,
                offset=index.body_bytes,
                hint="load it without crc_check if you know that it was saved without a CRC",
            )
        crc = mindspore_reader.read_all_into(opened.source, index, wanted_buffer)
    elif index.crc is None:
        for entry in _chosen_tensors(opened, choose):
            read_tensor_into(opened.source, entry, buffer_for(entry))
        return
    else:
        crc = safetensors_file.read_all_into(opened.source, index, wanted_buffer)
    if index.crc is not None:
        check_stored_crc(index.crc, crc)


def _chosen_tensors(opened: OpenCheckpoint, choose: Callable[[str], bool]) -> Iterator[TensorEntry]:
    for entry in opened.index.entries:
        if isinstance(entry, TextEntry) or not choose(entry.name):
            continue
        if isinstance(entry, MapEntry):
            yield from (entry.key, entry.value, entry.status)
        else:
            yield entry


def _values(
    opened: OpenCheckpoint, arrays: dict[int, np.ndarray], choose: Callable[[str], bool]
) -> Iterator[tuple[str, Value]]:
    for entry in opened.index.entries:
        if not choose(entry.name):
            continue
        if isinstance(entry, TextEntry):
            yield entry.name, entry.text
        elif isinstance(entry, MapEntry):
            parts = (entry.key, entry.value, entry.status)
            yield entry.name, MapArrays(*(arrays[id(part)] for part in parts))
        else:
            yield entry.name, arrays[id(entry)]


def _bytes_of(array: np.ndarray) -> memoryview:
    flat: np.ndarray = array.reshape(-1).view(np.uint8)
    return flat.data


@contextlib.contextmanager
def translated_errors(path: str) -> Iterator[None]:
    """Turn errors of the format and crypto layers into `CkptmgrError`s that name the file."""
    try:
        yield
    except format_errors.FormatError as error:
        raise _from_format(error, path) from error
    except crypto_errors.CryptoError as error:
        raise _from_crypto(error, path) from error


def _from_format(error: format_errors.FormatError, path: str) -> CkptmgrError:
    if isinstance(error, format_errors.UnsupportedError):
        return UnsupportedCheckpoint(str(error), path=path)
    kind: type[CorruptCheckpoint] = CorruptCheckpoint
    if isinstance(error, format_errors.TruncatedError):
        kind = TruncatedCheckpoint
    elif isinstance(error, format_errors.ChecksumError):
        kind = ChecksumMismatch
    return kind(str(error), path=path, offset=error.offset, tensor=error.tensor)


def _from_crypto(error: crypto_errors.CryptoError, path: str) -> CkptmgrError:
    if isinstance(error, crypto_errors.TamperedError):
        return TamperedCheckpoint(str(error), path=path, offset=error.offset, hint=error.hint)
    if isinstance(error, crypto_errors.TruncatedCiphertextError):
        return TruncatedCheckpoint(str(error), path=path, offset=error.offset, hint=error.hint)
    if isinstance(error, crypto_errors.UnsealedError):
        hint = f"MindSpore itself wrote it, or its end was cut off; {_ALLOW_HINT}"
        return UnsealedCheckpoint(str(error), path=path, hint=hint)
    if isinstance(error, crypto_errors.UnsupportedSuiteError):
        return UnsupportedCheckpoint(str(error), path=path, hint=error.hint)
    return KeyProblem(str(error), path=path, hint=error.hint)
