# SPDX-License-Identifier: Apache-2.0
"""Shared vocabulary: errors, frozen values, file names, regions of tensors, trust."""
