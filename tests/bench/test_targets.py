# SPDX-License-Identifier: Apache-2.0
"""Verdicts follow from medians; a value that was not measured is not judged."""

from __future__ import annotations

import pytest

from tools.bench.figures import Figures, Subject, cpu_of
from tools.bench.memory import MIB, Peak
from tools.bench.scale import curves, line_over_bytes, seconds_per_tensor
from tools.bench.tables import report
from tools.bench.targets import Verdict, verdicts


def _figures(*rows: tuple[str, str, str, str, list[float]], size_bytes: int = MIB) -> Figures:
    figures = Figures()
    for section, who, mode, what, values in rows:
        for value in values:
            figures.add(_subject(section, who, mode, what, size_bytes=size_bytes), value)
    return figures


def _subject(
    section: str, who: str, mode: str, what: str, *, size_bytes: int = MIB, tensors: int = 200
) -> Subject:
    return Subject(
        section=section, who=who, mode=mode, what=what, size_bytes=size_bytes, tensors=tensors
    )


def _of(found: list[Verdict], target: str) -> list[tuple[str, float | None, bool | None]]:
    return [(one.what, one.value, one.is_met) for one in found if one.target == target]


def test_verdicts_nothing_measured_are_none() -> None:
    assert verdicts(Figures(), [], {}) == []


def test_verdict_save_is_compared_with_the_median_of_raw_and_the_faster_safetensors() -> None:
    figures = _figures(
        ("files", "raw O_DIRECT", "limit", "save", [1.0, 9.0, 2.0]),
        ("files", "ckptmgr", "ckpt", "save", [2.0, 2.0, 5.0]),
        ("files", "safetensors.numpy", "safetensors", "save", [8.0]),
        ("files", "safetensors.torch", "safetensors", "save", [6.0]),
    )
    assert _of(verdicts(figures, [], {}), "T1") == [
        ("save ckpt, of raw", 1.0, True),
        ("save ckpt, faster than safetensors", 3.0, False),
    ]


def test_verdict_container_is_compared_with_the_aes_gcm_of_mindspore() -> None:
    figures = _figures(
        ("files", "ckptmgr", "container-gcm", "save", [1.0]),
        ("files", "mindspore", "ckpt-gcm", "save", [15.0]),
    )
    assert _of(verdicts(figures, [], {}), "T2") == [
        ("save container-gcm, faster than MindSpore", 15.0, True)
    ]


@pytest.mark.parametrize(("sm4", "is_met"), [("OpenSSL", True), ("16 lanes", False)])
def test_verdict_sm4_asks_more_of_the_accelerator(sm4: str, is_met: bool) -> None:
    figures = _figures(
        ("slow files", "ckptmgr", "ckpt-sm4", "save", [1.0]),
        ("slow files", "mindspore", "ckpt-sm4", "save", [5.0]),
    )
    (one,) = [one for one in verdicts(figures, [], {"sm4": sm4}) if one.target == "T4"]
    assert one.is_met is is_met


def test_verdict_load_is_asked_a_share_of_raw_and_states_that_of_raw_into_new_memory() -> None:
    figures = _figures(
        ("files", "raw O_DIRECT", "limit", "load", [0.25]),
        ("files", "raw O_DIRECT", "limit", "load new", [0.75]),
        ("files", "ckptmgr", "ckpt", "load", [1.0]),
    )
    assert _of(verdicts(figures, [], {}), "T5") == [
        ("load ckpt, of raw", 0.25, False),
        ("load ckpt, of raw into new memory", 0.75, None),
    ]


def test_verdict_verify_is_asked_a_share_of_raw_and_states_that_of_raw_with_digests() -> None:
    figures = _figures(
        ("files", "raw O_DIRECT", "limit", "load", [0.25]),
        ("files", "raw O_DIRECT", "limit", "load digested", [0.375]),
        ("files", "ckptmgr", "ckpt", "load", [1.0]),
        ("files", "ckptmgr", "ckpt", "verify", [0.5]),
    )
    assert _of(verdicts(figures, [], {}), "T6") == [
        ("verify ckpt, of raw", 0.5, False),
        ("verify ckpt, of raw with BLAKE3", 0.75, None),
    ]


def test_verdict_blocked_time_is_counted_in_copies() -> None:
    figures = _figures(
        ("background", "one memcpy", "unit", "blocked", [0.1]),
        ("background", "ckptmgr", "thread", "blocked", [0.12]),
        ("background", "ckptmgr", "zero-stall", "blocked", [0.02]),
    )
    (thread, late) = _of(verdicts(figures, [], {}), "T7")
    assert thread[2] is True
    assert late[2] is False


