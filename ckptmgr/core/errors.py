# SPDX-License-Identifier: Apache-2.0
"""The error tree.

```
CkptmgrError (Exception)
├── CheckpointNotFound (LookupError, ValueError)  no such run, checkpoint or selector
│   └── CheckpointFileNotFound (FileNotFoundError)  ... the path that was given has no file
├── CorruptCheckpoint (ValueError)       the bytes are damaged; names file, offset, tensor
│   ├── TruncatedCheckpoint              ... they end too early
│   ├── ChecksumMismatch                 ... a CRC or digest does not match
│   └── TamperedCheckpoint               ... under the right key: changed, reordered or spliced
├── UnsupportedCheckpoint (ValueError)   well-formed, but of a kind this version cannot handle
├── KeyProblem (ValueError)              key missing, wrong, of the wrong length, or not obtainable
│   └── UnsealedCheckpoint               a key was given, but no seal covers the file
│       └── UnprovenCheckpoint           keys were given, but none proves the identity of the file
├── UnsupportedState (TypeError)         a value in the state cannot be stored without pickling
├── StoreLocked                          another live process writes the series; or a lost lease
├── StoreFull (OSError)                  not enough disk space; nothing was changed
├── StagingExhausted (MemoryError)       a state exceeds the staging memory; nothing was saved
├── UnsafePrune                          a retention request that loses the last good checkpoint
├── UnsafeWrite                          output would destroy a file: its input or an existing one
└── SaveFailed                           the save is not durable; the previous state is intact
    └── SaveSuperseded                   ... because a newer one replaced it before its start
```

An `OSError` that is not about a checkpoint passes through untouched. Errors carry `path` and
`hint`; the text already contains both.
"""

from __future__ import annotations

import errno
import os


class CkptmgrError(Exception):
    """Report a failure of the checkpoint manager.

    Args:
        message: The problem, as a lower-case sentence.
        path: The file or directory it is about, or None.
        hint: What to do next, or None.
    """

    def __init__(
        self, message: str, *, path: str | os.PathLike[str] | None = None, hint: str | None = None
    ) -> None:
        self.message = message
        self.path = None if path is None else os.fspath(path)
        self.hint = hint
        text = message if self.path is None else f"{self.path}: {message}"
        super().__init__(text if hint is None else f"{text}\nhint: {hint}")


class CheckpointNotFound(CkptmgrError, LookupError, ValueError):
    """Report that no such run, checkpoint or selector exists.

    A ValueError, too, because MindSpore's `load_checkpoint` raises one for a missing file.
    """


class CheckpointFileNotFound(CheckpointNotFound, FileNotFoundError):
    """Report a given path without a file; `errno` is ENOENT, `path` the path.

    Like every CkptmgrError it is no error of the disk: a retry would not help.
    """

    def __init__(
        self, message: str, *, path: str | os.PathLike[str] | None = None, hint: str | None = None
    ) -> None:
        super().__init__(message, path=path, hint=hint)
        self.errno = errno.ENOENT


class CorruptCheckpoint(CkptmgrError, ValueError):
    """Report damaged bytes.

    Attributes:
        offset: Byte offset of the damage, or None.
        tensor: Name of the damaged tensor, or None.
    """

    def __init__(
        self,
        message: str,
        *,
        path: str | os.PathLike[str] | None = None,
        hint: str | None = None,
        offset: int | None = None,
        tensor: str | None = None,
    ) -> None:
        super().__init__(message, path=path, hint=hint)
        self.offset = offset
        self.tensor = tensor


class TruncatedCheckpoint(CorruptCheckpoint):
    """Report a checkpoint that ends too early."""


class ChecksumMismatch(CorruptCheckpoint):
    """Report content that does not match its stored CRC or digest."""


class TamperedCheckpoint(CorruptCheckpoint):
    """Report an authenticated checkpoint that was changed, reordered or spliced."""


class UnsupportedCheckpoint(CkptmgrError, ValueError):
    """Report a well-formed file or option that this version cannot handle."""


class KeyProblem(CkptmgrError, ValueError):
    """Report a key that is missing, wrong, of the wrong length, or not obtainable."""


class UnsealedCheckpoint(KeyProblem):
    """Report a file that is not authenticated as a whole although a key was given."""


class UnprovenCheckpoint(UnsealedCheckpoint):
    """Report a file that no given key proves to be a certain checkpoint."""


class UnsupportedState(CkptmgrError, TypeError):
    """Report a value in the state that cannot be stored without pickling; names its path."""


class StoreLocked(CkptmgrError):
    """Report that another live process writes a series, or that its lease is unavailable or lost.

    Attributes:
        is_ending: Whether the lease may soon be free: the run that holds it is over and only its
            worker process remains, or its holder only cleans up after dead writers.
    """

    is_ending: bool = False


class StoreFull(CkptmgrError, OSError):
    """Report that the disk has not enough free space for a save.

    `missing_bytes` says how much less the file system reports than the save needs; 0 where it
    reports enough, as with a quota, or nothing. `was_begun` says whether writing found out.
    """

    missing_bytes = 0
    was_begun = False


class StagingExhausted(CkptmgrError, MemoryError):
    """Report that a state cannot be copied within the memory given to checkpointing."""


class UnsafePrune(CkptmgrError):
    """Report a retention request that is refused for safety."""


class UnsafeWrite(CkptmgrError):
    """Report output that is refused because it would overwrite something."""


class SaveFailed(CkptmgrError):
    """Report a save that did not become durable."""


class SaveSuperseded(SaveFailed):
    """Report a save that a newer one replaced before it started (`back_pressure="coalesce"`)."""
