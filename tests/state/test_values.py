# SPDX-License-Identifier: Apache-2.0
"""Values beside the tensors of a stored state, by path."""

from __future__ import annotations

import datetime
import json
import random
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest

from ckptmgr.state import tree
from ckptmgr.state.paths import TreeError
from ckptmgr.state.values import values_of


def values(state: Any) -> dict[str, Any]:
    return values_of(tree.flatten(state).skeleton)


def test_numbers_and_texts_are_found_under_their_paths() -> None:
    state = {"lr": 0.1, "net": {"w": np.ones(3)}, "steps": [1, (True, None)], 7: "x", "empty": {}}
    assert values(state) == {
        **{"lr": 0.1, "steps/0": 1, "steps/1/0": True, "steps/1/1": None},
        **{"7": "x", "empty": "dict"},
    }


def test_value_that_json_has_no_type_for_is_its_kind_and_its_text() -> None:
    day = datetime.date(2026, 3, 1)
    assert values({"day": day, "raw": b"ab", "z": 1j}) == {
        "day": "date 2026-03-01",
        "raw": "bytes 6162",
        "z": 'complex ["0x0.0p+0", "0x1.0000000000000p+0"]',
    }


def test_other_containers_are_values_with_their_parts_below() -> None:
    assert values({"o": OrderedDict(a=1)}) == {"o": "ordered", "o/a": 1}
    assert values(3) == {"state": 3}
    (rng, *_) = values({"rng": random.Random(1)})
    assert rng == "rng"


def test_shared_object_has_a_value_at_each_path() -> None:
    one = [1]
    assert values({"a": one, "b": one}) == {"a/0": 1, "b/0": 1}


@pytest.mark.parametrize("nodes", [[], [1, 2], [{"list": 2}], [{"float": "much"}]])
def test_damaged_skeleton_is_an_error(nodes: list[Any]) -> None:
    with pytest.raises(TreeError):
        values_of(json.dumps({"version": 1, "nodes": nodes}))
