# SPDX-License-Identifier: Apache-2.0
"""Tensors to bytes and back: MindSpore `.ckpt`, `.safetensors`, the CRC32 trailer."""
