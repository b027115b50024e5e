# SPDX-License-Identifier: Apache-2.0
# pyright: reportAttributeAccessIssue=false
"""Ranks of MindSpore, which meet in a directory.

MindSpore has nothing better to meet over: its collectives have no timeout and do not tell who is missing, and the clients
of its `TCPStore` count as nodes of the cluster, which takes them for lost when they leave, and fails the job.
"""

from __future__ import annotations

import os

from mindspore.communication import get_group_size, get_rank

from ckptmgr.parallel.shared_directory import SharedDirectory


def mindspore_coordinator(
    directory: str | os.PathLike[str], *, timeout_s: float = 60.0
) -> SharedDirectory:
    """Return a coordinator for the ranks of `mindspore.communication.init`, for `ModelCheckpoint(..., coordinator=...)`.

    Args:
        directory: Where they meet; all of them see it, and no other job uses it.
        timeout_s: How long to wait for the other ranks.

    Raises:
        ValueError: MindSpore is not told of other ranks yet.
        RanksMissing: Some ranks did not come in time.
    """
    try:
        rank, world = get_rank(), get_group_size()
    except RuntimeError as error:
        raise ValueError("call mindspore.communication.init() first") from error
    return SharedDirectory(directory, rank=rank, world=world, timeout_s=timeout_s)
