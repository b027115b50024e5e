# SPDX-License-Identifier: Apache-2.0
"""`CheckpointConfig`: its values, their conversions and refusals."""

from __future__ import annotations

import copy
import inspect
import itertools
import logging
import pickle
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from traceback import TracebackException
from typing import Any

import numpy as np
import pytest

from ckptmgr import (
    CheckpointConfig,
    EverySeconds,
    EverySteps,
    KeyProblem,
    MemoryConfig,
    ModelCheckpoint,
    Never,
    Overhead,
    PolicyTextError,
)
from ckptmgr.config.config import check_config
from ckptmgr.policy.rules import Best, Last, RetentionPolicy
from ckptmgr.policy.time_rules import PerMinutes

_KEY = b"sixteen byte key"


class _Module:
    def state_dict(self) -> dict[str, object]:
        return {}


class _Generator:
    """Looks like MindSpore's class of this name, without MindSpore."""


_Generator.__name__ = "Generator"
_Generator.__module__ = "mindspore.common.generator"


def test_parameters_in_order_are_those_of_mindspore() -> None:
    counts = ["save_checkpoint_steps", "save_checkpoint_seconds", "keep_checkpoint_max"]
    ways = [
        "keep_checkpoint_per_n_minutes",
        "integrated_save",
        "async_save",
        "saved_network",
        "append_info",
    ]
    files = ["enc_key", "enc_mode", "exception_save", "crc_check", "remove_redundancy", "format"]
    parameters = inspect.signature(CheckpointConfig).parameters.values()
    assert [
        p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD
    ] == counts + ways + files


@pytest.mark.parametrize(
    "name", [*CheckpointConfig().get_checkpoint_policy(), "enc_key", "append_dict"]
)
def test_property_assignment_is_refused(name: str) -> None:
    with pytest.raises(AttributeError):
        setattr(CheckpointConfig(), name, 1)


def test_plain_attributes_are_those_of_mindspore() -> None:
    config = CheckpointConfig(
        exception_save=True, remove_redundancy=True, enable_redundance=3, incremental=True
    )
    held = (
        config.exception_save,
        config.remove_redundancy,
        config.enable_redundance,
        config.map_param_inc,
    )
    assert held == (True, True, 3, True)


@pytest.mark.parametrize("value", [0, None])
def test_keep_without_any_limit_becomes_one_file(value: int | None) -> None:
    config = CheckpointConfig(keep_checkpoint_max=value, keep_checkpoint_per_n_minutes=value)
    assert config.keep_checkpoint_max == 1
    assert config.retention_policy() == RetentionPolicy((Last(1),))


def test_save_policy_with_steps_ignores_seconds() -> None:
    assert CheckpointConfig(3, 60).save_policy() == EverySteps(3)


def test_save_policy_with_seconds_only_is_by_seconds() -> None:
    assert CheckpointConfig(0, 60).save_policy() == EverySeconds(60)


def test_save_policy_with_neither_is_never() -> None:
    assert CheckpointConfig(None, None).save_policy() == Never()


def test_retention_policy_with_minutes_is_per_minutes() -> None:
    config = CheckpointConfig(keep_checkpoint_max=None, keep_checkpoint_per_n_minutes=7)
    assert config.retention_policy() == RetentionPolicy((PerMinutes(7),))


@pytest.mark.parametrize(
    ("keep", "text"),
    [
        ("last(3) | best(2, loss, min)", "last(3) | best(2, loss, min)"),
        (Last(4), "last(4)"),
        (Last(4) | Best(1, "acc", "max"), "last(4) | best(1, acc, max)"),
        ("every(1000)", "every(1000) | last(1)"),
        ("best(1, loss, min) | pinned", "best(1, loss, min) | pinned | last(1)"),
    ],
)
def test_retention_policy_with_keep_is_that_policy(
    keep: str | Last | RetentionPolicy, text: str
) -> None:
    assert str(CheckpointConfig(keep=keep).retention_policy()) == text


@pytest.mark.parametrize(
    ("limit", "value"),
    [
        ("keep_checkpoint_max", 3),
        ("keep_checkpoint_max", None),
        ("keep_checkpoint_per_n_minutes", 1),
    ],
)
def test_keep_beside_another_limit_is_refused(limit: str, value: int | None) -> None:
    with pytest.raises(ValueError, match="give one or the other"):
        CheckpointConfig(keep="last(3)", **{limit: value})  # type: ignore[arg-type]


