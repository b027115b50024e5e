# SPDX-License-Identifier: Apache-2.0
"""`save_checkpoint` and `load_checkpoint`: MindSpore's functions, for one file at a time.

Same parameters, defaults and argument errors. Different on purpose, each for safety:

* A save is atomic and durable, replaces a file only when the new one is on disk, and leaves a
  manifest with digests.
* Mixed dictionaries are saved whole; a name that appears twice is an error, never a silent
  replacement.
* `enc_key` with `crc_check` works: the CRC goes inside the encryption.
* Encrypted files are sealed. Given `dec_key`, a file without a seal is refused unless
  `allow_unsealed=True`.
* An unknown option of `save_checkpoint` is a TypeError.
* Data that MindSpore fills with zeros, truncates or crashes on is an error that names file, offset
  and tensor.
"""

from __future__ import annotations

import inspect
import io
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

from ckptmgr.config.checks import (
    Framework,
    check_async_save,
    check_bool,
    check_cipher_mode,
    check_compression,
    check_crc,
    check_file_mode,
    check_framework,
    check_manifest,
    check_options,
    check_signing_key,
)
from ckptmgr.config.keys import check_given_key, resolve_keys
from ckptmgr.core.arguments import check_is_bool
from ckptmgr.core.errors import TruncatedCheckpoint, UnsupportedState
from ckptmgr.core.model import Checkpoint
from ckptmgr.core.names import CONTAINER_SUFFIX
from ckptmgr.core.place import capabilities_at
from ckptmgr.core.shard_names import is_set_name
from ckptmgr.core.trust import Trust
from ckptmgr.files.load.options import ReadOptions, everything
from ckptmgr.files.save.job import SaveOptions
from ckptmgr.files.save.single_file import save_single_file
from ckptmgr.files.serialization_arguments import (
    MoreOptions,
    check_append_dict,
    check_more_options,
    check_safetensors_options,
    chooser,
    load_place,
    safetensors_metadata,
    save_path,
    warn_of_redundancy,
)
from ckptmgr.formats.source import BytesSource
from ckptmgr.formats.tensor import Item, Tensor
from ckptmgr.io.gc_pause import gc_paused
from ckptmgr.io.page_cache import bypass_page_cache_unless_shared
from ckptmgr.io.permissions import DEFAULT_FILE_MODE
from ckptmgr.objects.places import FilePlace
from ckptmgr.observe.events import Facts
from ckptmgr.observe.observers import REGISTERED
from ckptmgr.state.arrays import named_tensors
from ckptmgr.store.manifest.codec import Manifest

if TYPE_CHECKING:  # a plain save needs none of these
    from ckptmgr.crypto.keys.signing import PublicKey, SigningKey
    from ckptmgr.files.load.open import OpenCheckpoint

_EMPTY_RESULT = (
    "The loaded parameter dict is empty after filter or specify, please check whether 'filter_prefix' or "
    "'specify_prefix' are set correctly."
)


