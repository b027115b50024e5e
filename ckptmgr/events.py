# SPDX-License-Identifier: Apache-2.0
"""The events that observers receive."""

from ckptmgr.observe.events import *  # noqa: F403 - a door: the public path of that module
