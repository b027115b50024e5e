# SPDX-License-Identifier: Apache-2.0
"""Changes the recipients of a container: new header copies, the payload untouched.

Two writes of a few KiB, each durable before the next, so that one copy is whole at every instant.
The copy that does not count (damaged, outdated, or else B) is written first. A removed recipient
may still know the data key: to exclude one that may have opened the file, encrypt it again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from ..slots import Recipient, Slot
from .unlock import CopyState, UnlockedContainer


@dataclass(frozen=True, slots=True, kw_only=True)
class HeaderWrite:
    """The bytes of one header copy, to be written at `offset` of a container."""

    offset: int
    data: bytes = field(repr=False)


def rewrite_header(
    unlocked: UnlockedContainer,
    *,
    add: Sequence[Recipient] = (),
    remove: Callable[[Slot], bool] | None = None,
) -> tuple[HeaderWrite, HeaderWrite]:
    """Return the two writes that change the slots, in order; the caller syncs the file after each.

    `add` are new recipients; `remove` selects the slots to drop. Without both, the writes repair a
    damaged copy.

    Raises:
        ValueError: No slot would be left, or they do not fit into the header, or there is no next
            generation.
    """
    header = unlocked.header
    bound = header.fixed.pack()
    kept = tuple(slot for slot in header.slots if remove is None or not remove(slot))
    added = tuple(recipient.wrap(unlocked.data_key, bound=bound) for recipient in add)
    changed = replace(header, generation=header.generation + 1, slots=kept + added)
    data = changed.pack(unlocked.data_key)
    a, b = HeaderWrite(offset=0, data=data), HeaderWrite(offset=len(data), data=data)
    return (b, a) if unlocked.states[0] is CopyState.CURRENT else (a, b)
