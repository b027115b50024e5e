# SPDX-License-Identifier: Apache-2.0
"""Features of Lightning go on bit for bit, wherever a fit ends: `make kit FRAMEWORK=lightning`."""

from __future__ import annotations

import functools
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning", reason="needs lightning: make kit FRAMEWORK=lightning")
torch = pytest.importorskip("torch")

from tests.kit.lightning_feature_programs import FEATURES, Stop, run  # noqa: E402

pytestmark = [pytest.mark.kit, pytest.mark.usefixtures("quiet")]
CUTS = (8, 10)  # inside the second epoch of five batches, and at its end


@pytest.fixture
def quiet() -> Iterator[None]:
    """Let Lightning advise."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@functools.cache
def uncut(feature: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        return run(Path(directory), feature)


def check(resumed: dict[str, Any], feature: str) -> None:
    expected = uncut(feature)
    assert resumed["ends"] == expected["ends"]
    for part in ("frozen", "evaluated", "metrics"):
        assert resumed[part] == expected[part], part
    assert resumed["losses"].items() <= expected["losses"].items()
    assert resumed["saved"].items() <= expected["saved"].items()
    for part in ("optimizers", "weights"):
        torch.testing.assert_close(resumed[part], expected[part], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("feature", FEATURES)
def test_fit_with_a_feature_goes_on_as_if_it_had_not_been_killed(
    feature: str, cut: int, tmp_path: Path
) -> None:
    assert run(tmp_path, feature, stop=Stop(cut, "killed")) == {}
    check(run(tmp_path, feature), feature)


@pytest.mark.parametrize("how", ["SIGTERM", "should_stop"])
@pytest.mark.parametrize("feature", FEATURES)
def test_stop_leaves_no_trace_in_the_step_that_it_saves(
    feature: str, how: str, tmp_path: Path
) -> None:
    run(tmp_path, feature, stop=Stop(8, how), every=1000)
    check(run(tmp_path, feature, every=1000), feature)


VALIDATED = {
    "validation in the epoch": (4, 12),
    "results of the epoch": (4,),
    "EMAWeightAveraging": (4, 12),
    "plateau": (5, 10),
    "early stopping in the epoch": (4,),
    "accumulation": (3,),
}


@pytest.mark.parametrize(
    ("feature", "cut"), [(name, cut) for name, cuts in VALIDATED.items() for cut in cuts]
)
def test_validation_ends_before_a_stop(feature: str, cut: int, tmp_path: Path) -> None:
    how = "SIGTERM in a validation"
    assert run(tmp_path, feature, stop=Stop(cut, how), every=1000) == {}
    check(run(tmp_path, feature, every=1000), feature)
