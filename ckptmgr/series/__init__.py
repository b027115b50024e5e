# SPDX-License-Identifier: Apache-2.0
"""The checkpoints of one run: lease, numbering, lookup, retention after a save."""
