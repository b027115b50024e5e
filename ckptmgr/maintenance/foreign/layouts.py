# SPDX-License-Identifier: Apache-2.0
"""Layouts of other tools: one table of pure recognisers, each with the facts that it rests on.

| tool | checkpoint | written last | points at one |
|---|---|---|---|
| transformers | `checkpoint-N/` | `trainer_state.json` | its `best_model_checkpoint`, `best_global_step` |
| lightning | `...step=N.ckpt`, a file or a directory | the end of the ZIP archive | `last.ckpt` |
| megatron | `iter_NNNNNNN/` | the tracker file | `latest_checkpointed_iteration.txt` |
| deepspeed | `global_stepN/` | `latest` | `latest`, `latest_universal` |
| torchtitan | `step-N/` with `train_state` in `.metadata` of one of the first | `.metadata`, or the index | - |
| torchtitan-or-dcp | other `step-N/` with DCP or Hub files | the same | - |
| orbax | `N/`, `PREFIX_N/` | the final name, `commit_timestamp_nsecs` | - |
| dcp | any other directory with `*.distcp` | `.metadata` | - |
| hub | a folder with shards, or with links to weights; asked about itself alone | - | - |

Sources: transformers 5.23 `trainer.py` `_save_checkpoint`; lightning 2.6 `model_checkpoint.py`;
Megatron-LM `training/checkpointing.py`; DeepSpeed `runtime/engine.py` `save_checkpoint`; torchtitan
0.3 `components/checkpointer/dcp.py`; orbax-checkpoint 0.12 `_src/path/step.py` and `atomicity.py`;
torch 2.13 `distributed/checkpoint/filesystem.py` `finish`. MindSpore's files are listed by the
store.

Nothing is unpickled: a fact that is only in a pickle is not known.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ckptmgr.core.model import Figures
from ckptmgr.formats.strict_json import parse_bounded
from ckptmgr.io.filesystem import FileStatus
from ckptmgr.maintenance.foreign.model import Folder, Pointer

_NO_METRICS: Mapping[str, float] = {}
_INDEX = ".index.json"
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".h5", ".msgpack", ".gguf", ".pt", ".pth")
_WEIGHT_INDEXES = tuple(f"{suffix}{_INDEX}" for suffix in _WEIGHT_SUFFIXES)
_SHARD = re.compile(
    rf"(.+)-[0-9]{{5}}-of-([0-9]{{5}})({'|'.join(map(re.escape, _WEIGHT_SUFFIXES))})"
)
_MOST_SHARDS = 10_000
_ZIP_MAGIC = b"PK\x03\x04"
_WEIGHTS = re.compile(r"(?:pytorch_model|model|adapter_model)\S*\.(?:bin|safetensors)")
_FILE_SUFFIX = ".ckpt"
_TRAINER_FILES = ("trainer_state.json", "training_args.bin", "optimizer.pt", "scheduler.pt")
_MODEL_STATES = re.compile(r"(?:.*_)?model_states\.pt")
_OPTIMIZER_RANK = re.compile(
    r"(?:bf16_)?zero_pp_rank_([0-9]{1,9})_(mp_rank_[0-9]+)_optim_states\.pt"
)
_RANK_METADATA = re.compile(r"__[0-9]+\.metadata")
_ORBAX_MARKS = ("_CHECKPOINT_METADATA", "_METADATA", "commit_success.txt")
_METRIC_IN_NAME = re.compile(
    r"(?:^|-)([A-Za-z_][A-Za-z0-9_./]*)=(-?[0-9]+(?:\.[0-9]+)?(?:e[-+]?[0-9]+)?)(?=-|\.ckpt|$)"
)

_STEP_FOLDER = re.compile(r"step-([0-9]{1,18})")
_TRAIN_STATE = b"train_state"
_MOST_METADATA = 4  # each has megabytes

Judge = Callable[[Folder, str, int | None], str | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Layout of one tool.

    Attributes:
        tool: Its short name, in tables and JSON.
        title: Its name in messages.
        names: Names of its checkpoints that are understood; group 1 is the step, if any.
        is_its: Whether an entry of such a name, or any other where `takes_others`, looks as if the
            tool wrote it.
        why_incomplete: Why an entry is not whole, or None; given the step, if it is known.
        pointers: What points at the checkpoints of a directory.
        metrics: Metrics of an entry.
        takes_files: Whether a checkpoint may be a file, whose name ends in `.ckpt`.
        takes_others: Whether entries with other names are listed, too.
        most_looked_at: How many entries are looked at to decide whether the tool is at work here.
        has_own_names: Whether no other program uses such names: beside a checkpoint of the tool,
            an entry that holds nothing yet is one, too.
    """

    tool: str
    title: str
    names: re.Pattern[str]
    is_its: Callable[[Folder, str], bool]
    why_incomplete: Judge
    pointers: Callable[[Folder, Sequence[str]], list[Pointer]] = lambda _folder, _names: []
    metrics: Callable[[Folder, str, int | None], Mapping[str, float]] = lambda *_: _NO_METRICS
    takes_files: bool = False
    takes_others: bool = False
    most_looked_at: int | None = None
    has_own_names: bool = True

    def step_of(self, name: str) -> int | None:
        """Return the step in a name; None for a name that is not understood."""
        match = self.names.fullmatch(name)
        return None if match is None or match[1] is None else int(match[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Recognised:
    """A checkpoint of a layout, before its size is known; see `ForeignCheckpoint`."""

    layout: Layout
    name: str
    step: int | None
    problem: str | None
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recognition:
    """The checkpoints of one tool in a directory, and what points at them."""

    layout: Layout
    found: tuple[Recognised, ...]
    pointers: tuple[Pointer, ...]


def recognise(folder: Folder, layouts: Sequence[Layout] | None = None) -> list[Recognition]:
    """Return the checkpoints of other tools in a directory, in the order of the layouts."""
    # Of files only those of Lightning are checkpoints; a run of ours has very many others.
    entries = {
        name: one
        for name, one in folder.entries().items()
        if (one.is_directory or name.endswith(_FILE_SUFFIX)) and not name.startswith(".")
    }
    answer: list[Recognition] = []
    for layout in LAYOUTS if layouts is None else layouts:
        fitting = [
            name
            for name, status in entries.items()
            if status.is_directory or (layout.takes_files and status.is_file)
        ]
        named = [name for name in fitting if layout.names.fullmatch(name)]
        its = [
            name for name in sorted(named)[: layout.most_looked_at] if layout.is_its(folder, name)
        ]
        if its and layout.has_own_names:
            its = named
        if layout.takes_others:
            its += [one for one in fitting if one not in named and layout.is_its(folder, one)]
        if not its:
            continue
        found = tuple(
            Recognised(
                layout=layout,
                name=name,
                step=(step := layout.step_of(name)),
                problem=layout.why_incomplete(folder, name, step),
                metrics=Figures(layout.metrics(folder, name, step)),
            )
            for name in its
        )
        whole = [one.name for one in found if one.problem is None]
        pointers = tuple(layout.pointers(folder, whole))
        answer.append(Recognition(layout=layout, found=found, pointers=pointers))
        entries = {name: status for name, status in entries.items() if name not in its}
    return answer


def most_memory_of(text: str) -> int:
    """Return how much memory the values of a JSON file may take; long logs take four times its size."""
    return (64 << 20) + 8 * len(text)


def _object(folder: Folder, name: str) -> dict[str, object] | None:
    """Return a JSON object in a file; None if there is none."""
    text = folder.text(name)
    try:
        most = None if text is None else most_memory_of(text)
        value = None if text is None else parse_bounded(text, what=name, most_bytes=most)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def missing_shards(folder: Folder) -> list[str]:
    """Return the files that an index of weights (`*.index.json`) names and the directory lacks.

    Of several indexes, such as for safetensors and for pickles, one that none of its files is here
    for does not count beside one that is whole.
    """
    by_index: dict[str, tuple[set[str], set[str]]] = {}
    for name in folder.entries():
        if name.endswith(_INDEX):
            places = (_object(folder, name) or {}).get("weight_map")
            if not (isinstance(places, dict) or name.endswith(_WEIGHT_INDEXES)):
                continue  # of something else
            wanted = {str(one) for one in places.values()} if isinstance(places, dict) else set()
            wanted = wanted or {f"the weight_map of {name}"}
            by_index[name] = (wanted, {one for one in wanted if folder.file(one) is None})
    has_whole = any(not missing for _, missing in by_index.values())
    counted = [
        missing for wanted, missing in by_index.values() if not (has_whole and missing == wanted)
    ]
    return sorted(set().union(*counted))


def _missing(files: Sequence[str]) -> str | None:
    return f"{files[0]} is missing" if files else None


def is_hub_folder(entries: Mapping[str, FileStatus]) -> bool:
    """Return whether a folder has weights in shards, or as links, as the cache of the Hub has them."""
    return any(
        one.endswith(_WEIGHT_INDEXES)
        or _SHARD.fullmatch(one)
        or (one.endswith(_WEIGHT_SUFFIXES) and _is_link(status))
        for one, status in entries.items()
    )


def _is_link(status: FileStatus) -> bool:
    return not (status.is_file or status.is_directory)


def _hub_problem(folder: Folder, name: str, step: int | None) -> str | None:
    inside = folder.folder(name)
    entries = inside.entries()
    lost = missing_shards(inside)
    lost += [
        one
        for one, status in sorted(entries.items())
        if one.endswith(_WEIGHT_SUFFIXES) and _is_link(status) and inside.file(one) is None
    ]
    if not any(one.endswith(_WEIGHT_INDEXES) for one in entries):
        lost += _missing_numbers(inside)
    return _missing(lost)


def _missing_numbers(folder: Folder) -> list[str]:
    """Return the shards that the names of others count and the directory lacks, without an index."""
    groups = {
        (match[1], int(match[2]), match[3])
        for match in map(_SHARD.fullmatch, folder.entries())
        if match is not None and int(match[2]) <= _MOST_SHARDS
    }
    names = (
        f"{stem}-{number:05d}-of-{count:05d}{suffix}"
        for stem, count, suffix in sorted(groups)
        for number in range(1, count + 1)
    )
    return [name for name in names if folder.file(name) is None]


def _is_of_transformers(folder: Folder, name: str) -> bool:
    entries = folder.folder(name).entries()
    return any(one in _TRAINER_FILES or _WEIGHTS.fullmatch(one) for one in entries)


def _transformers_problem(folder: Folder, name: str, step: int | None) -> str | None:
    inside = folder.folder(name)
    entries = inside.entries()
    if name.startswith("tmp-"):
        return "a save that did not end"
    if "trainer_state.json" not in entries:
        return "no trainer_state.json: the save did not end"
    state = _object(inside, "trainer_state.json")
    if state is None:
        return "trainer_state.json is not whole"
    if state.get("global_step") != step:
        return "trainer_state.json is of another step"
    has_weights = any(_WEIGHTS.fullmatch(one) and inside.file(one) is not None for one in entries)
    if not has_weights and not any(status.is_directory for status in entries.values()):
        return "no weights"
    return _missing(missing_shards(inside))


def _transformers_pointers(folder: Folder, whole: Sequence[str]) -> list[Pointer]:
    """Return the best ones, as the newest checkpoint of each run and the newest whole one say."""

    def step_of(name: str) -> int:
        return TRANSFORMERS.step_of(name) or 0

    newest_whole = max(whole, key=step_of, default=None)
    latest: list[dict[str, object]] = []
    named = filter(TRANSFORMERS.names.fullmatch, folder.entries())
    for name in sorted(named, key=step_of, reverse=True):
        state = _object(folder.folder(name), "trainer_state.json")
        if state is not None and (
            name == newest_whole or not any(_goes_on(state, newer) for newer in latest)
        ):
            latest.append(state)
    notes = [note for state in latest for note in _best_of(state, folder.entries())]
    return list(dict.fromkeys(notes))


def _goes_on(state: dict[str, object], newer: dict[str, object]) -> bool:
    """Return whether a run went on from a state to a newer one: with all that it had logged.

    A run that evaluated has logged something; one that did not knows no best checkpoint.
    """
    earlier, later = state.get("log_history"), newer.get("log_history")
    if not (isinstance(earlier, list) and earlier):
        return True
    # As texts, because a loss that is NaN is not equal to itself.
    return isinstance(later, list) and repr(later[: len(earlier)]) == repr(earlier)


def _best_of(state: dict[str, object], entries: Mapping[str, FileStatus]) -> list[Pointer]:
    """Return the notes of one state.

    Its path is that of the training, perhaps of Windows; the directory may have been moved. A best
    step has a checkpoint only if it was saved: the Trainer itself looks whether there is one.
    """
    path, step = state.get("best_model_checkpoint"), state.get("best_global_step")
    notes = []
    if path is not None:
        parts = re.split(r"[/\\]", path.rstrip("/\\")) if isinstance(path, str) else [""]
        notes.append(Pointer(source="best_model_checkpoint", target=parts[-1] or None))
    at_step = f"checkpoint-{step}"
    if at_step in entries and at_step not in [one.target for one in notes]:
        notes.append(Pointer(source="best_global_step", target=at_step))
    return notes


def _transformers_metrics(folder: Folder, name: str, step: int | None) -> Mapping[str, float]:
    state = _object(folder.folder(name), "trainer_state.json") or {}
    logs = state.get("log_history")
    found: dict[str, float] = {}
    for entry in logs if isinstance(logs, list) else []:
        if isinstance(entry, dict) and entry.get("step") == step:
            found |= {key: value for key, value in entry.items() if key.startswith("eval_")}
    return _numbers(found)


def _numbers(values: Mapping[str, object]) -> Mapping[str, float]:
    timings = ("_runtime", "_per_second")
    return {
        str(name): float(value)
        for name, value in values.items()
        if isinstance(value, int | float)
        and not isinstance(value, bool)
        and not str(name).endswith(timings)
        and (isinstance(value, int) or math.isfinite(value))
        and abs(value) < 1e300
    }


def _is_of_lightning(folder: Folder, name: str) -> bool:
    status = folder.entries().get(name)
    if status is not None and status.is_directory:
        return bool(folder.folder(name).entries())
    return status is not None and (not status.size_bytes or folder.head(name) == _ZIP_MAGIC)


def _lightning_problem(folder: Folder, name: str, step: int | None) -> str | None:
    status = folder.entries()[name]
    if status.is_file:
        return None if status.size_bytes else "an empty file"
    inside = folder.folder(name)
    return _dcp_problem(folder, name, step) if _has_shards(inside) else None


def _lightning_pointers(folder: Folder, whole: Sequence[str]) -> list[Pointer]:
    links = [name for name in folder.entries() if re.fullmatch(r"last(?:-v[0-9]+)?\.ckpt", name)]
    return [Pointer(source=name, target=folder.link(name) or name) for name in sorted(links)]


def _metrics_in_name(folder: Folder, name: str, step: int | None) -> Mapping[str, float]:
    found = {key: float(value) for key, value in _METRIC_IN_NAME.findall(name)}
    return _numbers({key: one for key, one in found.items() if key not in ("epoch", "step")})


def _has_shards(inside: Folder) -> bool:
    return any(name == ".metadata" or name.endswith(".distcp") for name in inside.entries())


def _is_of_dcp(folder: Folder, name: str) -> bool:
    return _has_shards(folder.folder(name))


def _dcp_problem(folder: Folder, name: str, step: int | None) -> str | None:
    entries = folder.folder(name).entries()
    if ".metadata" in entries or any(_RANK_METADATA.fullmatch(one) for one in entries):
        return None
    return "no .metadata: the save did not end"


def _is_of_torchtitan(folder: Folder, name: str) -> bool:
    """Return whether `.metadata` names the state of its trainer; plain DCP may have any names."""
    return folder.folder(name).holds(".metadata", _TRAIN_STATE)


def _has_steps_of_dcp(folder: Folder, name: str) -> bool:
    inside = folder.folder(name)
    return _has_shards(inside) or any(one.endswith(".safetensors") for one in inside.entries())


def _torchtitan_problem(folder: Folder, name: str, step: int | None) -> str | None:
    inside = folder.folder(name)
    if "model.safetensors.index.json" in inside.entries():
        return _missing(missing_shards(inside))
    return _dcp_problem(folder, name, step)


def _is_of_deepspeed(folder: Folder, name: str) -> bool:
    return any(
        _MODEL_STATES.fullmatch(one)
        or _OPTIMIZER_RANK.fullmatch(one)
        or (one == "zero" and name.endswith("_universal"))
        for one in folder.folder(name).entries()
    )


def _deepspeed_problem(folder: Folder, name: str, step: int | None) -> str | None:
    entries = folder.folder(name).entries()
    if not any(_MODEL_STATES.fullmatch(one) for one in entries):
        return "no model_states.pt"
    ranks: dict[str, set[int]] = {}
    for match in filter(None, map(_OPTIMIZER_RANK.fullmatch, entries)):
        ranks.setdefault(match[2], set()).add(int(match[1]))
    world = 1 + max((max(one) for one in ranks.values()), default=-1)
    for group, present in sorted(ranks.items()):
        absent = next((rank for rank in range(world) if rank not in present), None)
        if absent is not None:
            return f"the optimizer of rank {absent} of {group} is missing"
    latest = DEEPSPEED.step_of((folder.text("latest") or "").strip())
    return _newer(step, latest, "latest")


def _newer(step: int | None, latest: int | None, source: str) -> str | None:
    if step is None or latest is None or step <= latest:
        return None
    return f"newer than {source} says: the save did not end"


def _deepspeed_pointers(folder: Folder, whole: Sequence[str]) -> list[Pointer]:
    entries = folder.entries()
    sources = [name for name in ("latest", "latest_universal") if name in entries]
    return [
        Pointer(source=name, target=(folder.text(name) or "").strip() or None) for name in sources
    ]


_TRACKER = "latest_checkpointed_iteration.txt"


def _is_of_megatron(folder: Folder, name: str) -> bool:
    inside = folder.folder(name)
    entries = inside.entries()
    return any(one.startswith("mp_rank_") or one == "common.pt" for one in entries) or _has_shards(
        inside
    )


def _megatron_problem(folder: Folder, name: str, step: int | None) -> str | None:
    inside = folder.folder(name)
    if "common.pt" in inside.entries() or _has_shards(inside):
        problem = _dcp_problem(folder, name, step)
    else:
        ranks = [one for one in inside.entries() if one.startswith("mp_rank_")]
        empty = [one for one in sorted(ranks) if not inside.folder(one).entries()]
        problem = f"{empty[0]} is empty" if empty else None if ranks else "no ranks"
    return problem or _newer(step, _megatron_iteration(folder), "the tracker file")


def _megatron_iteration(folder: Folder) -> int | None:
    text = (folder.text(_TRACKER) or "").strip()
    return int(text) if re.fullmatch(r"[0-9]{1,18}", text) else None


def _megatron_pointers(folder: Folder, whole: Sequence[str]) -> list[Pointer]:
    if _TRACKER not in folder.entries():
        return []
    iteration = _megatron_iteration(folder)
    text = (folder.text(_TRACKER) or "").strip()
    target = "release" if text == "release" else None
    if iteration is not None:
        target = f"iter_{iteration:07d}"
    return [Pointer(source=_TRACKER, target=target)]


def _is_of_orbax(folder: Folder, name: str) -> bool:
    inside = folder.folder(name)
    entries = inside.entries()
    if ".orbax-checkpoint-tmp" in name or any(one in entries for one in _ORBAX_MARKS):
        return True
    return any(
        status.is_directory and "_METADATA" in inside.folder(one).entries()
        for one, status in entries.items()
    )


def _orbax_problem(folder: Folder, name: str, step: int | None) -> str | None:
    if ".orbax-checkpoint-tmp" in name:
        return "the name of a save that did not end"
    inside = folder.folder(name)
    if "_CHECKPOINT_METADATA" in inside.entries():
        facts = _object(inside, "_CHECKPOINT_METADATA")
        if facts is None:
            return "_CHECKPOINT_METADATA is not whole"
        if facts.get("commit_timestamp_nsecs", 0) is None:
            return "no time of commit: the save did not end"
    return None if _is_of_orbax(folder, name) else "nothing that tells that the save ended"


def _orbax_metrics(folder: Folder, name: str, step: int | None) -> Mapping[str, float]:
    facts = _object(folder.folder(name), "_CHECKPOINT_METADATA") or {}
    metrics = facts.get("metrics")
    return _numbers(metrics) if isinstance(metrics, dict) else _NO_METRICS


TRANSFORMERS = Layout(
    tool="transformers",
    title="the Trainer of Transformers",
    names=re.compile(r"(?:tmp-)?checkpoint-([0-9]{1,18})"),
    is_its=_is_of_transformers,
    why_incomplete=_transformers_problem,
    pointers=_transformers_pointers,
    metrics=_transformers_metrics,
)
DEEPSPEED = Layout(
    tool="deepspeed",
    title="DeepSpeed",
    names=re.compile(r"global_step([0-9]{1,18})"),
    is_its=_is_of_deepspeed,
    why_incomplete=_deepspeed_problem,
    pointers=_deepspeed_pointers,
    takes_others=True,
)
LAYOUTS: tuple[Layout, ...] = (
    TRANSFORMERS,
    Layout(
        tool="lightning",
        title="PyTorch Lightning",
        names=re.compile(
            r"(?:.*[-_])?(?:step=([0-9]{1,18})|epoch=[0-9]+)(?:-.*=.*)?(?:-v[0-9]+)?\.ckpt"
            r"|last(?:-v[0-9]+)?\.ckpt"
        ),
        is_its=_is_of_lightning,
        why_incomplete=_lightning_problem,
        pointers=_lightning_pointers,
        metrics=_metrics_in_name,
        takes_files=True,
        has_own_names=False,
    ),
    Layout(
        tool="megatron",
        title="Megatron",
        names=re.compile(r"iter_([0-9]{7,18})|release"),
        is_its=_is_of_megatron,
        why_incomplete=_megatron_problem,
        pointers=_megatron_pointers,
    ),
    DEEPSPEED,
    Layout(
        tool="torchtitan",
        title="torchtitan",
        names=_STEP_FOLDER,
        is_its=_is_of_torchtitan,
        why_incomplete=_torchtitan_problem,
        most_looked_at=_MOST_METADATA,
    ),
    Layout(
        tool="torchtitan-or-dcp",
        title="torchtitan or plain torch.distributed.checkpoint",
        names=_STEP_FOLDER,
        is_its=_has_steps_of_dcp,
        why_incomplete=_torchtitan_problem,
    ),
    Layout(
        tool="orbax",
        title="Orbax",
        names=re.compile(r"(?:.+_)?([0-9]{1,18})(?:\.orbax-checkpoint-tmp.*)?"),
        is_its=_is_of_orbax,
        why_incomplete=_orbax_problem,
        metrics=_orbax_metrics,
        has_own_names=False,
    ),
    Layout(
        tool="dcp",
        title="torch.distributed.checkpoint",
        names=re.compile(r"(?:.*[-_=])?([0-9]{1,18})"),
        is_its=_is_of_dcp,
        why_incomplete=_dcp_problem,
        takes_others=True,
        has_own_names=False,
    ),
)
"""The tools, the first that recognises an entry has it."""
HUB = Layout(
    tool="hub",
    title="the Hugging Face Hub",
    names=re.compile(r"(?!)()"),  # none has a step
    is_its=lambda folder, name: is_hub_folder(folder.folder(name).entries()),
    why_incomplete=_hub_problem,
    takes_others=True,
    has_own_names=False,
)
"""A folder of a model, by itself: not one of the checkpoints of a training."""
TITLES: Mapping[str, str] = {layout.tool: layout.title for layout in (*LAYOUTS, HUB)}
