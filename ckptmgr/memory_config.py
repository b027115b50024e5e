# SPDX-License-Identifier: Apache-2.0
"""`MemoryConfig`: the memory of background saves."""

from ckptmgr.config.memory import *  # noqa: F403 - a door: the public path of that module
