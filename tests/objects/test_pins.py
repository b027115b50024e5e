# SPDX-License-Identifier: Apache-2.0
"""The versions of the servers, as the page about object stores names them."""

from __future__ import annotations

import re
from pathlib import Path

from tests.objects import azurite, ceph

_TOP = Path(__file__).parents[2]


def test_page_names_the_versions_of_the_servers_that_it_was_tried_with() -> None:
    page = (_TOP / "docs/object-stores.md").read_text()
    pins = (_TOP / "constraints.txt").read_text()
    (moto,) = re.findall(r"^moto==(\S+)$", pins, re.MULTILINE)
    for name in (f"moto {moto}", f"Ceph {ceph.VERSION}", f"Azurite {azurite.VERSION}"):
        assert name in page
