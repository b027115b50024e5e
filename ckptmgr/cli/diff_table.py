# SPDX-License-Identifier: Apache-2.0
"""Differences of checkpoints on the screen and in JSON."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass

from ckptmgr.cli import render
from ckptmgr.cli.exits import Exit, note
from ckptmgr.cli.render import Cell, Output
from ckptmgr.core.model import Checkpoint
from ckptmgr.formats.strict_json import Json
from ckptmgr.formats.tensor import TensorSpec
from ckptmgr.maintenance.diff import Change, Comparison, TensorDifference, ValueDifference
from ckptmgr.maintenance.diff_elements import ElementDifferences, Tolerance

_FIGURES = ("DIFFER", "ABS", "REL", "NORM", "NAN", "INF")
_HEADER = ("CHANGE", "NAME", "A", "B", *_FIGURES)
_SHOWN_CHARACTERS = 40
_STYLES = {"added": "green", "removed": "red", "same": "dim"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two checkpoints and their differences; None for one that is not there."""

    a: Checkpoint | None
    b: Checkpoint | None
    found: Comparison | None = None

    @property
    def is_same(self) -> bool:
        """Whether both are there and nothing differs."""
        return self.found is not None and self.found.is_same


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """Parts of the result that are shown; `has_many` for the checkpoints of two directories."""

    tolerance: Tolerance
    is_summary: bool
    is_verbose: bool
    has_many: bool


def exit_code(pairs: Iterable[Pair]) -> int:
    """Return the exit code of diff(1)."""
    return Exit.DONE if all(pair.is_same for pair in pairs) else Exit.NO


def show(output: Output, pairs: Iterator[Pair], shown: Shown) -> list[Pair]:
    """Show pairs as they are compared; return them."""
    done: list[Pair] = []
    for pair in pairs:
        done.append(pair)
        _notes(pair)
        if output.is_quiet:
            _print_names(output, pair, shown)
        elif output.is_text:
            _print(output, pair, shown)
    if output.is_json:
        output.result([_item(pair, shown) for pair in done], _summary(done, shown))
    elif output.is_text and shown.has_many:
        same = sum(pair.is_same for pair in done)
        differ = sum(pair.found is not None for pair in done) - same
        lacking = "".join(
            f", {count} only in {side}"
            for side, count in (("A", _only(done, "b")), ("B", _only(done, "a")))
            if count
        )
        output.line(
            f"{render.counted(len(done), 'step')}: {same} the same, {differ} differ{lacking}"
        )
    return done


def _only(pairs: Iterable[Pair], lacking: str) -> int:
    return sum(getattr(pair, lacking) is None for pair in pairs)


def _notes(pair: Pair) -> None:
    if pair.found is None:
        return
    for checkpoint in pair.found.unverified:
        note(
            f"{checkpoint.path} is not verified: it is plain, and has neither a manifest nor a CRC32"
        )
    if not pair.found.has_values:
        note("tensors only: the other values of checkpoints of many ranks are not compared")


def _print_names(output: Output, pair: Pair, shown: Shown) -> None:
    if pair.is_same:
        return
    if shown.has_many:
        output.paths([one.path for one in (pair.a, pair.b) if one is not None])
        return
    names = [one.name for one in _differences(pair, is_verbose=False)]
    output.names([name.encode("utf-8", "surrogatepass") for name in names])


def _differences(pair: Pair, *, is_verbose: bool) -> list[TensorDifference | ValueDifference]:
    if pair.found is None:
        return []
    tensors = [one for one in pair.found.tensors if is_verbose or one.change is not Change.SAME]
    return [*tensors, *pair.found.values]


def _print(output: Output, pair: Pair, shown: Shown) -> None:
    for side, one in (("A", pair.a), ("B", pair.b)):
        if one is not None:
            only = "" if pair.found is not None else f"  only in {side}"
            output.line(Cell(side, "bold"), f"  {one.path}  step {render.step(one)}{only}")
    if pair.found is None:
        return
    found = [] if shown.is_summary else _differences(pair, is_verbose=shown.is_verbose)
    if found:
        rows = [_row(output, one) for one in found]
        used = [
            index
            for index, name in enumerate(_HEADER)
            if name not in _FIGURES or any(row[index].text != "-" for row in rows)
        ]
        output.table(
            [_HEADER[index] for index in used],
            [[row[index] for index in used] for row in rows],
            right=" ".join(_FIGURES),
        )
    output.line(_totals_line(pair.found, _arrow(output)))


