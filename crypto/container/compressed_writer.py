# SPDX-License-Identifier: Apache-2.0
"""Write a container whose length is known last: the segments are sealed as its compressed frames become ready.

Like `container`, but the header states what the frames expand to. How many segments there are follows from the length of the
file, and that none is missing from the last one, which is marked as the last under the key.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from ..ciphers import Random
from ..slots import Recipient
from .header import Content
from .writer import SEGMENT_BYTES, start_container


class FramesSealer:
    """Encrypts frames and their table for their recipients. The segments may be sealed by several threads, in any order.

    Args:
        recipients: Who may open the file; 1 to 16.
        mode: As in `ContainerSealer`.
        raw_size: Bytes that the frames expand to.
        segment_bytes: Length of a segment; a multiple of 16 up to 64 MiB.
        random: Returns that many unpredictable bytes.

    Attributes:
        head: Everything before the first segment.
        copies_bytes: Bytes of the two header copies, with which the head begins.
        segment_bytes: Length of every segment but the last.
        plaintext_bytes: What fits into one.

    Raises:
        UnsupportedSuiteError: There is no such mode.
        ValueError: A size or the number of recipients is out of range.
    """

    def __init__(
        self,
        recipients: Sequence[Recipient],
        mode: str = "AES-GCM",
        *,
        raw_size: int,
        segment_bytes: int = SEGMENT_BYTES,
        random: Random = os.urandom,
    ) -> None:
        self._random = random
        start = start_container(
            recipients,
            mode,
            stated_size=raw_size,
            content=Content.FRAMES,
            segment_bytes=segment_bytes,
            copy_bytes=None,
            random=random,
        )
        self._message, self.head = start.message, start.head
        self._parameters = start.fixed.parameters
        self.copies_bytes = 2 * start.fixed.copy_bytes
        self.segment_bytes = segment_bytes
        self.plaintext_bytes = self._parameters.plaintext_bytes

    def segment_size(self, plaintext_size: int) -> int:
        """Return the length of the segment that holds `plaintext_size` bytes."""
        return self._parameters.segment_size(plaintext_size)

    def seal_into(
        self, index: int, plaintext: memoryview, segment: memoryview, *, is_final: bool
    ) -> None:
        """Encrypt segment `index`. Safe to call from several threads, once for each segment.

        Args:
            index: Which segment.
            plaintext: `plaintext_bytes` bytes; in the final segment as many or fewer, a multiple of 16.
            segment: Where to; `segment_size(plaintext.nbytes)` bytes that do not overlap the plaintext.
            is_final: Whether it is the last one.

        Raises:
            ValueError: A length is wrong.
        """
        self._message.seal_into(index, plaintext, segment, is_final=is_final, random=self._random)
