# SPDX-License-Identifier: Apache-2.0
"""Directories of other tools: their checkpoints are listed, checked and pruned, never unpickled."""