def test_keep_of_another_type_is_refused() -> None:
    with pytest.raises(TypeError, match="must be str or RetentionPolicy"):
        CheckpointConfig(keep=3)  # type: ignore[arg-type]


def test_keep_without_rules_is_refused() -> None:
    with pytest.raises(ValueError, match="name what to keep"):
        CheckpointConfig(keep=RetentionPolicy(()))


def test_keep_with_a_typo_names_the_place() -> None:
    with pytest.raises(PolicyTextError, match="did you mean 'last'"):
        CheckpointConfig(keep="lsat(3)")


def test_append_dict_when_changed_leaves_the_configuration_alone() -> None:
    config = CheckpointConfig(append_info=["epoch_num", {"lr": 0.1}])
    changed = config.append_dict
    assert changed is not None
    changed["epoch_num"] = 9
    assert config.append_dict == {"epoch_num": 0, "lr": 0.1}


def test_append_dict_when_the_given_dict_changes_stays_as_given() -> None:
    given: dict[str, object] = {"lr": 0.1}
    config = CheckpointConfig(append_info=[given])
    given["lr"] = 0.2
    assert config.append_dict == {"lr": 0.1}


def test_append_values_counts_on_from_the_start_values() -> None:
    config = CheckpointConfig(append_info=[{"epoch_num": 10, "step_num": 50, "note": "x"}])
    assert config.append_values(2, step=10) == {"epoch_num": 12, "step_num": 60, "note": "x"}


def test_append_values_of_a_reused_configuration_starts_again() -> None:
    config = CheckpointConfig(append_info=["step_num"])
    config.append_values(1, step=10)
    assert config.append_values(1, step=10) == {"step_num": 10}


def test_append_values_without_append_info_is_none() -> None:
    assert CheckpointConfig().append_values(1, step=1) is None


def test_append_info_with_a_mindspore_object_is_accepted() -> None:
    generator = _Generator()
    assert CheckpointConfig(append_info=[{"rng": generator}]).append_dict == {"rng": generator}


def test_append_info_with_the_same_class_name_from_elsewhere_is_refused() -> None:
    other = type("Generator", (), {"__module__": "mindspore_lookalike"})()
    with pytest.raises(TypeError, match="the value type must be int or float or bool"):
        CheckpointConfig(append_info=[{"rng": other}])


@pytest.mark.parametrize("value", [2**63, -(2**63) - 1])
def test_append_info_beyond_64_bits_is_refused(value: int) -> None:
    with pytest.raises(ValueError, match="'big' in 'append_info' does not fit in 64 bits"):
        CheckpointConfig(append_info=[{"big": value}])


def test_append_info_with_a_key_that_is_no_text_is_refused() -> None:
    with pytest.raises(TypeError, match="got key type <class 'int'>, value type <class 'int'>"):
        CheckpointConfig(append_info=[{1: 2}])  # type: ignore[dict-item]


def test_append_info_with_a_counter_twice_counts_it_once() -> None:
    assert CheckpointConfig(append_info=["step_num", "step_num"]).append_dict == {"step_num": 0}


def test_append_info_with_an_unknown_counter_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"must be in \['epoch_num', 'step_num'\], but got epoch\."
    ):
        CheckpointConfig(append_info=["epoch"])


def test_append_info_with_a_text_counter_is_refused() -> None:
    with pytest.raises(TypeError, match="what counting starts from"):
        CheckpointConfig(append_info=[{"epoch_num": "first"}])


