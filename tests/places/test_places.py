# SPDX-License-Identifier: Apache-2.0
"""The behaviours of places, for each of ours; `tests/objects/test_places.py` has the real servers."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptmgr.testing.places import PlaceBehaviours
from tests.places.adapters import LocalPlace, ObjectsPlace, RanksPlace, TrainerPlace
from tests.remote.buckets import new_objects


class TestLocalDirectory(PlaceBehaviours):
    @pytest.fixture
    def place(self, tmp_path: Path) -> LocalPlace:
        return LocalPlace(tmp_path / "run")


class TestFilesOfRanks(PlaceBehaviours):
    @pytest.fixture
    def place(self, tmp_path: Path) -> RanksPlace:
        return RanksPlace(tmp_path / "run")


class TestPrefixInMemory(PlaceBehaviours):
    @pytest.fixture
    def place(self, tmp_path: Path) -> ObjectsPlace:
        pytest.importorskip("obstore")
        return ObjectsPlace(new_objects(), LocalPlace(tmp_path / "run"))


class TestDirectoryOfTheTrainer(PlaceBehaviours):
    @pytest.fixture
    def place(self, tmp_path: Path) -> TrainerPlace:
        return TrainerPlace(tmp_path / "run")
