# SPDX-License-Identifier: Apache-2.0
"""`CheckpointConfig`: MindSpore's configuration surface; invalid values fail at construction.

Parameters, defaults, properties, normalisation and messages are those of
`mindspore.train.CheckpointConfig` 2.10.0 (`mindspore/train/callback/_checkpoint.py`), in the order
in which it checks them. Differences:

* A key of the wrong length, an unknown `enc_mode` with a key, an unknown `format`, and an appended
  integer of more than 64 bits are refused here. MindSpore accepts them, and a save then deletes the
  oldest checkpoint before it fails.
* `crc_check` together with `enc_key` works; MindSpore writes files that cannot be loaded.
* With `format="safetensors"`, `enc_key`, `crc_check` and `exception_save` work; MindSpore refuses
  them.
* An unknown option is a TypeError; MindSpore ignores it, and with `enc_kye=` saves plaintext.
* A run never changes the configuration. MindSpore counts in the shared `append_dict`, so that a
  second callback with the same configuration continues the counts of the first.
* The key is in no message and no repr, and the configuration is not pickled with one.
* `keep=` takes any retention policy, as text or value; `save_only_kept=` saves no others.

>>> config = CheckpointConfig(save_checkpoint_steps=100, keep="last(3) | best(2, loss, min)")
>>> config.save_policy()
EverySteps(interval_steps=100, since='zero', offset=0)
>>> str(config.retention_policy())
'last(3) | best(2, loss, min)'
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ckptmgr.config.checks import (
    check_any_set,
    check_append_info,
    check_async_save,
    check_bool,
    check_cipher_mode,
    check_compression,
    check_file_mode,
    check_network,
    check_optional_count,
    check_options,
    check_signing_key,
    warn_of_masked,
)
from ckptmgr.config.failure import BackPressure, OnError, check_back_pressure, parse_on_error
from ckptmgr.config.keys import check_given_key, check_recipients, resolve_keys
from ckptmgr.config.option import Option
from ckptmgr.core.arguments import check_is_bool, check_type
from ckptmgr.core.names import FORMATS, extension_of
from ckptmgr.core.trust import DEFAULT_TRUST, Trust
from ckptmgr.io.permissions import DEFAULT_FILE_MODE

if TYPE_CHECKING:  # imported by the functions that need them
    from ckptmgr.config.memory import MemoryConfig
    from ckptmgr.crypto.keys.ring import Keys
    from ckptmgr.crypto.keys.signing import SigningKey
    from ckptmgr.policy.rules import RetentionPolicy, Rule
    from ckptmgr.policy.save import Overhead, SavePolicy, Since


DEFAULT_KEEP_MAX = 5
_OPTIONS = ("incremental", "enable_redundance")


class _TrueByDefault:
    """Default that stands for True and can be distinguished from a given True."""

    def __repr__(self) -> str:
        return "True"


_TRUE_BY_DEFAULT: Any = _TrueByDefault()


def _check_removal(config: CheckpointConfig, value: object) -> bool:
    removes = check_is_bool("remove_redundancy", value)
    has_key = config.enc_key is not None or bool(config.enc_recipients)
    is_default = (has_key or config.enc_mode == "AES-GCM") and not config.incremental
    if config.format == "safetensors" and not is_default:
        raise ValueError(
            "For 'save_checkpoint', when format is 'safetensors', other param must be default."
        )
    if config.format not in FORMATS:
        raise ValueError(
            "For 'save_checkpoint', the format must be 'safetensors' or 'ckpt', "
            f"but got {config.format}."
        )
    return removes


def _check_network(config: CheckpointConfig, network: object) -> object:
    checked = check_network(network)
    check_any_set(*[vars(config)[name] for name in _COUNTS])
    return checked


def _load_keys(config: CheckpointConfig, _: None) -> Keys | None:
    return resolve_keys(
        "enc_key",
        config.enc_key,
        mode=config.enc_mode,
        format=config.format,
        recipients=config.enc_recipients,
    )


def _check_keep(config: CheckpointConfig, keep: object) -> RetentionPolicy | None:
    if keep is None:
        return None
    from ckptmgr.config.retention import check_keep

    return check_keep(keep, config.keep_checkpoint_max, config.keep_checkpoint_per_n_minutes)


def _check_memory(memory: object) -> MemoryConfig | None:
    if memory is None:
        return None
    from ckptmgr.config.memory import MemoryConfig

    if not isinstance(memory, MemoryConfig):
        raise TypeError(f"memory must be a MemoryConfig, but got {type(memory)}.")
    return memory


def _check_measured(metric: object) -> str | None:
    if metric is not None and not (isinstance(metric, str) and metric):
        raise TypeError(
            f"save_when_measured is the name of a metric that step_end gets, but got {metric!r}"
        )
    return metric


def _check_overhead(share: float | None) -> Overhead | None:
    if share is None:
        return None
    from ckptmgr.policy.save import Overhead

    return Overhead(share)


def _check_only_kept(config: CheckpointConfig, _: None) -> RetentionPolicy | None:
    if not config.save_only_kept:
        return None
    from ckptmgr.config.retention import check_only_kept

    return check_only_kept(config.keep)


def _check_on_error(on_error: OnError) -> OnError:
    parse_on_error(on_error)
    return on_error


def _check_zero_stall(config: CheckpointConfig, value: object) -> bool:
    is_wanted = check_is_bool("zero_stall", value)
    if is_wanted and not config.async_save:
        raise ValueError(
            "zero_stall is about background saves: it needs async_save=True or 'process'"
        )
    return is_wanted


_COUNTS = (
    "save_checkpoint_steps",
    "save_checkpoint_seconds",
    "keep_checkpoint_max",
    "keep_checkpoint_per_n_minutes",
)


class CheckpointConfig:
    """When to save, what to keep, and how a checkpoint file is written.

    Args:
        save_checkpoint_steps: Save at the multiples of this number of steps; in MindSpore's
            callbacks, so many steps after the last save. None or 0 for no interval in steps.
        save_checkpoint_seconds: Interval of saves in seconds. As in MindSpore without effect beside
            steps, whose default is 1, but with a warning: give `save_checkpoint_steps=None`.
        keep_checkpoint_max: How many of the newest checkpoints stay; None or 0 for no such limit.
        keep_checkpoint_per_n_minutes: Keep about one checkpoint per this many minutes. As in
            MindSpore without effect beside `keep_checkpoint_max`, whose default is 5, but with a
            warning: give `keep_checkpoint_max=None`. Without both, one checkpoint is kept.
        integrated_save: No effect where no tensor is split. Ranks write the slices that they hold,
            with their layout, and `load_checkpoint` returns whole tensors; an explicit True together
            with slices is refused, because a save merges nothing.
        async_save: False, True or "thread" for a background thread, "process" for a background
            process.
        saved_network: Saved by `ModelCheckpoint` instead of the training network: an object with
            parameters (a MindSpore Cell, any object with `state_dict()`), or a mapping of names to
            arrays.
        append_info: "epoch_num", "step_num", and at most one dict of names to int, float, bool or
            str (or MindSpore Parameter, Tensor, Generator): values in every file beside the
            parameters or the state, for `load_checkpoint`.
        enc_key: The key, 16, 24 or 32 bytes (SM4-CBC: 16), or None for a plain file. Or a source:
            of the key (`file:run.key`, `env:RUN_KEY`, `cmd:...`, `fd:3`, `prompt:`,
            `wrapped:FILE`), of a passphrase (`passphrase:prompt:`), or of a private or public key
            (`file:alice.pem`). Sources are read once, at construction; a prompt asks twice, against
            typing errors.
        enc_mode: "AES-GCM", "AES-CBC" or "SM4-CBC"; no effect without a key.
        exception_save: Whether an exception that leaves the `with` block of a manager or callback,
            also KeyboardInterrupt and SystemExit, saves the state of the last step that ended, with
            `why="exception:NAME"`. The state is read when the exception arrives, perhaps in the
            middle of the next step, so the checkpoint never counts for retention or as the latest
            one, and `resume` takes it only where there is no other.
        crc_check: Whether the file ends with a CRC-32 of its content, inside the encryption; a
            safetensors file has it in its header.
        remove_redundancy: Whether each tensor is saved by one rank of a parallel run only.
        format: "ckpt" or "safetensors".
        keep: A retention policy instead of `keep_checkpoint_*`, e.g. "last(3) | best(2, loss,
            min)".
        save_only_kept: Whether a due save is passed over that no rule of `keep` would keep, as a
            step whose loss is not among the best; the end of the training, preemption and
            exceptions are saved all the same. A step without the metric is passed over, too, and
            the next one that has it takes its place.
        save_checkpoint_overhead: Instead of steps and seconds: the largest share of the training
            time for which saving may hold it up, e.g. 0.03.
        save_when_measured: The name of a metric: a step for which `step_end` is given it is due, too,
            so that `best` sees each measured step. `save_checkpoint_steps=None` saves no others. All
            ranks are given it at the same steps.
        memory: Budget and kind of the memory in which background saves stage the state.
        back_pressure: For a background save while another one runs: "wait" for that one, "skip"
            this one, or "coalesce": keep only the newest as the next to run.
        on_error: After a failed save: "raise" (of a background save at the next step), "warn" in
            the log, "retry(n)" and then raise, or a function that gets the exception. With "warn"
            or a function the training goes on, and the step counts as not saved.
        zero_stall: Whether background saves also copy the state in the background, during forward
            and backward. The loop calls `manager.before_update()` before it changes the state in
            place; torch optimizers do so by themselves. NumPy arrays are copied at once. A change
            that comes too early fails the save if torch counts it. Torch does not count writes
            through `.data`, DLPack, a NumPy view made after the save began (or of a tensor that a
            load made), or fused kernels: of these, only changes of a whole tensor are detected with
            certainty.
        verify_after_write: Read every file back from the disk, past the page cache, before it is
            published; if the bytes differ, the save fails, and the earlier checkpoints stay.
        compression: "zstd", or None. Only with format "safetensors"; the name then ends in `.ckpz`,
            with a key in `.ckpe`.
        compression_level: 1 (fast) to 19; above 1 hardly pays for weights, but for sparse states.
        enc_recipients: Sources of further keys that open the files, usually files of public keys
            (`file:alice.pem.pub`). Without `enc_key`, this run cannot read its own checkpoints.
        signing_key: The source of an Ed25519 private key (`file:sign.pem` of `ckptmgr keygen --type
            ed25519`) that signs every manifest; the public key verifies it.
        file_mode: Permission bits of data files and manifests, whatever the umask: 0o440 or 0o640 lets
            the group read, 0o660 also save and prune. Directories that the run makes allow the same
            (x where r); all other files of the run follow.
        options: MindSpore's `incremental` (only the changes of map parameters) and
            `enable_redundance` (of its AITURBO store). A manager or callback refuses them unless they
            are false: its checkpoints are complete, and it uses no such store.

    Raises:
        TypeError: A value of a wrong type, or an unknown option.
        ValueError: A value out of range, an impossible combination, or an invalid `keep`.
        KeyProblem: A key that does not fit the mode; also a ValueError.
    """

    # The table of options. The order of their checks decides which of two mistakes is reported; it is
    # MindSpore's.
    save_checkpoint_steps = Option[int | None]("Steps between saves.", check_optional_count)
    save_checkpoint_seconds = Option[int | None](
        "Seconds between saves; None when steps decide.", check_optional_count
    )
    keep_checkpoint_max = Option[int | None](
        "How many of the newest checkpoints stay.", check_optional_count
    )
    keep_checkpoint_per_n_minutes = Option[int | None](
        "Minutes for which about one checkpoint stays; None when the number decides.",
        check_optional_count,
    )
    saved_network = Option[object](
        "The object that is saved instead of the training network, or None.", within=_check_network
    )
    exception_save = Option[bool]("Whether exceptions save.", check_bool, is_plain=True)
    asks_for_integrated_save = Option[bool](
        "Whether `integrated_save=True` was given, and not left at its default."
    )
    integrated_save = Option[bool](
        "Whether split tensors are merged before saving, as given; see `CheckpointConfig`.",
        lambda value: True if value is _TRUE_BY_DEFAULT else check_bool(value),
    )
    async_save = Option[bool | str](
        "Whether, or how, saves run in the background.", check_async_save
    )
    _appended = Option[dict[str, object] | None]("The values to append.", check_append_info)
    enc_key = Option[bytes | str | None](
        "The key or its source, as given.", partial(check_given_key, "enc_key")
    )
    enc_recipients = Option[tuple[str, ...]]("Sources of further keys.", check_recipients)
    enc_mode = Option[str]("The cipher mode.", partial(check_cipher_mode, "enc_mode"))
    crc_check = Option[bool](
        "Whether the file ends with a CRC-32.", partial(check_is_bool, "crc_check")
    )
    format = Option[str]("`ckpt` or `safetensors`.", lambda one: check_type("format", one, str))
    incremental = Option[object]("MindSpore's option, as given.")
    enable_redundance = Option[object]("MindSpore's option, as given.", is_plain=True)
    remove_redundancy = Option[bool](
        "Whether one rank saves each tensor.", within=_check_removal, is_plain=True
    )
    keys = Option["Keys | None"]("The loaded keys; None for plain files.", within=_load_keys)
    compression = Option[str | None]("`zstd`, or None.")
    compression_level = Option[int | None](
        "Level of zstd, or None when files are not compressed.",
        within=lambda config, level: check_compression(
            config.compression, level, format=config.format
        ),
    )
    keep = Option["RetentionPolicy | None"]("The policy `keep`, or None.", within=_check_keep)
    save_only_kept = Option[bool](
        "Whether rules of `keep` choose what is saved.", partial(check_is_bool, "save_only_kept")
    )
    only_kept = Option["RetentionPolicy | None"](
        "The rules that choose what is saved, or None.",
        within=_check_only_kept,
        is_plain=True,
    )
    save_when_measured = Option[str | None](
        "The metric whose steps are due, or None.", _check_measured
    )
    save_checkpoint_overhead = Option["Overhead | None"](
        "The save policy by overhead, or None.",
        _check_overhead,
    )
    memory = Option["MemoryConfig | None"]("Memory of saves.", _check_memory, is_plain=True)
    back_pressure = Option[BackPressure](
        "What a save beside another one does.", check_back_pressure, is_plain=True
    )
    on_error = Option[OnError]("What a failed save does.", _check_on_error, is_plain=True)
    signing_key = Option["SigningKey | None"]("Signs.", check_signing_key, is_plain=True)
    verify_after_write = Option[bool](
        "Whether files are read back.", partial(check_is_bool, "verify_after_write"), is_plain=True
    )
    file_mode = Option[int]("Permission bits.", check_file_mode, is_plain=True)
    zero_stall = Option[bool](
        "Whether the state is copied later.", within=_check_zero_stall, is_plain=True
    )

    def __init__(
        self,
        save_checkpoint_steps: int | None = 1,
        save_checkpoint_seconds: int | None = 0,
        keep_checkpoint_max: int | None = DEFAULT_KEEP_MAX,
        keep_checkpoint_per_n_minutes: int | None = 0,
        integrated_save: bool = _TRUE_BY_DEFAULT,
        async_save: bool | str = False,
        saved_network: object = None,
        append_info: list[str | dict[str, object]] | None = None,
        enc_key: bytes | str | None = None,
        enc_mode: str = "AES-GCM",
        exception_save: bool = False,
        crc_check: bool = False,
        remove_redundancy: bool = False,
        format: str = "ckpt",
        *,
        keep: str | RetentionPolicy | Rule | None = None,
        save_only_kept: bool = False,
        save_when_measured: str | None = None,
        save_checkpoint_overhead: float | None = None,
        memory: MemoryConfig | None = None,
        back_pressure: BackPressure = "wait",
        on_error: OnError = "raise",
        zero_stall: bool = False,
        verify_after_write: bool = False,
        enc_recipients: Sequence[str] = (),
        signing_key: str | SigningKey | None = None,
        compression: str | None = None,
        compression_level: int = 1,
        file_mode: int = DEFAULT_FILE_MODE,
        **options: object,
    ) -> None:
        given = {**locals(), **dict.fromkeys(_OPTIONS, False), **options}
        given |= {"asks_for_integrated_save": integrated_save is True, "_appended": append_info}
        check_options("CheckpointConfig", options, options=_OPTIONS, parameters=_PARAMETERS)
        for name, option in _TABLE.items():
            option.take(self, given.get(name))
        steps, keep_max = self.save_checkpoint_steps, self.keep_checkpoint_max
        seconds, minutes = self.save_checkpoint_seconds, self.keep_checkpoint_per_n_minutes
        warn_of_masked(
            {"save_checkpoint_seconds": seconds},
            {"save_checkpoint_overhead": save_checkpoint_overhead, "save_checkpoint_steps": steps},
            way_out="save_checkpoint_steps=None saves by seconds",
        )
        warn_of_masked(
            {"keep_checkpoint_per_n_minutes": minutes},
            {"keep_checkpoint_max": keep_max},
            way_out="keep_checkpoint_max=None keeps by minutes",
        )
        vars(self).update(
            save_checkpoint_seconds=None if steps else seconds,
            keep_checkpoint_max=1 if not keep_max and not minutes else keep_max,
            keep_checkpoint_per_n_minutes=None if keep_max else minutes,
        )

    def __repr__(self) -> str:
        if "zero_stall" not in vars(self):  # construction failed; a traceback shows it
            return "CheckpointConfig(...)"
        key = None if self.keys is None else "<redacted>"
        network = None if self.saved_network is None else type(self.saved_network).__name__
        return (
            f"CheckpointConfig(save={self.save_policy()!r}, keep='{self.retention_policy()}', "
            f"async_save={self.async_save!r}, saved_network={network}, "
            f"append_info={None if self._appended is None else sorted(self._appended)}, "
            f"enc_key={key}, enc_mode={self.enc_mode!r}, exception_save={self.exception_save!r}, "
            f"crc_check={self.crc_check!r}, format={self.format!r})"
        )

    @property
    def extension(self) -> str:
        """The extension of files: the format, and any suffix of containers or compression."""
        return extension_of(
            self.format,
            is_encrypted=self.keys is not None,
            is_compressed=self.compression_level is not None,
        )

    @property
    def append_dict(self) -> dict[str, object] | None:
        """The values appended to every checkpoint, counters with their start values; a new dict."""
        return None if self._appended is None else dict(self._appended)

    @property
    def map_param_inc(self) -> object:
        """The option `incremental`, as given; see `CheckpointConfig`."""
        return self.incremental

    def get_checkpoint_policy(self) -> dict[str, object]:
        """Return MindSpore's policy dict: the four normalised numbers, and the saved network."""
        return {
            "save_checkpoint_steps": self.save_checkpoint_steps,
            "save_checkpoint_seconds": self.save_checkpoint_seconds,
            "keep_checkpoint_max": self.keep_checkpoint_max,
            "keep_checkpoint_per_n_minutes": self.keep_checkpoint_per_n_minutes,
            "saved_network": self.saved_network,
        }

    def save_policy(self, *, since: Since = "zero") -> SavePolicy:
        """Return the save policy: by overhead, else by steps, else by seconds, else never.

        `since` is that of `EverySteps`: the surfaces of MindSpore count from the last save.
        """
        from ckptmgr.policy.save import EverySeconds, EverySteps, Never

        if self.save_checkpoint_overhead is not None:
            return self.save_checkpoint_overhead
        if self.save_checkpoint_steps:
            return EverySteps(self.save_checkpoint_steps, since)
        return (
            EverySeconds(self.save_checkpoint_seconds) if self.save_checkpoint_seconds else Never()
        )

    def retention_policy(self) -> RetentionPolicy:
        """Return the retention policy: `keep`, else the newest by number, else by minutes.

        A `keep` of only `every`, `best`, `pinned` and `tagged` is joined with `last(1)`: early in a
        run those keep nothing yet, which `plan` refuses. The newest checkpoint stays under every policy
        anyway.
        """
        from ckptmgr.policy.rules import Last, RetentionPolicy

        if self.keep is not None:
            from ckptmgr.config.retention import joined_policy

            return joined_policy(self.keep)
        if self.keep_checkpoint_per_n_minutes:
            from ckptmgr.policy.time_rules import PerMinutes

            return RetentionPolicy((PerMinutes(self.keep_checkpoint_per_n_minutes),))
        return RetentionPolicy((Last(self.keep_checkpoint_max or 1),))

    def append_values(self, epoch: int | None, *, step: int) -> dict[str, object] | None:
        """Return the values to append: counters plus start values; None for nothing.

        Raises:
            ValueError: The epoch is to be appended, and there is none.
        """
        values = self.append_dict
        if epoch is None and values and "epoch_num" in values:
            raise ValueError(
                "append_info has 'epoch_num', so each step needs its epoch: step_end(step, state, epoch=...)"
            )
        for name, counted in (("epoch_num", epoch), ("step_num", step)):
            start = values.get(name) if values else None
            if values and counted is not None and isinstance(start, int | float):
                values[name] = start + counted
        return values


