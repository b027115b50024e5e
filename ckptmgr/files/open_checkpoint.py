# SPDX-License-Identifier: Apache-2.0
"""`open_checkpoint`: read one tensor of a file, or some of its rows, without the others.

```
with ckptmgr.open_checkpoint("net-1000.ckpt") as reader:
    for name in reader.names():
        print(reader.spec(name))
    head = reader.read("embedding.weight", rows=slice(0, 100))
```

Returned values are checked, as by `load_checkpoint`. So a read of a tensor reads:

* with a manifest: the digest ranges (16 MiB) of the tensor and its own description; in a `.ckpt`
  the descriptions are between the tensors, so `names()` once reads each range that has one, most of
  a file of small tensors;
* compressed: the frames (4 MiB) of the tensor, and the table at the end;
* encrypted: the cipher blocks (4 MiB) of the tensor, and once, at the opening, those of all
  descriptions;
* a plain file without a manifest: only its bytes, unverified.

The address of an object, such as `s3://bucket/run/ckpt-1.ckpt`, is read by ranges, with the same
number of bytes. So is any other store, by a source:

```
source = ckptmgr.RangeSource(get_range, size_bytes=size, name="s3://runs/net-1000.safetensors.ckpe")
with ckptmgr.open_checkpoint(source, dec_key="file:run.key") as reader:
    head = reader.read("embedding.weight", rows=slice(0, 100))
```

With `mmap=True` a tensor of a plain file is checked as above, but not copied: its array is page
cache.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ckptmgr.config.checks import Framework, check_framework
from ckptmgr.core.arguments import check_is_bool
from ckptmgr.core.error_translation import translated_errors
from ckptmgr.core.errors import CheckpointFileNotFound, UnsupportedCheckpoint
from ckptmgr.files.load.bulk import confirm_index
from ckptmgr.files.load.mapped import MappedTensors
from ckptmgr.files.load.open import OpenCheckpoint, open_source, with_manifest
from ckptmgr.files.load.options import ReadOptions, read_options
from ckptmgr.files.load.tensors import CheckpointReader
from ckptmgr.formats.source import Source
from ckptmgr.io.files import CachedFile
from ckptmgr.io.filesystem import InputFile
from ckptmgr.objects.places import place_of
from ckptmgr.store.manifest.codec import Manifest

if TYPE_CHECKING:  # signatures are rare, and their library is slow to import
    from ckptmgr.crypto.keys.signing import PublicKey

__all__ = ["CheckpointReader", "open_checkpoint"]


def open_checkpoint(
    path: str | os.PathLike[str] | Source,
    *,
    dec_key: bytes | str | None = None,
    dec_mode: str | None = None,
    allow_unsealed: bool = False,
    allow_unencrypted: bool = False,
    mmap: bool = False,
    framework: Framework = "np",
    trusted_keys: Iterable[str | os.PathLike[str] | PublicKey] = (),
) -> CheckpointReader:
    """Open a file for reading single tensors; close the reader, or use it in a `with` block.

    Args:
        path: A `.ckpt` or `.safetensors` file, plain or encrypted, or its address in an object
            store, such as `s3://bucket/run/ckpt-1.ckpt`; or a source of its bytes, such as a
            `RangeSource`: with a `size` and a `read_into(offset, buffer)` that several threads may
            call. A source is not closed, and has no manifest, so plain data of it is not verified.
        dec_key: The key, or a source as for `CheckpointConfig`; files that are not authenticated as
            a whole are then refused, unless `allow_unsealed`.
        dec_mode: The required cipher mode, or None for the one that the file names.
        allow_unsealed: With a key, accept encrypted files without a seal (MindSpore's own).
        allow_unencrypted: With a key, accept plain files, too.
        mmap: Return read-only arrays, over the mapped file instead of copies if a tensor is
            contiguous and aligned for its type: most of a safetensors file, some of a `.ckpt`.
            Processes that map one file share its memory, and the arrays may outlive the reader.
            Only for files that are not changed in place (ckptmgr never does that), on trusted
            disks: bytes that are written into the file later, or read again because memory ran
            short, show in arrays that were checked before. An access to a page of a file that was
            truncated kills the process (SIGBUS).
        framework: Of the tensors that `read` and `read_tensors` return: `np`, `pt` (torch; bf16
            included), or `jax`. `read_block` always returns an array.
        trusted_keys: Public keys, or their files in PEM: a file whose manifest none of them signed
            is refused, unless `allow_unencrypted`, or `allow_unsealed` with a key.

    Raises:
        CheckpointNotFound: There is no such file.
        CorruptCheckpoint: The description of the tensors is damaged.
        KeyProblem: Wrong or missing key, or no seal.
        UnsupportedCheckpoint: It is a file of another kind, or cannot be mapped.
        OSError: From the disk.
    """
    check_is_bool("mmap", mmap)
    check_framework(framework)
    if mmap and framework != "np":
        raise ValueError(
            "mmap gives read-only NumPy arrays over the file; leave it out for a framework"
        )
    options = read_options(
        dec_key,
        dec_mode,
        trusted_keys=trusted_keys,
        allow_unsealed=allow_unsealed,
        allow_unencrypted=allow_unencrypted,
    )
    if not isinstance(path, str | os.PathLike):
        return _opened_source(path, options, is_mapped=mmap, framework=framework)
    return open_reader(path, options, is_mapped=mmap, framework=framework)


def open_reader(
    path: str | os.PathLike[str],
    options: ReadOptions,
    *,
    is_mapped: bool = False,
    framework: Framework = "np",
) -> CheckpointReader:
    """Open a file as `open_checkpoint` does, with options that are checked already."""
    place = place_of(path, trust=options.trust)
    if not place.exists():
        raise CheckpointFileNotFound("no such file", path=path)
    shown = str(path if place.objects is None else place.path)
    if place.objects is not None and is_mapped:
        raise UnsupportedCheckpoint("only files can be mapped", path=shown)
    return with_manifest(
        place.store,
        place.path.name,
        lambda manifest: _opened_file(
            CachedFile(place.path) if place.objects is None else place.open(),
            shown,
            options,
            manifest,
            is_mapped=is_mapped,
            framework=framework,
        ),
    )


def _opened_file(
    raw: InputFile,
    path: str,
    options: ReadOptions,
    manifest: Manifest | None,
    *,
    is_mapped: bool,
    framework: Framework,
) -> CheckpointReader:
    with contextlib.ExitStack() as stack:
        stack.callback(raw.close)
        opened = checked_opening(raw, path, options, manifest)
        with translated_errors(path):
            mapped = None
            if is_mapped and isinstance(raw, CachedFile):
                mapped = MappedTensors(raw, opened)
        return CheckpointReader(opened, stack.pop_all(), mapped, framework=framework)


def _opened_source(
    source: Source, options: ReadOptions, *, is_mapped: bool, framework: Framework
) -> CheckpointReader:
    if not (hasattr(source, "size") and hasattr(source, "read_into")):
        raise TypeError(f"a path or a source with size and read_into is wanted, not {source!r}")
    name = getattr(source, "name", None)
    path = name if isinstance(name, str) else "<source>"
    if is_mapped:
        raise UnsupportedCheckpoint("only files can be mapped", path=path)
    return CheckpointReader(checked_opening(source, path, options, None), framework=framework)


def checked_opening(
    raw: Source, path: str, options: ReadOptions, manifest: Manifest | None
) -> OpenCheckpoint:
    """Open the content of a file for a `CheckpointReader`, which reads single tensors."""
    opened = open_source(raw, path=path, options=options, manifest=manifest, is_for_loading=True)
    if opened.is_sealed or opened.format == "safetensors":
        # An attacker could change descriptions to swap tensors; here all descriptions are in one
        # place.
        with translated_errors(path):
            confirm_index(opened)
    return opened
