# SPDX-License-Identifier: Apache-2.0
"""Nested state to named tensors and back, without pickle."""