def save_checkpoint(
    save_obj: object,
    ckpt_file_name: str | os.PathLike[str],
    integrated_save: bool = True,
    async_save: bool | str = False,
    append_dict: Mapping[str, object] | None = None,
    enc_key: bytes | str | None = None,
    enc_mode: str = "AES-GCM",
    choice_func: Callable[[str], bool] | None = None,
    crc_check: bool | None = None,
    format: str = "ckpt",
    *,
    verify_after_write: bool = False,
    manifest: bool = True,
    signing_key: str | SigningKey | None = None,
    compression: str | None = None,
    compression_level: int = 1,
    file_mode: int = DEFAULT_FILE_MODE,
    metadata: Mapping[str, str] | None = None,
    **kwargs: object,
) -> Checkpoint:
    """Save tensors to one file; when it returns, they survive a power cut.

    After Ctrl-C the directory has its old content, or the complete new checkpoint. The same is true
    after `kill -9` or a power cut, but an unfinished file, a manifest without data or a lease file
    may be left, which no reader takes for a checkpoint. The next save into that directory removes
    them; a manifest without data after a day, unless it is provably left over.

    Args:
        save_obj: A mapping of names to arrays or strings, MindSpore's list of `{"name", "data"}`,
            an object with `state_dict()`, or a MindSpore Cell.
        ckpt_file_name: The file; its end becomes `.ckpt`, `.safetensors`, `.safetensors.ckpe` (with
            a key) or `.safetensors.ckpz` (compressed). Or the address of an object whose name is
            free: it is written into the temporary folder (TMPDIR), and is there when this returns.
        integrated_save: Accepted; it matters for sharded parameters only.
        async_save: Accepted (`True`, `"thread"`, `"process"`); this version saves before it
            returns.
        append_dict: More values to store: int, float, bool, str, arrays.
        enc_key: 16, 24 or 32 bytes (SM4-CBC in a `.ckpt`: 16) encrypt and seal the file; or a
            source, as for `CheckpointConfig`.
        enc_mode: `AES-GCM`, `AES-CBC` or `SM4-CBC`; for safetensors also `SM4-GCM`.
        choice_func: Which names to save.
        crc_check: Store a CRC32; with a key, inside the encryption. None (MindSpore: False) stores
            one with `manifest=False`, if the file is neither encrypted nor compressed.
        format: `ckpt` or `safetensors`.
        verify_after_write: Read the file back from the disk, past the page cache, before it is
            published.
        manifest: Leave a manifest with digests beside the file. False leaves the file alone, as
            MindSpore does, and refuses the values that a manifest holds: `signing_key`, `global_step_num`.
        compression: "zstd", or None; for safetensors only.
        compression_level: 1 (fast) to 19; levels above 1 help sparse states, but hardly weights.
        file_mode: Permission bits of the file and its manifest, as for `CheckpointConfig`.
        metadata: Strings to store beside the tensors; for safetensors only. Its `format` is written
            without being named: `ms` if a MindSpore Cell, a list or MindSpore's tensors are saved,
            else `pt`, which PyTorch, Hugging Face's libraries and MindSpore read.
        signing_key: The source of an Ed25519 private key, such as `file:sign.pem`; signs the
            manifest.
        kwargs: MindSpore's `remove_redundancy` (noted in the metadata of a safetensors file),
            `global_step_num` (the step in the manifest, if `append_dict` has no `step_num`) and
            `incremental` (refused unless false); each is refused where it changes nothing. Another
            name is a TypeError, unlike in MindSpore, where `enc_kye=` writes plaintext.

    Returns:
        The checkpoint as listed.

    Raises:
        TypeError, ValueError, IsADirectoryError: An argument is unusable; messages as MindSpore's.
        StoreLocked: Another process is saving this file now.
        StoreFull: Not enough disk space; nothing was changed.
        SaveFailed: With `verify_after_write`: the file differs from the written bytes; nothing was
            changed.
        UnsafeWrite: The address has another checkpoint of this name.
        OSError: From the disk; an older file of this name is intact.
    """
    check_options("save_checkpoint", kwargs, options=MoreOptions._fields, parameters=_PARAMETERS)
    path = save_path(
        save_obj,
        ckpt_file_name,
        format,
        is_encrypted=enc_key is not None,
        is_compressed=compression is not None,
    )
    check_bool(integrated_save)
    check_async_save(async_save)
    check_append_dict(append_dict)
    check_given_key("enc_key", enc_key)
    check_cipher_mode("enc_mode", enc_mode)
    more = check_more_options(kwargs, format)
    has_manifest = check_manifest(
        manifest, signing_key=signing_key, global_step_num=more.global_step_num
    )
    has_crc = check_crc(
        crc_check,
        has_manifest=has_manifest,
        is_checked=enc_key is not None or compression is not None,
    )
    check_safetensors_options(format, enc_key, enc_mode, more)
    key = resolve_keys("enc_key", enc_key, mode=enc_mode, format=format)
    level = check_compression(compression, compression_level, format=format)
    with gc_paused():
        items = join_items(named_tensors(save_obj), named_tensors(dict(append_dict or {})))
    if choice_func is not None:
        items = [item for item in items if choice_func(name_of(item))]
    strings = safetensors_metadata(save_obj, format, metadata, more.remove_redundancy)
    options = SaveOptions(
        format=format,
        key=key,
        mode=enc_mode,
        has_crc=has_crc,
        compression_level=level,
        file_mode=check_file_mode(file_mode),
        verify_after_write=check_is_bool("verify_after_write", verify_after_write),
        has_manifest=has_manifest,
    )
    if capabilities_at(path).folders and not path.parent.is_dir():
        raise FileNotFoundError(2, os.strerror(2), str(path))
    return save_single_file(
        path,
        items,
        options=options,
        metadata=strings,
        facts={"step_num": more.global_step_num, **(append_dict or {})},
        signing_key=check_signing_key(signing_key),
    )


