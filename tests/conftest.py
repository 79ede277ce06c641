"""Fixtures and markers of every test: an environment of its own, and skips that say why."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zlib
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from tests import slow
from torch_pruner import config, exc, log, versions
from torch_pruner.target import CpuProbe

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator
    from pathlib import Path

_STARTED = pytest.StashKey[float]()
pytest_plugins = ("tests.compiling",)  # fixtures of whoever compiles


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="rewrite the files in tests/golden"
    )
    parser.addoption("--every", action="store_true", help="all tests, sampled and rotated too")
    parser.addoption(
        "--note-slow", action="store_true", help="write tests/slow.json anew, from this run"
    )


def _tvm_problem() -> str:
    try:
        versions.check_tvm_versions()
    except exc.IncompatibleTVM as err:
        return str(err)
    return "" if config.c_compiler() else "no C compiler to link kernels with"


def _cuda_problem() -> str:
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed"
    import torch

    return "" if torch.cuda.is_available() else "no CUDA device, or a build of torch without CUDA"


def _isa_problem(flags: tuple[str, ...]) -> str:
    absent = sorted(set(flags) - CpuProbe.read().flags)
    return f"this CPU has no {', '.join(absent)}" if absent else ""


def pytest_configure(config: pytest.Config) -> None:
    """The key that signs cache entries is one of this run; child processes have the same."""
    if hasattr(config, "workerinput"):  # of pytest-xdist: it has the run's environment
        return
    home = tempfile.mkdtemp(prefix="torch_pruner-tests-")
    os.environ["XDG_DATA_HOME"] = home
    config.add_cleanup(lambda: shutil.rmtree(home, ignore_errors=True))
    if config.getoption("--note-slow"):
        if not config.getoption("--every"):
            raise pytest.UsageError("--note-slow lists what is slow of all tests: give --every too")
        config.pluginmanager.register(slow.Notes(), "slow-tests")


def _commit(config: pytest.Config) -> bytes:
    """The commit that is tested; nothing outside of a checkout."""
    command = ["git", "-C", str(config.rootpath), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, check=False).stdout.strip()
    except OSError:
        return b""


def _leave_out(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of a test that is ``sampled(n)`` one case in n runs, the same at every run, and the first.

    Which is drawn by number: every n-th would leave out a value of a parameter of n values. Of the
    tests that are ``rotated(n)`` about one in n runs, drawn by the commit: all have their turn. So
    has an eighth, by seconds, of the tests that are slow by tests/slow.json.
    """
    seen: Counter[str] = Counter()
    turn_of = slow.turns()
    commit = _commit(config)
    every = config.getoption("--every")
    by_name = any("::" in argument for argument in config.args)  # somebody asked for this test
    kept, left = [], []
    for item in items:
        turns = item.get_closest_marker("rotated")
        if turns is not None and not every and not by_name:
            test = item.nodeid.partition("[")[0]
            if zlib.crc32(commit + test.encode()) % turns.args[0]:
                left.append(item)
                continue
        elif not every and not by_name and not slow.runs(turn_of, item.nodeid, commit):
            left.append(item)
            continue
        marker = item.get_closest_marker("sampled")
        if marker is not None and not every:
            test = item.nodeid.partition("[")[0]
            number, seen[test] = seen[test], seen[test] + 1
            if number and zlib.crc32(b"%d" % number) % marker.args[0]:
                left.append(item)
                continue
        kept.append(item)
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = kept


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what this machine cannot run; probe each kind once, and only if a test needs it."""
    if not any("[" in argument for argument in config.args):  # nobody asked for one case
        _leave_out(config, items)
    problems: dict[str, str] = {}
    probes = {"tvm": _tvm_problem, "cuda": _cuda_problem}
    for item in items:
        found = []
        for marker, probe in probes.items():
            if item.get_closest_marker(marker):
                if marker not in problems:
                    problems[marker] = probe()
                found.append(problems[marker])
        found += [_isa_problem(m.args) for m in item.iter_markers("isa")]
        if item.get_closest_marker("rpc") and importlib.util.find_spec("tornado") is None:
            found.append("executor='rpc' needs tornado: pip install \"torch-pruner[rpc]\"")
        if reason := "; ".join(p for p in found if p):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """What a test takes of the processors is a property of its reports."""
    item.stash[_STARTED] = slow.processor_seconds()
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, None, None]:
    """See ``pytest_runtest_protocol``."""
    yield
    used = slow.processor_seconds() - item.stash[_STARTED]
    item.user_properties.append((slow.PROPERTY, round(used, 1)))


@pytest.fixture(autouse=True)
def own_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No setting of the developer's reaches a test, and no kernel of a test their cache."""
    for name in [n for n in os.environ if n.startswith(config.PREFIX)]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("TORCH_PRUNER_CACHE_DIR", str(tmp_path / "pruner-cache"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "torch-cache"))
    log.forget_warnings()


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    """What one test compiled is no cached graph of the next. Does not import torch by itself."""
    yield
    if "torch._dynamo" in sys.modules:
        sys.modules["torch"]._dynamo.reset()
    log.configure(None)


@pytest.fixture
def update_golden(request: pytest.FixtureRequest) -> bool:
    """Whether to rewrite golden files instead of comparing with them."""
    return bool(request.config.getoption("--update-golden"))