def _arrow(output: Output) -> str:
    return "→" if output.has_unicode else "->"


def _row(output: Output, one: TensorDifference | ValueDifference) -> list[Cell]:
    if isinstance(one, ValueDifference):
        texts = [_cut(text) for text in (one.a, one.b)]
        return [Cell("value"), Cell(one.name), *map(Cell, texts), *([Cell("-")] * len(_FIGURES))]
    change = one.change.value
    return [
        Cell(change, _STYLES.get(change, "yellow")),
        Cell(one.name),
        Cell(_spec(one.a)),
        Cell(_spec(one.b)),
        *map(Cell, _figures(one.elements, _arrow(output))),
    ]


def _figures(found: ElementDifferences | None, arrow: str) -> list[str]:
    if found is None:
        return ["-"] * len(_FIGURES)
    return [
        f"{found.differing} of {found.elements}",
        *(_number(one) for one in (found.max_abs, found.max_rel, found.norm)),
        _counts(found.nan_a, found.nan_b, arrow),
        _counts(found.inf_a, found.inf_b, arrow),
    ]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _counts(a: int, b: int, arrow: str) -> str:
    return "-" if not (a or b) else f"{a} {arrow} {b}"


def _spec(spec: TensorSpec | None) -> str:
    if spec is None:
        return "-"
    return f"{spec.dtype.name} {'x'.join(map(str, spec.stated_shape)) or 'scalar'}"


def _cut(text: str | None) -> str:
    if text is None:
        return "-"
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."


def _totals_line(found: Comparison, arrow: str) -> str:
    counts, total, largest = found.counts, found.total, found.largest
    kinds = ", ".join(f"{counts[kind]} {kind.value}" for kind in Change if counts[kind])
    parts = [f"{render.counted(len(found.tensors), 'tensor')}{kinds and ': '}{kinds}"]
    if found.values:
        verb = "differs" if len(found.values) == 1 else "differ"
        parts.append(f"{render.counted(len(found.values), 'value')} {verb}")
    if largest is not None and largest.elements is not None:
        parts.append(f"largest change {_number(largest.elements.max_abs)} in {largest.name}")
        parts.append(f"norm {_number(total.norm)}")
    for word, a, b in (("NaN", total.nan_a, total.nan_b), ("Inf", total.inf_a, total.inf_b)):
        if a or b:
            parts.append(f"{a} {arrow} {b} {word}")
    return "; ".join(parts)


def _item(pair: Pair, shown: Shown) -> dict[str, Json]:
    found = pair.found
    differences = [] if shown.is_summary else _differences(pair, is_verbose=shown.is_verbose)
    return {
        "a": None if pair.a is None else render.checkpoint_json(pair.a),
        "b": None if pair.b is None else render.checkpoint_json(pair.b),
        "is_same": pair.is_same,
        "differences": [_difference_item(one) for one in differences],
        "tensors": {} if found is None else {kind.value: found.counts[kind] for kind in Change},
        "values": 0 if found is None else len(found.values),
        "total": None if found is None else asdict(found.total),
        "unverified": [] if found is None else [str(one.path) for one in found.unverified],
    }


def _difference_item(one: TensorDifference | ValueDifference) -> dict[str, Json]:
    if isinstance(one, ValueDifference):
        return {"name": one.name, "change": "value", "a": one.a, "b": one.b, "elements": None}
    return {
        "name": one.name,
        "change": one.change.value,
        "a": _spec_json(one.a),
        "b": _spec_json(one.b),
        "elements": None if one.elements is None else asdict(one.elements),
    }


def _spec_json(spec: TensorSpec | None) -> Json:
    return None if spec is None else {"dtype": spec.dtype.name, "shape": list(spec.stated_shape)}


def _summary(pairs: list[Pair], shown: Shown) -> dict[str, Json]:
    return {
        "is_same": all(pair.is_same for pair in pairs),
        "count": len(pairs),
        "same": sum(pair.is_same for pair in pairs),
        "only_a": sum(pair.b is None for pair in pairs),
        "only_b": sum(pair.a is None for pair in pairs),
        "atol": shown.tolerance.atol,
        "rtol": shown.tolerance.rtol,
    }
