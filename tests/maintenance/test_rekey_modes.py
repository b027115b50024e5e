# SPDX-License-Identifier: Apache-2.0
"""A change of keys keeps who may read the files, and a header that cannot be rewritten any more."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ckptmgr import UnsafeWrite
from ckptmgr.cli.exits import Exit
from ckptmgr.crypto.container.unlock import unlock
from ckptmgr.formats.source import BytesSource
from ckptmgr.maintenance.rekey import open_for_rekeying, plan_rekeying, reencrypt_checkpoint
from ckptmgr.maintenance.rekey_change import KeyChange
from tests.cli.running import run
from tests.support import api
from tests.support.rekeying import NEW, OLD, ROTATION, rekey, ring, save_run
from tests.support.saved import only, overwrite

ANEW = KeyChange(keys=ring(OLD), add=(ring(NEW),), is_exclusive=True)


def shared(directory: Path, *, form: str = "safetensors") -> dict[str, int]:
    """Save a checkpoint, let others read its files, and return who may."""
    save_run(directory=directory, steps=1, form=form)
    (manifest,) = directory.glob("*.manifest.json")
    manifest.chmod(0o440)
    Path(str(manifest).removesuffix(".manifest.json")).chmod(0o444)
    return modes(directory)


def modes(directory: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mode & 0o777 for path in directory.glob("net-*")}


def test_rekey_keeps_who_may_read(tmp_path: Path) -> None:
    before = shared(tmp_path)
    rekey(ROTATION, directory=tmp_path)
    assert sorted(before.values()) == [0o440, 0o444]
    assert modes(tmp_path) == before


@pytest.mark.parametrize("form", ["ckpt", "safetensors"])
def test_reencrypt_keeps_who_may_read(tmp_path: Path, form: str) -> None:
    before = shared(tmp_path, form=form)
    reencrypt_checkpoint(open_for_rekeying(tmp_path, ANEW), only(api.place(tmp_path)), ANEW)
    assert modes(tmp_path) == before


def test_pin_keeps_who_may_read(tmp_path: Path) -> None:
    before = shared(tmp_path)
    key = tmp_path / "old.key"
    key.touch(mode=0o600)
    key.write_text(OLD.raw.hex() + "\n")
    assert run("pin", "1", "--dir", tmp_path, "--key", f"file:{key}").exit_code == Exit.DONE
    assert modes(tmp_path) == before


def test_header_of_the_last_generation_is_refused_and_encrypted_anew(tmp_path: Path) -> None:
    save_run(directory=tmp_path, steps=1)
    (path,) = tmp_path.glob("*.ckpe")
    content = path.read_bytes()
    unlocked = unlock(BytesSource(content), ring(OLD).identities)
    last = replace(unlocked.header, generation=2**64 - 1).pack(unlocked.data_key)
    overwrite(path, last * 2 + content[2 * len(last) :])
    with pytest.raises(UnsafeWrite, match=r"as often as can be(.|\n)*ckptmgr reencrypt"):
        plan_rekeying(open_for_rekeying(tmp_path, ROTATION), only(api.place(tmp_path)), ROTATION)
    answer = reencrypt_checkpoint(
        open_for_rekeying(tmp_path, ANEW), only(api.place(tmp_path)), ANEW
    )
    assert answer.is_pending
