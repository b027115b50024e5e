# SPDX-License-Identifier: Apache-2.0
"""`save_state` and `load_state`: one nested state in one file, without a directory of its own.

```
ckptmgr.save_state({"model": model, "step": 7, "rng": rng}, "run/last.safetensors")
ckptmgr.load_state("run/last.safetensors", into={"model": model, "step": 0, "rng": rng})
```

The tensors are stored as in any checkpoint, and the skeleton of the state in the metadata of the
file, so the file alone restores the state. The manifest beside it has the digests of its content;
`manifest=False` leaves exactly one file. Without the manifest an encrypted file is proven by its
seal, a compressed one checked by its frames, and a plain one by its CRC32, which `manifest=False`
stores by default; of other plain files only the structure is checked.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING

from ckptmgr.config.checks import (
    check_cipher_mode,
    check_compression,
    check_crc,
    check_file_mode,
    check_manifest,
    check_signing_key,
)
from ckptmgr.config.keys import check_given_key, check_recipients, resolve_keys
from ckptmgr.core.arguments import (
    check_is_bool,
    checked_count,
    checked_epoch,
    checked_metrics,
    resolve_state,
)
from ckptmgr.core.errors import CheckpointFileNotFound, UnsupportedCheckpoint
from ckptmgr.core.model import Checkpoint
from ckptmgr.core.names import (
    COMPRESSED_SUFFIX,
    CONTAINER_SUFFIX,
    FORMATS,
    without_envelope,
)
from ckptmgr.core.place import capabilities_at
from ckptmgr.core.shard_names import is_set_name
from ckptmgr.files.load.options import ReadOptions, read_options
from ckptmgr.files.load.state import SKELETON, StoredState, state_metadata, verified_state
from ckptmgr.files.save.job import SaveOptions
from ckptmgr.files.save.single_file import save_single_file
from ckptmgr.files.serialization_arguments import place_of_file
from ckptmgr.io.page_cache import bypass_page_cache_unless_shared
from ckptmgr.io.permissions import DEFAULT_FILE_MODE
from ckptmgr.objects.places import FilePlace, place_of
from ckptmgr.observe.events import Facts
from ckptmgr.observe.observers import REGISTERED
from ckptmgr.state import tree
from ckptmgr.state.part import checked_parts
from ckptmgr.store.manifest.codec import Manifest
from ckptmgr.store.reserved_names import is_reserved_name

if TYPE_CHECKING:  # a plain save needs none of these
    from ckptmgr.crypto.keys.signing import PublicKey, SigningKey
    from ckptmgr.files.load.in_place import InPlaceState

_DEFAULT_MODE = "AES-GCM"


def save_state(
    state: object,
    path: str | os.PathLike[str],
    *,
    step: int = 0,
    epoch: int | None = None,
    metrics: Mapping[str, float] | None = None,
    format: str | None = None,
    enc_key: bytes | str | None = None,
    enc_mode: str = _DEFAULT_MODE,
    enc_recipients: Sequence[str] = (),
    signing_key: str | SigningKey | None = None,
    compression: str | None = None,
    compression_level: int = 1,
    crc_check: bool | None = None,
    verify_after_write: bool = False,
    file_mode: int = DEFAULT_FILE_MODE,
    manifest: bool = True,
) -> Checkpoint:
    """Save a nested state to one file; when it returns, the state survives a power cut.

    The file replaces an older one only when it is whole and on the disk: after Ctrl-C, `kill -9` or
    a power cut, the path has its old content or the new one.

    Args:
        state: What `CheckpointManager.save` takes: any nesting of dicts, lists, numbers, arrays,
            tensors, random number generators and objects with `state_dict()`, or a function that
            returns it.
        path: The file, under this very name. Its directory exists. Or the address of an object, as
            for `save_checkpoint`.
        step: Global step, for the manifest.
        epoch: Epoch number, for the manifest.
        metrics: Name to value, for the manifest.
        format: `ckpt` or `safetensors`; None for that of the name. Another name needs it.
        enc_key: The key, or a source, as for `CheckpointConfig`: encrypts and seals the file.
        enc_mode: The cipher mode, as for `save_checkpoint`.
        enc_recipients: Sources of further keys that open the file, as for `CheckpointConfig`.
        signing_key: The source of an Ed25519 private key, which signs the manifest.
        compression: "zstd", or None; for safetensors only.
        compression_level: 1 (fast) to 19.
        crc_check: Store a CRC32, which checks a plain file whose manifest is lost. None stores one
            with `manifest=False`, if the file is neither encrypted nor compressed.
        verify_after_write: Read the file back from the disk before it is published.
        file_mode: Permission bits of the file and its manifest, as for `CheckpointConfig`.
        manifest: Leave a manifest with digests beside the file. False leaves the file alone, and
            refuses the values that a manifest holds: `step`, `epoch`, `metrics`, `signing_key`.

    Returns:
        The checkpoint as listed.

    Raises:
        TypeError, ValueError: An argument is unusable, or not for this file; names it.
        UnsupportedState: A value of the state cannot be stored; names its path.
        FileNotFoundError, IsADirectoryError: There is no such directory; the path is one.
        StoreLocked, StoreFull, SaveFailed, UnsafeWrite, OSError: As `save_checkpoint`; an older
            file of this name is intact.
    """
    has_manifest = check_manifest(
        manifest, step=step or None, epoch=epoch, metrics=metrics, signing_key=signing_key
    )
    place = place_of_file(path)
    is_encrypted = enc_key is not None or bool(check_recipients(enc_recipients))
    stored_as = _format_of(place.name, format)
    check_cipher_mode("enc_mode", enc_mode)
    if enc_mode != _DEFAULT_MODE and not is_encrypted:
        raise ValueError(f"enc_mode={enc_mode!r} has no effect without enc_key or enc_recipients")
    level = check_compression(compression, compression_level, format=stored_as)
    check_given_key("enc_key", enc_key)
    options = SaveOptions(
        format=stored_as,
        key=resolve_keys(
            "enc_key", enc_key, mode=enc_mode, format=stored_as, recipients=enc_recipients
        ),
        mode=enc_mode,
        has_crc=check_crc(
            crc_check,
            has_manifest=has_manifest,
            is_checked=is_encrypted or compression is not None,
        ),
        compression_level=level,
        file_mode=check_file_mode(file_mode),
        verify_after_write=check_is_bool("verify_after_write", verify_after_write),
        has_manifest=has_manifest,
    )
    _check_envelope(place.name, options)
    facts = {"step_num": checked_count("step", step), "epoch_num": checked_epoch(epoch)}
    values = checked_metrics(metrics)
    signer = check_signing_key(signing_key)
    if place.is_dir():
        raise IsADirectoryError(21, os.strerror(21), str(place))
    if capabilities_at(place).folders and not place.parent.is_dir():
        raise FileNotFoundError(2, os.strerror(2), str(place))
    flat = tree.flatten(resolve_state(state))
    return save_single_file(
        place,
        flat.tensors,
        options=options,
        metadata=state_metadata(flat),
        facts=facts,
        metrics=values,
        signing_key=signer,
    )


def load_state(
    path: str | os.PathLike[str],
    into: object = None,
    *,
    only: str | Sequence[str] | None = None,
    dec_key: bytes | str | None = None,
    dec_mode: str | None = None,
    allow_unsealed: bool = False,
    allow_unencrypted: bool = False,
    trusted_keys: Iterable[str | os.PathLike[str] | PublicKey] = (),
) -> object:
    """Load the nested state of one file; a damaged one is an error, never a wrong value.

    Takes the files of `save_state` and of a `CheckpointManager`, also without their manifests.

    Args:
        path: The file, under any name; or its address in an object store, such as
            `s3://bucket/run/ckpt-1.ckpt`, of which only the needed ranges are requested.
        into: Restore into this state, built as for a fresh start; arrays are filled in place. None
            returns new objects, each of the kind that was saved: torch tensors come back as such.
        only: Name, or names, of entries of the dict that was saved: only these are read and
            compared. `load_state(path, {"net": net}, only="net")` takes the weights out of the
            state of a training.
        dec_key: The key, or a source as for `CheckpointConfig`; files that are not proven as a
            whole are then refused, unless `allow_unsealed`.
        dec_mode: The required cipher mode, or None for the one that the file names.
        allow_unsealed: With a key, accept encrypted files without a seal (MindSpore's own).
        allow_unencrypted: With a key or trusted keys, accept plain files, too.
        trusted_keys: Public keys, or their files in PEM: a file whose manifest none of them signed
            is refused, unless `allow_unencrypted`, or `allow_unsealed` with a key.

    Returns:
        The state: `into`, or what replaces it where a value cannot be changed in place.

    Raises:
        CheckpointNotFound: There is no such file; also a FileNotFoundError.
        CorruptCheckpoint: Damaged; nothing was changed.
        KeyProblem: Wrong or missing key, or no proof.
        StateMismatch: The stored state does not fit `into`, or has no part of a name in `only`;
            names every difference. Nothing was changed.
        UnsupportedCheckpoint: The file has no nested state: `load_checkpoint` reads it.
    """
    options = read_options(
        dec_key,
        dec_mode,
        trusted_keys=trusted_keys,
        allow_unsealed=check_is_bool("allow_unsealed", allow_unsealed),
        allow_unencrypted=check_is_bool("allow_unencrypted", allow_unencrypted),
    )
    parts = checked_parts(only)
    place = place_of(path, trust=options.trust)
    if is_set_name(place.path.name):
        raise UnsupportedCheckpoint(
            "is a checkpoint of many ranks, which has several files",
            path=place.path,
            hint="CheckpointManager.load reads it, and load_checkpoint its tensors",
        )
    if not place.exists():
        raise CheckpointFileNotFound("no such file", path=path)
    with REGISTERED.timed("load", path=place.path) as facts:
        return _read(place, options, into, parts, facts).put_back(into)


def _read(
    place: FilePlace,
    options: ReadOptions,
    into: object,
    only: Sequence[str] | None,
    facts: Facts,
) -> StoredState | InPlaceState:
    from ckptmgr.files.load.open import open_source, with_manifest

    path = place.path

    def read_with(manifest: Manifest | None) -> StoredState | InPlaceState:
        with ExitStack() as stack:
            file = place.open()
            facts["size_bytes"] = file.size
            raw = bypass_page_cache_unless_shared(file) if into is None else file
            stack.enter_context(closing(raw))
            opened = open_source(
                raw,
                path=str(path),
                options=options,
                manifest=manifest,
                is_for_loading=True,
            )
            if SKELETON not in opened.metadata:
                raise UnsupportedCheckpoint(
                    "this file has no nested state: neither save_state nor a CheckpointManager "
                    "wrote it",
                    path=path,
                    hint="load it with ckptmgr.load_checkpoint",
                )
            return verified_state(
                opened, stack, path=path, manifest=manifest, state=into, only=only
            )

    return with_manifest(place.store, path.name, read_with)


def _format_of(name: str, given: str | None) -> str:
    """Return the format of a file.

    Raises:
        ValueError: It is unknown, or contradicts the name.
    """
    if given is not None and given not in FORMATS:
        raise ValueError(f"format must be 'ckpt' or 'safetensors', but got {given!r}")
    bare = without_envelope(name)
    named = next((one for one in FORMATS if bare.endswith(f".{one}")), None)
    if named is None and (given is None or is_reserved_name(name)):
        raise ValueError(
            f"the name {name!r} ends in neither .ckpt nor .safetensors"
            + ("; give format=" if given is None else ", and is that of another file of ckptmgr")
        )
    if named is not None and given not in (None, named):
        raise ValueError(f"format={given!r} contradicts the name {name!r}")
    return given or str(named)


def _check_envelope(name: str, options: SaveOptions) -> None:
    """Raise ValueError if a name says that the file is encrypted or compressed, and it is not."""
    for suffix in (CONTAINER_SUFFIX, COMPRESSED_SUFFIX):
        if name.endswith(suffix) and not options.extension.endswith(suffix):
            raise ValueError(
                f"the name {name!r} ends in {suffix}, but the file will be a {options.extension} file"
            )
