# SPDX-License-Identifier: Apache-2.0
"""Servers of object stores for the tests of this folder: each test runs against each of them."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Mapping

import pytest

from tests.objects import azurite
from tests.objects.servers import NO_SERVER, variable_of

_ENDPOINTS = {"s3": "AWS_ENDPOINT_URL", "az": "AZURITE_BLOB_STORAGE_URL"}
_numbers = itertools.count()


@pytest.fixture(scope="session")
def moto_server() -> Iterator[str]:
    """The address of a server in this process."""
    moto = pytest.importorskip("moto.server")
    running = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    host, port = running.get_host_and_port()
    yield f"http://{host}:{port}"
    running.stop()


@pytest.fixture(params=["moto", "ceph", "azurite"])
def store(request: pytest.FixtureRequest) -> str:
    """The name of a server."""
    return str(request.param)


@pytest.fixture
def server(store: str, request: pytest.FixtureRequest) -> str:
    """The address of a running server."""
    pytest.importorskip("obstore")
    if store == "moto":
        return str(request.getfixturevalue("moto_server"))
    address = os.environ.get(variable_of(store), f"{NO_SERVER}`make objects` starts one")
    if address.startswith(NO_SERVER):
        pytest.skip(f"{store}: {address.removeprefix(NO_SERVER)}")
    return address


@pytest.fixture
def new_bucket(store: str, server: str, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Return a function that makes a bucket and returns the address of a run in it."""
    settings = _azure(server) if store == "azurite" else _s3(server)
    for name, value in settings.items():
        monkeypatch.setenv(name, value)

    def make(*, has_versions: bool = False) -> str:
        bucket = f"bucket-{os.getpid()}-{next(_numbers)}"
        if store != "azurite":
            _make_s3_bucket(server, bucket, has_versions=has_versions)
            return f"s3://{bucket}/run"
        if has_versions:
            pytest.skip("Azurite keeps no versions")
        azurite.make_container(server, bucket)
        return f"az://{bucket}/run"

    return make


@pytest.fixture
def lose_server(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Return a function that has the address of a store lead to a port where none answers."""

    def lose(url: str) -> None:
        monkeypatch.setenv(_ENDPOINTS[url.partition(":")[0]], "http://127.0.0.1:9")

    return lose


def _s3(server: str) -> Mapping[str, str]:
    return {
        "AWS_ENDPOINT_URL": server,
        "AWS_ALLOW_HTTP": "true",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_REGION": "us-east-1",
        "AWS_DEFAULT_REGION": "us-east-1",
    }


def _azure(server: str) -> Mapping[str, str]:
    return {
        "AZURITE_BLOB_STORAGE_URL": server,
        "AZURE_STORAGE_USE_EMULATOR": "true",
        "AZURE_STORAGE_ACCOUNT_NAME": azurite.ACCOUNT,
        "AZURE_STORAGE_ACCOUNT_KEY": azurite.KEY,
    }


def _make_s3_bucket(server: str, bucket: str, *, has_versions: bool) -> None:
    import boto3

    client = boto3.client("s3", endpoint_url=server)
    client.create_bucket(Bucket=bucket)
    if has_versions:
        enabled = {"Status": "Enabled"}
        client.put_bucket_versioning(Bucket=bucket, VersioningConfiguration=enabled)
