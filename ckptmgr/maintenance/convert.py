# SPDX-License-Identifier: Apache-2.0
"""Decrypt and encrypt files as streams: constant memory, and only checked bytes come out.

* A checkpoint is published like a save: temporary file, sync, rename, with a manifest. After an
  error there is no output.
* Any other file goes into a container as it is, and out of it again; it is no checkpoint and gets
  no manifest. The names decide: a file is one if neither its old nor its new name ends in `.ckpt`
  or `.safetensors`.
* A sealed file decrypts to the bytes that were sealed: an ordinary `.ckpt`, CRC trailer included.
* Damage is never sealed: digests and CRC32 are checked before the output exists.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

from ckptmgr.core.contexts import contextmanager
from ckptmgr.core.error_translation import translated_errors
from ckptmgr.core.errors import KeyProblem, UnsafeWrite, UnsupportedCheckpoint
from ckptmgr.core.names import CONTAINER_SUFFIX, DATA_SUFFIXES, without_envelope
from ckptmgr.crypto.keys.ring import Keys
from ckptmgr.files.load.open import open_source
from ckptmgr.files.load.options import ReadOptions
from ckptmgr.files.load.plaintext import ENCRYPTED, kind_of
from ckptmgr.maintenance.contents import (
    NewContent,
    container_content,
    needs_container,
    sealed_content,
)
from ckptmgr.maintenance.convert_source import open_file, open_plaintext
from ckptmgr.maintenance.convert_target import ConversionResult, check_target, publish
from ckptmgr.store.manifest.codec import Manifest


def decrypt_file(
    source: Path,
    target: Path,
    *,
    options: ReadOptions,
    force: bool = False,
    clock: Callable[[], float] = time.time,
) -> ConversionResult:
    """Write the plaintext of an encrypted file to a file; durable when this returns.

    With `force` an existing target is replaced. `clock` stamps the manifest of a checkpoint that
    had none.

    Raises:
        UnsafeWrite: The target is the input, exists, or has a name for another kind of file.
        StoreLocked: A live process writes the target, or its series in that directory.
        CkptmgrError: As `open_plaintext`.
        OSError: From the disk; nothing was changed.
    """
    check_target(source, target, force=force)
    _check_name(target, is_container=False)
    with open_plaintext(source, options) as (content, manifest):
        return publish(
            source,
            target,
            content,
            options=options,
            manifest=manifest,
            force=force,
            clock=clock,
        )


def encrypt_file(
    source: Path,
    target: Path,
    *,
    key: Keys,
    mode: str = "AES-GCM",
    force: bool = False,
    clock: Callable[[], float] = time.time,
) -> ConversionResult:
    """Write a plain file encrypted to a file; durable when this returns.

    A `.ckpt` stays a file that MindSpore loads, with a seal, unless the target has the name of a
    container (`.ckpe`); every other file goes into a container. A `.ckpt` outside a container takes
    one key and nothing else, and no `SM4-GCM`. `force` and `clock` as for `decrypt_file`.

    Raises:
        UnsafeWrite: The target is the input, exists, or has a name for another kind of file.
        StoreLocked: A live process writes the target, or its series in that directory.
        UnsupportedCheckpoint: The input is encrypted already.
        CorruptCheckpoint: It is a checkpoint and damaged; nothing was written.
        KeyProblem: The key does not fit the mode.
        OSError: From the disk; nothing was changed.
    """
    check_target(source, target, force=force)
    with _encrypted(source, target, key=key, mode=mode) as (content, manifest):
        return publish(
            source,
            target,
            content,
            options=ReadOptions(),
            manifest=manifest,
            force=force,
            clock=clock,
        )


def encrypted_chunks(source: Path, *, key: Keys, mode: str = "AES-GCM") -> Iterator[memoryview]:
    """Yield a plain file encrypted, in order, for a pipe; each view is valid until the next one.

    The last chunk comes only after the input was checked, so a reader refuses an output that an
    error cut short. Raises as `encrypt_file`.
    """
    with _encrypted(source, None, key=key, mode=mode) as (content, _):
        yield from content.chunks()


@contextmanager
def _encrypted(
    source: Path, target: Path | None, *, key: Keys, mode: str
) -> Iterator[tuple[NewContent, Manifest | None]]:
    """Open a plain file, and yield it encrypted for a target or, where that is None, for a pipe."""
    names = (source.name,) if target is None else (source.name, target.name)
    is_checkpoint = is_checkpoint_name(*names)
    if not is_checkpoint:
        _check_name(target, is_container=True)
    options = ReadOptions()
    with (
        open_file(source, options, has_manifest=is_checkpoint) as (raw, manifest),
        translated_errors(str(source)),
    ):
        if kind_of(raw, name=source.name) in ENCRYPTED:
            raise UnsupportedCheckpoint(
                "is encrypted already", path=source, hint="decrypt it first to change key or mode"
            )
        if not is_checkpoint:
            yield container_content(raw, key=key, mode=mode), None
            return
        opened = open_source(
            raw, path=str(source), options=options, manifest=manifest, is_for_loading=True
        )
        is_required = needs_container(key, mode)
        is_container = is_required if target is None else target.name.endswith(CONTAINER_SUFFIX)
        if opened.format == "safetensors" or is_container:
            _check_name(target, is_container=True)
            yield container_content(opened, key=key, mode=mode), manifest
        elif is_required:
            raise KeyProblem(
                "a .ckpt that MindSpore can open takes one key and nothing else, and no SM4-GCM",
                path=target,
                hint=f"give it a name that ends in .ckpt{CONTAINER_SUFFIX}: a container takes everything",
            )
        else:
            yield sealed_content(opened, key=key, mode=mode), manifest


def encrypted_name(name: str, *, key: Keys, mode: str) -> str:
    """Return the name that a plain file keeps or gets when it is encrypted."""
    is_ckpt = name.endswith(".ckpt")
    if is_ckpt and not needs_container(key, mode):
        return name
    return (without_envelope(name) if is_checkpoint_name(name) else name) + CONTAINER_SUFFIX


def is_checkpoint_name(*names: str) -> bool:
    """Return whether one of the names is that of a checkpoint."""
    return any(name.endswith(DATA_SUFFIXES) for name in names)


def _check_name(target: Path | None, *, is_container: bool) -> None:
    if target is not None and target.name.endswith(CONTAINER_SUFFIX) != is_container:
        ending = "must end" if is_container else "must not end"
        raise UnsafeWrite(
            f"the name {ending} in {CONTAINER_SUFFIX}, which containers have",
            path=target,
            hint="choose another name",
        )
