# SPDX-License-Identifier: Apache-2.0
"""Retention policies as text, for configuration files and command lines.

```
policy    rule ("|" rule)*
rule      last(3)  best(2, loss, min)  every(1000)  every(1000, last=5)  every(3h)  epochs(2)  within(2d)
          hourly(24)  daily(7)  weekly(4)  monthly(6)  yearly(3)  within_hourly(2d)  within_daily(7d)
          within_weekly(4w)  within_monthly(52w)  within_yearly(520w)  per_minutes(5)  pinned
          tagged(release)  all
metric    bare [A-Za-z_][A-Za-z0-9_./-]*, or quoted: "..." with JSON escapes, or '...' as it stands
duration  90s 30min 12h 2d 1w, or several in one: 1d12h
```

`30m` is refused where it is typed, because `m` means months to users of restic and borg; it is read
as minutes in files that were written before.

>>> parse_policy("last(3)|best(2, 'val loss', min)").rules[1]
Best(count=2, metric='val loss', mode='min')
>>> str(parse_policy("within(36h) | pinned"))
'within(1d12h) | pinned'
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal, NoReturn

from ckptmgr.core.errors import CkptmgrError
from ckptmgr.policy.rules import (
    MAX_COUNT,
    MAX_POLICY_CHARACTERS,
    All,
    Best,
    Epochs,
    Every,
    Last,
    Pinned,
    RetentionPolicy,
    Rule,
)
from ckptmgr.policy.tag_rules import Tagged
from ckptmgr.policy.time_rules import (
    Daily,
    EveryTime,
    Hourly,
    Monthly,
    PerMinutes,
    Weekly,
    Within,
    WithinDaily,
    WithinHourly,
    WithinMonthly,
    WithinWeekly,
    WithinYearly,
    Yearly,
)

_TOKEN = re.compile(
    r"(?P<word>[A-Za-z_][A-Za-z0-9_./-]*)|(?P<number>[0-9][A-Za-z0-9_.]*)"
    r"|(?P<quoted>\"(?:[^\"\\]|\\.)*\"|'[^']*')|(?P<mark>[(),|=])",
    re.DOTALL,
)
_DURATION = re.compile(r"(?:[0-9]{1,12}(?:min|[smhdw]))+")
_DURATION_PART = re.compile(r"([0-9]+)(min|[smhdw])")
_DURATION_UNITS = {
    "s": "seconds",
    "m": "minutes",
    "min": "minutes",
    "h": "hours",
    "d": "days",
    "w": "weeks",
}
_HAS_M = re.compile(r"[0-9]m(?!in)")
_SHOWN_BEFORE, _SHOWN_AFTER = 40, 40


class PolicyTextError(CkptmgrError, ValueError):
    """Report an invalid policy text; the message shows the place.

    Attributes:
        text: The policy text.
        offset: Index of the first wrong character.
    """

    def __init__(self, message: str, *, text: str, offset: int, length: int = 1) -> None:
        start = max(0, offset - _SHOWN_BEFORE)
        shown = text[start : offset + max(length, _SHOWN_AFTER)][: _SHOWN_BEFORE + _SHOWN_AFTER]
        shown = "".join(char if char.isprintable() else "?" for char in shown)
        carets = "^" * max(1, min(length, len(shown) - (offset - start)))
        super().__init__(
            f"{message} (at column {offset + 1})\n  {shown}\n  {' ' * (offset - start)}{carets}"
        )
        self.text = text
        self.offset = offset


def parse_policy(text: str, *, is_stored: bool = False) -> RetentionPolicy:
    """Return the policy of a text; its `str` gives the text.

    `is_stored`: it comes from a file, where `m` is minutes.

    Raises:
        PolicyTextError: The text is empty, too long, or not a policy.
    """
    return _Parser(text, is_stored=is_stored).policy()


def has_doubtful_unit(text: str) -> bool:
    """Return whether a duration has the unit `m`, which is minutes here and months elsewhere."""
    return _DURATION.fullmatch(text) is not None and _HAS_M.search(text) is not None


def parse_duration(text: str, *, is_stored: bool = False) -> timedelta | None:
    """Return a duration such as `90s` or `1d12h`; None for other texts and when out of range.

    `is_stored`: it comes from a file, where `m` is minutes.
    """
    if not _DURATION.fullmatch(text) or (has_doubtful_unit(text) and not is_stored):
        return None
    try:
        parts = [
            timedelta(**{_DURATION_UNITS[unit]: int(number)})
            for number, unit in _DURATION_PART.findall(text)
        ]
        return sum(parts, timedelta())
    except OverflowError:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Token:
    kind: str
    text: str
    offset: int


class _Parser:
    """Recursive-descent parser; all errors go through `_fail`, which adds the place."""

    def __init__(self, text: str, *, is_stored: bool) -> None:
        self._text = text
        self._is_stored = is_stored
        self._next = 0
        if len(text) > MAX_POLICY_CHARACTERS:
            self._fail(f"a policy has at most {MAX_POLICY_CHARACTERS} characters, not {len(text)}")
        if not text.strip():
            self._fail("the policy is empty; name what to keep, e.g. last(5)")
        self._tokens = self._read_tokens()

    def policy(self) -> RetentionPolicy:
        rules = [self._rule()]
        while self._peek().kind != "end":
            self._take("|", "expected '|' before the next rule")
            rules.append(self._rule())
        return RetentionPolicy(tuple(rules))

    def _rule(self) -> Rule:
        name = self._peek()
        if name.kind != "word":
            self._fail("expected a rule, e.g. last(3)", name)
        if name.text not in _RULES:
            self._fail(f"unknown rule {name.text!r}{_did_you_mean(name.text)}", name)
        self._next += 1
        rule, kinds = _RULES[name.text]
        if not kinds and self._peek().text != "(":
            return rule()
        self._mark("(")
        arguments: list[object] = []
        for kind in kinds:
            if kind == "last" and (self._peek().text != "," or not isinstance(arguments[0], int)):
                continue  # which is an option of every(steps) alone
            if arguments:
                self._take(",", "expected ',', as in best(2, loss, min)")
            arguments.append(_ARGUMENTS[kind](self))
        self._mark(")")
        return rule(*arguments)

    def count(self) -> int:
        token = self._peek()
        value = int(token.text) if re.fullmatch("[0-9]{1,19}", token.text) else 0
        if token.kind != "number" or not 1 <= value <= MAX_COUNT:
            self._fail("expected a number from 1 to 2**63 - 1", token)
        self._next += 1
        return value

    def interval(self) -> int | timedelta:
        """Return a number of steps, or a duration."""
        return self.count() if self._peek().text.isdecimal() else self.duration()

    def last(self) -> int:
        self._word("last")
        self._mark("=")
        return self.count()

    def _word(self, word: str) -> None:
        token = self._peek()
        if token.text != word:
            self._fail(f"expected {word}=, or the end of the rule", token)
        self._next += 1

    def duration(self) -> timedelta:
        token = self._peek()
        value = parse_duration(token.text, is_stored=self._is_stored)
        if has_doubtful_unit(token.text) and not self._is_stored:
            self._fail("m may mean minutes or months; write min, or days: 30min, 30d", token)
        if value is None or not value:
            self._fail("expected a duration such as 90s, 30min, 12h, 2d, 1w or 1d12h", token)
        self._next += 1
        return value

    def metric(self) -> str:
        token = self._peek()
        name = token.text if token.kind == "word" else ""
        if token.kind == "quoted":
            name = self._unquote(token)
        if not name:
            self._fail("expected the name of a metric, e.g. loss or 'val loss'", token)
        self._next += 1
        return name

    def tag(self) -> str:
        token = self._peek()
        if token.kind not in ("word", "quoted"):
            self._fail("expected the name of a tag, e.g. release or 'paper*'", token)
        return self.metric()

    def mode(self) -> Literal["min", "max"]:
        token = self._peek()
        if token.text not in ("min", "max"):
            self._fail("expected min (smaller is better) or max", token)
        self._next += 1
        return "min" if token.text == "min" else "max"

    def _mark(self, mark: str) -> None:
        self._take(mark, f"expected {mark!r}")

    def _unquote(self, token: _Token) -> str:
        if token.text.startswith("'"):
            return token.text[1:-1]
        try:
            return str(json.loads(token.text))
        except ValueError as error:
            self._fail(f"not a quoted name: {error}", token)

    def _take(self, mark: str, complaint: str) -> None:
        token = self._peek()
        if token.kind != "mark" or token.text != mark:
            self._fail(complaint, token)
        self._next += 1

    def _peek(self) -> _Token:
        return self._tokens[self._next]

    def _read_tokens(self) -> list[_Token]:
        tokens, offset = [], 0
        while offset < len(self._text):
            if self._text[offset].isspace():
                offset += 1
                continue
            match = _TOKEN.match(self._text, offset)
            if match is None:
                self._fail(self._explain(offset), _Token(kind="bad", text="?", offset=offset))
            tokens.append(_Token(kind=match.lastgroup or "", text=match[0], offset=offset))
            offset = match.end()
        tokens.append(_Token(kind="end", text="", offset=len(self._text)))
        return tokens

    def _explain(self, offset: int) -> str:
        char = self._text[offset]
        return "this quote is never closed" if char in "\"'" else f"unexpected character {char!r}"

    def _fail(self, message: str, token: _Token | None = None) -> NoReturn:
        offset, length = (token.offset, len(token.text)) if token else (0, 1)
        raise PolicyTextError(message, text=self._text, offset=offset, length=length)


def _every(interval: int | timedelta, last: int | None = None) -> Rule:
    return EveryTime(interval) if isinstance(interval, timedelta) else Every(interval, last)


_ARGUMENTS: dict[str, Callable[[_Parser], object]] = {
    "count": _Parser.count,
    "duration": _Parser.duration,
    "interval": _Parser.interval,
    "last": _Parser.last,
    "metric": _Parser.metric,
    "mode": _Parser.mode,
    "tag": _Parser.tag,
}
_RULES: dict[str, tuple[Callable[..., Rule], tuple[str, ...]]] = {
    "last": (Last, ("count",)),
    "best": (Best, ("count", "metric", "mode")),
    "every": (_every, ("interval", "last")),
    "epochs": (Epochs, ("count",)),
    "within": (Within, ("duration",)),
    "hourly": (Hourly, ("count",)),
    "daily": (Daily, ("count",)),
    "weekly": (Weekly, ("count",)),
    "monthly": (Monthly, ("count",)),
    "yearly": (Yearly, ("count",)),
    "within_hourly": (WithinHourly, ("duration",)),
    "within_daily": (WithinDaily, ("duration",)),
    "within_weekly": (WithinWeekly, ("duration",)),
    "within_monthly": (WithinMonthly, ("duration",)),
    "within_yearly": (WithinYearly, ("duration",)),
    "per_minutes": (PerMinutes, ("count",)),
    "pinned": (Pinned, ()),
    "tagged": (Tagged, ("tag",)),
    "all": (All, ()),
}
"""Name of a rule to its class and the kinds of its arguments."""


def _did_you_mean(name: str) -> str:
    close = difflib.get_close_matches(name.lower(), _RULES, n=1, cutoff=0.5)
    return f", did you mean {close[0]!r}?" if close else f"; known: {', '.join(_RULES)}"
