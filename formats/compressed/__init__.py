# SPDX-License-Identifier: Apache-2.0
"""Compressed files: zstd frames of the bytes of a safetensors file, and a table of the frames."""
