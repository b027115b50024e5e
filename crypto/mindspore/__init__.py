# SPDX-License-Identifier: Apache-2.0
"""MindSpore's encrypted blocks, sealed."""
