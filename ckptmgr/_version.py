# SPDX-License-Identifier: Apache-2.0
"""The version, in a file that the build can read without importing the package."""

__version__ = "0.1.0"
