# SPDX-License-Identifier: Apache-2.0
"""A server of S3 for the tests of this folder: moto's, one for each worker."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest

_numbers = itertools.count()


@pytest.fixture(scope="session")
def server() -> Iterator[str]:
    """The address of a running server."""
    moto = pytest.importorskip("moto.server")
    pytest.importorskip("obstore")
    running = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    host, port = running.get_host_and_port()
    yield f"http://{host}:{port}"
    running.stop()


@pytest.fixture
def new_bucket(server: str, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Return a function that makes a bucket and returns the address of a run in it."""
    import boto3

    for name, value in {
        "AWS_ENDPOINT_URL": server,
        "AWS_ALLOW_HTTP": "true",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_REGION": "us-east-1",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    client = boto3.client("s3", endpoint_url=server)

    def make(*, has_versions: bool = False) -> str:
        bucket = f"bucket-{next(_numbers)}"
        client.create_bucket(Bucket=bucket)
        if has_versions:
            client.put_bucket_versioning(
                Bucket=bucket, VersioningConfiguration={"Status": "Enabled"}
            )
        return f"s3://{bucket}/run"

    return make
