# SPDX-License-Identifier: Apache-2.0
"""A directory or one file, by its path or by its address in an object store."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ckptmgr.core.errors import CheckpointFileNotFound
from ckptmgr.core.trust import Trust
from ckptmgr.core.urls import is_url
from ckptmgr.io.filesystem import InputFile
from ckptmgr.store.manifest.codec import SUFFIX
from ckptmgr.store.real_files import real_file
from ckptmgr.store.store import Store

if TYPE_CHECKING:
    from ckptmgr.objects.requests import Objects


def open_place(
    directory: str | os.PathLike[str],
    *,
    trust: Trust,
    clock: Callable[[], float] = time.time,
) -> Store:
    """Return the store of a directory, which may not exist, or of an address.

    Raises:
        TypeError, ValueError: It is neither.
        CkptmgrError: obstore is not installed, or refuses its configuration.
    """
    if not is_url(directory):
        return Store(Path(directory), trust=trust, clock=clock)
    from ckptmgr.objects.place import ObjectPlace
    from ckptmgr.objects.requests import open_objects

    return ObjectPlace(open_objects(str(directory)), trust=trust, clock=clock)


class FilePlace(NamedTuple):
    """The directory of a file, and its path there; `objects` of an address."""

    store: Store
    path: Path
    objects: Objects | None = None

    def exists(self) -> bool:
        """Return whether the file may exist: of an address only opening it shows."""
        return self.objects is not None or self.path.exists()

    def open(self) -> InputFile:
        """Open the file.

        Raises:
            CheckpointFileNotFound: There is none.
            OSError: From the disk or the network.
        """
        try:
            return self.store.fs.open(self.path)
        except FileNotFoundError as error:
            hint = None if self.objects is None else _hint(self.objects, self.path)
            raise CheckpointFileNotFound("no such file", path=self.path, hint=hint) from error


def place_of(path: str | os.PathLike[str], *, trust: Trust) -> FilePlace:
    """Return the place of a file; of an address nothing is requested yet.

    Raises:
        ValueError: It is the address of no object.
        CkptmgrError: obstore is not installed, or refuses its configuration.
        CorruptCheckpoint: As `real_file`.
    """
    if not is_url(path):
        real = real_file(path)
        return FilePlace(Store(real.parent, trust=trust), real)
    from ckptmgr.objects.paths import UrlPath
    from ckptmgr.objects.place import ObjectPlace
    from ckptmgr.objects.requests import checked_url, open_objects

    # A Path has one slash where an address has two.
    url = checked_url(path if isinstance(path, str) else str(UrlPath(path)))
    prefix, _, name = url.rpartition("/")
    if prefix.endswith(("/", ":")):
        raise ValueError(f"{url!r} names no object; write {url}/run/NAME")
    objects = open_objects(prefix)
    store = ObjectPlace(objects, trust=trust)
    return FilePlace(store, store.directory / name, objects)


def _hint(objects: Objects, path: Path) -> str:
    folder = f"{path.name}/"
    keys = [one.key.removeprefix(folder) for one in objects.list(folder)]
    names = sorted(key.removesuffix(SUFFIX) for key in keys if key.endswith(SUFFIX))
    if not names:
        return f"ckptmgr ls {objects.url} lists what is there"
    return f"this is the address of a run; name one of its checkpoints, such as {path}/{names[-1]}"