@pytest.mark.parametrize("name", ["save_checkpoint_steps", "keep_checkpoint_max"])
@pytest.mark.parametrize(
    "value", [2**63, 10**5000, -(10**5000)], ids=["2**63", "10**5000", "-10**5000"]
)
def test_count_beyond_64_bits_is_refused(name: str, value: int) -> None:
    with pytest.raises(ValueError, match=r"got 'a number of \d+ bits'"):
        CheckpointConfig(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("network", [_Module(), {"w": np.zeros(2)}, {}])
def test_saved_network_with_parameters_is_accepted(network: object) -> None:
    assert CheckpointConfig(saved_network=network).saved_network is network


@pytest.mark.parametrize(
    "network", [_Module, {"w": 1}, {1: np.zeros(2)}, [np.zeros(2)], "net", True]
)
def test_saved_network_without_parameters_is_refused(network: object) -> None:
    with pytest.raises(TypeError, match="'saved_network' must be None or Cell, but got <class "):
        CheckpointConfig(saved_network=network)


@pytest.mark.parametrize(
    ("mode", "length"), [("AES-GCM", 16), ("AES-GCM", 24), ("AES-CBC", 32), ("SM4-CBC", 16)]
)
def test_enc_key_of_a_length_that_fits_is_accepted(mode: str, length: int) -> None:
    assert CheckpointConfig(enc_key=bytes(length), enc_mode=mode).enc_key == bytes(length)


@pytest.mark.parametrize(("mode", "length"), [("AES-GCM", 0), ("AES-CBC", 17), ("SM4-CBC", 32)])
def test_enc_key_of_another_length_is_refused(mode: str, length: int) -> None:
    with pytest.raises(
        KeyProblem, match=f"a key for {mode} must be .* bytes long, but got {length}"
    ):
        CheckpointConfig(enc_key=bytes(length), enc_mode=mode)


def test_enc_mode_unknown_with_a_key_suggests_the_right_one() -> None:
    with pytest.raises(KeyProblem, match="did you mean 'AES-GCM'"):
        CheckpointConfig(enc_key=_KEY, enc_mode="aes-gcm")


def test_enc_mode_unknown_without_a_key_means_nothing() -> None:
    assert CheckpointConfig(enc_mode="none").enc_mode == "none"


@pytest.mark.parametrize(
    "arguments",
    [
        {"enc_key": _KEY.decode()},
        {"enc_key": bytearray(_KEY)},
        {"enc_mode": _KEY},
        {"enc_key": _KEY[:5]},
        {"enc_key": _KEY, "enc_mode": "XTS"},
    ],
)
def test_error_about_a_key_never_shows_it(arguments: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"enc_|key|cipher") as caught:
        CheckpointConfig(**arguments)  # type: ignore[arg-type]
    assert "sixte" not in str(caught.value)


def test_repr_with_a_key_hides_it() -> None:
    shown = repr(CheckpointConfig(enc_key=_KEY, saved_network=_Module(), append_info=["step_num"]))
    assert "sixteen" not in shown
    assert "enc_key=<redacted>" in shown


@pytest.mark.parametrize("source", [_KEY, "passphrase:env:PHRASE"])
def test_attributes_and_copies_of_a_configuration_show_no_key(
    source: bytes | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PHRASE", "sixteen bottles")
    config = CheckpointConfig(enc_key=source, format="safetensors")
    copied = copy.deepcopy(config)
    assert (copied.enc_key, copied.keys) == (source, config.keys)
    assert "sixteen" not in f"{vars(config)} {vars(copied)} {config.enc_key!r}"


@pytest.mark.parametrize("source", [_KEY, "passphrase:env:PHRASE"])
def test_configuration_with_a_key_is_not_pickled_but_sent_to_another_process(
    source: bytes | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PHRASE", "sixteen bottles")
    config = CheckpointConfig(enc_key=source, format="safetensors")
    with pytest.raises(TypeError, match="keep the source of a key"):
        pickle.dumps(config)
    arrived = pickle.loads(ForkingPickler.dumps(config))  # noqa: S301 - our own
    assert arrived.enc_key == source
    assert repr(arrived.keys) == repr(config.keys)


def test_traceback_with_locals_of_a_refused_configuration_can_be_shown() -> None:
    with pytest.raises(KeyProblem) as caught:
        CheckpointConfig(enc_key=_KEY, enc_mode="XTS")
    shown = "".join(TracebackException.from_exception(caught.value, capture_locals=True).format())
    assert "CheckpointConfig(...)" in shown


def test_repr_without_a_key_says_so() -> None:
    assert "enc_key=None" in repr(CheckpointConfig())


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("enc_kye", "enc_key"),
        ("keeep", "keep"),
        ("compresion", "compression"),
        ("keep_checkpoint_maximum", "keep_checkpoint_max"),
        ("enable_redundancy", "enable_redundance"),
    ],
)
def test_unknown_option_is_refused_with_a_suggestion(name: str, meant: str) -> None:
    with pytest.raises(TypeError) as caught:
        CheckpointConfig(**{name: _KEY})  # type: ignore[arg-type]
    assert str(caught.value) == f"CheckpointConfig has no option {name!r}; did you mean {meant!r}?"


def test_unknown_option_like_no_other_is_refused_without_its_value() -> None:
    with pytest.raises(TypeError) as caught:
        CheckpointConfig(zzz="secret")
    assert str(caught.value) == "CheckpointConfig has no option 'zzz'"


def test_options_of_mindspore_are_accepted() -> None:
    config = CheckpointConfig(incremental=False, enable_redundance=True)
    assert (config.map_param_inc, config.enable_redundance) == (False, True)


@pytest.mark.parametrize(
    ("options", "warning"),
    [
        (
            {"save_checkpoint_seconds": 100},
            "save_checkpoint_seconds=100 has no effect: save_checkpoint_steps=1 is in force; "
            "save_checkpoint_steps=None saves by seconds",
        ),
        (
            {"save_checkpoint_seconds": 100, "save_checkpoint_overhead": 0.05},
            "save_checkpoint_seconds=100 has no effect: save_checkpoint_overhead=0.05 is in force; "
            "save_checkpoint_steps=None saves by seconds",
        ),
        (
            {"keep_checkpoint_per_n_minutes": 5},
            "keep_checkpoint_per_n_minutes=5 has no effect: keep_checkpoint_max=5 is in force; "
            "keep_checkpoint_max=None keeps by minutes",
        ),
    ],
)
def test_setting_that_a_default_replaces_gives_one_warning_that_says_what_is_in_force(
    options: dict[str, Any], warning: str, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    with caplog.at_level(logging.WARNING, logger="ckptmgr"):
        ModelCheckpoint("net", str(tmp_path), CheckpointConfig(**options))
    assert caplog.messages == [warning]


def test_settings_in_force_give_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    CheckpointConfig()
    CheckpointConfig(7, None, 3, None)
    CheckpointConfig(None, 100, None, 5)
    CheckpointConfig(0, 100, 0, 5)
    assert caplog.messages == []


# In the order in which MindSpore 2.10.0 checks them (measured with each pair).
_MISTAKES: list[tuple[str, object]] = [
    ("save_checkpoint_steps", -1),
    ("save_checkpoint_seconds", -2),
    ("keep_checkpoint_max", -3),
    ("keep_checkpoint_per_n_minutes", -4),
    ("saved_network", 5),
    ("exception_save", 1),
    ("integrated_save", 2.5),
    ("async_save", "fork"),
    ("append_info", 5),
    ("enc_key", "key"),
    ("enc_mode", 7),
    ("crc_check", 1),
    ("format", None),
    ("remove_redundancy", 1),
]


def _complaint(**arguments: object) -> str:
    with pytest.raises((TypeError, ValueError)) as caught:
        CheckpointConfig(**arguments)  # type: ignore[arg-type]
    return str(caught.value)


@pytest.mark.parametrize(("first", "second"), list(itertools.combinations(_MISTAKES, 2)))
def test_two_mistakes_report_the_one_that_mindspore_reports(
    first: tuple[str, object], second: tuple[str, object]
) -> None:
    assert _complaint(**dict([second, first])) == _complaint(**dict([first]))


def test_level_of_a_compression_that_is_not_asked_for_is_refused() -> None:
    with pytest.raises(ValueError, match="compression_level=3 needs compression='zstd'"):
        CheckpointConfig(format="safetensors", compression_level=3)


def test_check_config_of_none_is_the_default() -> None:
    assert check_config(None).keep_checkpoint_max == 5


def test_check_config_returns_the_same_object() -> None:
    config = CheckpointConfig()
    assert check_config(config) is config


def test_overhead_takes_the_place_of_steps_and_seconds() -> None:
    assert CheckpointConfig(save_checkpoint_overhead=0.05).save_policy() == Overhead(0.05)


def test_background_options_are_kept() -> None:
    memory = MemoryConfig(slab_bytes=1 << 20)
    config = CheckpointConfig(memory=memory, back_pressure="skip", on_error="retry(2)")
    assert (config.memory, config.back_pressure, config.on_error) == (memory, "skip", "retry(2)")


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"memory": {"slab_bytes": 1}}, TypeError),
        ({"back_pressure": "queue"}, ValueError),
        ({"on_error": "ignore"}, ValueError),
        ({"save_checkpoint_overhead": 3}, ValueError),
    ],
    ids=["memory", "back_pressure", "on_error", "overhead"],
)
def test_background_option_that_cannot_work_is_refused(
    options: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        CheckpointConfig(**options)
