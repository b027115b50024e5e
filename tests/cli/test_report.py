# SPDX-License-Identifier: Apache-2.0
"""`ckptmgr report`, of directories that a run saved to."""

from __future__ import annotations

import csv
import json
import math
import os
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptmgr import CheckpointConfig, CheckpointManager
from ckptmgr.cli.report_view import markdown_text
from ckptmgr.core.printable import printable
from ckptmgr.event_log import JsonLinesObserver
from ckptmgr.events import Event
from ckptmgr.maintenance.report.model import Space
from ckptmgr.maintenance.report.page import space_sentences
from tests.cli.running import run, run_json
from tests.cli.schemas import run_with_schema
from tests.support.saved import START_S, flip, overwrite, save_run, tree_of

LOSSES = {10: {"loss": 3.0}, 20: {"loss": 1.0}, 30: {"loss": 2.0}, 40: {"loss": float("nan")}}
POLICY = ("--keep", "last(1) | best(1, loss, min)")


class Page(HTMLParser):
    """The elements, attributes and texts of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.texts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href")]
        assert not [name for name, _ in attrs if name.startswith("on")]

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def page_of(path: Path) -> Page:
    return Page(path.read_text(encoding="utf-8"))


def saved_with_events(directory: Path) -> None:
    """Save five steps, of which the last two stay, and note the events."""
    observer = JsonLinesObserver(directory / "events.jsonl")
    config = CheckpointConfig(save_checkpoint_steps=1, keep="last(2)")
    with CheckpointManager(directory, config, observe=observer) as manager:
        for step in range(1, 6):
            manager.step_end(step, {"w": np.arange(4.0)}, metrics={"loss": 1 / step})


def test_page_loads_nothing_and_runs_no_script(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    save_run(runs, list(LOSSES), metrics=LOSSES)
    answer = run("report", runs, *POLICY, "-o", tmp_path / "r.html")
    assert (answer.exit_code, answer.stderr) == (0, "")
    assert answer.stdout.startswith(f"{tmp_path / 'r.html'}  4 checkpoints, ")
    found = page_of(tmp_path / "r.html")
    assert "script" not in found.tags
    assert found.addresses == ["data:,"]
    assert {"svg", "table", "polyline", "circle"} <= set(found.tags)
    assert (tmp_path / "r.html").stat().st_mode & 0o777 == 0o666 & ~_umask()


def test_page_names_the_reasons_of_the_policy(tmp_path: Path) -> None:
    save_run(tmp_path, list(LOSSES), metrics=LOSSES)
    document = run_with_schema("report", tmp_path, *POLICY)
    fates = {item["step"]: (item["fate"], item["why"]) for item in document["items"]}
    assert fates[20] == ("kept", ["best 1/1 loss=1"])
    assert fates[10][0] == fates[30][0] == "goes"
    assert fates[40] == ("kept", ["last 1/1"])
    assert document["summary"]["counts"]["goes"] == 2
    assert document["summary"]["policy"] == POLICY[1]
    page = run("report", tmp_path, *POLICY, "-o", "-").stdout
    assert "best 1/1 loss=1" in page
    assert "here, the policy would drop it" in page


def test_report_of_a_policy_file_and_of_none(tmp_path: Path) -> None:
    save_run(tmp_path, [10, 20])
    none = run_with_schema("report", tmp_path)
    assert (none["summary"]["policy"], none["summary"]["counts"]["kept"]) == (None, 2)
    (tmp_path / "ckptmgr.toml").write_text('keep = "last(1)"\n', encoding="utf-8")
    chosen = run_with_schema("report", tmp_path)
    assert (chosen["summary"]["policy"], chosen["summary"]["counts"]["goes"]) == ("last(1)", 1)


def test_report_shows_what_noted_saves_cost_and_what_is_gone(tmp_path: Path) -> None:
    saved_with_events(tmp_path)
    document = run_with_schema("report", tmp_path)
    summary = document["summary"]
    assert [item["step"] for item in document["items"] if item["fate"] == "gone"] == [1, 2, 3]
    assert [save["step"] for save in summary["saves"]] == [1, 2, 3, 4, 5]
    assert all(save["seconds"] > 0 for save in summary["saves"])
    assert summary["has_events"]
    assert len(summary["used"]) == 8  # five saves, three prunes
    assert summary["used"][-1]["bytes"] == sum(
        item["size_bytes"] for item in document["items"] if item["fate"] == "kept"
    )
    page = run("report", tmp_path, "-o", "-").stdout
    assert "training held up" in page
    assert "step 5: durable after" in page


def test_report_says_what_steps_that_came_again_have_shown(tmp_path: Path) -> None:
    observe = JsonLinesObserver(tmp_path / "events.jsonl")
    state = {"w": np.zeros(4)}
    config = CheckpointConfig(save_checkpoint_steps=100)
    for _ in range(2):
        with CheckpointManager(tmp_path, config, prefix="net", observe=observe) as manager:
            if manager.resume(state).is_fresh:
                manager.save(1, state)
            manager.step_end(2, state, metrics={"loss": 1.0})
            manager._past.unsaved = None  # as if it had died
    said = "steps that came again up to 2: continued; proven equal over 1 step"
    assert said in run("report", tmp_path, "--terminal").stdout
    assert said in run("report", tmp_path, "-o", "-").stdout
    (noted,) = run_with_schema("report", tmp_path)["summary"]["witness"]
    assert (noted["event"], noted["step"], noted["equal_steps"]) == ("witness.equal", 2, 1)


def test_report_without_events_says_how_to_note_them(tmp_path: Path) -> None:
    save_run(tmp_path, [10])
    page = run("report", tmp_path, "-o", "-").stdout
    assert "observe=JsonLinesObserver(...)" in page
    assert not run_with_schema("report", tmp_path)["summary"]["has_events"]


def test_failed_save_and_damaged_checkpoint_are_failures(tmp_path: Path) -> None:
    path, _ = save_run(tmp_path, [10, 20])
    overwrite(path, b"short")
    event = {
        "event": "save.failed", "at": 1.0, "seconds": 0.1, "size_bytes": 0, "path": None, "series": "net",
        "step": 30, "error": "no space left", "error_type": "StoreFull", "figures": {}, "notes": [],
    }  # fmt: skip
    (tmp_path / "events.jsonl").write_text(json.dumps(event) + '\n{"event": "cut sh', "utf-8")
    document = run_with_schema("report", tmp_path)
    assert document["summary"]["failures"][0]["error"] == "no space left"
    assert document["summary"]["unreadable_events"] == 1
    assert document["summary"]["counts"]["damaged"] == 1
    text = run("report", tmp_path, "--terminal").stdout
    assert "failed  net-1_10.ckpt: " in text
    assert "failed  save.failed step 30: StoreFull: no space left" in text
    assert "1 line of the file of events not readable" in text


def test_checkpoint_whose_step_is_not_known_has_none_on_every_surface(tmp_path: Path) -> None:
    save_run(tmp_path / "runs", [7])
    overwrite(tmp_path / "runs/net-1_7.ckpt.manifest.json", b"{")
    (item,) = run_with_schema("report", tmp_path / "runs")["items"]
    assert item["step"] is None
    assert run("report", tmp_path / "runs", "--csv").stdout.splitlines()[1].startswith(",")
    assert "| - |" in run("report", tmp_path / "runs", "--markdown").stdout
    page = tmp_path / "r.html"
    assert run("report", tmp_path / "runs", "-o", page).exit_code == 0
    assert "Checkpoints" not in page_of(page).texts
    assert "net-1_7.ckpt" in page_of(page).texts
    save_run(tmp_path / "runs", [8])
    assert run("report", tmp_path / "runs", "-o", page).exit_code == 0
    assert page_of(page).tags.count("circle") == 1


def test_line_of_events_without_an_end_is_not_read_as_a_whole(tmp_path: Path) -> None:
    saved_with_events(tmp_path)
    events = tmp_path / "events.jsonl"
    lines = events.read_bytes()
    events.write_bytes(b"\0" * (3 << 20) + b"\n" + lines)
    document = run_json("report", tmp_path)
    assert document["summary"]["unreadable_events"] == 3  # of at most 1 MiB each
    assert len(document["summary"]["saves"]) == 5


def test_time_of_the_last_verification_comes_from_events(tmp_path: Path) -> None:
    (path,) = save_run(tmp_path, [10])
    event = {
        "event": "verify", "at": path.stat().st_mtime + 4e9, "seconds": 0.1, "size_bytes": 0, "path": str(path),
        "series": "net", "step": 10, "error": None, "error_type": None, "figures": {}, "notes": [],
    }  # fmt: skip
    (tmp_path / "events.jsonl").write_text(json.dumps(event), "utf-8")
    (item,) = run_with_schema("report", tmp_path)["items"]
    assert item["verified_at"] is not None
    event["at"] = 1.0  # of an earlier file of this name
    (tmp_path / "events.jsonl").write_text(json.dumps(event), "utf-8")
    (item,) = run_with_schema("report", tmp_path)["items"]
    assert item["verified_at"] is None


def test_checkpoint_in_the_trash_is_shown_as_such(tmp_path: Path) -> None:
    save_run(tmp_path, [10, 20])
    assert run("prune", tmp_path, "--keep", "last(1)", "--yes").exit_code == 0
    document = run_with_schema("report", tmp_path)
    assert {item["step"]: item["fate"] for item in document["items"]} == {10: "trash", 20: "kept"}
    assert document["summary"]["space"]["trash_bytes"] > 0


def test_names_that_steer_a_terminal_or_are_no_utf_8_are_spelled_out_in_csv(tmp_path: Path) -> None:
    name = b"\x1b[31m\xff".decode("utf-8", "surrogateescape")
    save_run(tmp_path, [1], series=name, metrics={1: {"a\r\n\u202eb": 1.0}})
    (row,) = csv.DictReader(run("report", tmp_path, "--csv").stdout.splitlines())
    assert row["series"] == r"\x1b[31m\udcff"
    assert row["metric:" + r"a\r\n\u202eb"] == "1.0"


def test_names_from_files_are_text_on_the_page_and_no_formula_in_csv(tmp_path: Path) -> None:
    hostile = "<script>alert(1)</script>"
    save_run(tmp_path, [10], metrics={10: {hostile: 1.0}}, series="=cmd")
    page = Page(run("report", tmp_path, "-o", "-").stdout)
    assert "script" not in page.tags
    assert hostile in page.texts
    (row,) = csv.DictReader(run("report", tmp_path, "--csv").stdout.splitlines())
    assert row["series"] == "'=cmd"
    assert row[f"metric:{hostile}"] == "1.0"
    assert "<script>" not in run("report", tmp_path, "--markdown").stdout


def test_markdown_and_terminal_show_the_newest_first(tmp_path: Path) -> None:
    save_run(tmp_path, list(range(1, 13)))
    markdown = run("report", tmp_path, "--markdown").stdout.splitlines()
    assert markdown[0] == f"# Checkpoints of {tmp_path}"
    assert next(line for line in markdown if line.startswith("| 1")).startswith("| 12 |")
    text = run("report", tmp_path, "--terminal").stdout
    assert "and 2 older ones" in text


def test_earlier_report_is_replaced_and_any_other_file_stays(tmp_path: Path) -> None:
    runs, target = tmp_path / "runs", tmp_path / "page.html"
    save_run(runs, [10])
    for _ in range(2):
        assert run("report", runs, "-o", target, "-q").stdout == f"{target}\n"
    target.write_text("mine", encoding="utf-8")
    refused = run("report", runs, "-o", target)
    assert refused.exit_code == 13
    assert "exists, and is no report" in refused.stderr
    assert target.read_text(encoding="utf-8") == "mine"
    assert run("report", runs, "-o", target, "--force").exit_code == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["page.html", "runs"]


def test_report_leaves_the_directory_as_it_was(tmp_path: Path) -> None:
    save_run(tmp_path, [10, 20])
    before = tree_of(tmp_path)
    for form in (["-o", "-"], ["--json"], ["--csv"], ["--markdown"], ["--terminal"]):
        assert run("report", tmp_path, *form).exit_code == 0
    assert tree_of(tmp_path) == before


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--csv", "--json"], "one report has one form"),
        (["--csv", "--markdown"], "one report has one form"),
        (["--csv", "-o", "x.csv"], "-o is for the page"),
        (["--events", "no.jsonl"], "no such file of events"),
        (["-o", "missing/r.html"], "no such directory"),
    ],
)
def test_report_refuses_what_it_cannot_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], reason: str
) -> None:
    monkeypatch.chdir(tmp_path)
    save_run(tmp_path, [10])
    answer = run("report", tmp_path, *options)
    assert answer.exit_code in (2, 10)
    assert reason in answer.stderr


def test_report_of_no_checkpoints_and_of_no_directory(tmp_path: Path) -> None:
    document = run_with_schema("report", tmp_path)
    assert document["items"] == []
    assert run("report", tmp_path, "-o", "-").exit_code == 0
    assert run("report", tmp_path / "none").exit_code == 10


def test_many_checkpoints_are_thinned_on_the_chart_but_not_in_csv(tmp_path: Path) -> None:
    lines = []
    for step in range(3000):
        event = {
            "event": "save.durable", "at": float(step), "seconds": 0.1, "size_bytes": 1,
            "path": str(tmp_path / f"net-{step}.ckpt"), "series": "net", "step": step, "error": None,
            "error_type": None, "figures": {"blocked_s": 0.05}, "notes": [],
        }  # fmt: skip
        lines.append(json.dumps(event))
    save_run(tmp_path, [4000])
    (tmp_path / "events.jsonl").write_text("\n".join(lines), encoding="utf-8")
    page = Page(run("report", tmp_path, "-o", "-").stdout)
    assert page.tags.count("circle") <= 1501
    assert len(run("report", tmp_path, "--csv").stdout.splitlines()) == 3002


def test_results_of_verify_are_in_the_report(tmp_path: Path) -> None:
    first, _ = save_run(tmp_path, [10, 20])
    assert "verified last: no record" in run("report", tmp_path, "--terminal").stdout
    flip(first, -1)
    assert run("verify", tmp_path).exit_code == 1
    damaged, sound = run_with_schema("report", tmp_path)["items"]
    assert (damaged["state"], damaged["fate"], damaged["verified_at"]) == (
        "damaged",
        "damaged",
        None,
    )
    assert damaged["why"][0].startswith("verify found it damaged: ")
    assert (sound["state"], sound["verified_at"] is None) == ("ok", False)
    assert "verified last: no record" not in run("report", tmp_path, "--terminal").stdout


def test_metrics_of_checkpoints_that_are_gone_come_from_the_events(tmp_path: Path) -> None:
    observer = JsonLinesObserver(tmp_path / "events.jsonl")
    config = CheckpointConfig(save_checkpoint_steps=1, keep="last(1)")
    with CheckpointManager(tmp_path, config, observe=observer) as manager:
        for step, loss in ((1, 0.75), (2, math.nan), (3, 0.25)):
            manager.step_end(step, {"w": 1.0}, metrics={"loss": loss})
    items = run_json("report", tmp_path)["items"]
    assert [(one["step"], one["fate"], one["metrics"]) for one in items] == [
        (1, "gone", {"loss": 0.75}),
        (2, "gone", {"loss": None}),
        (3, "kept", {"loss": 0.25}),
    ]
    page = run("report", tmp_path, "-o", "-").stdout
    curve = re.search(r'<polyline class="curve" points="([^"]+)"', page)
    assert curve is not None
    assert len(curve[1].split()) == 2  # NaN is on no curve
    assert [page.count(f'class="{fate}"') for fate in ("kept", "gone")] == [1, 2]


def test_markdown_lists_failures_and_text_the_newest_rows(tmp_path: Path) -> None:
    first, *_ = save_run(tmp_path, list(range(10, 130, 10)))
    overwrite(first, b"short")
    markdown = run("report", tmp_path, "--markdown").stdout
    assert "\n## Failures\n\n* net-1_10.ckpt: " in markdown
    text = run("report", tmp_path, "--terminal").stdout
    assert "\nand 2 older ones\n" in text


def test_text_sums_up_what_noted_saves_cost(tmp_path: Path) -> None:
    observer = JsonLinesObserver(tmp_path / "events.jsonl")
    with CheckpointManager(tmp_path, observe=observer) as manager:
        manager.save(1, {"w": 1.0})
    assert "\n1 noted save: " in run("report", tmp_path, "--terminal").stdout


def test_page_goes_into_a_directory_and_replaces_no_link(tmp_path: Path) -> None:
    save_run(tmp_path / "run", [10])
    (tmp_path / "out").mkdir()
    page = tmp_path / "out" / "report.html"
    assert run("report", tmp_path / "run", "-o", tmp_path / "out").stdout.startswith(f"{page}  ")
    page.unlink()
    page.symlink_to(tmp_path / "elsewhere")
    assert run("report", tmp_path / "run", "-o", tmp_path / "out").exit_code == 13
    assert not (tmp_path / "elsewhere").exists()


def test_text_of_an_empty_directory_has_no_table(tmp_path: Path) -> None:
    text = run("report", tmp_path, "--terminal").stdout
    assert "0 checkpoints: none" in text
    assert "STEP" not in text


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_forecast_of_the_disk_is_spelled_out_for_ten_years(tmp_path: Path) -> None:
    save_run(tmp_path, [10, 20])  # an hour apart
    text = run("report", tmp_path, "--markdown").stdout
    assert "every 60 min the disk is full in more than 10 years, if nothing is removed" in text
    near = Space(
        kept_bytes=5,
        trash_bytes=0,
        free_bytes=500,
        save_bytes=5,
        interval_s=3600.0,
        most_bytes=None,
    )
    assert "the disk is full in 4 days, if nothing is removed" in space_sentences(near)[-1]


MARKUP = (
    "[x](http://evil.example)", "![p](http://evil.example/p.png)", "<img src=x>", "@octocat", "#1", "a!1",
    "owner/repo#12", "http://evil.example", "HTTPS://evil.example", "www.evil.example", "a@evil.example",
    "`code`", "**b**", "_b_", "a|b", "&copy;", "&lt;script&gt;", "~~x~~", "[x]: http://evil.example",
    "$1$", "GH-12", ":smile:", "- x", "1. x", "+ x", "# x", "> x", "\\", "^x^", "mailto:a@evil.example",
)  # fmt: skip


def shown_by_markdown(text: str) -> tuple[set[str], str]:
    """Return the tags of Markdown, and the visible text without spaces that have no width."""
    markdown_it = pytest.importorskip("markdown_it", reason="needs markdown-it-py")
    renderer = markdown_it.MarkdownIt("commonmark").enable(["table", "strikethrough"])
    page = Page(renderer.render(text))
    return set(page.tags), "".join(page.texts).replace("\u200b", "")


@pytest.mark.parametrize("text", MARKUP)
def test_stored_text_is_no_markup_in_markdown(text: str, tmp_path: Path) -> None:
    save_run(tmp_path, [10], metrics={10: {text: 1.0}})
    event = {
        "event": "mirror", "at": 1.0, "seconds": 0.1, "size_bytes": 1, "path": None, "series": "net", "step": 1,
        "error": text, "error_type": "OSError", "figures": {}, "notes": [],
    }  # fmt: skip
    (tmp_path / "events.jsonl").write_text(json.dumps(event))
    keep = ("--keep", f"best(1, {json.dumps(text)}, min)")
    markdown = run("report", tmp_path, "--markdown", *keep).stdout
    tags, shown = shown_by_markdown(markdown)
    assert tags <= {"h1", "h2", "ul", "li", "p", "table", "thead", "tbody", "tr", "th", "td"}
    assert f"\n{text}\n" in shown
    assert f"OSError: {text}\n" in shown
    for live in ("](", "@octocat", "#1", "!1", "http://", "www.", "a@evil", "<img", "GH-12"):
        assert live not in markdown.replace(str(tmp_path), "")


@given(st.text(max_size=60))
def test_any_text_is_shown_by_markdown_as_it_is(text: str) -> None:
    written = f"* x {markdown_text(text)} x"
    tags, shown = shown_by_markdown(written)
    assert tags <= {"ul", "li"}
    assert " ".join(shown.split()) == " ".join(
        f"x {printable(text)} x".replace("\u200b", "").split()
    )


def test_long_texts_and_very_many_rows_are_cut_in_markdown_and_said(tmp_path: Path) -> None:
    save_run(tmp_path, [10], metrics={10: {"m" * 100_000: 1.0}})
    event = {
        "event": "save.failed", "at": 1.0, "seconds": 0.1, "size_bytes": 1, "path": None, "series": "net",
        "step": 1, "error": "e" * 100_000, "error_type": "OSError", "figures": {}, "notes": [],
    }  # fmt: skip
    saved = {**event, "event": "save.durable", "error": None, "error_type": None}
    lines = [json.dumps({**event, "error": "x"})] * 2500 + [json.dumps(event)]
    lines += [json.dumps({**saved, "path": f"{tmp_path}/net-{n}.ckpt"}) for n in range(2500)]
    (tmp_path / "events.jsonl").write_text("\n".join(lines))
    markdown = run("report", tmp_path, "--markdown").stdout
    assert max(map(len, markdown.splitlines())) < 5000
    assert len(markdown.splitlines()) < 4100
    assert "the newest 2,000 of 2,501 checkpoints; --csv has all" in markdown
    assert "the newest 2,000 of 2,501 failures; --json has all" in markdown
    page = run("report", tmp_path, "-o", "-").stdout
    assert "the newest 2,000 of 2,501; --json has all" in page
    assert len(page) < 3_000_000


def test_very_many_metrics_of_one_checkpoint_displace_no_other_metric(tmp_path: Path) -> None:
    save_run(tmp_path, [10, 20, 30], metrics={n: {"loss": 1 / n, "z": 2.0} for n in (10, 20, 30)})
    many = {f"a{number}": 0.5 for number in range(50_000)}
    (path,) = save_run(tmp_path / "other", [40], metrics={40: {"loss": 0.1, **many}}, series="big")
    for file in path.parent.iterdir():
        file.rename(tmp_path / file.name)
    page = run("report", tmp_path, "-o", "-").stdout
    assert len(page) < 100_000
    assert "loss by step: " in page
    assert "and 49,982 more metrics, which --json has" in page
    result = run("report", tmp_path, "--csv")
    header = result.stdout.splitlines()[0].split(",")
    assert len(header) == 30
    assert {"metric:loss", "metric:z"} <= set(header)
    assert "and 49,982 more metrics, which --json has" in result.stderr
    for form in ("--markdown", "--terminal"):
        text = run("report", tmp_path, form).stdout
        assert "more metrics, which --json has" in text
        assert len(text) < 10_000
    assert len(run_json("report", tmp_path)["summary"]["metrics"]) == 50_002


def test_course_of_very_many_saves_is_thinned_on_the_page(tmp_path: Path) -> None:
    event = {
        "event": "save.durable", "seconds": 0.1, "size_bytes": 1, "path": None, "series": "net",
        "step": 1, "error": None, "error_type": None, "figures": {}, "notes": [],
    }  # fmt: skip
    lines = [json.dumps({**event, "at": float(number)}) for number in range(20_000)]
    save_run(tmp_path, [10])
    (tmp_path / "events.jsonl").write_text("\n".join(lines))
    assert len(run("report", tmp_path, "-o", "-").stdout) < 200_000


@pytest.mark.parametrize("kind", ["link", "pipe", "directory", "second name"])
def test_file_of_events_that_is_none_is_named_and_the_rest_is_reported(
    tmp_path: Path, kind: str
) -> None:
    runs = tmp_path / "runs"
    runs.mkdir()
    save_run(runs, [1, 2])
    event = Event(name="save.failed", at=START_S, error="the private text of another file")
    private = tmp_path / "private"
    private.write_text(json.dumps(event.to_json()) + "\n", encoding="utf-8")
    path = runs / "events.jsonl"
    if kind == "link":
        path.symlink_to(private)
    elif kind == "second name":
        path.hardlink_to(private)
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir()
    done = run("report", runs, "--terminal")
    assert done.exit_code == 3
    assert "events.jsonl" in done.stderr
    assert "private text" not in done.output
    assert "2 checkpoints" in done.stdout or "step 2" in done.stdout
    assert '"has_events": true' in run("report", runs, "--json", "--events", private).stdout
