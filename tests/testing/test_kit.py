# SPDX-License-Identifier: Apache-2.0
"""The conformance kit: it passes a program that goes on, and finds each way not to."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from ckptmgr.testing import Cut, ForkServer, Kit, NotConforming
from ckptmgr.testing.__main__ import main
from ckptmgr.testing.child import find_program
from ckptmgr.testing.kit import differences

PROGRAM = """
import random
from ckptmgr import CheckpointConfig, CheckpointManager

def main(directory, steps):
    random.seed(0)
    state = {"drawn": []}
    with CheckpointManager(directory, CheckpointConfig(keep="last(2) | best(1, loss, min)")) as manager:
        step = manager.resume(state).step
        while step < steps and not manager.should_stop:
            for batch in manager.batches(range(4)):
                state["drawn"].append((batch, random.random()))
                step += 1
                manager.step_end(step, state, metrics={"loss": 1.0 / step})
                if step == steps or manager.should_stop:
                    break
    return state
"""


def changed(*changes: tuple[str, str]) -> str:
    text = PROGRAM
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    return text


class Kits:
    """Makes kits for texts of programs."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.made: list[Kit] = []

    def __call__(
        self,
        text: str,
        *,
        fork: bool | ForkServer = True,
        keep: int | None = None,
        stops_at_once: bool = False,
        name: str = "program.py",
    ) -> Kit:
        (self.directory / name).write_text(text)
        program = f"{self.directory}/{name}:main"
        made = Kit(program, steps_per_epoch=4, fork=fork, keep=keep, stops_at_once=stops_at_once)
        self.made.append(made)
        return self.made[-1]


@pytest.fixture
def kits(tmp_path: Path) -> Iterator[Kits]:
    """Kits that are closed in the end."""
    kits = Kits(tmp_path)
    yield kits
    for kit in kits.made:
        kit.close()


def cut(kit: Kit, name: str) -> Cut:
    (found,) = (one for one in kit.cuts if name in one.name)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["killed inside", "preempted inside", "NaN"])
def test_program_passes_in_new_processes(name: str, kits: Kits, tmp_path: Path) -> None:
    kit = kits(PROGRAM, fork=False)
    kit.check(cut(kit, name), tmp_path / "run")


def test_kits_share_a_server_which_imports_what_a_first_run_imported(
    kits: Kits, tmp_path: Path
) -> None:
    lazy = changed((SEED, f"import colorsys, sys; {SEED}"))
    with ForkServer() as server:
        for number, text in enumerate([changed(("import random", "import no_such_module")), lazy]):
            kit = kits(text, fork=server)
            if number == 0:
                with pytest.raises(NotConforming, match="cannot be imported"):
                    kit.check(cut(kit, "killed inside"), tmp_path / "refused")
            else:
                kit.check(cut(kit, "killed inside"), tmp_path / "run")
        later = changed((SEED, f"import sys; assert 'colorsys' in sys.modules; {SEED}"))
        kit = kits(later, fork=server, name="later.py")
        kit.check(cut(kit, "killed inside"), tmp_path / "later")


def test_program_that_ends_the_server_is_found(kits: Kits, tmp_path: Path) -> None:
    kit = kits(changed(("import random", "import random, os; os._exit(7)")))
    with pytest.raises(NotConforming, match=r"ended the process .* \(exit code 7\)"):
        kit.check(cut(kit, "killed inside"), tmp_path / "run")


def test_run_that_succeeds_waits_for_its_threads_and_exit_functions(
    kits: Kits, tmp_path: Path
) -> None:
    text = changed(
        ("import random", "import atexit, pathlib, random, threading"),
        (SEED, f"{SEED}; touch = lambda name: pathlib.Path({str(tmp_path)!r}, name).touch()"),
        ("    step = ", "    atexit.register(touch, 'at exit')\n        step = "),
        ("return state", "threading.Timer(0.05, touch, ['thread']).start()\n    return state"),
    )
    kit = kits(text)
    kit.check(cut(kit, "NaN"), tmp_path / "run")
    assert {"at exit", "thread"} <= {path.name for path in tmp_path.iterdir()}


def test_interpreter_of_a_kit_with_a_shared_server_is_refused() -> None:
    with ForkServer() as server, pytest.raises(ValueError, match="given to the ForkServer"):
        Kit("a.py:main", steps_per_epoch=3, fork=server, environment={"A": "1"})


@pytest.mark.slow
def test_program_that_ends_with_the_step_of_the_signal_passes_where_that_is_said(
    kits: Kits, tmp_path: Path
) -> None:
    note = "asked = []; import signal; signal.signal(signal.SIGTERM, lambda *_: asked.append(1))"
    text = changed((SEED, f"{SEED}; {note}"), ("manager.should_stop", "asked"))
    with pytest.raises(NotConforming, match="saved were only"):
        kits(text).check(cut(kits.made[-1], "preempted inside"), tmp_path / "next")
    kit = kits(text, stops_at_once=True)
    kit.check(cut(kit, "preempted inside"), tmp_path / "now")