def check_config(config: object) -> CheckpointConfig:
    """Return the configuration of a `ModelCheckpoint`; None stands for the default one."""
    if config is None:
        return CheckpointConfig()
    if not isinstance(config, CheckpointConfig):
        raise TypeError(
            "For 'ModelCheckpoint', the type of argument 'config' should be 'CheckpointConfig', "
            f"but got {type(config)}."
        )
    return config


_TABLE = {name: one for name, one in vars(CheckpointConfig).items() if isinstance(one, Option)}
_PARAMETERS = tuple(
    name for name in inspect.signature(CheckpointConfig).parameters if name != "options"
)


def trust_of(config: CheckpointConfig, given: Trust = DEFAULT_TRUST) -> Trust:
    """Return the trust of a run, which also trusts its own signing key.

    Raises:
        ValueError: It is given keys that the configuration gives.
    """
    for name, option in (("keys", "enc_key"), ("signing_key", "signing_key")):
        if getattr(given, name) is not None:
            raise ValueError(
                f"a run takes {name} from CheckpointConfig({option}=...), and not from Trust: leave it out"
            )
    own = () if config.signing_key is None else (config.signing_key.public_key,)
    return replace(
        given,
        keys=config.keys,
        trusted_keys=(*own, *given.trusted_keys),
        signing_key=config.signing_key,
    )
