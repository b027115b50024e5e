# SPDX-License-Identifier: Apache-2.0
"""Checkpoints in object stores to be loaded: uploaded ones, with the store that functions open."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptmgr.objects import requests
from ckptmgr.objects.directory import RemoteDirectory
from ckptmgr.objects.requests import Objects
from ckptmgr.store.store import Store


def upload(directory: Path, name: str, url: str) -> str:
    """Upload a checkpoint of a directory below an address; return its own address."""
    there = RemoteDirectory(requests.open_objects(url), clock=time.time)
    there.upload(Store(directory), name)
    return f"{url}/{name}"


def open_as(monkeypatch: pytest.MonkeyPatch, wrap: Callable[[Objects], Objects]) -> None:
    """Have the objects of every address wrapped from now on."""
    inner = requests.open_objects
    monkeypatch.setattr(requests, "open_objects", lambda url: wrap(inner(url)))