def test_verdict_python_loop_beside_a_thread_is_only_stated() -> None:
    figures = _figures(("loops", "ckptmgr", "thread", "lost python", [0.5]))
    assert _of(verdicts(figures, [], {}), "T8") == [
        ("steps lost by a python loop, thread", 50.0, None)
    ]


def test_verdict_steps_lost_beside_raw_writes_are_only_stated() -> None:
    figures = _figures(
        ("loops", "raw O_DIRECT", "limit", "lost numpy", [0.03125]),
        ("loops", "ckptmgr", "process", "lost numpy", [0.015625]),
    )
    assert _of(verdicts(figures, [], {}), "T8") == [
        ("steps lost by a numpy loop, process", 1.5625, True),
        ("steps lost by a numpy loop, raw writes", 3.125, None),
    ]


def test_verdict_memory_of_save_and_load_are_judged_apart() -> None:
    peak = Peak(mode="ckpt", save_bytes=30 * MIB, load_bytes=65 * MIB, limit_bytes=256 * MIB)
    found = _of(verdicts(Figures(), [peak], {}), "T9")
    assert [is_met for _, _, is_met in found] == [True, False]


def test_verdict_small_tensors_costs_the_slope_between_the_two_largest_numbers() -> None:
    figures = Figures()
    for tensors, seconds in ((10, 0.5), (1_000, 0.1), (11_000, 0.2)):
        subject = _subject("counts", "ckptmgr", "ckpt", "save", tensors=tensors)
        figures.add(subject, seconds)
    ((_, value, is_met),) = _of(verdicts(figures, [], {}), "T10")
    assert value == pytest.approx(10.0)
    assert is_met is False


def test_verdict_scale_is_the_ratio_of_slopes_and_shows_both_and_how_straight_they_are() -> None:
    figures = Figures()
    for gib, off_s in ((1, 0.0), (2, 0.3), (3, 0.0)):
        for who, mode, factor in (("raw O_DIRECT", "limit", 0.5), ("ckptmgr", "ckpt", 0.525)):
            subject = _subject("sizes", who, mode, "save", size_bytes=gib << 30)
            figures.add(subject, 0.3 + factor * gib + (off_s if who == "ckptmgr" else 0))
    (verdict,) = verdicts(figures, [], {})
    assert verdict.value == pytest.approx(1.05)
    assert verdict.is_met is True
    assert verdict.detail == "0.525 against 0.500 s/GiB, residuals 0.141 and 0.000 s"
    assert f"| 1.05x ({verdict.detail}) | met |" in report(figures, [verdict], [], {})


def test_verdict_scale_of_loads_states_the_slope_of_raw_into_new_memory() -> None:
    figures = Figures()
    for gib in (1, 2):
        for who, mode, what, factor in (
            ("raw O_DIRECT", "limit", "load", 0.3),
            ("raw O_DIRECT", "limit", "load new", 0.8),
            ("ckptmgr", "ckpt", "load", 1.2),
        ):
            figures.add(_subject("sizes", who, mode, what, size_bytes=gib << 30), factor * gib)
    asked, stated = verdicts(figures, [], {})
    assert asked.value == pytest.approx(4.0)
    assert asked.is_met is False
    assert stated.what == "load ckpt, slope over bytes, of that of raw into new memory"
    assert stated.value == pytest.approx(1.5)
    assert stated.is_met is None
    table = report(figures, [], [], {})
    assert "| raw O_DIRECT, into new memory | limit | 0.800 | 1.600 |" in table


def test_verdict_lazy_read_is_asked_of_the_container_and_stated_of_others() -> None:
    figures = _figures(
        ("lazy", "ckptmgr", "container-gcm", "warm, with opening", [0.010, 0.030, 0.012]),
        ("lazy", "ckptmgr", "container-gcm", "warm, alone", [0.021]),
        ("lazy", "ckptmgr", "ckpt-gcm", "warm, with opening", [0.5]),
        ("lazy", "ckptmgr", "container-gcm", "cold, with opening", [0.5]),
        size_bytes=4 << 30,
    )
    assert _of(verdicts(figures, [], {}), "T12") == [
        ("1 MiB of 4 GiB, container-gcm, warm, with opening", 12.0, True),
        ("1 MiB of 4 GiB, ckpt-gcm, warm, with opening", 500.0, None),
        ("1 MiB of 4 GiB, container-gcm, warm, alone", 21.0, False),
    ]


