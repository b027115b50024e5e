# SPDX-License-Identifier: Apache-2.0
"""The graph file that `ModelCheckpoint` writes for a network that MindSpore has compiled."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptmgr import CheckpointConfig, ModelCheckpoint
from tests.support.surface import KEY, Loop

GRAPH = "net-graph.meta"


class Network(dict[str, np.ndarray]):
    """A network with the method of a MindSpore Cell that returns its graph."""

    def __init__(self, graph: bytes | str = b"graph") -> None:
        super().__init__(w=np.zeros(4))
        self.graph = graph

    def get_func_graph_proto(self) -> bytes | str:
        """Return the graph; an empty text before it is compiled."""
        return self.graph


def run(directory: Path, network: Any, **options: Any) -> None:
    """Train for three steps."""
    callback = ModelCheckpoint("net", str(directory), CheckpointConfig(**options))
    Loop(callbacks=(callback,), network=network).run(3)


def test_graph_of_a_compiled_network_is_written_for_its_owner_only(tmp_path: Path) -> None:
    run(tmp_path, Network())
    assert (tmp_path / GRAPH).read_bytes() == b"graph"
    assert (tmp_path / GRAPH).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("network", "options"),
    [(Network(""), {}), ({"w": np.zeros(4)}, {}), (Network(), {"enc_key": KEY})],
    ids=["not compiled", "no graph", "with a key"],
)
def test_no_graph_is_written_without_one_or_in_plain_beside_encrypted_files(
    tmp_path: Path, network: Any, options: dict[str, Any]
) -> None:
    run(tmp_path, network, **options)
    assert not (tmp_path / GRAPH).exists()


def test_graph_that_cannot_be_written_is_a_warning_and_the_checkpoints_are_saved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / GRAPH).mkdir()
    with caplog.at_level(logging.WARNING):
        run(tmp_path, Network())
    assert f"{GRAPH} is not written" in caplog.text
    assert len(list(tmp_path.glob("*.ckpt"))) == 3


class BrokenNetwork(Network):
    """A network whose method raises."""

    def get_func_graph_proto(self) -> bytes | str:
        """Raise, as a network that cannot be compiled."""
        raise RuntimeError("the network cannot be compiled")


@pytest.mark.parametrize(
    ("network", "said"),
    [(BrokenNetwork(), "cannot be compiled"), (Network("text"), "is str, not bytes")],
    ids=["raises", "no bytes"],
)
def test_graph_that_the_network_does_not_return_is_a_warning_and_the_checkpoints_are_saved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, network: Network, said: str
) -> None:
    with caplog.at_level(logging.WARNING):
        run(tmp_path, network)
    assert f"{GRAPH} is not written" in caplog.text
    assert said in caplog.text
    assert len(list(tmp_path.glob("*.ckpt"))) == 3
