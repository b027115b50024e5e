# SPDX-License-Identifier: Apache-2.0
"""The rule for files with secrets and trust anchors: owner, and permissions to change and read."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from ckptmgr.crypto.errors import KeySourceError
from ckptmgr.crypto.keys.signing import SigningKey, load_public_key
from ckptmgr.crypto.keys.trusted_files import read_trusted_file, refusal_of

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
