"""How commands end: statuses, one-line reasons, and a standard output that holds JSON alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from torch_pruner import __version__, exc, log
from torch_pruner.cli import arguments
from torch_pruner.cli.main import main

if TYPE_CHECKING:
    from collections.abc import Callable

    Run = Callable[..., tuple[int, str, str]]


def one_line(text: str) -> str:
    lines = text.splitlines()
    assert len(lines) == 1, text
    return lines[0]


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ([], "COMMAND"),
        (["frobnicate"], "invalid choice: 'frobnicate'"),
        (["tune"], "MODEL"),
        (["cache"], "SUBCOMMAND"),
        (["tune", "net.py:make", "--trials", "many"], "integer of at least 0, not 'many'"),
        (["tune", "net.py:make", "--effort", "heroic"], "'none', 'quick', 'full'"),
        (["tune", "net.py:make", "--set", "trails=3"], "did you mean 'trials'?"),
        (["tune", "net.py:make", "--set", "library"], "expected OPTION=VALUE"),
        (["tune", "net.py:make", "--set", "library=maybe"], "1 or 0"),
        (["bench", "net.py:make", "--rounds", "0"], "integer of at least 1, not '0'"),
        (["cache", "prune", "--max-bytes", "-1"], "integer of at least 1"),
        (["draw", "report.json"], "invalid choice"),
        (["tune", "net.py:make", "--executor", "rpc"], "tracker"),
    ],
)
def test_wrong_usage_is_status_2_and_one_line(run: Run, argv: list[str], says: str) -> None:
    status, out, err = run(*argv)
    assert (status, out) == (2, "")
    assert says in one_line(err)


def test_help_and_version(run: Run) -> None:
    status, out, _ = run("--help")
    assert status == 0
    commands = ("tune", "explain", "bench", "cache", "bundle", "curve", "doctor")
    assert all(name in out for name in commands)
    assert run("--version") == (0, f"torch-pruner {__version__}\n", "")


@pytest.mark.parametrize(
    "argv",
    [["--help"], ["cache", "ls"], ["cache", "stats"], ["cache", "verify"], ["tune", "--help"]],
)
def test_commands_that_need_no_torch_import_none(argv: list[str]) -> None:
    code = (
        "import sys; from torch_pruner.cli.main import main; status = main(sys.argv[1:]);"
        " print(status, [m for m in ('torch', 'tvm', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *argv], check=True, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.splitlines()[-1] == "0 []"


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (exc.CacheMiss("matmul_3x2"), 1),
        (exc.BuildFailed("matmul_3x2", "no candidate compiles", "log\nof\nlines"), 1),
        (exc.CompileError("graph0", "the linker failed"), 1),
        (exc.IncompatibleTVM("apache-tvm 0.1", "apache-tvm 0.27", "pip install ..."), 2),
        (exc.CacheDirectoryError("/nowhere", "it belongs to user 0"), 2),
        (exc.UnsupportedModel("net", "it has no graph"), 2),
    ],
)
def test_errors_of_ours_are_one_line(
    run: Run, fake_api: Any, error: exc.PrunerError, status: int
) -> None:
    fake_api.error = error
    found, out, err = run("tune", "net.py:make", "--json")
    assert (found, out) == (status, "")
    assert err.splitlines()[-1] == f"torch-pruner: {str(error).splitlines()[0]}"
    assert "Traceback" not in err


def test_an_error_of_ours_that_torch_wrapped_is_found(run: Run, fake_api: Any) -> None:
    try:
        try:
            raise exc.CacheMiss("matmul_3x2")
        except exc.CacheMiss:
            raise RuntimeError("backend='pruner' raised") from None
    except RuntimeError as wrapped:
        fake_api.error = wrapped
    status, _, err = run("tune", "net.py:make")
    assert status == 1
    assert "no tuned kernel for matmul_3x2" in err


def test_a_bug_is_not_disguised(run: Run, fake_api: Any) -> None:
    fake_api.error = ZeroDivisionError()
    with pytest.raises(ZeroDivisionError):
        run("tune", "net.py:make")


def test_the_log_level_of_the_environment_counts(
    monkeypatch: pytest.MonkeyPatch, run: Run, here: Any
) -> None:
    monkeypatch.setenv("TORCH_PRUNER_LOG", "debug")
    status, _, err = run("explain", "net.py:fails")
    assert status == 2
    assert "Traceback" in err
    log.configure(None)


def test_warnings_are_shown_once_and_without_ceremony(
    monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    monkeypatch.setenv("TORCH_PRUNER_TRAILS", "3")
    status, out, err = run("cache", "stats", "--json")
    assert (status, json.loads(out)["kernels"]) == (0, 0)
    assert one_line(err).startswith("torch-pruner: ignoring unknown environment variable")
    log.forget_warnings()
    monkeypatch.setenv("TORCH_PRUNER_LOG", "warning")
    assert run("cache", "stats")[0] == 0


def test_a_wrong_variable_is_unusable_input_but_not_for_doctor(
    monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    monkeypatch.setenv("TORCH_PRUNER_EFFORT", "heroic")
    status, out, err = run("cache", "stats")
    assert (status, out) == (2, "")
    assert "TORCH_PRUNER_EFFORT" in one_line(err)
    assert "TORCH_PRUNER_EFFORT" in run("doctor")[1]


def test_a_reader_that_left_is_no_traceback() -> None:
    code = (
        "import sys; from torch_pruner.cli import cache; from torch_pruner.cli.main import main\n"
        "cache.KernelStore.ls = lambda self: print('x' * 10**6) or []\n"
        "sys.exit(main(['cache', 'ls']))"
    )
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as out:
        done = subprocess.run(
            [sys.executable, "-c", code],
            stdout=out,
            stderr=subprocess.PIPE,
            timeout=60,
            check=False,
        )
    assert (done.returncode, done.stderr) == (1, b"")


def test_json_keeps_standard_output_clean_of_everyone_else(capfd: Any) -> None:
    with arguments.clean_stdout(True):
        print("python")
        subprocess.run([sys.executable, "-c", "print('a child')"], check=True, timeout=60)
        os.write(1, b"C code\n")
    print(json.dumps({}))
    out, err = capfd.readouterr()
    assert out == "{}\n"
    assert {"python", "a child", "C code"} <= set(err.splitlines())


def test_standard_output_may_be_an_object_of_the_host(monkeypatch: Any, capsys: Any) -> None:
    with arguments.clean_stdout(True):
        print("python")
    assert capsys.readouterr() == ("", "python\n")


def test_main_returns_and_does_not_exit() -> None:
    assert main(["--version"]) == 0
