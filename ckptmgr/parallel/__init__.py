# SPDX-License-Identifier: Apache-2.0
"""Tensors that are cut over many ranks."""
