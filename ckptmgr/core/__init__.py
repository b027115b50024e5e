# SPDX-License-Identifier: Apache-2.0
"""Shared values: errors, checkpoints, file names, regions of tensors, trust."""
