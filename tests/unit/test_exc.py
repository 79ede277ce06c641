"""Exceptions: one root, facts as fields, messages that help, and survival of pickling."""

from __future__ import annotations

import copy
import inspect
import pickle
from pathlib import Path

import pytest

from torch_pruner import exc

EXAMPLES = [
    exc.PrunerError("something"),
    exc.OptionError("trails", "unknown option", known=("trials", "seed")),
    exc.CacheMiss("fused_matmul 3f2a", {"device": ("a", "b")}, "torch-pruner tune m:f"),
    exc.CorruptEntry(Path("/cache/x.json"), "digest differs"),
    exc.CacheDirectoryError("/cache", "Permission denied"),
    exc.IncompatibleBundle("kernels.tpb", "made for znver4"),
    exc.IncompatibleTVM("0.26", "0.27", "pip install x"),
    exc.UnsupportedModel("m:f", "it returns no module"),
    exc.CompileError("matmul", "undefined symbol", log="ld: oops\n"),
    exc.CompileError.no_compiler("matmul", ("gcc", "cc")),
    exc.MeasureError("no device"),
    exc.MeterError("RAPL", "Permission denied", "run as root"),
    exc.WorkerDied(41, -9),
    exc.MeasureTimeout("build of matmul", 10.0),
    exc.WrongResult("matmul", 0.5, 1e-3),
    exc.BuildFailed("matmul", "every candidate failed", log="trace"),
    exc.ResultMismatch("graph 0", 1, 0.5, 1e-3),
]
IDS = [type(e).__name__ for e in EXAMPLES]


def test_every_exception_has_an_example() -> None:
    kinds = {k for _, k in inspect.getmembers(exc, inspect.isclass) if issubclass(k, Exception)}
    assert kinds == {type(e) for e in EXAMPLES}


@pytest.mark.parametrize("error", EXAMPLES, ids=IDS)
def test_has_the_root_and_a_message(error: exc.PrunerError) -> None:
    assert isinstance(error, exc.PrunerError)
    assert str(error).splitlines()[0].strip()


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("error", EXAMPLES, ids=IDS)
def test_survives_pickling(error: exc.PrunerError, protocol: int) -> None:
    error.add_note("seen in worker 3")
    again = pickle.loads(pickle.dumps(error, protocol))
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert vars(again) == vars(error)


@pytest.mark.parametrize("error", EXAMPLES, ids=IDS)
def test_survives_copying(error: exc.PrunerError) -> None:
    assert vars(copy.copy(error)) == vars(error)


def test_option_error_names_the_nearest() -> None:
    error = exc.OptionError("TORCH_PRUNER_TRAILS", "unknown option", known=("trials", "seed"))
    assert error.nearest == "trials"
    assert isinstance(error, ValueError)
    assert "did you mean 'trials'?" in str(error)
    assert "known options: trials, seed" in str(error)


def test_option_error_of_a_known_name_proposes_no_other() -> None:
    error = exc.OptionError("trials", "expected an integer", known=("trials", "trial"))
    assert error.nearest is None
    assert "did you mean" not in str(error)


def test_cache_miss_says_which_fields_differ_and_what_to_run() -> None:
    text = str(exc.CacheMiss("matmul", {"threads": ("2", "4")}, "torch-pruner tune m:f"))
    assert "threads (2 vs 4)" in text
    assert text.endswith("torch-pruner tune m:f")
    assert "holds no entry like it" in str(exc.CacheMiss("matmul"))


def test_the_first_line_is_the_message_and_the_log_follows() -> None:
    first, *rest = str(exc.CompileError("matmul", "no symbol", log="ld: oops\n")).splitlines()
    assert first == "cannot compile matmul: no symbol"
    assert rest == ["ld: oops"]


def test_worker_died_tells_signals_from_exit_codes() -> None:
    assert "killed by signal 9" in str(exc.WorkerDied(1, -9))
    assert "exited with 3" in str(exc.WorkerDied(1, 3))
