# SPDX-License-Identifier: Apache-2.0
"""What holds a secret is no way to it: not by repr, copy, pickle, nor by the tools of dataclasses."""

from __future__ import annotations

import copy
import pickle
from dataclasses import asdict, astuple
from multiprocessing.reduction import ForkingPickler

import pytest

from ckptmgr.crypto.keys.key import Key
from ckptmgr.crypto.keys.ring import KeyKind, KeyMaterial, KeyRing
from ckptmgr.crypto.keys.signing import SigningKey
from ckptmgr.crypto.secret_bytes import SecretBytes

SECRET = b"0123456789-Top-Secret-0123456789"
HOLDERS = [
    SecretBytes(SECRET),
    Key(SECRET),
    SigningKey(SECRET),
    KeyMaterial(KeyKind.PHRASE, SECRET),
    KeyRing([KeyMaterial(KeyKind.PHRASE, SECRET)], [KeyMaterial.of_key(Key(SECRET))]),
]
by_kind = pytest.mark.parametrize("holder", HOLDERS, ids=lambda one: type(one).__name__)


@by_kind
def test_holder_shows_nothing(holder: object) -> None:
    assert "Top-Secret" not in f"{holder} {holder!r}"


@by_kind
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_holder_is_not_pickled(holder: object, protocol: int) -> None:
    with pytest.raises(TypeError, match="keep the source of a key"):
        pickle.dumps(holder, protocol)


@by_kind
def test_holder_is_sent_to_another_process(holder: object) -> None:
    arrived = pickle.loads(ForkingPickler.dumps(holder))  # noqa: S301 - our own
    assert (type(arrived), repr(arrived)) == (type(holder), repr(holder))


@by_kind
def test_holder_is_copied(holder: object) -> None:
    for same in (copy.copy(holder), copy.deepcopy(holder)):
        assert same == holder


@pytest.mark.parametrize("holder", [Key(SECRET), SigningKey(SECRET)])
def test_fields_of_a_key_show_nothing(holder: Key | SigningKey) -> None:
    assert "Top-Secret" not in f"{asdict(holder)} {astuple(holder)}"


def test_ring_that_arrives_opens_what_the_ring_encrypts_for() -> None:
    ring = KeyRing([KeyMaterial(KeyKind.PHRASE, b"correct horse")])
    slot = ring.recipients[0].wrap(Key(SECRET), bound=b"file")
    arrived = pickle.loads(ForkingPickler.dumps(ring))  # noqa: S301 - our own
    assert arrived.identities[0].unwrap(slot, bound=b"file") == SECRET
