# SPDX-License-Identifier: Apache-2.0
"""Choice of one training step among the files of all ranks. Pure: reads names and manifests only.

The files of all ranks are one checkpoint only if they are of one step. Directories of ranks may
hold different steps: a rank that was killed while it saved step 20 has 10 only. `choose_step` takes
the newest step that all ranks have, `refuse_mixture` compares manifests and names of the chosen
files.

Restart names count: where several ranks have files of the series `net`, `net-1_20` and `net_1-1_20`
are of different runs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ckptmgr.core.errors import CheckpointNotFound
from ckptmgr.core.names import parse_name, parse_step_name, stem_of
from ckptmgr.parallel.errors import LayoutError, MixedSteps
from ckptmgr.store.manifest.codec import Manifest

_SHOWN = 8
_STEP_TEXT = re.compile(r"[0-9]{1,18}(_[0-9]{1,18})?")
_NUMBER = re.compile(r"[0-9]+")
_NUMBERED = re.compile(r"(?P<head>.*?)(?P<number>[0-9]{1,18})")

Position = tuple[int, ...]


class NamedSave(NamedTuple):
    """The save of a file name: series, step (or epoch and step in the epoch), attempt."""

    series: str
    position: Position
    attempt: int = 0


class Label(NamedTuple):
    """Key of one step; with the series only where ranks share the names of series."""

    position: Position
    series: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenRanks:
    """The files of one step, by rank."""

    paths: Mapping[int, Path]
    step: str | None = None  # as users write it, `20` or `3_40`; None where no name has it
    notes: tuple[str, ...] = ()  # newer steps that were passed over, ranks that were left out


def checked_step(step: int | str | None) -> str | None:
    """Return a step as file names spell it, or raise ValueError."""
    if step is None:
        return None
    text = str(step)
    if isinstance(step, bool) or not _STEP_TEXT.fullmatch(text):
        raise ValueError(
            f"step is {step!r}; write a step, such as 20, or epoch and step in the epoch, such as 3_40"
        )
    return "_".join(str(int(number)) for number in text.split("_"))


def choose_step(
    files: Mapping[int, Sequence[Path]],
    *,
    step: str | None = None,
    has_step: Callable[[Path, int], bool] = lambda _path, _step: False,
) -> ChosenRanks:
    """Return the file of each rank at one step: the newest that all ranks have, or the one named.

    Files whose names have no step are taken as they are; of several the one with the largest
    numbers. Ranks that lack a named step are left out; the notes name them. `has_step` looks for a
    global step in the manifest of a file whose name does not have it.

    Raises:
        MixedSteps: No step is there for all ranks.
        CheckpointNotFound: No rank has the step.
        LayoutError: Several files of a rank are equally likely to be meant.
    """
    places = _places(files)
    if step is not None:
        return _chosen_by_user(places, step, has_step)
    known = {rank: found for rank, found in places.items() if any(found.values())}
    shared = _shared_series(known)
    labels = {
        rank: {_label(place, shared) for place in found.values() if place is not None}
        for rank, found in known.items()
    }
    paths = {rank: _newest(found) for rank, found in places.items() if rank not in known}
    if not labels:
        return ChosenRanks(paths=dict(sorted(paths.items())))
    common = set.intersection(*labels.values())
    if not common:
        raise MixedSteps(
            f"no step is there for all ranks: {_steps_of(labels)}", ranks=tuple(sorted(labels))
        )
    position = max(label.position for label in common)
    best = [label for label in common if label.position == position]
    for rank, found in known.items():
        paths[rank] = _only(
            [(path, place) for path, place in found.items() if _is_one_of(place, best, shared)]
        )
    newer = sorted({one for own in labels.values() for one in own if one.position > position})
    return ChosenRanks(
        paths=dict(sorted(paths.items())),
        step=_text(position),
        notes=tuple(_passed_over(newer, labels, position)),
    )


def _chosen_by_user(
    places: Mapping[int, Mapping[Path, NamedSave | None]],
    step: str,
    has_step: Callable[[Path, int], bool],
) -> ChosenRanks:
    paths: dict[int, Path] = {}
    for rank, found in places.items():
        named = [(path, place) for path, place in found.items() if _says(place, step)]
        if not named and step.isdecimal():
            named = [(path, place) for path, place in found.items() if has_step(path, int(step))]
        if named:
            paths[rank] = _only(named)
    if not paths:
        labels = {
            rank: {_label(place, ()) for place in found.values() if place is not None}
            for rank, found in places.items()
        }
        raise CheckpointNotFound(f"no rank has step {step}: {_steps_of(labels)}")
    left_out = sorted(set(places) - set(paths))
    notes = (f"left out: {_ranks(left_out)} without step {step}",) if left_out else ()
    return ChosenRanks(paths=dict(sorted(paths.items())), step=step, notes=notes)


def named_save(name: str) -> NamedSave | None:
    """Return the save that a file name names, or None where no run writes such names."""
    parsed = parse_name(name)
    if parsed is not None:
        return NamedSave(parsed.prefix, (parsed.epoch, parsed.step_in_epoch))
    step = parse_step_name(name)
    return None if step is None else NamedSave(step.prefix, (step.step,), step.attempt)


def _places(files: Mapping[int, Sequence[Path]]) -> dict[int, dict[Path, NamedSave | None]]:
    if numbered_by_rank(files):
        return {rank: dict.fromkeys(found) for rank, found in files.items()}
    heads = _series_without_steps(files)
    return {
        rank: {path: named_save(path.name) or _numbered(path, heads) for path in found}
        for rank, found in files.items()
    }


def numbered_by_rank(files: Mapping[int, Sequence[Path]]) -> bool:
    """Return whether each rank of several has one file that ends in its number (`net-1_7`)."""
    return len(files) > 1 and all(
        len(found) == 1 and _numbers(found[0])[-1:] == [rank] for rank, found in files.items()
    )


def _series_without_steps(files: Mapping[int, Sequence[Path]]) -> set[str]:
    """Return the text before the number of names such as `model_10` of which a rank has several."""
    heads: set[str] = set()
    for found in files.values():
        seen: set[str] = set()
        for path in found:
            match = _NUMBERED.fullmatch(stem_of(path.name))
            if match is not None and named_save(path.name) is None:
                (heads if match["head"] in seen else seen).add(match["head"])
    return heads


def _numbered(path: Path, heads: Collection[str]) -> NamedSave | None:
    match = _NUMBERED.fullmatch(stem_of(path.name))
    if match is None or match["head"] not in heads:
        return None
    return NamedSave(match["head"], (int(match["number"]),))


def _shared_series(known: Mapping[int, Mapping[Path, NamedSave | None]]) -> set[str]:
    """Return the series that several ranks have files of."""
    seen: set[str] = set()
    shared: set[str] = set()
    for found in known.values():
        own = {place.series for place in found.values() if place is not None}
        shared |= own & seen
        seen |= own
    return shared


def _label(place: NamedSave, shared: Collection[str]) -> Label:
    # Where ranks share series, that of a single rank is of another run; else names may hold ranks.
    return Label(place.position, place.series if shared else None)


def _is_one_of(place: NamedSave | None, labels: Sequence[Label], shared: Collection[str]) -> bool:
    return place is not None and _label(place, shared) in labels


def _says(place: NamedSave | None, step: str) -> bool:
    return place is not None and _text(place.position) == step


def _only(found: Sequence[tuple[Path, NamedSave | None]]) -> Path:
    """Return the last attempt among the files of one step; raise LayoutError for several series."""
    if len({place.series for _, place in found if place is not None}) > 1:
        return _single([path for path, _ in found])
    attempts = [0 if place is None else place.attempt for _, place in found]
    last = max(attempts)
    return _single([path for (path, _), one in zip(found, attempts, strict=True) if one == last])


def _newest(found: Collection[Path]) -> Path:
    """Return the file with the largest numbers (MindSpore's order by name has 9 after 10)."""
    latest = max(_numbers(path)[-2:] for path in found)
    return _single([path for path in found if _numbers(path)[-2:] == latest])


def _single(paths: Sequence[Path]) -> Path:
    if len(paths) > 1:
        first, second = sorted(path.name for path in paths)[:2]
        raise LayoutError(
            f"{first!r} and {second!r} are equally likely to be meant",
            path=paths[0].parent,
            hint="move one away, or give the suffix of the file name",
        )
    return paths[0]


def _numbers(path: Path) -> list[int]:
    return [int(digits) for digits in _NUMBER.findall(stem_of(path.name))]


def _passed_over(
    newer: Iterable[Label], labels: Mapping[int, set[Label]], position: Position
) -> Iterable[str]:
    newest = max(newer, default=None)
    if newest is not None:
        having = [rank for rank, own in sorted(labels.items()) if newest in own]
        lacking = sorted(set(labels) - set(having))
        yield (
            f"took step {_text(position)}, the newest of all ranks; step {_text(newest.position)}"
            f" is newer, but not in {_ranks(lacking)} (step={_text(newest.position)} or --step takes it)"
        )


def refuse_mixture(
    files: Mapping[int, Path], manifests: Mapping[int, Manifest | None], *, by_lineage: bool = False
) -> int | None:
    """Compare manifests and names of the files of one checkpoint; return their global step.

    With `by_lineage` the runs must have been resumed equally often, too.

    Raises:
        MixedSteps: Two of them are proven to be of different steps.
    """
    steps = {
        rank: (one.step,)
        for rank, one in manifests.items()
        if one is not None and (one.run_id or one.step)
    }
    _compare(steps, "steps", lambda value: f"step {_text(value)}")
    if not numbered_by_rank({rank: [path] for rank, path in files.items()}):
        parsed = {rank: parse_name(path.name) for rank, path in files.items()}
        named = {
            rank: (one.epoch, one.step_in_epoch) for rank, one in parsed.items() if one is not None
        }
        _compare(named, "steps", lambda value: f"step {_text(value)}")
    if by_lineage:
        ages = {
            rank: (len(one.parent_run_ids),)
            for rank, one in manifests.items()
            if one is not None and one.run_id
        }
        _compare(ages, "runs", lambda value: f"a run resumed {value[0]} times")
    return next(iter(steps.values()))[0] if steps else None


def _compare(
    values: Mapping[int, Position], kind: str, describe: Callable[[Position], str]
) -> None:
    by_value: dict[Position, list[int]] = {}
    for rank, value in sorted(values.items()):
        by_value.setdefault(value, []).append(rank)
    if len(by_value) > 1:
        shown = "; ".join(
            f"{_ranks(ranks)}: {describe(value)}" for value, ranks in sorted(by_value.items())
        )
        raise MixedSteps(
            f"the files of the ranks are of different {kind}: {shown}", ranks=tuple(sorted(values))
        )


def _steps_of(labels: Mapping[int, Collection[Label]]) -> str:
    """Return which ranks have which steps, ranks with the same steps together."""
    by_steps: dict[str, list[int]] = {}
    for rank, own in sorted(labels.items()):
        by_steps.setdefault(_listed(own), []).append(rank)
    return "; ".join(f"{_ranks(ranks)}: {text}" for text, ranks in by_steps.items())


def _listed(labels: Collection[Label]) -> str:
    newest = sorted(labels, reverse=True)[:_SHOWN]
    texts = [
        _text(one.position) + ("" if one.series is None else f" of {one.series!r}")
        for one in newest
    ]
    more = ", ..." if len(labels) > _SHOWN else ""
    return f"step {', '.join(texts)}{more}" if texts else "no step in the names"


def _ranks(ranks: Sequence[int]) -> str:
    more = f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else ""
    return ", ".join(f"rank_{rank}" for rank in ranks[:_SHOWN]) + more


def _text(position: Position) -> str:
    return "_".join(map(str, position))
