# SPDX-License-Identifier: Apache-2.0
"""Change who may open a container: new header copies, the payload untouched.

Two writes of a few KiB, each durable before the next, so that one copy is whole at every instant. The copy that does not
count (damaged, outdated, or else B) is written first. Whoever knew the data key still knows it: to shut somebody out who
may have opened the file, encrypt it anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from ..slots import Recipient, Slot
from .unlock import CopyState, UnlockedContainer


@dataclass(frozen=True, slots=True, kw_only=True)
class HeaderWrite:
    """Bytes to write into an existing container.

    Attributes:
        offset: Where.
        data: What; the whole of one header copy.
    """

    offset: int
    data: bytes = field(repr=False)


def rewrite_header(
    unlocked: UnlockedContainer,
    *,
    add: Sequence[Recipient] = (),
    remove: Callable[[Slot], bool] | None = None,
) -> tuple[HeaderWrite, HeaderWrite]:
    """Return the two writes that change the slots; without arguments, those that repair a damaged copy.

    Args:
        unlocked: The opened container.
        add: Who may open it from now on.
        remove: Tells which of the present slots go, or None to keep them all.

    Returns:
        The writes, in order: sync the file after each.

    Raises:
        ValueError: No slot would be left, or they do not fit into the header, or there is no next generation.
    """
    header = unlocked.header
    bound = header.fixed.pack()
    kept = tuple(slot for slot in header.slots if remove is None or not remove(slot))
    added = tuple(recipient.wrap(unlocked.data_key, bound=bound) for recipient in add)
    changed = replace(header, generation=header.generation + 1, slots=kept + added)
    data = changed.pack(unlocked.data_key)
    a, b = HeaderWrite(offset=0, data=data), HeaderWrite(offset=len(data), data=data)
    return (b, a) if unlocked.states[0] is CopyState.CURRENT else (a, b)
