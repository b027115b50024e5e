# SPDX-License-Identifier: Apache-2.0
"""Options about keys and proof that several commands share, and the keys that they name."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import click

from ckptmgr.cli.exits import UsageProblem
from ckptmgr.cli.options import Command, only_one
from ckptmgr.core.errors import KeyProblem

if TYPE_CHECKING:
    from ckptmgr.core.trust import Trust
    from ckptmgr.crypto.keys.ring import Keys
    from ckptmgr.crypto.keys.signing import PublicKey, SigningKey

_SCHEMES = ("env:", "file:", "cmd:", "fd:", "prompt:", "wrapped:", "passphrase:")
_SOURCES = "env:NAME, file:PATH, cmd:COMMAND, fd:N, prompt:, wrapped:FILE or passphrase:SOURCE"


def key_option(function: Command) -> Command:
    """Add `--key`."""
    return click.option(
        "--key",
        "key_sources",
        metavar="SOURCE",
        multiple=True,
        help=f"{_SOURCES}; a file of a private key opens, too. May be repeated: any of them opens.  "
        "[default: the file $CKPTMGR_KEY_FILE, then the variable CKPTMGR_KEY]",
    )(function)


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenTrust:
    """Options about keys and proof, before any key is loaded."""

    key_sources: tuple[str, ...] = ()
    public_keys: tuple[str, ...] = ()
    signing_source: str | None = None
    allow_unsealed: bool = False
    allow_unencrypted: bool = False

    def load(self, *, is_new: bool = False) -> Trust:
        """Load the keys; `is_new` as for `keys_of_command`.

        A signing key trusts only its own signatures, unless public keys are named.

        Raises:
            UsageProblem, KeyProblem: A source gives no key.
        """
        return self.with_keys(keys_of_command(self.key_sources, is_new=is_new))

    def has_environment_key(self) -> bool:
        """Return whether the environment names a key."""
        return bool(sources_in_environment(os.environ))

    def with_keys(self, keys: Keys | None) -> Trust:
        """Return the trust in keys that were loaded elsewhere; see `load`."""
        from ckptmgr.core.trust import Trust

        signing_key = signing_key_of_option(self.signing_source)
        trusted = load_public_keys(self.public_keys)
        if signing_key is not None and not trusted:
            trusted = (signing_key.public_key,)
        return Trust(
            keys=keys,
            trusted_keys=trusted,
            signing_key=signing_key,
            allow_unsealed=self.allow_unsealed,
            allow_unencrypted=self.allow_unencrypted,
        )


def trust_options(
    *, has_public_key: bool = False, has_signing_key: bool = False, has_allowing: bool = True
) -> Callable[[Command], Command]:
    """Return a decorator that adds the options about keys and proof, passed on as `given_trust`."""
    allowing = (
        click.option(
            "--allow-unencrypted",
            is_flag=True,
            help="With a key: accept plain files, too.",
        ),
        click.option(
            "--allow-unsealed",
            is_flag=True,
            help="With a key: accept encrypted files that are not proven as a whole (MindSpore's own).",
        ),
    )

    def decorate(function: Command) -> Command:
        @functools.wraps(function)
        def command(*args: object, **options: object) -> object:
            names = [name for name in GivenTrust.__dataclass_fields__ if name in options]
            given = {name: options.pop(name) for name in names}
            return function(*args, given_trust=GivenTrust(**cast(Any, given)), **options)

        decorated = cast(Command, command)
        for option in (
            *([signing_key_option] if has_signing_key else []),
            *(allowing if has_allowing else ()),
            key_option,
            *([public_key_option] if has_public_key else []),
        ):
            decorated = option(decorated)
        return decorated

    return decorate


def public_key_option(function: Command) -> Command:
    """Add `--public-key`."""
    return click.option(
        "--public-key",
        "public_keys",
        metavar="FILE",
        multiple=True,
        help="Whose signatures count; what none of them signed is refused. May be repeated.",
    )(function)


def signing_key_option(function: Command) -> Command:
    """Add `--signing-key`."""
    return click.option(
        "--signing-key",
        "signing_source",
        metavar="SOURCE",
        multiple=True,
        callback=only_one,
        help="Source of the private key that signs what is changed: file:PATH, env:NAME, cmd:COMMAND or fd:N.",
    )(function)


def keys_of_command(
    sources: Sequence[str], environment: Mapping[str, str] = os.environ, *, is_new: bool = False
) -> Keys | None:
    """Return the keys that `--key` or the environment names, or None.

    `is_new`: the key encrypts something new; a passphrase is then asked for twice.

    Raises:
        UsageProblem: A literal key, or no known kind of source. It is not shown.
        KeyProblem: A source gives no key.
    """
    sources = sources or sources_in_environment(environment)
    return keys_of_option("--key", sources, is_new=is_new) if sources else None


def keys_of_option(option: str, sources: Sequence[str], *, is_new: bool = False) -> Keys:
    """Return the keys, passphrases, private and public keys that an option names; as `keys_of_command`."""
    if not all(source.startswith(_SCHEMES) for source in sources):
        raise UsageProblem(
            f"{option} takes the source of a key, never the key itself (not shown)",
            hint=f"use {_SOURCES}; every user of the machine can read a command line",
        )
    from ckptmgr.crypto import errors
    from ckptmgr.crypto.keys import material as key_sources

    try:
        return key_sources.load_keys(sources, asked_for=option, is_new=is_new)
    except errors.CryptoError as error:
        raise KeyProblem(error.message, hint=error.hint) from error


def signing_key_of_option(source: str | None) -> SigningKey | None:
    """Return the key that `--signing-key` names, or None.

    Raises:
        UsageProblem: No known kind of source. It is not shown.
        KeyProblem: The source gives no key.
    """
    if source is None:
        return None
    check_source("--signing-key", source)
    from ckptmgr.config.checks import check_signing_key

    return check_signing_key(source)


def check_source(option: str, source: str) -> None:
    """Raise UsageProblem unless an option names the source of a private key, which is not shown."""
    if not source.startswith(_SCHEMES):
        raise UsageProblem(
            f"{option} takes the source of a key, never the key itself (not shown)",
            hint="use file:PATH, env:NAME, cmd:COMMAND or fd:N",
        )


def load_public_keys(files: Sequence[str]) -> tuple[PublicKey, ...]:
    """Return the keys that `--public-key` names.

    Raises:
        KeyProblem: A file is no public key.
    """
    from ckptmgr.core.trust import public_keys

    return public_keys(files)


def sources_in_environment(environment: Mapping[str, str] = os.environ) -> Sequence[str]:
    """Return the sources that the environment names: those without `--key`."""
    if environment.get("CKPTMGR_KEY_FILE"):
        return [f"file:{environment['CKPTMGR_KEY_FILE']}"]
    return ["env:CKPTMGR_KEY"] if environment.get("CKPTMGR_KEY") else []
