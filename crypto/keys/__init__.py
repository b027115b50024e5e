# SPDX-License-Identifier: Apache-2.0
"""Keys, their sources, and the rings that hold several of them."""
