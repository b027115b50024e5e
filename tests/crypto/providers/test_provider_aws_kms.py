# SPDX-License-Identifier: Apache-2.0
"""AWS KMS through the real boto3: against moto, and against recorded refusals where moto does not refuse."""

from __future__ import annotations

import base64
import logging
import subprocess
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptmgr.crypto.errors import KeySourceError
from ckptmgr.crypto.providers.aws_kms import AwsKmsProvider, open_aws_kms
from ckptmgr.crypto.providers.provider import (
    KeyGenerator,
    KeyProvider,
    ProviderAnswerError,
    ProviderError,
    ProviderRefusedError,
    ProviderUnavailableError,
)
from ckptmgr.crypto.providers.registry import open_provider
from ckptmgr.crypto.providers.run_key import RunKey, RunKeyReader

boto3 = pytest.importorskip("boto3", reason="needs boto3: make providers")
moto = pytest.importorskip("moto", reason="needs moto: make providers")
pytestmark = pytest.mark.providers

KEY = b"\xc0\xff\xee-Top-Secret!!"
CONTEXT = {"run": "7f"}
REGION = "eu-west-1"


@pytest.fixture(autouse=True)
def kms(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An AWS of this process, without any settings of the machine."""
    for name in ("AWS_PROFILE", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_KMS", "AWS_REGION"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, "/dev/null")
    monkeypatch.setenv("AWS_DEFAULT_REGION", REGION)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with moto.mock_aws():
        yield


def new_key(region: str = REGION) -> str:
    """Create a key in AWS KMS and return its ARN."""
    return str(boto3.client("kms", region_name=region).create_key()["KeyMetadata"]["Arn"])


@pytest.fixture
def provider() -> AwsKmsProvider:
    return AwsKmsProvider(key_id=new_key())


def test_wrapped_key_unwraps(provider: AwsKmsProvider) -> None:
    service: KeyProvider = provider
    blob = service.wrap(KEY, CONTEXT)
    assert KEY not in blob
    assert service.unwrap(blob, CONTEXT) == KEY


def test_run_uses_a_key_that_the_service_made(provider: AwsKmsProvider) -> None:
    assert isinstance(provider, KeyGenerator)
    wrapped = RunKey(provider, CONTEXT).take()
    assert len(wrapped.key.raw) == 32
    assert wrapped.provider == "aws-kms"
    assert RunKeyReader(provider).unwrap(wrapped.blob, CONTEXT) == wrapped.key
    assert RunKey(provider, CONTEXT).take().key != wrapped.key


@pytest.mark.parametrize("context", [{}, {"run": "80"}, {"run": "7f", "more": ""}])
def test_wrapped_key_with_another_context_is_refused(
    provider: AwsKmsProvider, context: dict[str, str]
) -> None:
    blob = provider.wrap(KEY, CONTEXT)
    with pytest.raises(ProviderRefusedError, match="does not unwrap this blob") as caught:
        provider.unwrap(blob, context)
    assert caught.value.hint == "another key or another context wrapped it, or it was changed"


def test_wrapped_key_that_was_changed_is_refused(provider: AwsKmsProvider) -> None:
    blob = provider.wrap(KEY, CONTEXT)
    with pytest.raises(ProviderRefusedError, match="InvalidCiphertextException"):
        provider.unwrap(blob[:-1] + bytes([blob[-1] ^ 1]), CONTEXT)


@pytest.mark.parametrize("blob", [b"", b"blob", bytes(200)], ids=len)
def test_blob_of_somebody_else_is_refused(provider: AwsKmsProvider, blob: bytes) -> None:
    with pytest.raises(ProviderRefusedError):
        provider.unwrap(blob, CONTEXT)


def test_key_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ProviderRefusedError, match=r"NotFoundException: Alias .*training"):
        AwsKmsProvider(key_id="alias/training").wrap(KEY, CONTEXT)


def test_alias_names_a_key(provider: AwsKmsProvider) -> None:
    client = boto3.client("kms")
    client.create_alias(AliasName="alias/training", TargetKeyId=provider.key_id)
    named = open_provider("aws-kms:alias/training")
    assert named.key_id == "alias/training"
    assert provider.unwrap(named.wrap(KEY, CONTEXT), CONTEXT) == KEY


def test_arn_says_its_region(monkeypatch: pytest.MonkeyPatch) -> None:
    arn = new_key("us-east-2")
    provider = open_aws_kms(arn)
    assert provider.unwrap(provider.wrap(KEY, CONTEXT), CONTEXT) == KEY
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    assert provider.wrap(KEY, CONTEXT)
    with pytest.raises(ProviderUnavailableError, match="You must specify a region"):
        open_aws_kms(arn.rpartition("/")[2]).wrap(KEY, CONTEXT)


def test_service_that_nobody_answers_for_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_KMS", "http://127.0.0.1:9")
    provider = AwsKmsProvider(key_id="alias/training", timeout_s=2.0, max_attempts=1)
    with pytest.raises(ProviderUnavailableError, match="could not be asked"):
        provider.wrap(KEY, CONTEXT)


def test_machine_without_credentials_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(ProviderUnavailableError, match="credentials") as caught:
        AwsKmsProvider(key_id="alias/training").wrap(KEY, CONTEXT)
    assert caught.value.hint is not None


def answering(monkeypatch: pytest.MonkeyPatch, response: tuple[int, dict[str, object]]) -> None:
    """Let botocore's own hook give a recorded answer to every call of KMS."""
    from botocore.awsrequest import AWSResponse
    from botocore.hooks import HierarchicalEmitter

    emit = HierarchicalEmitter.emit_until_response
    status, document = response

    def recorded(self: Any, name: str, **words: object) -> object:
        if not name.startswith("before-call.kms"):
            return emit(self, name, **words)
        http = AWSResponse("https://kms", status, {}, None)
        return None, (http, document)

    monkeypatch.setattr(HierarchicalEmitter, "emit_until_response", recorded)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("AccessDeniedException", ProviderRefusedError),
        ("DisabledException", ProviderRefusedError),
        ("IncorrectKeyException", ProviderRefusedError),
        ("InvalidKeyUsageException", ProviderRefusedError),
        ("KMSInvalidStateException", ProviderRefusedError),
        ("DependencyTimeoutException", ProviderUnavailableError),
        ("KMSInternalException", ProviderUnavailableError),
        ("KeyUnavailableException", ProviderUnavailableError),
        ("ThrottlingException", ProviderUnavailableError),
    ],
)
def test_refusal_that_aws_documents_has_its_kind(
    code: str, kind: type[ProviderError], monkeypatch: pytest.MonkeyPatch
) -> None:
    answering(monkeypatch, (400, {"Error": {"Code": code, "Message": "because"}}))
    with pytest.raises(ProviderError, match=f"{code}: because") as caught:
        AwsKmsProvider(key_id="alias/training").unwrap(b"blob", CONTEXT)
    assert type(caught.value) is kind


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ({}, "without Plaintext"),
        ({"Plaintext": "text"}, "without Plaintext"),
        ({"Plaintext": bytes(7)}, "unwrapped 7 bytes"),
        ({"Plaintext": bytes(32)}, "without CiphertextBlob"),
        ({"Plaintext": bytes(32), "CiphertextBlob": b""}, "a blob of 0 bytes"),
    ],
)
def test_answer_that_lacks_something_is_refused(
    answer: dict[str, object], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    answering(monkeypatch, (200, answer))
    with pytest.raises(ProviderAnswerError, match=reason):
        AwsKmsProvider(key_id="alias/training").generate(CONTEXT)


def test_debug_log_of_the_library_never_holds_the_key(
    provider: AwsKmsProvider, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    wrapped = RunKey(provider, CONTEXT).take()
    provider.unwrap(provider.wrap(wrapped.key.raw, CONTEXT), CONTEXT)
    spelled = base64.b64encode(wrapped.key.raw).decode()
    assert spelled not in caplog.text
    # boto3 does log keys, and still does so for other callers.
    boto3.client("kms").encrypt(KeyId=provider.key_id, Plaintext=wrapped.key.raw)
    assert spelled in caplog.text


FRESH = """
import logging, sys
logging.basicConfig(level=logging.DEBUG)
from ckptmgr.crypto.providers.aws_kms import AwsKmsProvider
from ckptmgr.crypto.providers.provider import ProviderUnavailableError
try:
    AwsKmsProvider(key_id="alias/x", timeout_s=2, max_attempts=1).wrap(bytes(range(32)), {})
except ProviderUnavailableError:
    logging.debug("the call is over")
"""


def test_first_call_of_a_process_is_as_silent_as_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_KMS", "http://127.0.0.1:9")
    done = subprocess.run(
        [sys.executable, "-c", FRESH],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[3],
        check=True,
    )
    assert "the call is over" in done.stderr
    assert base64.b64encode(bytes(range(32))).decode() not in done.stderr


def test_failure_shows_no_key(provider: AwsKmsProvider) -> None:
    with pytest.raises(ProviderError) as caught:
        AwsKmsProvider(key_id="alias/absent").wrap(KEY, CONTEXT)
    shown = "".join(traceback.format_exception(caught.value)) + repr(caught.value)
    for form in (KEY.hex(), base64.b64encode(KEY).decode(), repr(KEY)[2:-1]):
        assert form not in shown


def test_machine_without_boto3_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "botocore.exceptions", None)
    with pytest.raises(ProviderUnavailableError, match="needs boto3") as caught:
        AwsKmsProvider(key_id="alias/training").wrap(KEY, CONTEXT)
    assert caught.value.hint == 'pip install "ckptmgr[aws]"'


def test_address_without_a_key_is_refused() -> None:
    with pytest.raises(KeySourceError, match="has no name"):
        open_aws_kms("")
