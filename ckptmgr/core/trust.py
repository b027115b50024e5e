# SPDX-License-Identifier: Apache-2.0
"""Trust: the keys that prove a checkpoint, the signing key, and the exceptions from proof.

One frozen value travels from the user's options to every decision about proof. A key or a trusted
public key makes reading strict: an unproven checkpoint is refused and does not count for retention.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ckptmgr.core.arguments import check_is_bool
from ckptmgr.core.errors import KeyProblem
from ckptmgr.crypto.errors import CryptoError

if TYPE_CHECKING:  # slow to import, and needed with keys only
    from ckptmgr.core.model import Checkpoint
    from ckptmgr.crypto.keys.ring import Keys
    from ckptmgr.crypto.keys.signing import PublicKey, SigningKey


ACCEPT_UNSEALED_HINT = (
    "pass allow_unsealed=True (CLI: --allow-unsealed) if you trust where the file comes from"
)
ACCEPT_UNENCRYPTED_HINT = (
    "pass allow_unencrypted=True (CLI: --allow-unencrypted) if you trust where the file comes from"
)


@dataclass(frozen=True, slots=True, kw_only=True, init=False)
class Trust:
    """The proofs that a run accepts: `CheckpointManager(..., trust=Trust(trusted_keys=["a.pub"]))`.

    Attributes:
        trusted_keys: Public keys, or their files in PEM. A run does not resume from a checkpoint
            unless one of them signed its manifest. The public key of the configuration's
            `signing_key` is always trusted.
        allow_unsealed: With a key, also accept files that are encrypted under it but not proven as a
            whole by a seal, an authenticated manifest or a trusted signature (MindSpore's own).
        allow_unencrypted: With a key or trusted keys, also accept plain files; includes
            `allow_unsealed`.
        keys: Open files and check the HMAC of manifests; encrypt and authenticate on writing. A run
            takes them from `enc_key` and `enc_recipients` of its configuration.
        signing_key: Signs the manifests that are written; a run takes it from its configuration.

    Raises:
        TypeError, ValueError: A value of a wrong type.
        KeyProblem: A file holds no public key.
    """

    trusted_keys: tuple[PublicKey, ...]
    allow_unsealed: bool
    allow_unencrypted: bool
    keys: Keys | None
    signing_key: SigningKey | None

    def __init__(
        self,
        *,
        trusted_keys: Iterable[str | os.PathLike[str] | PublicKey] = (),
        allow_unsealed: bool = False,
        allow_unencrypted: bool = False,
        keys: Keys | None = None,
        signing_key: SigningKey | None = None,
    ) -> None:
        values = {
            "allow_unsealed": check_is_bool("allow_unsealed", allow_unsealed),
            "allow_unencrypted": check_is_bool("allow_unencrypted", allow_unencrypted),
            "trusted_keys": public_keys(trusted_keys),
            "keys": keys,
            "signing_key": signing_key,
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

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
        """Whether only proven checkpoints are accepted."""
        return (self.keys is not None or bool(self.trusted_keys)) and not self.accepts_unsealed

    @property
    def can_prove(self) -> bool:
        """Whether an accepted manifest is proven: by an opening key or a trusted signature."""
        return self.is_strict and (self.can_authenticate or bool(self.trusted_keys))

    @property
    def can_authenticate(self) -> bool:
        """Whether the keys check and write the HMAC of a manifest; public keys alone do not."""
        if self.keys is None:
            return False
        from ckptmgr.crypto.keys.ring import ring_of

        return ring_of(self.keys).can_open

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
        """The same keys without exceptions; a writer that signs trusts its own signatures."""
        own = () if self.signing_key is None else (self.signing_key.public_key,)
        return replace(
            self,
            trusted_keys=tuple(dict.fromkeys((*own, *self.trusted_keys))),
            allow_unsealed=False,
            allow_unencrypted=False,
        )

    def proves(self, checkpoint: Checkpoint) -> bool:
        """Return whether the keys have proven the manifest of a listed checkpoint."""
        return self.can_prove and checkpoint.is_attested and checkpoint.run_id is not None

    def hint_without_mac(self, ciphers: Iterable[str | None]) -> str | None:
        """Return how to accept a manifest without authentication; None where it is accepted.

        `ciphers` has the cipher mode of each file in the manifest, None for a plain file.
        """
        if not self.needs_encryption:
            return None
        if any(cipher is None for cipher in ciphers):
            return ACCEPT_UNENCRYPTED_HINT
        return None if self.allow_unsealed else ACCEPT_UNSEALED_HINT


def public_keys(keys: Iterable[str | os.PathLike[str] | PublicKey]) -> tuple[PublicKey, ...]:
    """Return public keys, given as values or as PEM files."""
    if isinstance(keys, str | bytes | os.PathLike):
        raise TypeError("'trusted_keys' must be a list of public key files, not one of them")
    given = tuple(keys)
    if not given:
        return ()
    from ckptmgr.crypto.keys.signing import PublicKey, load_public_key

    try:
        return tuple(one if isinstance(one, PublicKey) else load_public_key(one) for one in given)
    except CryptoError as error:
        raise KeyProblem(error.message, hint=error.hint) from error


DEFAULT_TRUST = Trust()
