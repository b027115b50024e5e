# SPDX-License-Identifier: Apache-2.0
"""The behaviours of places, in real servers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ckptmgr.testing.places import PlaceBehaviours
from tests.support import api

pytest.importorskip("obstore")


from tests.places.adapters import LocalPlace, ObjectsPlace

pytestmark = pytest.mark.objects


class TestPrefixOfAServer(PlaceBehaviours):
    @pytest.fixture
    def place(self, tmp_path: Path, new_bucket: Callable[..., str]) -> ObjectsPlace:
        return ObjectsPlace(api.open_objects(new_bucket()), LocalPlace(tmp_path / "run"))
