# SPDX-License-Identifier: Apache-2.0
# pyright: reportAttributeAccessIssue=false
"""Coordinator of MindSpore ranks over a shared directory.

MindSpore has no better means: its collectives have no timeout and do not report missing ranks, and
clients of its `TCPStore` count as nodes of the cluster, which fails the job when they leave.
"""

from __future__ import annotations

import os

from mindspore.communication import get_group_size, get_rank

from ckptmgr.parallel.shared_directory import SharedDirectory


def mindspore_coordinator(
    directory: str | os.PathLike[str], *, timeout_s: float = 60.0
) -> SharedDirectory:
    """Return a coordinator for the ranks of `mindspore.communication.init`.

    Args:
        directory: All ranks see it, and no other job uses it.
        timeout_s: How long to wait for the other ranks.

    Raises:
        ValueError: `mindspore.communication.init` was not called.
        RanksMissing: Some ranks did not come in time.
    """
    try:
        rank, world = get_rank(), get_group_size()
    except RuntimeError as error:
        raise ValueError("call mindspore.communication.init() first") from error
    return SharedDirectory(directory, rank=rank, world=world, timeout_s=timeout_s)
