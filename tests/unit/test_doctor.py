"""``torch-pruner doctor``: each thing that can be missing is named, with what to do."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

import pytest

from torch_pruner import exc, versions
from torch_pruner.cli import doctor
from torch_pruner.cli.doctor import Check, Status
from torch_pruner.config import Config
from torch_pruner.tuner.measure.meter import MeterSource

if TYPE_CHECKING:
    from pathlib import Path

TEXT, JSON = argparse.Namespace(json=False), argparse.Namespace(json=True)


def named(name: str) -> Check:
    return next(c for c in doctor.report() if c.name == name)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str | None]:
    """A table of installed distributions, to be changed by the test."""
    table: dict[str, str | None] = {
        **versions.pins(),
        "torch-pruner": "0.1.0",
        "torch": "2.13.0+cpu",
    }
    monkeypatch.setattr(versions, "installed_version", table.get)
    monkeypatch.setattr(doctor, "_required", lambda _: "<2.16,>=2.11")
    return table


def test_a_complete_machine_passes(
    installed: dict[str, str | None], capsys: pytest.CaptureFixture[str]
) -> None:
    assert doctor.run(TEXT) == 0
    assert "apache-tvm-ffi" in capsys.readouterr().out


def test_json_is_all_there_is_on_standard_output(
    installed: dict[str, str | None], capsys: pytest.CaptureFixture[str]
) -> None:
    assert doctor.run(JSON) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {"name", "status", "found", "fix"} == set(rows[0])
    assert {r["status"] for r in rows} <= {"ok", "note"}


def test_what_objectives_measure_with(
    installed: dict[str, str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    for argument, status in (("steady", Status.OK), ("absent", Status.NOTE)):
        source = MeterSource("tests.fakes:FakeMeter", argument)
        monkeypatch.setattr(doctor, "RAPL", source)
        found = named("energy meter")
        assert found.status is status
    assert "nobody has made one" in found.found
    assert found.fix == "wait"


@pytest.mark.parametrize("found", [None, "0.1.15.post2"])
def test_a_wrong_ffi_names_the_exact_command(
    installed: dict[str, str | None], capsys: pytest.CaptureFixture[str], found: str | None
) -> None:
    installed["apache-tvm-ffi"] = found
    assert doctor.run(TEXT) == 1
    wanted = versions.pins()
    command = (
        f'pip install "apache-tvm=={wanted["apache-tvm"]}"'
        f' "apache-tvm-ffi=={wanted["apache-tvm-ffi"]}"'
    )
    assert command in capsys.readouterr().out
    with pytest.raises(exc.IncompatibleTVM) as caught:
        versions.check_tvm_versions()
    assert command in str(caught.value)
    assert (found or "not installed") in caught.value.found


@pytest.mark.parametrize(
    ("found", "status"),
    [
        ("2.13.0+cpu", Status.OK),
        ("2.11.0", Status.OK),
        ("2.15.1", Status.OK),
        ("2.10.1", Status.MISSING),
        ("2.16.0", Status.MISSING),
        ("2.16.0.dev20261101", Status.MISSING),
        (None, Status.MISSING),
    ],
)
def test_torch_range(installed: dict[str, str | None], found: str | None, status: Status) -> None:
    installed["torch"] = found
    assert named("torch").status is status


def test_not_installed_itself(installed: dict[str, str | None]) -> None:
    installed["torch-pruner"] = None
    assert "entry point" in named("torch-pruner").fix


def test_no_compiler(installed: dict[str, str | None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", "/nonexistent")
    assert named("c compiler").status is Status.MISSING


def test_a_compiler_that_cannot_link(tmp_path: Path) -> None:
    broken = tmp_path / "cc"
    broken.write_text("#!/bin/sh\necho 'math.h: No such file' >&2\nexit 1\n")
    broken.chmod(0o755)
    check = doctor._compiler(str(broken))
    assert check.status is Status.MISSING
    assert "math.h" in check.found


def test_a_compiler_that_cannot_run(tmp_path: Path) -> None:
    broken = tmp_path / "cc"
    broken.write_bytes(b"\x7fELF")
    broken.chmod(0o755)
    assert doctor._compiler(str(broken)).status is Status.MISSING


def test_an_unusable_cache_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("TORCH_PRUNER_CACHE_DIR", str(tmp_path / "file"))
    check = named("cache directory")
    assert check.status is Status.MISSING
    assert "TORCH_PRUNER_CACHE_DIR" in check.fix


def test_settings_that_do_not_fit_are_found_and_do_not_stop_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TORCH_PRUNER_TRIALS", "many")
    check = named("options")
    assert check.status is Status.MISSING
    assert "TORCH_PRUNER_TRIALS" in check.found


def test_unknown_settings_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_PRUNER_TRAILS", "3")
    assert named("options").status is Status.NOTE


@pytest.mark.parametrize(
    ("threads", "env", "names"),
    [
        (None, {}, {"threads"}),
        (None, {"TVM_NUM_THREADS": "4", "TVM_BIND_THREADS": "0"}, {"threads"}),
        (2, {"TVM_NUM_THREADS": "2"}, {"threads"}),
        (None, {"TVM_NUM_THREADS": "1"}, {"threads", "tvm threads"}),
        (None, {"TVM_BIND_THREADS": "1"}, {"threads", "tvm pinning"}),
    ],
)
def test_threads(threads: int | None, env: dict[str, str], names: set[str]) -> None:
    checks = doctor._threads(Config(threads=threads), env, 4)
    assert {c.name for c in checks} == names
    assert all((c.status is Status.OK) == (c.name == "threads") for c in checks)


def test_more_threads_than_cores() -> None:
    assert doctor._threads(Config(threads=8), {}, 4)[0].status is Status.NOTE


def test_optional_packages_do_not_fail(installed: dict[str, str | None]) -> None:
    installed["openvino"] = None
    check = named("openvino")
    assert check.status is Status.NOTE
    assert "torch-pruner[peers]" in check.fix


def test_pins_are_of_the_tvm_that_is_tested() -> None:
    assert set(versions.TVM_PACKAGES) <= set(versions.pins())
