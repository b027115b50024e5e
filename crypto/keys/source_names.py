# SPDX-License-Identifier: Apache-2.0
"""Names of key sources and files that may be shown: a user may have typed a key in place of a name.

>>> looks_like_key("/srv/ada/keys/run-7f3a.key"), looks_like_key("hex:00"), looks_like_key("ab" * 16)
(False, True, True)
>>> spells_key("runs/" + "ab" * 16), spells_key("resnet50-imagenet-batch256-run12"), spells_key("ab" * 16)
(False, False, True)
"""

from __future__ import annotations

import re

_STATED = re.compile(r"(?<![a-z0-9])(?:hex|base64|raw):", re.IGNORECASE)
_HEX = re.compile(r"(?:[0-9a-f]{32}|[0-9a-f]{48}|[0-9a-f]{64})", re.IGNORECASE)
_BASE64_LENGTHS = (22, 32, 43)
_GROUPED_HEX = re.compile(r"(?:[0-9a-f][: _-]?){24,}", re.IGNORECASE)
_RUN = re.compile(r"[A-Za-z0-9+/_=-]{20,}")
_JOINTS = re.compile(r"[+/_=-]")
# Parts of paths and variables: words, numbers and short ids; random base64 consists of those once
# in a million.
_WORD = re.compile(
    r"[a-z0-9]{0,12}|[A-Za-z0-9]{1,4}|[A-Z]{1,14}[0-9]{0,4}|[a-z]*[0-9]{1,14}"
    r"|[A-Z]{0,5}[a-z]{2,}(?:[A-Z][a-z]{2,})*[0-9]{0,4}"
)
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")


def looks_like_key(name: str) -> bool:
    """Return whether a name may be, or contain, a key: hex or base64, also in groups."""
    if _STATED.search(name) or _GROUPED_HEX.search(name):
        return True
    return any(not _is_path(run) for run in _RUN.findall(name))


def spells_key(text: str) -> bool:
    """Return whether a text is a key and nothing else: 16, 24 or 32 bytes, or with a prefix.

    Unlike `looks_like_key` it is for texts that may as well be the path of a checkpoint: a path
    with a digest in it is no key.
    """
    text = text.strip()
    if _STATED.match(text) or _HEX.fullmatch(re.sub("[: ]", "", text)):
        return True
    is_base64 = len(text.rstrip("=")) in _BASE64_LENGTHS and _RUN.fullmatch(text)
    return bool(is_base64) and not _is_path(text)


def is_variable(name: str) -> bool:
    """Return whether a name can be shown as that of an environment variable."""
    return _VARIABLE.fullmatch(name) is not None and not looks_like_key(name)


def _is_path(run: str) -> bool:
    if run.endswith("="):
        return False
    words = _JOINTS.split(run)
    spelled = sum(len(word) for word in words if len(word) > 2)
    return 2 * spelled >= len(run) and all(_WORD.fullmatch(word) for word in words)