def test_verdict_compression_asks_weights_and_states_the_rest() -> None:
    figures = _figures(
        ("compression", "ckptmgr", "fp32 plain", "ratio", [0.9]),
        ("compression", "ckptmgr", "bf16 container", "ratio", [0.68]),
        ("compression", "ckptmgr", "int64 plain", "ratio", [0.25]),
    )
    found = _of(verdicts(figures, [], {}), "T13")
    assert [is_met for _, _, is_met in found] == [False, True, None]


@pytest.mark.parametrize(("seconds", "is_met"), [(1.9, True), (2.1, False)])
def test_verdict_plan_has_two_seconds(seconds: float, is_met: bool) -> None:
    figures = _figures(("ranks", "ckptmgr", "4096 ranks, 2000 tensors", "plan", [seconds]))
    assert _of(verdicts(figures, [], {}), "T14") == [
        ("plan for 4096 ranks, 2000 tensors", seconds, is_met)
    ]


def test_slopes_of_a_single_point_are_none() -> None:
    figures = _figures(("sizes", "ckptmgr", "ckpt", "save", [1.0]))
    (curve,) = curves(figures, "sizes", "save").values()
    assert line_over_bytes(curve) is None
    assert seconds_per_tensor(curve) is None


def test_report_compares_a_peer_with_raw_and_with_ours_of_its_mode() -> None:
    figures = _figures(
        ("files", "raw O_DIRECT", "limit", "save", [1.0]),
        ("files", "ckptmgr", "container-gcm", "save", [2.0]),
        ("files", "tensorizer", "encrypted", "save", [5.0]),
    )
    text = report(figures, [], [], {"jax": "not installed"})
    assert "| encrypted | tensorizer | 5.000 | 0.20 | 2.5x |" in text
    assert "| container-gcm | ckptmgr | 2.000 | 0.50 |  |" in text
    assert text.endswith("* Left out: jax: not installed")


def test_report_states_processor_seconds_for_a_gib() -> None:
    figures = _figures(
        ("files", "ckptmgr", "safetensors", "load warm", [0.5]),
        ("files", "ckptmgr", "safetensors", cpu_of("load warm"), [0.3, 0.1, 0.2]),
        size_bytes=1 << 29,
    )
    assert "| safetensors | ckptmgr | 0.500 |  |  | 0.400 |" in report(figures, [], [], {})


def test_verdict_loads_are_compared_with_loops_that_do_their_work() -> None:
    figures = _figures(
        ("files", "raw O_DIRECT", "limit", "load new digested", [0.9]),
        ("files", "raw O_DIRECT", "limit", "into digested", [0.8]),
        ("files", "raw O_DIRECT", "limit", "load warm digested", [0.8]),
        ("files", "ckptmgr", "safetensors", "load", [1.0]),
        ("files", "ckptmgr", "safetensors", "into", [1.0]),
        ("files", "ckptmgr", "safetensors", "into own", [0.8]),
        ("files", "ckptmgr", "safetensors", "load warm", [1.0]),
    )
    assert _of(verdicts(figures, [], {}), "T5") == [
        ("load safetensors, of the bare loop into new memory", 0.9, True),
        ("into own safetensors, of the bare loop into memory that lies alike", 1.0, True),
        ("into safetensors, of the bare loop into memory that lies alike", 0.8, None),
        ("load warm safetensors, of readinto with BLAKE3", 0.8, True),
    ]


def test_report_shows_beside_loads_and_checks_what_the_disk_does_with_their_work() -> None:
    figures = _figures(
        ("files", "raw O_DIRECT", "limit", "load", [0.3]),
        ("files", "raw O_DIRECT", "limit", "load new", [0.6]),
        ("files", "raw O_DIRECT", "limit", "touch", [0.5]),
        ("files", "raw O_DIRECT", "limit", "load digested", [0.4]),
        ("files", "raw O_DIRECT", "limit", "load busy", [0.75]),
        ("files", "ckptmgr", "ckpt", "load", [0.6]),
        ("files", "ckptmgr", "ckpt", "verify", [0.5]),
    )
    loads, checks = report(figures, [], [], {}).split("## Files: verify")
    for table in (loads, checks):
        assert "| limit | raw O_DIRECT | 0.300 |  |  |" in table
        assert "| limit | raw O_DIRECT beside a busy processor | 0.750 | 0.40 |  |" in table
        assert "| limit | raw O_DIRECT, with BLAKE3 | 0.400 | 0.75 |  |" in table
    assert "| limit | raw O_DIRECT, into new memory | 0.600 | 0.50 |  |" in loads
    assert "| limit | new memory alone, touched | 0.500 | 0.60 |  |" in loads
