# SPDX-License-Identifier: Apache-2.0
"""Secret bytes that logs, tracebacks and dumps do not show, and that are not pickled.

In every other way they are bytes; a slice of them is plain bytes again.

>>> SecretBytes(b"top secret"), SecretBytes(b"top secret") == b"top secret"
(<10 bytes, not shown>, True)

Tools that collect local variables, attributes of a configuration or hyper-parameters use `repr` or
pickle. Pickles stay in files for years, so pickling fails; only `multiprocessing` can send the
bytes through a pipe to another process of the same program.
"""

from __future__ import annotations

from multiprocessing.reduction import ForkingPickler
from typing import NoReturn, Self, SupportsIndex


class SecretBytes(bytes):
    """Secret bytes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"<{len(self)} bytes, not shown>"

    __str__ = __repr__

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError("keys are not pickled: keep the source of a key, such as 'file:run.key'")


def _for_another_process(secret: SecretBytes) -> tuple[type[SecretBytes], tuple[bytes]]:
    return SecretBytes, (bytes(secret),)


ForkingPickler.register(SecretBytes, _for_another_process)
