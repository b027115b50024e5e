# SPDX-License-Identifier: Apache-2.0
"""The common part of the adapters of frameworks."""

from __future__ import annotations

from ckptmgr.training.manager import CheckpointManager


class FrameworkManager(CheckpointManager):
    """A manager under the loop of a framework, which counts its own batches.

    `resume` refuses what another number of processes saved: they divided the data otherwise, and
    the framework would go on at the batch of one of them.
    """

    _needs_same_division = True
