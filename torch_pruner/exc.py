"""Every exception that the package raises on purpose.

One root, ``PrunerError``. A message says what went wrong, where, and what to do next, in that
order, and the first line is enough (torch shows only that line). Exceptions carry their facts as
fields and survive pickling, since some of them cross a process. Imports nothing of ours.
"""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path


class PrunerError(Exception):
    """Root of the package's exceptions.

    Example:
        try:
            torch_pruner.tune(model, (x,))
        except exc.PrunerError as err:
            print(err)  # what, where, and what to do next
    """

    def __reduce__(self) -> tuple[Any, ...]:
        # The default calls ``type(self)(*self.args)``; args is the message, not __init__'s input.
        return _restore, (type(self), self.args, dict(self.__dict__))


def _restore(kind: type[PrunerError], args: tuple[Any, ...], fields: dict[str, Any]) -> PrunerError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(fields)
    return error


def _with_log(message: str, log: str) -> str:
    return f"{message}\n{log.rstrip()}" if log else message


class OptionError(PrunerError, ValueError):
    """An option is unknown, of a wrong type or out of range; ``nearest`` is the likeliest name.

    Example:
        try:
            torch_pruner.tune(model, (x,), {"trails": 64})
        except exc.OptionError as err:
            print(err)  # unknown option 'trails'; did you mean 'trials'?
    """

    def __init__(
        self, option: str, problem: str, *, known: Sequence[str] = (), noun: str = "option"
    ) -> None:
        self.option, self.problem, self.known = option, problem, tuple(known)
        bare = option.lower().removeprefix("torch_pruner_")
        close = [] if bare in self.known else difflib.get_close_matches(bare, self.known, n=1)
        self.nearest: str | None = close[0] if close else None
        hint = f"; did you mean {self.nearest!r}?" if close else ""
        listing = f"; known {noun}s: {', '.join(self.known)}" if self.known else ""
        super().__init__(f"{noun} {option!r} of backend 'pruner': {problem}{hint}{listing}")


class CacheMiss(PrunerError):
    """No tuned kernel for ``key``. ``nearest`` maps each differing key field to (wanted, found).

    ``missing`` names all that was found missing with it, ``key`` first.

    Example:
        try:
            torch.compile(model, backend="pruner", options={"on_miss": "error"})(x)
        except exc.CacheMiss as err:
            print(err.missing, err.nearest)
    """

    def __init__(
        self,
        key: str,
        nearest: Mapping[str, tuple[str, str]] | None = None,
        hint: str = "torch-pruner tune MODEL",
        others: Sequence[str] = (),
    ) -> None:
        self.key, self.nearest, self.hint = key, dict(nearest or {}), hint
        self.missing = (key, *others)
        if self.nearest:
            fields = ", ".join(f"{k} ({a} vs {b})" for k, (a, b) in self.nearest.items())
            reason = f"the nearest entry differs in: {fields}"
        else:
            reason = "the cache holds no entry like it"
        more = f" and {len(others)} more" if others else ""
        listing = "".join(f"\n  missing: {name}" for name in self.missing) if others else ""
        super().__init__(
            f"no tuned kernel for {key}{more}; {reason}; tune it with: {hint}{listing}"
        )

    @classmethod
    def of(cls, misses: Sequence[CacheMiss]) -> CacheMiss:
        """One for all of ``misses``, of which there is at least one; it explains the first."""
        first = misses[0]
        names = dict.fromkeys(name for miss in misses for name in miss.missing)
        others = [name for name in names if name != first.key]
        return cls(first.key, first.nearest, first.hint, others)


class CorruptEntry(PrunerError):
    """A cache file does not hold what its name or digest promises. It is never used.

    Example:
        try:
            toolchain.load(path, names)
        except exc.CorruptEntry as err:
            print(err.path, err.reason)  # the library is built anew
    """

    def __init__(self, path: str | Path, reason: str) -> None:
        self.path, self.reason = str(path), reason
        fix = "a damaged entry is tuned again; `torch-pruner cache verify` lists all of them"
        super().__init__(f"damaged cache entry {self.path}: {reason}; {fix}")


class CacheDirectoryError(PrunerError):
    """The cache directory cannot be used at all.

    Example:
        try:
            torch_pruner.load_bundle("kernels.bundle", cache_dir="/proc/none")
        except exc.CacheDirectoryError as err:
            print(err.path, err.reason)
    """

    def __init__(self, path: str | Path, reason: str, fix: str = "") -> None:
        self.path, self.reason = str(path), reason
        fix = fix or "set TORCH_PRUNER_CACHE_DIR to a directory that this user may write"
        super().__init__(f"cannot use the cache directory {self.path}: {reason}; {fix}")


class IncompatibleBundle(PrunerError):
    """A bundle was made for another device or version, or its file is damaged.

    Example:
        try:
            torch_pruner.load_bundle("kernels.bundle")
        except exc.IncompatibleBundle as err:
            print(err.path, err.reason, err.fix)
    """

    def __init__(self, path: str | Path, reason: str, fix: str = "") -> None:
        self.path, self.reason = str(path), reason
        self.fix = fix or "make one with `torch-pruner bundle create` on a machine like this"
        super().__init__(f"cannot load bundle {self.path}: {reason}; {self.fix}")


