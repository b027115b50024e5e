# SPDX-License-Identifier: Apache-2.0
"""Pure decisions: when to save, which checkpoints to keep, how much space a run needs."""
