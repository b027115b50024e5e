# SPDX-License-Identifier: Apache-2.0
"""File in which a watch remembers across restarts which checkpoints passed their check.

It only saves work: without it, or for files that changed since, a check is made again. A process
that may write to it decides which checkpoints are not checked again, so it must belong to this user or to root.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path

from ckptmgr.core.errors import CkptmgrError
from ckptmgr.formats.errors import FormatError
from ckptmgr.formats.source import read_bytes
from ckptmgr.formats.strict_json import parse_object
from ckptmgr.io.files import CachedFile
from ckptmgr.io.filesystem import FileSystem, OsFileSystem, rename_temp
from ckptmgr.io.leases import ProcProcesses
from ckptmgr.io.temp_names import temp_name
from ckptmgr.maintenance.verdict import Level

_SCHEMA = "ckptmgr.watch-state/1"
_MAX_BYTES = 64 << 20
_LEVELS = [level.value for level in Level]
_HINT = "name another file with --state, or remove this one"

Passed = Mapping[str, Mapping[str, str]]
"""Directory to name to fingerprint."""


class Memory:
    """The file of `--state`.

    `level` is that of the checks of this watch: what passed a weaker one is checked again.
    """

    def __init__(self, path: Path, *, level: Level, fs: FileSystem | None = None) -> None:
        self._path = path
        self._level = level
        self._fs: FileSystem = OsFileSystem() if fs is None else fs
        self._written: Passed | None = None

    def read(self) -> Passed:
        """Return the content of the file.

        Raises:
            CkptmgrError: It is something else, or another user could have written it.
            OSError: From the disk.
        """
        try:
            with contextlib.closing(CachedFile(self._path)) as file:
                self._check_owner(file.status())
                data = read_bytes(file, 0, min(file.size, _MAX_BYTES + 1))
        except FileNotFoundError:
            return {}
        if not data:  # a power cut may leave that
            return {}
        try:
            document = parse_object(data, what="state of a watch", offset=0)
        except FormatError as error:
            raise CkptmgrError(str(error), path=self._path, hint=_HINT) from error
        level, passed = document.get("level"), document.get("passed")
        if document.get("schema") != _SCHEMA or level not in _LEVELS or not _is_passed(passed):
            raise CkptmgrError("is not the state of a watch", path=self._path, hint=_HINT)
        if _LEVELS.index(str(level)) < _LEVELS.index(self._level.value):
            return {}
        return passed  # type: ignore[return-value]  # as checked

    def _check_owner(self, status: os.stat_result) -> None:
        if status.st_uid not in (os.geteuid(), 0) or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise CkptmgrError(
                "another user could have written which checkpoints are not verified again",
                path=self._path,
                hint="chown it to yourself and chmod go-w, or remove it",
            )

    def write(self, passed: Passed) -> None:
        """Replace the file atomically, unless it says the same.

        Raises:
            OSError: From the disk.
        """
        if passed == self._written:
            return
        document = {"schema": _SCHEMA, "level": self._level.value, "passed": passed}
        data = f"{json.dumps(document)}\n".encode()
        name = temp_name(self._path.name, token=ProcProcesses().token(), series="watch")
        temp = self._path.with_name(name)
        with contextlib.closing(self._fs.create(temp, mode=0o600)) as file:
            try:
                file.write_at(0, data)
                file.sync()
            except BaseException:
                self._fs.unlink(temp)
                raise
        rename_temp(self._fs, temp, self._path)
        self._written = passed


def _is_passed(value: object) -> bool:
    return isinstance(value, dict) and all(
        isinstance(names, dict) and all(isinstance(one, str) for one in names.values())
        for names in value.values()
    )
