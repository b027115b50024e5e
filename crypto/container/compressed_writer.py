# SPDX-License-Identifier: Apache-2.0
"""Writes a container of compressed frames, whose length is known last.

Like `writer`, but the header states the expanded size. The number of segments follows from the
length of the file; the last one is marked as the last under the key, so none can be missing.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from ..ciphers import Random
from ..slots import Recipient
from .header import Content
from .writer import SEGMENT_BYTES, start_container


class FramesSealer:
    """Encrypts frames and their table. Several threads may seal segments, in any order.

    `raw_size` is the expanded size of the frames, `segment_bytes` a multiple of 16 up to 64 MiB.
    `head` are the bytes before the first segment, which begin with `copies_bytes` of header copies;
    a segment holds `plaintext_bytes`.

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

        `plaintext` has `plaintext_bytes` bytes; in the final segment as many or fewer, a multiple
        of 16. `segment` has `segment_size(plaintext.nbytes)` bytes that do not overlap the
        plaintext.

        Raises:
            ValueError: A length is wrong.
        """
        self._message.seal_into(index, plaintext, segment, is_final=is_final, random=self._random)
