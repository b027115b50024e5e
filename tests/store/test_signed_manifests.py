# SPDX-License-Identifier: Apache-2.0
"""Signatures of manifests: who has the public key can verify a directory, and who lacks the private one cannot change it."""

from __future__ import annotations

import hashlib
import hmac
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from hypothesis import given
from hypothesis import strategies as st

from ckptmgr import (
    CheckpointConfig,
    CheckpointManager,
    CkptmgrError,
    CorruptCheckpoint,
    KeyProblem,
    ModelCheckpoint,
    TamperedCheckpoint,
    Trust,
    UnprovenCheckpoint,
    UnsealedCheckpoint,
    load_checkpoint,
    open_checkpoint,
    save_checkpoint,
)
from ckptmgr.core.trust import public_keys
from ckptmgr.crypto.keys.signing import PublicKey
from ckptmgr.formats.source import BytesSource
from ckptmgr.io.digest import digest_of
from ckptmgr.maintenance.rekey import (
    Action,
    open_for_rekeying,
    plan_reencryption,
    reencrypt_checkpoint,
    rekey_checkpoint,
)
from ckptmgr.maintenance.rekey_change import KeyChange
from ckptmgr.store.manifest.codec import PLACEHOLDER
from ckptmgr.store.manifest.lineage import Lineage
from ckptmgr.store.manifest.proofs import PAYLOAD_TYPE, canonical
from tests.support import api
from tests.support.manifests import PATH, manifest
from tests.support.rekeying import NEW, ring
from tests.support.saved import flip, only, overwrite, save_run
from tests.support.surface import Loop

KEY, SIGNER, OTHER = api.Key(bytes(32)), api.SigningKey(bytes(range(32))), api.SigningKey(bytes(32))
TRUSTED = (SIGNER.public_key,)
VECTORS = Path(__file__).parents[1] / "vectors/manifests"


def signed(
    change: Callable[[dict[str, Any]], object] = lambda _: None, key: api.Key | None = None
) -> bytes:
    document = json.loads(
        api.encode_manifest(manifest(), trust=api.Trust(keys=key, signing_key=SIGNER))
    )
    change(document)
    return json.dumps(document).encode()


def test_signed_manifest_names_its_signer_when_the_key_is_trusted() -> None:
    read = api.decode_manifest(
        signed(),
        path=PATH,
        trust=api.Trust(
            trusted_keys=(
                OTHER.public_key,
                *TRUSTED,
            )
        ),
    )
    assert (read, read.signed_by) == (manifest(), SIGNER.public_key.key_id)
    assert api.decode_manifest(signed(), path=PATH).signed_by is None


def test_signature_and_authentication_do_not_depend_on_each_other() -> None:
    both = signed(key=KEY)
    assert api.decode_manifest(both, path=PATH, trust=api.Trust(keys=KEY)) == manifest()
    assert api.decode_manifest(both, path=PATH, trust=api.Trust(trusted_keys=TRUSTED)) == manifest()
    without = signed(lambda document: document.pop("auth"), KEY)
    assert (
        api.decode_manifest(without, path=PATH, trust=api.Trust(trusted_keys=TRUSTED)) == manifest()
    )
    with pytest.raises(UnsealedCheckpoint):
        api.decode_manifest(without, path=PATH, trust=api.Trust(keys=KEY, trusted_keys=TRUSTED))


def test_manifest_without_signature_is_refused_only_when_it_must_have_one() -> None:
    assert (
        api.decode_manifest(
            api.encode_manifest(manifest()),
            path=PATH,
            trust=api.Trust(trusted_keys=TRUSTED, allow_unencrypted=True),
        ).signed_by
        is None
    )
    with pytest.raises(UnsealedCheckpoint, match="not signed although"):
        api.decode_manifest(
            api.encode_manifest(manifest(), trust=api.Trust(keys=KEY)),
            path=PATH,
            trust=api.Trust(trusted_keys=TRUSTED),
        )


def test_signature_of_a_stranger_is_a_key_problem_that_names_both() -> None:
    with pytest.raises(KeyProblem, match=f"{SIGNER.public_key.key_id}.*{OTHER.public_key.key_id}"):
        api.decode_manifest(
            signed(),
            path=PATH,
            trust=api.Trust(trusted_keys=(OTHER.public_key,), allow_unencrypted=True),
        )


