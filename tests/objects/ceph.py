# SPDX-License-Identifier: Apache-2.0
"""A cluster of Ceph in memory with its gateway for S3, from Debian's packages, which are not installed.

One monitor, one OSD without replicas, one gateway; no authentication between them. The packages
are downloaded and unpacked into a folder, so neither root nor the package database is touched.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tests.objects.processes import Unavailable, free_port, output_of, running, until_reached

VERSION = "16.2.15"  # Debian 12
_PROGRAMS = ("radosgw", "ceph-mon", "ceph-osd")
_SIMULATED = re.compile(r"^Inst (\S+) (?:\[\S+\] )?\((\S+) ", re.MULTILINE)
_SETTINGS = """\
[global]
fsid = {fsid}
auth cluster required = none
auth service required = none
auth client required = none
mon host = v1:127.0.0.1:{mon_port}/0
mon allow pool size one = true
mon data = {data}/mon
mon data avail warn = 1
mon data avail crit = 1
paxos propose interval = 0.05
paxos min wait = 0.01
public addr = 127.0.0.1
ms type = async+posix
run dir = {data}
admin socket =
log file = {data}/$name.log
plugin dir = {libraries}/ceph
erasure code dir = {libraries}/ceph/erasure-code
osd class dir = {libraries}/rados-classes
osd class load list = *
osd class default list = *
osd data = {data}/osd
osd objectstore = memstore
memstore device bytes = 4294967296
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 1
osd crush chooseleaf type = 0
rgw data = {data}/rgw
rgw frontends = beast endpoint=127.0.0.1:{port}
rgw enable usage log = false
"""


def install(folder: Path) -> Path:
    """Download and unpack the programs; return the folder of their tree.

    Raises:
        Unavailable: The packages of this version cannot be had here.
    """
    tree = folder / f"ceph-{VERSION}"
    if tree.is_dir():
        return tree
    if shutil.which("apt-get") is None or shutil.which("dpkg") is None:
        raise Unavailable("Ceph comes from Debian's packages, and there is no apt-get here")
    try:
        _download(tree)
    except Unavailable:
        if os.geteuid() != 0:
            raise
        output_of(["apt-get", "update", "-qq"])
        _download(tree)
    return tree


def _download(tree: Path) -> None:
    wanted = [f"{program}={VERSION}*" for program in _PROGRAMS]
    simulated = output_of(["apt-get", "install", "--simulate", "--no-install-recommends", *wanted])
    packages = [f"{name}={version}" for name, version in _SIMULATED.findall(simulated)]
    with tempfile.TemporaryDirectory(dir=tree.parent) as work:
        output_of(["apt-get", "download", "-qq", *packages], folder=Path(work))
        made = Path(work) / "tree"
        for package in sorted(Path(work).glob("*.deb")):
            output_of(["dpkg", "--extract", str(package), str(made)])
        made.rename(tree)


@contextlib.contextmanager
def started(tree: Path) -> Iterator[str]:
    """Run a cluster; yield the address of its gateway, which knows the user `test` with the secret `test`.

    Raises:
        Unavailable: It does not start here.
    """
    found = sorted(tree.glob("usr/lib/*/librados.so.2"))
    if not found:
        raise Unavailable(f"{tree} has no librados.so.2")
    libraries = found[0].parent
    mon_port, port = free_port(), free_port()
    with tempfile.TemporaryDirectory(prefix="ckptmgr-ceph-") as name, contextlib.ExitStack() as up:
        data = Path(name)
        for folder in ("mon", "osd"):
            (data / folder).mkdir()
        fsid, osd_id = str(uuid.uuid4()), str(uuid.uuid4())
        settings = data / "ceph.conf"
        settings.write_text(
            _SETTINGS.format(
                fsid=fsid, mon_port=mon_port, port=port, data=data, libraries=libraries
            )
        )
        environment = _environment(tree, libraries, settings)

        def call(program: str, *arguments: str, by: Sequence[str] = ()) -> None:
            path = str(tree / "usr/bin" / program)
            output_of([*by, path, *arguments], environment=environment)

        def serve(program: str, *arguments: str) -> None:
            command = [str(tree / "usr/bin" / program), *arguments, "--foreground"]
            up.enter_context(running(command, environment=environment, log=data / program))

        monitor = f"[v1:127.0.0.1:{mon_port}]"
        monitors = str(data / "monmap")
        call("monmaptool", "--create", "--addv", "a", monitor, "--fsid", fsid, monitors)
        call("ceph-mon", "--id", "a", "--mkfs", "--monmap", monitors)
        serve("ceph-mon", "--id", "a")
        # Debian's Python, for which its bindings are built.
        call("ceph", "--connect-timeout", "30", "osd", "new", osd_id, by=["/usr/bin/python3"])
        call("ceph-osd", "--id", "0", "--mkfs", "--osd-uuid", osd_id)
        serve("ceph-osd", "--id", "0")
        user = ["--uid=test", "--display-name=test", "--access-key=test", "--secret=test"]
        call("radosgw-admin", "user", "create", *user)
        serve("radosgw", "--name", "client.rgw")
        until_reached(port, what=f"Ceph {VERSION}", log=data / "client.rgw.log")
        yield f"http://127.0.0.1:{port}"


def _environment(tree: Path, libraries: Path, settings: Path) -> Mapping[str, str]:
    folders = [libraries, libraries / "ceph", tree / "lib" / libraries.name]
    kept = {name: os.environ[name] for name in ("HOME", "LANG", "TMPDIR") if name in os.environ}
    return {
        **kept,
        "PATH": f"{tree}/usr/bin:/usr/bin:/bin",
        "LD_LIBRARY_PATH": ":".join(map(str, folders)),
        "PYTHONPATH": f"{tree}/usr/lib/python3/dist-packages",
        "PYTHONDONTWRITEBYTECODE": "1",
        "CEPH_CONF": str(settings),
    }
