# SPDX-License-Identifier: Apache-2.0
"""Tensors to bytes and back: `.ckpt`, `.safetensors`, compressed files and strategy files."""