def first_signature(document: dict[str, Any]) -> dict[str, Any]:
    (found,) = document["signatures"]
    assert isinstance(found, dict)
    return found


TAMPERED: dict[str, Callable[[dict[str, Any]], object]] = {
    "another step": lambda d: d.update(step=2),
    "another metric": lambda d: d["metrics"].update(loss=0.1),
    "no pins": lambda d: d.update(pins=[]),
    "an unknown field": lambda d: d.update(more=1),
    "a link": lambda d: d.update(previous=None),
    "a signature of nothing": lambda d: first_signature(d).update(signature=""),
    "no hex": lambda d: first_signature(d).update(signature="zz"),
    "no signature": lambda d: first_signature(d).pop("signature"),
    "a signature of the plain text": lambda d: first_signature(d).update(
        signature=SIGNER.sign(canonical({k: v for k, v in d.items() if k != "signatures"})).hex()
    ),
}


@pytest.mark.parametrize("change", TAMPERED)
def test_changed_manifest_is_tampered(change: str) -> None:
    with pytest.raises(TamperedCheckpoint, match="its signature does not match"):
        api.decode_manifest(
            signed(TAMPERED[change]),
            path=PATH,
            trust=api.Trust(trusted_keys=TRUSTED, allow_unencrypted=True),
        )


@pytest.mark.parametrize(
    "signatures",
    [None, 1, "x", {}, [], [1], [{}], [{"algorithm": "none"}], [{"algorithm": "Ed25519"}] * 17],
    ids=repr,
)
def test_signatures_of_an_unknown_kind_are_refused(signatures: object) -> None:
    data = signed(lambda document: document.update(signatures=signatures))
    with pytest.raises((CorruptCheckpoint, UnsealedCheckpoint), match=r"signatures|not signed"):
        api.decode_manifest(data, path=PATH, trust=api.Trust(trusted_keys=TRUSTED))


def test_one_trusted_signature_of_several_is_enough() -> None:
    other = json.loads(api.encode_manifest(manifest(), trust=api.Trust(signing_key=OTHER)))[
        "signatures"
    ]
    data = signed(lambda document: document.update(signatures=other + document["signatures"]))
    read = api.decode_manifest(data, path=PATH, trust=api.Trust(trusted_keys=TRUSTED))
    assert read.signed_by == SIGNER.public_key.key_id


@given(data=st.data())
def test_any_flipped_bit_of_a_signed_manifest_is_noticed(data: st.DataObject) -> None:
    encoded = bytearray(api.encode_manifest(manifest(), trust=api.Trust(signing_key=SIGNER)))
    position = data.draw(st.integers(0, len(encoded) - 1))
    encoded[position] ^= 1 << data.draw(st.integers(0, 7))
    try:
        read = api.decode_manifest(bytes(encoded), path=PATH, trust=api.Trust(trusted_keys=TRUSTED))
    except CkptmgrError:
        return
    assert read == manifest()  # white space, or the case of a hexadecimal digit


def test_manifest_nested_to_the_limit_is_refused() -> None:
    for depth in range(100, 1100, 3):
        nested = b"[" * depth + b"]" * depth
        data = api.encode_manifest(manifest(), trust=api.Trust(signing_key=SIGNER))
        data = data.replace(b'"schema"', b'"x": ' + nested + b', "schema"')
        with pytest.raises(CorruptCheckpoint):
            api.decode_manifest(
                data, path=PATH, trust=api.Trust(trusted_keys=TRUSTED, allow_unencrypted=True)
            )


def test_signature_covers_the_file_that_is_being_replaced() -> None:
    both = manifest(replaces=manifest(content=b"old", step=0))
    read = api.decode_manifest(
        api.encode_manifest(both, trust=api.Trust(signing_key=SIGNER)),
        path=PATH,
        trust=api.Trust(trusted_keys=TRUSTED, allow_unencrypted=True),
    )
    assert read.replaces is not None
    assert read.replaces.signed_by == read.signed_by == SIGNER.public_key.key_id


