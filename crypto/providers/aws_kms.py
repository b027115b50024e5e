# SPDX-License-Identifier: Apache-2.0
"""AWS KMS as the key service: `ckptmgr[aws]`.

The context becomes KMS's encryption context, which shows in CloudTrail and can be demanded by key
policies. Keys of runs come from `GenerateDataKey`; `Encrypt` only wraps a key that exists already.
boto3 finds credentials, region and endpoint as always; an ARN states its own region.

Only the named key unwraps a blob. So when an alias moves to another key, name the old key to read
old files.

boto3 writes requests and answers, keys included, into its debug log; while a call runs here, its
loggers are silent.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol, cast

from ..errors import KeySourceError
from .provider import (
    GeneratedKey,
    ProviderAnswerError,
    ProviderError,
    ProviderRefusedError,
    ProviderUnavailableError,
    check_blob,
    check_key_size,
    check_unwrapped,
    context_bytes,
)
from .redaction import MAX_SHOWN_CHARACTERS

_SHOWN = "AWS KMS"
_TRANSIENT = frozenset(
    (
        "DependencyTimeoutException",
        "KMSInternalException",
        "KeyUnavailableException",
        "LimitExceededException",
        "ServiceUnavailable",
        "ServiceUnavailableException",
        "Throttling",
        "ThrottlingException",
    )
)
_LIBRARIES = ("boto3", "botocore", "urllib3")
_is_calling: ContextVar[bool] = ContextVar("ckptmgr.aws_kms.is_calling", default=False)

_Answer = Mapping[str, object]


class _Client(Protocol):
    """The methods of boto3's client that are used."""

    def encrypt(
        self,
        *,
        KeyId: str,
        Plaintext: bytes,
        EncryptionContext: Mapping[str, str],
    ) -> _Answer: ...

    def decrypt(
        self,
        *,
        KeyId: str,
        CiphertextBlob: bytes,
        EncryptionContext: Mapping[str, str],
    ) -> _Answer: ...

    def generate_data_key(
        self, *, KeyId: str, KeySpec: str, EncryptionContext: Mapping[str, str]
    ) -> _Answer: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AwsKmsProvider:
    """A symmetric key in AWS KMS.

    Attributes:
        key_id: Key id, ARN or alias (`alias/training`).
        timeout_s: For connecting and for each answer.
        max_attempts: Number of attempts of a call, including the first.

    Raises:
        KeySourceError: There is no key id.

    Source: AWS KMS API reference, GenerateDataKey, Encrypt and Decrypt.
    """

    key_id: str
    timeout_s: float = 5.0
    max_attempts: int = 3

    def __post_init__(self) -> None:
        if not self.key_id:
            raise KeySourceError("the AWS KMS key has no name", hint="write aws-kms:alias/NAME")

    @property
    def name(self) -> str:
        """`aws-kms`."""
        return "aws-kms"

    def generate(self, context: Mapping[str, str]) -> GeneratedKey:
        """Return a new key of 32 bytes with its blob; raises as `KeyProvider.wrap`."""
        context_bytes(context)
        answer = self._ask(
            lambda client: client.generate_data_key(
                KeyId=self.key_id, KeySpec="AES_256", EncryptionContext=dict(context)
            )
        )
        key = check_unwrapped(_bytes_of(answer, "Plaintext"), provider=_SHOWN)
        return GeneratedKey(
            key=key, blob=check_blob(_bytes_of(answer, "CiphertextBlob"), provider=_SHOWN)
        )

    def wrap(self, key: bytes, context: Mapping[str, str]) -> bytes:
        """Return the blob of a key; raises as `KeyProvider.wrap`."""
        check_key_size(key)
        context_bytes(context)
        answer = self._ask(
            lambda client: client.encrypt(
                KeyId=self.key_id, Plaintext=key, EncryptionContext=dict(context)
            )
        )
        return check_blob(_bytes_of(answer, "CiphertextBlob"), provider=_SHOWN)

    def unwrap(self, blob: bytes, context: Mapping[str, str]) -> bytes:
        """Return the key inside `blob`; raises as `KeyProvider.unwrap`."""
        context_bytes(context)
        answer = self._ask(
            lambda client: client.decrypt(
                KeyId=self.key_id, CiphertextBlob=blob, EncryptionContext=dict(context)
            )
        )
        return check_unwrapped(_bytes_of(answer, "Plaintext"), provider=_SHOWN)

    def _ask(self, call: Callable[[_Client], _Answer]) -> _Answer:
        try:
            from botocore.exceptions import BotoCoreError, ClientError
        except ImportError:
            raise ProviderUnavailableError(
                "AWS KMS needs boto3", hint='pip install "ckptmgr[aws]"'
            ) from None
        try:
            client = self._client()  # makes the loggers that are then silenced
            with _silent():
                return call(client)
        except ClientError as error:
            raise _translated(error.response) from None
        except BotoCoreError as error:
            raise ProviderUnavailableError(
                f"AWS KMS could not be asked: {_line(str(error))}",
                hint="check the network, the region and the credentials of boto3",
            ) from None

    def _client(self) -> _Client:
        from boto3.session import Session
        from botocore.config import Config

        config = Config(
            connect_timeout=self.timeout_s,
            read_timeout=self.timeout_s,
            retries={"total_max_attempts": self.max_attempts, "mode": "standard"},
        )
        # A session of its own, because the default one must not be shared between threads.
        session = Session(region_name=self._region)
        return cast(_Client, session.client("kms", config=config))

    @property
    def _region(self) -> str | None:
        parts = self.key_id.split(":")
        return parts[3] if parts[0] == "arn" and len(parts) > 3 else None


def open_aws_kms(key_id: str) -> AwsKmsProvider:
    """Return the provider for a key: `aws-kms:alias/training`, `aws-kms:arn:aws:kms:...`.

    Raises:
        KeySourceError: There is no key id.
    """
    return AwsKmsProvider(key_id=key_id)


def _translated(response: Mapping[str, object]) -> ProviderError:
    error = cast("Mapping[str, str]", response.get("Error", {}))
    code, message = error.get("Code", "no code"), error.get("Message", "")
    text = _line(f"{code}: {message}" if message else code)
    if code in _TRANSIENT:
        return ProviderUnavailableError(f"AWS KMS is not available now: {text}")
    if code == "InvalidCiphertextException":
        hint = "another key or another context wrapped it, or it was changed"
        return ProviderRefusedError(f"AWS KMS does not unwrap this blob: {text}", hint=hint)
    return ProviderRefusedError(
        f"AWS KMS refused: {text}", hint="check the name, the state and the policy of the key"
    )


def _line(text: str) -> str:
    """Return the message of a server or a library as one printable line of limited length."""
    line = " ".join("".join(one if one.isprintable() else " " for one in text).split())
    return line if len(line) <= MAX_SHOWN_CHARACTERS else f"{line[:MAX_SHOWN_CHARACTERS]}..."


def _bytes_of(answer: _Answer, member: str) -> bytes:
    value = answer.get(member)
    if not isinstance(value, bytes):
        raise ProviderAnswerError(f"AWS KMS gave an answer without {member}")
    return value


def _is_wanted(_: logging.LogRecord) -> bool:
    return not _is_calling.get()


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Keep boto3's loggers from writing keys, in this thread and during a call."""
    for name in tuple(logging.root.manager.loggerDict):
        if name.partition(".")[0] in _LIBRARIES:
            logging.getLogger(name).addFilter(_is_wanted)
    token = _is_calling.set(True)
    try:
        yield
    finally:
        _is_calling.reset(token)
