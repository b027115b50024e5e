# SPDX-License-Identifier: Apache-2.0
"""A key service is found by its address, and nothing that is installed takes the place of a built-in one."""

from __future__ import annotations

import tomllib
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

import pytest

from ckptmgr.crypto.errors import KeySourceError
from ckptmgr.crypto.keys.key import Key
from ckptmgr.crypto.providers.exec import ExecProvider
from ckptmgr.crypto.providers.local import LocalProvider
from ckptmgr.crypto.providers.provider import ProviderUnavailableError
from ckptmgr.crypto.providers.registry import BUILT_IN, ENTRY_POINT_GROUP, open_provider

SECRET = "c0ffee0102030405060708090a0b0c0d"
ROOT = Path(__file__).parents[3]


def entry_point(name: str, value: str) -> EntryPoint:
    return EntryPoint(name=name, value=value, group=ENTRY_POINT_GROUP)


def open_from_plugin(place: str) -> LocalProvider:
    """Stand for the function of another package."""
    return LocalProvider(Key(place.encode()))


PLUGIN = entry_point("vault", f"{__name__}:open_from_plugin")


def test_address_of_a_local_key_opens_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEK", SECRET)
    assert open_provider("local:env:KEK") == LocalProvider(Key(bytes.fromhex(SECRET)))


def test_address_of_a_program_is_split_and_not_run() -> None:
    provider = open_provider("exec:/no/such/program --mount 'a b'")
    assert provider == ExecProvider(command=("/no/such/program", "--mount", "a b"))


def test_address_of_another_package_calls_its_function() -> None:
    provider = open_provider("vault:0123456789abcdef", installed=[PLUGIN])
    assert provider == LocalProvider(Key(b"0123456789abcdef"))


def test_entry_point_with_the_name_of_a_built_in_service_is_not_used() -> None:
    thief = entry_point("exec", f"{__name__}:open_from_plugin")
    assert isinstance(open_provider("exec:true", installed=[thief]), ExecProvider)


def test_two_packages_with_one_name_are_refused() -> None:
    with pytest.raises(KeySourceError, match="2 packages offer the key service 'vault'"):
        open_provider("vault:x", installed=[PLUGIN, PLUGIN])


@pytest.mark.parametrize("value", ["no_such_module_at_all:open", f"{__name__}:no_such_function"])
def test_package_that_cannot_be_loaded_is_named(value: str) -> None:
    with pytest.raises(ProviderUnavailableError, match="'vault' cannot be loaded") as caught:
        open_provider("vault:x", installed=[entry_point("vault", value)])
    assert caught.value.hint == "install the package again"


@pytest.mark.parametrize("address", ["", "vault", "no-such-service:x", SECRET, f"hex:{SECRET}"])
def test_address_of_no_service_is_refused_and_not_repeated(address: str) -> None:
    with pytest.raises(KeySourceError, match="no key service has this address") as caught:
        open_provider(address)
    assert SECRET not in f"{caught.value} {caught.value.hint}"
    assert "aws-kms:" in str(caught.value.hint)


def test_entry_points_of_this_package_are_the_built_in_services() -> None:
    pyproject = ROOT / "pyproject.toml"
    if (ROOT / "crypto").is_dir():
        declared = tomllib.loads(pyproject.read_text())["project"]["entry-points"][
            ENTRY_POINT_GROUP
        ]
    else:
        declared = {point.name: point.value for point in entry_points(group=ENTRY_POINT_GROUP)}
    assert declared == {
        scheme: f"ckptmgr.crypto.providers.{module}:{function}"
        for scheme, (module, function) in BUILT_IN.items()
    }
