# SPDX-License-Identifier: Apache-2.0
"""Adapters to frameworks; each imports its framework, and nothing imports them at start."""
