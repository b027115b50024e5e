# SPDX-License-Identifier: Apache-2.0
"""The file `{prefix}-graph.meta`: the graph of a MindSpore network, as MindSpore's callback has it.

There is one in graph mode alone, written after the first step. A run with a key has none, because
the file would be plain, and of many ranks rank 0 writes it.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from ckptmgr.io.permissions import note_mode

if TYPE_CHECKING:
    from ckptmgr.config.config import CheckpointConfig
    from ckptmgr.parallel.coordinator import Coordinator
    from ckptmgr.training.callback_names import CallbackTarget

_LOG = logging.getLogger(__name__)


class NetworkGraph:
    """Writes the graph file of a run, once."""

    def __init__(self, config: CheckpointConfig, ranks: Coordinator | None) -> None:
        is_writer = ranks is None or ranks.rank == 0
        self._is_due = is_writer and config.keys is None

    def write_once(self, target: CallbackTarget, params: Any) -> None:
        """Write the file, the first time; where that fails, log a warning."""
        if not self._is_due:
            return
        self._is_due = False
        store = target.writer.store
        path = store.directory / f"{target.prefix}-graph.meta"
        try:
            graph = _graph_of(params.train_network)
            if graph is not None:
                from ckptmgr.parallel.mindspore.outputs import write_small_file

                mode = note_mode(store.file_mode)
                write_small_file(path, graph, is_beside_checkpoint=True, fs=store.fs, mode=mode)
        except Exception as error:  # the network's own method may raise any
            _LOG.warning("%s is not written, and no checkpoint needs it: %s", path, error)


def _graph_of(network: Any) -> bytes | None:
    """Return the compiled graph of a MindSpore network; None in PyNative mode."""
    get_graph: Any = getattr(network, "get_func_graph_proto", None)
    if get_graph is None:
        return None
    graph: object = get_graph()
    if not graph:
        return None
    if not isinstance(graph, bytes):
        raise TypeError(f"the graph of the network is {type(graph).__name__}, not bytes")
    return graph
