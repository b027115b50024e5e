# SPDX-License-Identifier: Apache-2.0
"""MindSpore's `.ckpt`: protobuf records of tensors."""
