# SPDX-License-Identifier: Apache-2.0
"""The objects of a training loop: `CheckpointManager`, `ModelCheckpoint`, resume, rollback."""
