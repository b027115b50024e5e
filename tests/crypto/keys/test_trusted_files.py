# SPDX-License-Identifier: Apache-2.0
"""The rule for files with secrets and trust anchors: owner, and permissions to change and read."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from ckptmgr.crypto.errors import KeySourceError
from ckptmgr.crypto.keys.signing import SigningKey, load_public_key
from ckptmgr.crypto.keys.trusted_files import is_given, read_trusted_file, refusal_of

USER, OTHER, ROOT = 1000, 1001, 0
PUBLIC_PEM = SigningKey(bytes(range(32))).public_key.to_pem()


def status(owner: int, mode: int) -> os.stat_result:
    return os.stat_result((stat.S_IFREG | mode, 0, 0, 1, owner, 0, 32, 0, 0, 0))


@pytest.mark.parametrize("is_public", [False, True])
@pytest.mark.parametrize("user", [USER, ROOT])
def test_file_of_another_user_is_refused(user: int, is_public: bool) -> None:
    refusal = refusal_of(status(OTHER, 0o600), user=user, is_public=is_public)
    assert refusal == f"belongs to another user (uid {OTHER})"


@pytest.mark.parametrize("is_public", [False, True])
@pytest.mark.parametrize("owner", [USER, ROOT])
def test_file_of_the_user_or_of_root_is_accepted(owner: int, is_public: bool) -> None:
    assert refusal_of(status(owner, 0o600), user=USER, is_public=is_public) is None


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666, 0o777])
def test_file_that_group_or_others_can_write_is_refused(mode: int) -> None:
    for owner in (USER, ROOT):
        refusal = refusal_of(status(owner, mode), user=USER, is_public=True)
        assert refusal == f"can be changed by others (mode {mode:04o})"
        refusal = refusal_of(status(owner, mode), user=USER)
        assert refusal == f"can be used by others (mode {mode:04o})"


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o601])
def test_file_that_others_can_read_is_accepted_only_where_it_is_public(mode: int) -> None:
    assert refusal_of(status(USER, mode), user=USER, is_public=True) is None
    assert refusal_of(status(USER, mode), user=USER) == f"can be used by others (mode {mode:04o})"


def test_symbolic_link_is_judged_by_the_file_that_it_leads_to(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.pub", tmp_path / "bad.pub"
    for path, mode in ((good, 0o644), (bad, 0o666)):
        path.write_bytes(PUBLIC_PEM)
        path.chmod(mode)
        (tmp_path / f"to-{path.name}").symlink_to(path)
    assert load_public_key(tmp_path / "to-good.pub") == load_public_key(good)
    with pytest.raises(KeySourceError, match=r"to-bad.pub' can be changed by others") as caught:
        load_public_key(tmp_path / "to-bad.pub")
    assert "chmod go-w" in str(caught.value.hint)
    assert "chown" in str(caught.value.hint)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["FIFO", "directory"])
def test_what_is_no_regular_file_is_refused_at_once(make: object, tmp_path: Path) -> None:
    path = tmp_path / "odd"
    make(path, 0o600)  # type: ignore[operator]
    for link in (path, tmp_path / "link"):
        with pytest.raises(KeySourceError, match=f"key file '{link}' is not a regular file"):
            read_trusted_file(link)
        (tmp_path / "link").unlink(missing_ok=True)
        (tmp_path / "link").symlink_to(path)


@pytest.mark.parametrize(
    ("owner", "mode", "user", "is_read_only", "expected"),
    [
        (0, 0o644, USER, False, True),
        (0, 0o440, USER, True, True),
        (USER, 0o644, USER, True, True),
        (0, 0o644, 0, True, True),
        (0, 0o644, 0, False, False),
        (USER, 0o644, USER, False, False),
        (OTHER, 0o644, USER, True, False),
        (0, 0o664, USER, True, False),
        (0, 0o646, USER, False, False),
    ],
)
def test_secret_that_its_reader_cannot_change_may_be_readable(
    owner: int, mode: int, user: int, is_read_only: bool, expected: bool
) -> None:
    assert is_given(status(owner, mode), user=user, is_read_only=is_read_only) is expected


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_secret_of_root_is_read_by_another_user_with_a_warning(tmp_path: Path) -> None:
    path = tmp_path / "run.key"
    path.write_text("11" * 32)
    path.chmod(0o644)
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == 0 and folder != Path("/"):
            folder.chmod(folder.stat().st_mode | 0o011)
    code = (
        "import os, sys; from ckptmgr.crypto.keys.trusted_files import read_trusted_file; os.setgid(12345);"
        "os.setuid(12345); print(len(read_trusted_file(sys.argv[1])))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, path], capture_output=True, text=True, check=False
    )
    assert done.stdout == "64\n"
    assert "can be used by others (mode 0644)" in done.stderr


def test_secret_on_a_read_only_mount_is_read_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "run.key"
    path.write_text("11" * 32)
    path.chmod(0o644)
    with pytest.raises(KeySourceError, match="can be used by others"):
        read_trusted_file(str(path))
    # As a mounted secret of Kubernetes; only root could mount one here.
    mounted = os.statvfs_result((*os.statvfs(path)[:8], os.ST_RDONLY, 255, 0))
    monkeypatch.setattr(os, "fstatvfs", lambda _: mounted)
    assert len(read_trusted_file(str(path))) == 64
    assert "can be used by others (mode 0644)" in caplog.text
