# SPDX-License-Identifier: Apache-2.0
"""Compressed tensors: zstd frames and their table."""
