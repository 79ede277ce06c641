"""One network, compiled and measured in a process of its own.

In: a ``Job`` as JSON on the command line. Out: a JSON object in the file named after it. A parent
starts it with ``launch``, which turns a crash, a hang or an error into a result as well; other
modules have jobs of their own that are launched and answer in the same way.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import torch

    from benchmarks.models import Inputs

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessJob:
    """What a process of its own is told: ``options`` of our backend, how many ``threads``.

    Subclasses add fields that JSON knows; what is annotated as a tuple comes back as one.
    """

    options: dict[str, Any] = field(default_factory=dict)
    threads: int | None = None

    @classmethod
    def from_json(cls, text: str) -> Self:
        given = json.loads(text)
        tuples = {f.name for f in fields(cls) if str(f.type).startswith("tuple")}
        return cls(**{k: tuple(v) if k in tuples else v for k, v in given.items()})

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    def use_threads(self) -> int:
        """Tells torch how many; how many it has then."""
        import torch

        if self.threads:
            torch.set_num_threads(self.threads)
        return torch.get_num_threads()


@dataclass(frozen=True, slots=True)
class Job(ProcessJob):
    """What to build, with which backend, and how much to measure.

    ``against`` names the backends that are timed beside it; empty: nothing is timed unless
    ``steady`` asks for the latency of the backend alone. ``preload`` are modules that count among
    the imports and not among the first call.
    """

    network: str
    precision: str = "float32"
    batch: int = 1
    layers: int | None = None
    backend: str = "pruner"
    check: bool = True
    steady: bool = False
    against: tuple[str, ...] = ()
    preload: tuple[str, ...] = ()
    rounds: int = 20
    min_seconds: float = 1.0


class Launchable(Protocol):
    """What ``launch`` hands to the module that runs it."""

    def to_json(self) -> str: ...


def compiled(
    module: torch.nn.Module, backend: str, options: Mapping[str, Any]
) -> Callable[..., object]:
    """The module itself for "eager", else ``torch.compile``; options are our backend's only."""
    import torch

    if backend == "eager":
        return module
    if backend == "pruner":
        return torch.compile(module, backend=backend, options=dict(options))
    return torch.compile(module, backend=backend)


def timed(function: Callable[[], object]) -> tuple[object, float]:
    start = time.perf_counter()
    result = function()
    return result, time.perf_counter() - start


def launch(
    job: Launchable,
    *,
    time_limit_s: float = 3600.0,
    environment: Mapping[str, str] | None = None,
    module: str = "benchmarks.job",
) -> dict[str, Any]:
    """Runs a job in a fresh interpreter; never raises for what happens inside it.

    The result has ``status`` (``ok | mismatch | error | crash | timeout``), ``error`` and
    ``process_s``, the wall time of the whole process with its imports. What a job wrote into its
    answer before it died is part of the result.
    """
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        answer = Path(folder) / "answer.json"
        command = [sys.executable, "-m", module, job.to_json(), str(answer)]
        start = time.perf_counter()
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **(environment or {})},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            with _stopped_by_signals():
                _, errors = process.communicate(timeout=time_limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            late = {"status": "timeout", "error": f"no answer in {time_limit_s:.0f} s"}
            outcome = _partial(answer) | late
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            raise
        else:
            outcome = _outcome(process.returncode, answer, errors)
        return {"error": "", **outcome, "process_s": time.perf_counter() - start}


@contextlib.contextmanager
def _stopped_by_signals() -> Iterator[None]:
    """SIGTERM ends what runs in here as Ctrl-C does. Left behind, a job would be timed by nobody,
    and disturb whatever is timed next."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def launch_cold(
    job: Launchable, *, time_limit_s: float, module: str = "benchmarks.job"
) -> dict[str, Any]:
    """``launch`` with cache directories that nobody has used."""
    with tempfile.TemporaryDirectory(prefix="cold-") as folder:
        environment = {
            "TORCHINDUCTOR_CACHE_DIR": str(Path(folder) / "inductor"),
            "TORCH_PRUNER_CACHE_DIR": str(Path(folder) / "pruner"),
        }
        return launch(job, time_limit_s=time_limit_s, environment=environment, module=module)


def _outcome(exit_status: int, answer: Path, errors: str) -> dict[str, Any]:
    if exit_status == 0 and answer.exists():
        return json.loads(answer.read_text())
    name = signal.Signals(-exit_status).name if exit_status < 0 else f"exit {exit_status}"
    last_line = (errors.strip().splitlines() or ["no message"])[-1]
    return _partial(answer) | {"status": "crash", "error": f"{name}: {last_line}"}


def _partial(answer: Path) -> dict[str, Any]:
    return json.loads(answer.read_text()) if answer.exists() else {}


def run(job: Job) -> dict[str, Any]:
    """Compiles, checks and times; imports are inside so that they can be timed."""
    start = time.perf_counter()
    import torch

    from benchmarks import models, reports, timing

    for name in job.preload:
        importlib.import_module(name)
    result: dict[str, Any] = {"status": "ok", "import_s": time.perf_counter() - start}
    job.use_threads()
    result["threads"] = torch.get_num_threads()
    module, inputs = models.load(
        job.network, models.PRECISIONS[job.precision], job.batch, job.layers
    )
    with torch.no_grad():
        function = compiled(module, job.backend, job.options)
        output, result["first_call_s"] = timed(lambda: models.call(function, inputs))
        result["tracing_s"], result["compiling_s"] = reports.dynamo_seconds()
        report = reports.last(job.backend)
        result["report"] = reports.summary(report) if report else None
        if job.check:
            result |= _check(job, module, inputs, output)
        del output
        gc.collect()
        candidates = {
            name: function if name == job.backend else compiled(module, name, {})
            for name in dict.fromkeys((*job.against, job.backend))
        }
        if job.against or job.steady:
            calls = {name: _bound(f, inputs) for name, f in candidates.items()}
            timings = timing.in_turns(calls, rounds=job.rounds, min_seconds=job.min_seconds)
            result["latency"] = {name: t.to_json() for name, t in timings.items()}
    if job.check and not result["difference"] <= result["bound"]:
        result["status"] = "mismatch"
    return result


def _bound(function: Callable[..., object], inputs: Inputs) -> Callable[[], object]:
    from benchmarks.models import call

    return lambda: call(function, inputs)


def _check(job: Job, module: torch.nn.Module, inputs: Inputs, output: object) -> dict[str, float]:
    from benchmarks import accuracy
    from benchmarks.models import call

    eager = call(module, inputs)
    if job.precision == "float32":
        exact, eager_difference = eager, 0.0
    else:
        exact = accuracy.float32_outputs(module, inputs)
        eager_difference = accuracy.difference(eager, exact)
    return {
        "difference": accuracy.difference(output, exact),
        "eager_difference": eager_difference,
        "bound": accuracy.bound(job.precision, eager_difference),
    }


def reason(error: BaseException) -> str:
    """An exception on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}".rstrip(": ")


def answer_with(run_job: Callable[[], dict[str, Any]], answer: Path) -> None:
    """Writes what a job returns, or what it raised, to the file that its parent reads."""
    try:
        result = run_job()
    except Exception as error:  # the row says so; the next network is not concerned
        traceback.print_exc()
        result = {"status": "error", "error": reason(error)}
    answer.write_text(json.dumps(result))


def main() -> None:
    job = Job.from_json(sys.argv[1])
    answer_with(lambda: run(job), Path(sys.argv[2]))


if __name__ == "__main__":
    main()