_PARAMETERS = tuple(
    name for name in inspect.signature(save_checkpoint).parameters if name != "kwargs"
)


def load_checkpoint(
    ckpt_file_name: str | os.PathLike[str] | io.BytesIO,
    net: Any = None,
    strict_load: bool = False,
    filter_prefix: str | Sequence[str] | None = None,
    dec_key: bytes | str | None = None,
    dec_mode: str = "AES-GCM",
    specify_prefix: str | Sequence[str] | None = None,
    choice_func: Callable[[str], bool] | None = None,
    crc_check: bool = False,
    remove_redundancy: bool = False,
    format: str | None = None,
    *,
    allow_unsealed: bool = False,
    allow_unencrypted: bool = False,
    into: Mapping[str, Any] | None = None,
    only: str | None = None,
    framework: Framework = "np",
    trusted_keys: Iterable[str | os.PathLike[str] | PublicKey] = (),
) -> dict[str, Any]:
    """Load one file; a damaged one is an error, never a wrong value.

    Args:
        ckpt_file_name: A `.ckpt` or `.safetensors` file, a safetensors file in a BytesIO, or the
            name of a checkpoint of many ranks, which ends in `.shards`: its tensors are returned
            whole, and of tensors that differ between ranks those of rank 0. Each may be the address
            of an object, such as `s3://bucket/run/ckpt-1.ckpt`.
        net: Also load into this: a mapping of names to arrays, a PyTorch module, an object with
            `load_state_dict()`, or a MindSpore Cell.
        strict_load: Refuse other element types, instead of converting floats or signed integers.
        filter_prefix: Leave out names with this prefix.
        dec_key: The key, or a source as for `CheckpointConfig`; files without a seal are then
            refused, unless `allow_unsealed`.
        dec_mode: The cipher mode.
        specify_prefix: Only names with this prefix.
        choice_func: Which names to load; ignored with either prefix, as in MindSpore.
        crc_check: Compare the CRC32.
        remove_redundancy: Whether a rank saved a part of the tensors only; a safetensors file that
            notes the opposite is loaded with MindSpore's warning.
        format: `ckpt` or `safetensors`; None depends on the file.
        allow_unsealed: With a key, accept encrypted files without a seal (MindSpore's own).
        allow_unencrypted: With a key, accept plain files, too.
        into: Name to NumPy array or torch tensor: only these names are read, straight into their
            memory. All shapes and types are compared before the first byte is written. Damage is
            found while writing, and leaves the content of the arrays undefined.
        only: Name of a part of the state that a `CheckpointManager` or `save_state` saved: only its
            tensors are read, and named as in the part. `load_checkpoint(path, net=net, only="net")`
            loads the weights out of the state of a training.
        framework: Of the returned tensors: `np`, `pt` (torch; bf16 included), or `jax`.
        trusted_keys: Public keys, or their files in PEM: a file whose manifest none of them signed
            is refused, unless `allow_unencrypted`, or `allow_unsealed` with a key.

    Returns:
        Name to array (bf16 by `ml_dtypes`), string, or `MapArrays`, in file order; or the values of
        `into`.

    Raises:
        CorruptCheckpoint: Damaged; names file, offset and tensor. Also a ValueError.
        KeyProblem: Wrong or missing key, or no seal. Also a ValueError.
        CheckpointNotFound: There is no such file. Also a ValueError.
        TypeError, ValueError: An argument is unusable; messages as MindSpore's.
        RuntimeError: A value has another shape or type than the one in `net`.
        StateMismatch: The file does not fit `into`, or a PyTorch module `net` (a RuntimeError,
            too), or has no part `only`; lists every difference. Nothing was changed. Or a PyTorch
            module holds other elements after the load, because a hook of it changed them.
        UnsupportedCheckpoint: The framework has no such tensor.
    """
    from ckptmgr.files.load.named_part import NamedPart, as_framework
    from ckptmgr.files.load.open import open_source
    from ckptmgr.files.load.values import read_into, read_values

    check_given_key("dec_key", dec_key)
    check_cipher_mode("dec_mode", dec_mode)
    check_is_bool("crc_check", crc_check)
    check_is_bool("remove_redundancy", remove_redundancy)
    choose = chooser(filter_prefix, specify_prefix, choice_func)
    if into is not None and (net is not None or choose is not everything):
        raise ValueError(
            "'into' says what is loaded; it goes with neither 'net' nor a choice of names"
        )
    check_framework(framework)
    if into is not None and framework != "np":
        raise ValueError("'into' has the framework of its arrays; leave 'framework' out")
    if only is not None and (into is not None or choose is not everything):
        raise ValueError(
            "'only' says what is loaded; it goes with neither 'into' nor a choice of names"
        )
    part = None if only is None else NamedPart.checked(only)
    if part is not None:
        choose = part.has
    is_container = str(ckpt_file_name).endswith(CONTAINER_SUFFIX)
    key = resolve_keys(
        "dec_key",
        dec_key,
        mode=dec_mode,
        format="safetensors" if is_container else "ckpt",
        is_for_reading=True,
    )
    options = ReadOptions(
        trust=Trust(
            keys=key,
            trusted_keys=trusted_keys,
            allow_unsealed=allow_unsealed,
            allow_unencrypted=allow_unencrypted,
        ),
        mode=dec_mode,
    )

    def wanted(opened: OpenCheckpoint) -> dict[str, Any]:
        warn_of_redundancy(opened.metadata, is_expected=remove_redundancy)
        if part is not None:
            return part.read(opened, check_crc=crc_check)
        if into is None:
            return dict(read_values(opened, choose=choose, check_crc=crc_check))
        read_into(opened, into, check_crc=crc_check)
        return dict(into)

    if isinstance(ckpt_file_name, io.BytesIO):
        if format != "safetensors":
            raise TypeError(
                "ckpt don't support BytesIO as input type, please change to safetensors."
            )
        source = BytesSource(ckpt_file_name.getvalue())
        values = wanted(open_source(source, path="<BytesIO>", options=options, is_for_loading=True))
    elif _is_of_many_ranks(ckpt_file_name):
        if into is not None:
            raise ValueError("'into' takes one file; a checkpoint of many ranks has several")
        from ckptmgr.files.load.shard_state import load_sharded

        values = dict(load_sharded(ckpt_file_name, options=options, choose=choose))
        if part is not None:
            values = part.named(values, path=ckpt_file_name)
    else:
        place = load_place(ckpt_file_name, format, trust=options.trust)
        with REGISTERED.timed("load", path=place.path) as facts:
            values = _read_file(place, options, wanted, facts)
    if not values:
        raise ValueError(_EMPTY_RESULT)
    if net is not None:
        from ckptmgr.files.load.network import load_into

        is_file = not isinstance(ckpt_file_name, io.BytesIO)
        name = str(ckpt_file_name) if is_file else None
        load_into(net, values, strict=strict_load, path=name)
    return as_framework(values, framework)


