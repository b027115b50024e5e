# SPDX-License-Identifier: Apache-2.0
"""The encrypted container: header, FLOE segments, key slots."""