def test_signed_overwrite_that_was_interrupted_leaves_the_old_file_signed(tmp_path: Path) -> None:
    train(tmp_path, range(1, 2))
    (found,) = api.listed(tmp_path)
    old = api.place(tmp_path).read_manifest(found.name)
    assert old is not None
    new = replace(old, file=replace(old.file, digest=digest_of(BytesSource(b"never written"))))
    both = api.encode_manifest(replace(new, replaces=old), trust=api.Trust(signing_key=SIGNER))
    overwrite(tmp_path / api.manifest_name(found.name), both)
    loaded = load_checkpoint(found.path, trusted_keys=TRUSTED)
    assert loaded["w"][0] == 1.0


# Frozen files: every later version, and every other implementation, reads and checks these.


def vectors() -> list[Path]:
    return sorted(VECTORS.glob("*.json"))


@pytest.mark.parametrize("path", vectors(), ids=lambda path: path.name)
def test_frozen_manifest_is_read_and_checked_as_stated(path: Path) -> None:
    vector = json.loads(path.read_bytes())
    data = vector["manifest"].encode()
    document = json.loads(data)
    bare = {k: v for k, v in document.items() if k not in ("auth", "signatures")}
    assert canonical(bare).decode() == vector["canonical"]
    keys = [PublicKey(bytes.fromhex(vector["public_key"]))]
    key = api.Key(bytes.fromhex(vector["key"]))
    place = PATH.with_name(vector["file"])

    def read() -> object:
        return api.decode_manifest(
            data, path=place, trust=api.Trust(keys=key, trusted_keys=tuple(keys))
        ).id

    if vector["expected"] == "ok":
        assert read() == vector["id"]
        return
    kinds = {
        "tampered": TamperedCheckpoint,
        "unsigned": UnprovenCheckpoint,
        "wrong key": KeyProblem,
    }
    with pytest.raises(kinds[vector["expected"]]) as caught:
        read()
    assert type(caught.value) is kinds[vector["expected"]]


@pytest.mark.parametrize("name", ["ok", "ok-other-layout"])
def test_frozen_manifest_is_proven_by_the_page_alone(name: str) -> None:
    # A second implementation, after docs/manifest-format.md.
    vector = json.loads((VECTORS / f"{name}.json").read_bytes())
    document = json.loads(vector["manifest"])
    auth, (signature,) = document.pop("auth"), document.pop("signatures")
    text = json.dumps(document, sort_keys=True, separators=(",", ":")).encode("ascii")
    signed_text = b"DSSEv1 37 application/vnd.ckptmgr.manifest+json %d %s" % (len(text), text)
    public = bytes.fromhex(vector["public_key"])
    Ed25519PublicKey.from_public_bytes(public).verify(
        bytes.fromhex(signature["signature"]), signed_text
    )
    assert hashlib.sha256(public).digest()[:8].hex() == signature["key_id"]
    secret = bytes.fromhex(vector["key"])
    derived = HKDF(hashes.SHA256(), 32, None, b"ckptmgr/v1/manifest").derive(secret)
    assert hmac.digest(derived, text, "sha256").hex() == auth["mac"]
    fixed = {
        field: document[field]
        for field in (
            "attempt",
            "epoch",
            "sequence",
            "series",
            "step",
            "why",
            "saved_at",
            "run",
            "world",
        )
    }
    fixed["files"] = [[f["name"], f["size_bytes"], f["digest"]["total"]] for f in document["files"]]
    fixed["previous"] = document["previous"]["id"]
    hashed = json.dumps(fixed, sort_keys=True, separators=(",", ":")).encode("ascii")
    identity = hashlib.sha256(b"ckptmgr/v1/checkpoint-id\n" + hashed).hexdigest()
    assert identity == vector["id"]


def test_vectors_cover_every_outcome() -> None:
    outcomes = [json.loads(path.read_bytes())["expected"] for path in vectors()]
    assert sorted(set(outcomes)) == ["ok", "tampered", "unsigned", "wrong key"]
    assert PAYLOAD_TYPE == "application/vnd.ckptmgr.manifest+json"


# Directories.


def train(directory: Path, steps: range = range(1, 4), **options: Any) -> None:
    config = CheckpointConfig(**{"signing_key": SIGNER, **options})
    with CheckpointManager(directory, config, prefix="net") as manager:
        state = {"w": np.zeros(300)}
        manager.resume(state)
        for step in steps:
            state["w"] += 1
            manager.step_end(step, state)