@pytest.mark.slow
def test_program_that_ends_with_its_epoch_passes_a_kit_that_expects_it(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(changed(("while step < steps", "while step < 12")))
    program = f"{tmp_path}/program.py:main"
    for ends, outcome in ((True, nullcontext()), (False, pytest.raises(NotConforming))):
        with Kit(program, steps_per_epoch=4, fork=True, ends_with_epoch=ends) as kit, outcome:
            kit.check(cut(kit, "killed inside"), tmp_path / str(ends))


LOOP, LEAVE = " and not manager.should_stop", " or manager.should_stop"
SEED = "random.seed(0)"
DEAF = "random.seed(0); import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)"
ONCE = "assert not __import__('os').path.exists(directory)"
FAULTS = {
    "random": ("killed inside", [("manager.batches(range(4))", "range(4)")], "another state"),
    "no save": ("killed inside", [("manager.step_end", "(lambda *a, **k: 0)")], "became durable"),
    "no stop": ("preempted inside", [(LOOP, ""), (LEAVE, "")], "ended with 143"),
    "goes on": (
        "preempted inside",
        [(LOOP, ""), (LEAVE, " or manager.should_stop and False")],
        "it trained to its end",
    ),
    "raises": ("killed inside", [(SEED, "raise SystemExit(3)")], "the uncut run ended with 3"),
    "once": ("killed inside", [(SEED, ONCE)], "the resumed run ended with 1"),
    "deaf": ("interrupted", [(SEED, DEAF)], "Ctrl-C did not end the program"),
    "import": ("killed inside", [("import random", "import no_such_module")], "be imported"),
    "last step": ("NaN", [("manager.step_end(", "step < 10 and manager.step_end(")], "not saved"),
    "value": ("killed inside", [("return state", "return __import__('os').getpid()")], "became"),
}


@pytest.mark.parametrize(("name", "changes", "said"), FAULTS.values(), ids=list(FAULTS))
def test_program_that_does_not_go_on_is_found(
    name: str,
    changes: list[tuple[str, str]],
    said: str,
    kits: Kits,
    tmp_path: Path,
) -> None:
    kit = kits(changed(*changes))
    with pytest.raises(NotConforming, match=re.escape(said)):
        kit.check(cut(kit, name), tmp_path / "run")


def test_program_that_keeps_another_number_of_checkpoints_is_found(
    kits: Kits, tmp_path: Path
) -> None:
    kit = kits(PROGRAM, keep=5)
    with pytest.raises(NotConforming, match="5 checkpoints should be kept, there are"):
        kit.check(cut(kit, "killed inside"), tmp_path / "run")


def test_epoch_without_an_inside_is_refused() -> None:
    with pytest.raises(ValueError, match="steps_per_epoch must be at least 3, but got 2"):
        Kit("a.py:main", steps_per_epoch=2)


@pytest.mark.parametrize("spelling", ["program.py", "program:", "a b"])
def test_program_that_is_spelled_otherwise_is_refused(spelling: str) -> None:
    with pytest.raises(ValueError, match=r"a program is file\.py:function"):
        find_program(spelling)


def test_program_of_a_module_is_found() -> None:
    assert find_program("tests.testing.test_kit:changed") is not None


def test_differences_name_tensors_and_values() -> None:
    import numpy as np

    one = {"w": np.zeros(2), "b": np.zeros(2), "n": 1}
    assert differences(one, {**one, "b": np.ones(2)}) == ["b"]
    (text,) = differences(one, {**one, "n": 2})
    assert "became" in text


def test_page_of_the_kit_shows_its_command_and_its_cuts() -> None:
    page = Path(__file__).parents[2] / "docs" / "testing.md"
    if not page.exists():
        pytest.skip("needs the sources: the page is not installed")
    text = page.read_text()
    cuts = [cut.name for cut in Kit("any.py:main", steps_per_epoch=3).cuts]
    shown = re.findall(r"^(.*): ok \(", text, re.MULTILINE)
    assert shown == cuts[: len(shown)] != []
    rows = re.findall(r"^\| (killed|preempted|interrupted|NaN) ", text, re.MULTILINE)
    assert {name.split()[0] for name in cuts} == set(rows)
    names: dict[str, object] = {}
    for example in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(example, names)  # noqa: S102 - our own page
    assert "test_torch_loop" in names


@pytest.mark.slow
def test_command_prints_a_line_for_each_cut(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    given = [f"{tmp_path}/program.py:main", "--steps-per-epoch", "4", "--fork"]
    assert main(given) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(": ")[2][:2] for line in lines] == ["ok"] * 8


def test_command_fails_with_a_program_that_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "program.py").write_text(changed((SEED, "raise SystemExit(3)")))
    assert main([f"{tmp_path}/program.py:main", "--steps-per-epoch", "4", "--fork"]) == 1
    assert "killed inside an epoch: FAILED: " in capsys.readouterr().out