class IncompatibleTVM(PrunerError):
    """TVM is missing, or not of the one version that this package is made for.

    Example:
        try:
            versions.check_tvm_versions()
        except exc.IncompatibleTVM as err:
            print(err.found, err.needs, err.fix)
    """

    def __init__(self, found: str, needs: str, fix: str) -> None:
        self.found, self.needs, self.fix = found, needs, fix
        super().__init__(f"found {found}, but this package needs {needs}; run: {fix}")


class UnsupportedModel(PrunerError):
    """A model or input that cannot be captured, loaded or tuned.

    Example:
        try:
            torch_pruner.onnx.compile("model.onnx")(x)
        except exc.UnsupportedModel as err:
            print(err.model, err.reason)
    """

    def __init__(self, model: str, reason: str, fix: str = "") -> None:
        self.model, self.reason, self.fix = model, reason, fix
        super().__init__(f"cannot use {model}: {reason}" + (f"; {fix}" if fix else ""))


class CompileError(PrunerError):
    """Code generation, compilation or linking failed. ``log`` is the tool's output.

    Example:
        try:
            torch.compile(model, backend="pruner", options={"strict": True})(x)
        except exc.CompileError as err:
            print(err.what, err.reason, err.log)
    """

    def __init__(self, what: str, reason: str, *, fix: str = "", log: str = "") -> None:
        self.what, self.reason, self.fix, self.log = what, reason, fix, log
        message = f"cannot compile {what}: {reason}" + (f"; {fix}" if fix else "")
        super().__init__(_with_log(message, log))

    @classmethod
    def no_compiler(cls, what: str, tried: Sequence[str]) -> CompileError:
        """The error for a machine without a C compiler to link with."""
        fix = "install one (for example gcc, with its C library headers) or set CC to its path"
        return cls(what, f"no C compiler found (tried {', '.join(tried)})", fix=fix)


class MeasureError(PrunerError):
    """Measuring is not possible. A candidate that fails is a result, not this.

    Example:
        try:
            torch_pruner.tune(model, (x,))
        except exc.MeasureError as err:
            print(err)  # workers cannot be started, a tracker does not answer
    """


class MeterError(MeasureError):
    """Energy cannot be measured: there is no meter, or it cannot be read.

    Example:
        try:
            meter = RaplMeter()
        except exc.MeterError as err:
            print(err.meter, err.reason, err.fix)
    """

    def __init__(self, meter: str, reason: str, fix: str = "") -> None:
        self.meter, self.reason, self.fix = meter, reason, fix
        super().__init__(f"cannot read {meter}: {reason}" + (f"; {fix}" if fix else ""))


class WorkerDied(MeasureError):
    """A worker process ended before it answered; negative exit codes are signals.

    Example:
        try:
            process.send(message)
        except exc.WorkerDied as err:
            print(err.pid, err.exitcode)  # the executor starts another
    """

    def __init__(self, pid: int, exitcode: int | None) -> None:
        self.pid, self.exitcode = pid, exitcode
        killed = exitcode is not None and exitcode < 0
        how = f"was killed by signal {-(exitcode or 0)}" if killed else f"exited with {exitcode}"
        fix = "if it happens again, look for out-of-memory kills; `debug_dir` keeps the kernel"
        super().__init__(f"measurement worker {pid} {how} before answering; {fix}")


class MeasureTimeout(MeasureError):
    """A job did not answer in time; its worker was killed.

    Example:
        try:
            executor.measure(inputs)
        except exc.MeasureTimeout as err:
            print(err.what, err.limit_s)
    """

    def __init__(self, what: str, limit_s: float) -> None:
        self.what, self.limit_s = what, limit_s
        fix = "its worker was stopped and the next job starts a new one"
        super().__init__(f"{what} did not finish within {limit_s:g} s; {fix}")


class WrongResult(MeasureError):
    """A kernel computed something else than its reference. Its time is not a time.

    Example:
        try:
            executor.measure(inputs)
        except exc.WrongResult as err:
            print(err.what, err.max_error, err.tolerance)
    """

    def __init__(self, what: str, max_error: float, tolerance: float) -> None:
        self.what, self.max_error, self.tolerance = what, max_error, tolerance
        super().__init__(
            f"{what} differs from its reference by {max_error:.3g} (allowed {tolerance:.3g});"
            " the candidate is dropped; please report it with the files of `debug_dir`"
        )


class BuildFailed(MeasureError):
    """No candidate of a kernel could be built.

    Example:
        try:
            executor.measure(inputs)
        except exc.BuildFailed as err:
            print(err.what, err.reason, err.log)
    """

    def __init__(self, what: str, reason: str, log: str = "") -> None:
        self.what, self.reason, self.log = what, reason, log
        fix = "run `torch-pruner doctor` to check the compiler and the versions"
        super().__init__(_with_log(f"cannot build {what}: {reason}; {fix}", log))


class ResultMismatch(MeasureError):
    """A compiled graph disagrees with eager on the first real inputs.

    Example:
        try:
            torch.compile(model, backend="pruner", options={"strict": True})(x)
        except exc.ResultMismatch as err:
            print(err.graph, err.max_error, err.tolerance)
    """

    def __init__(self, graph: str, output: int, max_error: float, tolerance: float) -> None:
        self.graph, self.output = graph, output
        self.max_error, self.tolerance = max_error, tolerance
        super().__init__(
            f"output {output} of compiled graph {graph} differs from eager by {max_error:.3g}"
            f" (allowed {tolerance:.3g}); eager runs instead and the cache entry is dropped;"
            " please report it with the files of `debug_dir`"
        )