KINDS: dict[str, dict[str, Any]] = {
    "plain ckpt": {},
    "plain safetensors": {"format": "safetensors"},
    "sealed AES-GCM": {"enc_key": KEY.raw},
    "sealed SM4-CBC": {"enc_key": KEY.raw[:16], "enc_mode": "SM4-CBC"},
    "container": {"enc_key": KEY.raw, "format": "safetensors"},
    "worker process": {"async_save": "process"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_signed_directory_verifies_with_the_public_key_alone(tmp_path: Path, kind: str) -> None:
    train(tmp_path, **KINDS[kind])
    store = api.place(tmp_path, trusted_keys=TRUSTED)
    found = store.scan()
    assert [c.state for c in found] == [api.State.OK] * 3
    options = api.reading(trusted_keys=TRUSTED)
    answers = [api.verify(store, c, options=options, lineage=Lineage(found)) for c in found]
    assert [answer.status for answer in answers] == [api.Status.OK] * 3
    assert all({"signature", "digests"} <= set(answer.checked) for answer in answers)


@pytest.mark.parametrize("kind", ["plain ckpt", "container"])
def test_flipped_bit_of_a_signed_file_is_found_with_the_public_key_alone(
    tmp_path: Path, kind: str
) -> None:
    train(tmp_path, range(1, 2), **KINDS[kind])
    store = api.place(tmp_path, trusted_keys=TRUSTED)
    (found,) = store.scan()
    flip(found.path, found.size_bytes - 20)
    answer = api.verify(store, found, trusted_keys=TRUSTED)
    assert answer.status is api.Status.DAMAGED


def unsigned(directory: Path) -> Path:
    train(directory, range(1, 2), signing_key=None)
    return directory / "net-1.ckpt"


def forged(directory: Path) -> Path:
    train(directory, range(1, 2), signing_key=OTHER)
    return directory / "net-1.ckpt"


def without_manifest(directory: Path) -> Path:
    train(directory, range(1, 2))
    (directory / api.manifest_name("net-1.ckpt")).unlink()
    return directory / "net-1.ckpt"


def made_up(directory: Path) -> Path:
    """A file of a stranger that got a manifest because a save that was to replace it failed."""
    path = unsigned(directory)
    store = api.place(directory)
    found = store.read_manifest(path.name)
    assert found is not None
    bare = replace(found, why=PLACEHOLDER, sequence=0, run_id="")
    overwrite(
        directory / api.manifest_name(path.name),
        api.encode_manifest(bare, trust=api.Trust(signing_key=SIGNER)),
    )
    return path


UNTRUSTED = {one.__name__: one for one in (unsigned, forged, without_manifest, made_up)}


@pytest.mark.parametrize("kind", [kind for kind in UNTRUSTED if kind != "without_manifest"])
def test_manager_loads_nothing_that_nobody_trusted_has_signed(tmp_path: Path, kind: str) -> None:
    path = UNTRUSTED[kind](tmp_path)
    with CheckpointManager(tmp_path, trust=Trust(trusted_keys=TRUSTED), prefix="net") as manager:
        with pytest.raises(KeyProblem):
            manager.resume()
        with pytest.raises(KeyProblem):
            manager.load(path.name)


@pytest.mark.parametrize("kind", UNTRUSTED)
def test_file_that_nobody_trusted_has_signed_is_found_by_verify(tmp_path: Path, kind: str) -> None:
    path = UNTRUSTED[kind](tmp_path)
    store = api.place(tmp_path, trusted_keys=TRUSTED)
    (found,) = [c for c in store.scan() if c.path == path]
    answer = api.verify(store, found, level=api.Level.QUICK, trusted_keys=TRUSTED)
    assert answer.status in (api.Status.UNPROVEN, api.Status.WRONG_KEY)


@pytest.mark.parametrize("kind", ["unsigned", "forged", "without_manifest"])
def test_file_that_nobody_trusted_has_signed_does_not_load(tmp_path: Path, kind: str) -> None:
    path = UNTRUSTED[kind](tmp_path)
    with pytest.raises(KeyProblem):
        load_checkpoint(path, trusted_keys=TRUSTED)
    with pytest.raises(KeyProblem):
        open_checkpoint(path, trusted_keys=TRUSTED)
    if kind != "forged":
        assert load_checkpoint(path, trusted_keys=TRUSTED, allow_unencrypted=True)


def test_signed_file_loads_with_the_file_of_the_public_key(tmp_path: Path) -> None:
    train(tmp_path / "runs", range(1, 2))
    (tmp_path / "pub").write_bytes(SIGNER.public_key.to_pem())
    loaded = load_checkpoint(tmp_path / "runs/net-1.ckpt", trusted_keys=[tmp_path / "pub"])
    assert loaded["w"].sum() == 300
    with open_checkpoint(tmp_path / "runs/net-1.ckpt", trusted_keys=[tmp_path / "pub"]) as reader:
        assert reader.is_verified


def test_single_file_is_signed_too(tmp_path: Path) -> None:
    path = tmp_path / "net.ckpt"
    save_checkpoint({"w": np.ones(3)}, path, signing_key=SIGNER)
    assert load_checkpoint(path, trusted_keys=TRUSTED)["w"].sum() == 3
    save_checkpoint({"w": np.ones(3)}, path)
    with pytest.raises(UnsealedCheckpoint):
        load_checkpoint(path, trusted_keys=TRUSTED)


def test_run_that_signs_goes_on_from_its_own_checkpoints_only(tmp_path: Path) -> None:
    unsigned(tmp_path)
    with pytest.raises(UnsealedCheckpoint, match="not signed"):
        train(tmp_path, range(2, 3))
    with CheckpointManager(
        tmp_path,
        CheckpointConfig(signing_key=SIGNER),
        trust=Trust(allow_unencrypted=True),
        prefix="net",
    ) as manager:
        assert manager.resume().step == 1


def test_pin_of_a_signed_checkpoint_needs_its_key(tmp_path: Path) -> None:
    train(tmp_path, range(1, 2))
    (found,) = api.listed(tmp_path)

    def pinned(pins: tuple[api.Pin, ...]) -> tuple[api.Pin, ...]:
        return (*pins, api.Pin(name="paper"))

    with pytest.raises(KeyProblem, match=r"is signed(.|\n)*--signing-key"):
        api.place(tmp_path).change_pins(found, pinned)
    api.place(tmp_path, signing_key=SIGNER).change_pins(found, pinned)
    (again,) = api.listed(tmp_path, trusted_keys=TRUSTED)
    assert (again.state, [pin.name for pin in again.pins]) == (api.State.OK, ["paper"])


def test_encrypted_and_signed_manifest_loses_neither_proof(tmp_path: Path) -> None:
    train(tmp_path, range(1, 2), enc_key=KEY.raw)
    (found,) = api.listed(tmp_path)
    for store in (
        api.place(tmp_path, signing_key=SIGNER),
        api.place(tmp_path, keys=KEY, allow_unencrypted=True),
    ):
        with pytest.raises(KeyProblem, match=r"is authenticated|is signed"):
            store.change_pins(found, lambda pins: pins)


def test_signature_of_another_run_under_this_name_is_the_true_one_of_that_run(
    tmp_path: Path,
) -> None:
    # A signature does not show that this is the newest. The chain and --expect-id do.
    train(tmp_path / "a", range(1, 2))
    train(tmp_path / "b", range(1, 3))
    for name in ("net-1.ckpt", api.manifest_name("net-1.ckpt")):
        shutil.copy(tmp_path / "a" / name, tmp_path / "b" / name)
    store = api.place(tmp_path / "b", trusted_keys=TRUSTED)
    present = store.scan()
    (old,) = [c for c in present if c.step == 1]
    options = api.reading(trusted_keys=TRUSTED)
    assert api.verify(store, old, options=options).status is api.Status.OK
    assert (
        api.verify(store, old, options=options, lineage=Lineage(present)).status
        is api.Status.DAMAGED
    )


def test_callback_that_resumes_from_a_replaced_file_warns(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    old = save_run(tmp_path / "a", [10])[0]
    first, second, newest = save_run(tmp_path / "b", [9, 10, 11])
    for name in (old.name, api.manifest_name(old.name)):
        (tmp_path / "b" / name).unlink(missing_ok=True)
        shutil.copy(tmp_path / "a" / name, tmp_path / "b" / name)
    first.unlink()
    flip(newest, 70)
    found = ModelCheckpoint("net", str(tmp_path / "b"), CheckpointConfig()).resume()
    assert found is not None
    assert (
        f"{second} may be an older file under this name: {newest.name} was saved after"
        in caplog.text
    )


def test_configuration_takes_a_source_and_never_shows_the_key(tmp_path: Path) -> None:
    path = tmp_path / "sign.pem"
    path.touch(mode=0o600)
    path.write_bytes(SIGNER.to_pem())
    config = CheckpointConfig(signing_key=f"file:{path}")
    assert config.signing_key == SIGNER
    assert SIGNER.raw.hex() not in repr(config) + repr(config.signing_key)
    with pytest.raises(KeyProblem, match="cannot be opened"):
        CheckpointConfig(signing_key="file:absent")
    with pytest.raises(TypeError, match="redacted bytes"):
        CheckpointConfig(signing_key=bytes(SIGNER.raw))  # type: ignore[arg-type]


def test_trusted_keys_that_are_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="list of public key files"):
        public_keys("sign.pem.pub")
    with pytest.raises(KeyProblem, match="cannot be opened"):
        public_keys([tmp_path / "absent"])


def test_callback_signs_and_resumes_from_what_it_signed(tmp_path: Path) -> None:
    config = CheckpointConfig(signing_key=SIGNER)
    Loop(callbacks=(ModelCheckpoint("net", str(tmp_path), config),)).run(1)
    (found,) = api.listed(tmp_path, trusted_keys=TRUSTED)
    assert found.state is api.State.OK
    assert ModelCheckpoint("net", str(tmp_path), config).resume() is not None
    other = CheckpointConfig(signing_key=OTHER)
    with pytest.raises(KeyProblem):
        ModelCheckpoint("net", str(tmp_path), other).resume()


def test_signature_outlives_new_keys_of_a_container(tmp_path: Path) -> None:
    train(tmp_path, range(1, 2), enc_key=KEY.raw, format="safetensors")
    change = KeyChange(keys=ring(KEY), add=(ring(NEW),), remove=(ring(KEY),))
    store = open_for_rekeying(tmp_path, change)
    assert rekey_checkpoint(store, only(store), change).action is Action.HEADER
    signed_store = api.place(tmp_path, keys=NEW, trusted_keys=TRUSTED)
    assert signed_store.scan()[0].state is api.State.OK


@pytest.mark.parametrize("format", ["ckpt", "safetensors"])
def test_file_that_is_encrypted_anew_must_be_signed_anew(tmp_path: Path, format: str) -> None:
    train(tmp_path, range(1, 2), enc_key=KEY.raw, format=format)
    change = KeyChange(keys=ring(KEY), add=(ring(NEW),), is_exclusive=True)
    store = open_for_rekeying(tmp_path, change)
    for step in (plan_reencryption, reencrypt_checkpoint):
        with pytest.raises(KeyProblem, match="is signed; without its key"):
            step(store, only(store), change)
    if format == "ckpt":
        with pytest.raises(KeyProblem, match="is signed; without its key"):
            rekey_checkpoint(
                store, only(store), replace(change, is_exclusive=False, remove=(ring(KEY),))
            )
    store = open_for_rekeying(tmp_path, change, trust=api.Trust(signing_key=SIGNER))
    reencrypt_checkpoint(store, only(store), change)
    signed_store = api.place(tmp_path, keys=NEW, trusted_keys=TRUSTED)
    assert signed_store.scan()[0].state is api.State.OK


def test_file_that_is_encrypted_anew_is_still_the_one_that_the_next_one_names(
    tmp_path: Path,
) -> None:
    train(tmp_path, range(1, 3), enc_key=KEY.raw, format="safetensors")
    change = KeyChange(keys=ring(KEY), add=(ring(NEW),), is_exclusive=True)
    store = open_for_rekeying(tmp_path, change, trust=api.Trust(signing_key=SIGNER))
    (first,) = [c for c in store.scan() if c.step == 1]
    reencrypt_checkpoint(store, first, change)
    present = api.listed(tmp_path)
    (again,) = [c for c in present if c.step == 1]
    assert again.id != first.id
    assert Lineage(present).why_replaced(again) is None