def _is_of_many_ranks(name: object) -> bool:
    return isinstance(name, (str, os.PathLike)) and is_set_name(str(name))


def join_items(items: Sequence[Item], appended: Sequence[Item]) -> list[Item]:
    """Return the items of the network and those appended to it.

    Raises:
        UnsupportedState: A name is in both: one would silently replace the other.
    """
    taken = {name_of(item) for item in items} if appended else set()
    for item in appended:
        if name_of(item) in taken:
            raise UnsupportedState(
                f"{name_of(item)!r} is the name of a parameter and of an appended value",
                hint="rename the appended value; saving both would lose the parameter",
            )
    return [*items, *appended]


def name_of(item: Item) -> str:
    """Return the name an item is stored under."""
    return item.spec.name if isinstance(item, Tensor) else item.name


def _read_file(
    place: FilePlace,
    options: ReadOptions,
    read: Callable[[OpenCheckpoint], dict[str, Any]],
    facts: Facts,
) -> dict[str, Any]:
    from ckptmgr.files.load.open import open_source, with_manifest

    path = place.path

    def read_with(manifest: Manifest | None) -> dict[str, Any]:
        with closing(bypass_page_cache_unless_shared(place.open())) as raw:
            facts["size_bytes"] = raw.size
            if (
                raw.size == 0 and manifest is None
            ):  # with MindSpore's sentence, which programs look for
                message = f"the file is empty; {_EMPTY_RESULT}"
                raise TruncatedCheckpoint(message, path=path, offset=0)
            return read(
                open_source(
                    raw, path=str(path), options=options, manifest=manifest, is_for_loading=True
                )
            )

    return with_manifest(place.store, path.name, read_with)
