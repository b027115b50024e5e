# SPDX-License-Identifier: Apache-2.0
"""Events and their observers."""

from ckptmgr.observe.observers import Observer, register, unregister

__all__ = ["Observer", "register", "unregister"]
