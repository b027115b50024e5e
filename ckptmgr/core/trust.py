# SPDX-License-Identifier: Apache-2.0
"""Trust: which keys prove a checkpoint, which key signs, and what is accepted without proof.

One frozen value travels from the options of a user to every place that decides about proof. A key or a trusted public
key makes reading strict: what it does not prove is refused, does not count for retention and is never handed out.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from ckptmgr.crypto.keys.ring import Keys, ring_of
from ckptmgr.crypto.keys.signing import PublicKey, SigningKey

ACCEPT_UNSEALED_HINT = (
    "pass allow_unsealed=True (CLI: --allow-unsealed) if you trust where the file comes from"
)
ACCEPT_UNENCRYPTED_HINT = (
    "pass allow_unencrypted=True (CLI: --allow-unencrypted) if you trust where the file comes from"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trust:
    """What a caller trusts.

    Attributes:
        keys: Open files and check the HMAC of manifests; also encrypt and authenticate what is written.
        trusted_keys: Public keys whose signatures count.
        signing_key: Signs the manifests that are written.
        allow_unsealed: Accept what is encrypted under `keys` although no seal, authenticated manifest or trusted
            signature proves it as a whole (files that MindSpore wrote). Without `keys` it accepts nothing.
        allow_unencrypted: Accept plain files, too; includes `allow_unsealed`.
    """

    keys: Keys | None = None
    trusted_keys: tuple[PublicKey, ...] = ()
    signing_key: SigningKey | None = None
    allow_unsealed: bool = False
    allow_unencrypted: bool = False

    @property
    def accepts_unsealed(self) -> bool:
        """Whether a file is accepted that is not proven as a whole."""
        return self.allow_unencrypted or (self.allow_unsealed and self.keys is not None)

    @property
    def accept_hint(self) -> str:
        """How to accept a file that is not proven as a whole."""
        return ACCEPT_UNENCRYPTED_HINT if self.keys is None else ACCEPT_UNSEALED_HINT

    @property
    def is_strict(self) -> bool:
        """Whether only what the keys prove is accepted."""
        return (self.keys is not None or bool(self.trusted_keys)) and not self.accepts_unsealed

    @property
    def can_prove(self) -> bool:
        """Whether a manifest that is accepted is proven: by a key that opens, or by a trusted signature."""
        can_open = self.keys is not None and ring_of(self.keys).can_open
        return self.is_strict and (can_open or bool(self.trusted_keys))

    @property
    def needs_signature(self) -> bool:
        """Whether a manifest must bear the signature of a trusted key."""
        return bool(self.trusted_keys) and not self.accepts_unsealed

    @property
    def needs_encryption(self) -> bool:
        """Whether a plain file is refused."""
        return self.keys is not None and not self.allow_unencrypted

    @property
    def strict(self) -> Trust:
        """The same keys with nothing accepted unproven; a writer that signs trusts its own signatures."""
        own = () if self.signing_key is None else (self.signing_key.public_key,)
        return replace(
            self,
            trusted_keys=tuple(dict.fromkeys((*own, *self.trusted_keys))),
            allow_unsealed=False,
            allow_unencrypted=False,
        )

    def hint_without_mac(self, ciphers: Iterable[str | None]) -> str | None:
        """Return how to accept a manifest without authentication; None where it is accepted.

        Args:
            ciphers: The cipher mode that the manifest states for each file; None for a plain file.
        """
        if not self.needs_encryption:
            return None
        if any(cipher is None for cipher in ciphers):
            return ACCEPT_UNENCRYPTED_HINT
        return None if self.allow_unsealed else ACCEPT_UNSEALED_HINT


NOTHING_GIVEN = Trust()
