# SPDX-License-Identifier: Apache-2.0
"""The package as built and installed: complete, light to import, and free of traces of its makers' machines."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LINKED = ("formats", "crypto")
BUILD_INPUTS = ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in", "ckptmgr", *LINKED)

in_checkout = pytest.mark.skipif(
    not (ROOT / "ckptmgr").is_dir(), reason="needs the sources beside the tests"
)
in_git = pytest.mark.skipif(
    not (ROOT / ".git").exists() or shutil.which("git") is None, reason="needs a git checkout"
)


def package_modules() -> dict[str, Path]:
    """Return the source of every module by its path in the installed package."""
    folders = {f"ckptmgr/{name}": ROOT / name for name in LINKED}
    return {
        f"ckptmgr/{source.relative_to(ROOT / 'ckptmgr')}": source
        for source in (ROOT / "ckptmgr").rglob("*.py")
        if source.relative_to(ROOT / "ckptmgr").parts[0] not in LINKED
    } | {
        f"{package}/{source.relative_to(folder)}": source
        for package, folder in folders.items()
        for source in folder.rglob("*.py")
    }


def git(*arguments: str) -> list[str]:
    """Run git in the checkout and return the NUL-terminated records it prints."""
    done = subprocess.run(["git", *arguments, "-z"], cwd=ROOT, capture_output=True, check=True)
    return done.stdout.decode().split("\0")[:-1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The names in a wheel that was built from a copy: building leaves files beside the sources."""
    pytest.importorskip("build")
    pytest.importorskip("setuptools")
    folder = tmp_path_factory.mktemp("wheel")
    for name in BUILD_INPUTS:
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=ignored)
        else:
            shutil.copy(ROOT / name, folder / name)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "."]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = (folder / "dist").glob("*.whl")
    with zipfile.ZipFile(built) as archive:
        return set(archive.namelist())


@in_checkout
def test_package_list_equals_the_folders_with_an_init() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    folders = {
        name.removesuffix("/__init__.py").replace("/", ".")
        for name in package_modules()
        if name.endswith("/__init__.py")
    }
    listed = settings["tool"]["setuptools"]["packages"]
    assert sorted(listed) == sorted(folders)


@in_checkout
def test_package_folders_with_modules_all_have_an_init() -> None:
    modules = package_modules()
    folders = {str(Path(name).parent) for name in modules}
    assert {folder for folder in folders if f"{folder}/__init__.py" not in modules} == set()


@in_checkout
@pytest.mark.parametrize("name", LINKED)
def test_link_in_the_package_leads_to_the_real_folder(name: str) -> None:
    link = ROOT / "ckptmgr" / name
    if link.is_symlink():
        assert str(link.readlink()) == f"../{name}"
        return
    # An unpacked sdist has a copy instead, which must not be a stale one.
    copies = {p.relative_to(link): p.read_bytes() for p in link.rglob("*.py")}
    real = ROOT / name
    assert copies == {p.relative_to(real): p.read_bytes() for p in real.rglob("*.py")}


@in_git
@pytest.mark.parametrize("name", LINKED)
def test_link_in_the_package_is_a_link_in_git(name: str) -> None:
    (entry,) = git("ls-files", "--stage", f"ckptmgr/{name}")
    assert entry.startswith("120000 ")


@pytest.mark.slow
@in_checkout
def test_wheel_contains_every_module(wheel: set[str]) -> None:
    assert {name for name in wheel if name.endswith(".py")} == set(package_modules())


@in_checkout
def test_wheel_contains_the_type_marker_and_the_licence(wheel: set[str]) -> None:
    assert "ckptmgr/py.typed" in wheel
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in wheel)


@in_checkout
def test_wheel_installs_one_top_level_name(wheel: set[str]) -> None:
    tops = {name.split("/")[0] for name in wheel}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"ckptmgr"}


