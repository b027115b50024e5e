# SPDX-License-Identifier: Apache-2.0
"""OpenSSF model signing: bundles that `model_signing verify key` accepts, made by that package.

A bundle of a file signs that file, `net-3_40.safetensors.sig`; a bundle of a directory signs all
files in it, `model.sig`, but for hidden ones: leases and the trash of a run. Source:
github.com/sigstore/model-transparency, 1.1.1.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from ckptmgr.core.errors import KeyProblem, UnsupportedCheckpoint
from ckptmgr.crypto.errors import CryptoError
from ckptmgr.crypto.keys.sources import load_secret

BUNDLE_NAME = "model.sig"
BUNDLE_SUFFIX = ".sig"


def bundle_path(path: Path) -> Path:
    """Return the path of the bundle of a file or a directory."""
    return path / BUNDLE_NAME if path.is_dir() else path.with_name(path.name + BUNDLE_SUFFIX)


def sign_bundle(path: Path, key_source: str) -> bytes:
    """Return a bundle that signs a file, or all files in a directory.

    `key_source` is that of a private key on a NIST curve, in PEM: `file:PATH`, `env:NAME`,
    `cmd:COMMAND` or `fd:N`.

    Raises:
        UnsupportedCheckpoint: `model_signing` is not installed, or cannot sign such files.
        KeyProblem: The source gives no such key. The message never shows the secret.
        OSError: From the disk.
    """
    try:
        from model_signing import hashing, signing
    except ImportError as error:
        raise UnsupportedCheckpoint(
            f"bundles are made by the model_signing package, which is not there ({error})",
            path=path,
            hint="pip install 'ckptmgr[sign]'",
        ) from error
    hashed = hashing.Config().set_ignored_paths(paths=_unsigned(path))
    with tempfile.TemporaryDirectory(prefix="ckptmgr-sign-") as folder:
        signer = signing.Config().set_hashing_config(hashed)
        _give_key(signer, key_source)
        target = Path(folder) / BUNDLE_NAME
        try:
            signer.sign(path, target)
        except ValueError as error:
            raise UnsupportedCheckpoint(f"cannot be signed: {error}", path=path) from error
        return target.read_bytes()


def _unsigned(path: Path) -> list[str]:
    if not path.is_dir():
        return []
    hidden = [entry.name for entry in path.iterdir() if entry.name.startswith(".")]
    return [*sorted(hidden), BUNDLE_NAME]


def _give_key(signer: object, source: str) -> None:
    """Give the package, which takes a path only, a key that is never on a disk."""
    try:
        text = load_secret(source).encode("utf-8")
    except CryptoError as error:
        raise KeyProblem(error.message, hint=error.hint) from error
    descriptor = os.memfd_create("ckptmgr-sign")
    try:
        os.write(descriptor, text)
        signer.use_elliptic_key_signer(private_key=Path(f"/proc/self/fd/{descriptor}"))  # type: ignore[attr-defined]
    except (ValueError, TypeError, AttributeError):
        raise KeyProblem(
            "the source gives no private key for bundles: one on a NIST curve, in PEM, without a passphrase",
            hint="ckptmgr keygen --type p256 --out bundle.pem",
        ) from None
    finally:
        os.close(descriptor)