def imported_by(statement: str, *, after: str = "") -> set[str]:
    """Return the modules that a statement adds to a fresh interpreter, which has run `after`."""
    program = (
        f"import sys\n{after}\nbefore = set(sys.modules)\n{statement}\n"
        "print(*sorted(set(sys.modules) - before), sep='\\n')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_import_of_the_package_loads_no_third_party_module() -> None:
    tops = {name.split(".")[0] for name in imported_by("import ckptmgr")}
    assert tops - sys.stdlib_module_names == {"ckptmgr"}


def test_import_of_the_package_starts_no_heavy_machinery() -> None:
    heavy = {"asyncio", "multiprocessing.pool", "http.client", "ssl", "sqlite3", "unittest", "pdb"}
    assert imported_by("import ckptmgr") & heavy == set()


# Packages that cost time to import, and that a plain save and a plain load can do without.
_RARE = (
    "_cffi_backend", "asyncio", "concurrent.futures.thread", "cryptography", "difflib", "email", "importlib.metadata",
    "jax", "ml_dtypes", "multiprocessing", "numpy.random", "safetensors", "socket",
    "subprocess", "torch", "urllib", "zstandard",
    "ckptmgr.cli", "ckptmgr.crypto.aead", "ckptmgr.crypto.ciphers", "ckptmgr.crypto.container",
    "ckptmgr.crypto.keys", "ckptmgr.crypto.mindspore", "ckptmgr.crypto.providers", "ckptmgr.crypto.secret_bytes",
    "ckptmgr.crypto.slots", "ckptmgr.engine.snapshots", "ckptmgr.engine.staging", "ckptmgr.engine.worker",
    "ckptmgr.engine.worker_client", "ckptmgr.engine.zero_stall", "ckptmgr.files.load.container",
    "ckptmgr.files.load.shard_pieces", "ckptmgr.files.save.compressed", "ckptmgr.files.save.container_stream",
    "ckptmgr.formats.strategy", "ckptmgr.integrations", "ckptmgr.maintenance", "ckptmgr.parallel.rank_commit",
    "ckptmgr.policy.text", "ckptmgr.policy.time_rules", "ckptmgr.state.slices", "ckptmgr.state.torch_values",
    "ckptmgr.store.manifest.keys", "ckptmgr.training.breakpoints", "ckptmgr.training.callback_names",
)  # fmt: skip
_FOR_LOADING = (
    "ckptmgr.files.load.bulk", "ckptmgr.files.load.open", "ckptmgr.files.load.values",
    "ckptmgr.files.load.plaintext", "ckptmgr.formats.compressed", "ckptmgr.formats.detect",
    "ckptmgr.formats.mindspore.reader", "ckptmgr.formats.safetensors_file", "ckptmgr.io.scatter", "ckptmgr.state.destinations",
    "ckptmgr.state.restore", "ckptmgr.state.unflatten", "ckptmgr.training.resume",
)  # fmt: skip
_MANAGER = "from ckptmgr import CheckpointManager"
_STEP = (
    f"{_MANAGER}, CheckpointConfig\n"
    "with CheckpointManager('run', CheckpointConfig(save_checkpoint_steps=1)) as manager:\n"
    "    manager.step_end(1, {'w': numpy.zeros(3), 'step': 1})"
)
_RESUME = (
    "with CheckpointManager('run') as manager:\n"
    "    assert manager.resume({'w': numpy.zeros(3), 'step': 1}).step == 1"
)
_FUNCTION = "from ckptmgr import save_checkpoint"
_SAVE = f"{_FUNCTION}\nsave_checkpoint({{'w': numpy.zeros(3)}}, 'one.ckpt')"
_LOAD = "from ckptmgr import load_checkpoint\nload_checkpoint('one.ckpt')"


def _of(packages: Sequence[str], modules: set[str]) -> set[str]:
    return {
        name
        for name in modules
        if any(name == one or name.startswith(f"{one}.") for one in packages)
    }


@pytest.mark.parametrize("statement", [_MANAGER, _FUNCTION, _STEP, _SAVE])
def test_plain_save_imports_nothing_for_keys_ranks_compression_or_loading(
    statement: str, tmp_path: Path
) -> None:
    found = imported_by(statement, after=f"import numpy, os; os.chdir({str(tmp_path)!r})")
    assert ("ckptmgr.files.save.saver" in found) == (statement != _MANAGER)
    assert _of((*_RARE, *_FOR_LOADING), found) == set()


def test_run_imports_no_library_that_the_name_of_the_manager_has_not(tmp_path: Path) -> None:
    before = imported_by(_MANAGER, after="import os")
    after = imported_by(_STEP, after=f"import numpy, os; os.chdir({str(tmp_path)!r})")
    late = {name.partition(".")[0] for name in after - before} - {
        "ckptmgr",
        *sys.builtin_module_names,
    }
    assert {name for name in late if not name.startswith("_")} == set()


def test_name_of_the_manager_imports_what_a_configuration_needs_and_no_run(tmp_path: Path) -> None:
    found = imported_by(_MANAGER, after=f"import numpy, os; os.chdir({str(tmp_path)!r})")
    own = _of(("ckptmgr",), found)
    assert len(own) <= 40, sorted(own)
    assert _of(("ckptmgr.engine", "ckptmgr.series", "ckptmgr.store", "ckptmgr.files"), own) == set()


@pytest.mark.parametrize("statement", [f"{_STEP}\n{_RESUME}", f"{_SAVE}\n{_LOAD}"])
def test_plain_load_imports_nothing_for_keys_ranks_or_compression(
    statement: str, tmp_path: Path
) -> None:
    found = imported_by(statement, after=f"import numpy, os; os.chdir({str(tmp_path)!r})")
    assert "ckptmgr.files.load.open" in found
    assert _of(_RARE, found) == set()


@pytest.mark.slow
@in_checkout
def test_every_module_says_what_it_is() -> None:
    modules = package_modules() | {
        str(path.relative_to(ROOT)): path for path in (ROOT / "tools").rglob("*.py")
    }
    silent = {
        name
        for name, path in modules.items()
        if not ast.get_docstring(ast.parse(path.read_bytes()))
    }
    assert silent == set()


@in_checkout
def test_every_module_starts_with_its_licence() -> None:
    line = b"# SPDX-License-Identifier: Apache-2.0\n"
    starts = {
        name: path.read_bytes().splitlines(keepends=True)
        for name, path in package_modules().items()
    }
    assert {name for name, lines in starts.items() if line not in lines[:2]} == set()


# Written in pieces, so that this file does not report itself.
TRACES = {
    "home of a superuser": rb"(?<![\w./])/roo" + rb"t/",
    "home of a user": rb"(?<![\w./])/hom" + rb"e/[a-z]",
    "build machine": rb"(?<![\w./])/(wor" + rb"k|op" + rb"t/py" + rb"pi)/",
    "virtual environment": rb"/ve" + rb"nvs/",
    "private key": rb"-----BEGIN [A-Z ]*PRIVATE " + rb"KEY-----",
    "access key": rb"\b(AKI" + rb"A[0-9A-Z]{16}|gh[po]_[0-9A-Za-z]{36})\b",
}


@in_git
@pytest.mark.parametrize("trace", TRACES)
def test_tracked_files_hold_no_trace_of_a_machine(trace: str) -> None:
    pattern = re.compile(TRACES[trace])
    names = [name for name in git("ls-files") if (ROOT / name).is_file()]
    assert {name for name in names if pattern.search((ROOT / name).read_bytes())} == set()
