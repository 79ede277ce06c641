"""Options of the backend: one frozen ``Config``, parsed and checked once at the edge.

In: ``mode`` and ``options`` of ``torch.compile`` and the environment. Out: a value that compares
and hashes. No other module reads the environment; every variable is a row of docs/env.md.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import dataclass, fields
from dataclasses import replace as dataclass_replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from torch_pruner import log
from torch_pruner import option_kinds as kinds
from torch_pruner.exc import OptionError

if TYPE_CHECKING:
    from collections.abc import Mapping

PREFIX = "TORCH_PRUNER_"
COMPILERS = ("gcc", "cc", "clang")
OBJECTIVES = ("latency", "memory", "energy")
SPINS = 7000  # looks for work before a thread sleeps: 2 to 5 ms
_logger = log.logger(__name__)


@dataclass(frozen=True, slots=True)
class Budget:
    """Bounds on tuning one graph; the first one reached ends it. ``None`` is no bound."""

    trials: int | None
    trials_per_task: int | None
    time_s: float | None


EFFORT: Mapping[str, Budget] = MappingProxyType(
    {
        "none": Budget(trials=0, trials_per_task=0, time_s=0.0),
        "quick": Budget(trials=None, trials_per_task=32, time_s=14.0),
        "full": Budget(trials=None, trials_per_task=800, time_s=3600.0),
    }
)

MODES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "default": {},
        "reduce-overhead": {"cuda_graphs": True},
        "max-autotune": {"effort": "full", "cuda_graphs": True},
        "max-autotune-no-cudagraphs": {"effort": "full", "cuda_graphs": False},
    }
)


OPTIONS: Mapping[str, kinds.Option] = MappingProxyType(
    {
        "effort": kinds.choice(*EFFORT),
        "time_budget_s": kinds.optional(kinds.seconds()),
        "trials": kinds.optional(kinds.integer(0)),
        "on_miss": kinds.choice("tune", "fallback", "error"),
        "fallback": kinds.choice("eager", "inductor", "error"),
        "library": kinds.boolean(),
        "strategy": kinds.choice("draft-verify", "metaschedule", "random"),
        "cost_model": kinds.choice("pacm", "moa", "offline", "xgb", "analytic", "random"),
        "executor": kinds.choice("local", "rpc"),
        "tracker": kinds.optional(
            kinds.pattern(r"[^:/\s]+:\d{1,5}/[^/\s]+", "'host:port/device_key'")
        ),
        "target": kinds.target(),
        "threads": kinds.optional(kinds.integer(1)),
        "cache_dir": kinds.optional(kinds.path()),
        "seed": kinds.integer(0),
        "check": kinds.choice("first-call", "off"),
        "compile": kinds.choice("blocking", "background"),
        "fast_math": kinds.boolean(),
        "weights": kinds.choice("checked", "live", "frozen"),
        "weight_bits": kinds.optional(kinds.number_of(8, 4)),
        "int8_weights": kinds.boolean(),
        "narrow_weights": kinds.boolean(),
        "objective": kinds.choice(*OBJECTIVES),
        "strict": kinds.boolean(),
        "debug_dir": kinds.optional(kinds.path()),
        "progress": kinds.or_auto(kinds.boolean()),
        "cuda_graphs": kinds.boolean(),
        "max_sizes": kinds.integer(0),
    }
)
# Settings of the environment alone: they concern the process and not one compiled model.
ENV_ONLY: Mapping[str, kinds.Option] = MappingProxyType(
    {
        "cache_max_bytes": kinds.integer(1),
        "log": kinds.optional(kinds.choice(*log.LEVELS)),
    }
)
ALIASES: Mapping[str, str] = MappingProxyType({"debug": "debug_dir"})
ENV_VARS = tuple(PREFIX + name.upper() for name in (*OPTIONS, *ENV_ONLY, *ALIASES))


@dataclass(frozen=True, slots=True)
class Config:
    """Every setting of one compilation. Construction checks and normalises each value.

    Raises:
        OptionError: A value has a wrong type or is out of range, or two values contradict.
    """

    effort: str = "quick"
    time_budget_s: float | None = None
    trials: int | None = None
    on_miss: str = "tune"
    fallback: str = "eager"
    library: bool = True
    strategy: str = "draft-verify"
    cost_model: str = "moa"
    executor: str = "local"
    tracker: str | None = None
    target: str = "auto"
    threads: int | None = None
    cache_dir: str | None = None
    seed: int = 0
    check: str = "first-call"
    compile: str = "blocking"
    fast_math: bool = False
    weights: str = "checked"
    weight_bits: int | None = None
    int8_weights: bool = False
    narrow_weights: bool = True
    objective: str = "latency"
    strict: bool = False
    debug_dir: str | None = None
    progress: bool | Literal["auto"] = "auto"
    cuda_graphs: bool = False
    max_sizes: int = 32
    cache_max_bytes: int = 10 << 30
    log: str | None = None

    def __post_init__(self) -> None:
        for name, option in (*OPTIONS.items(), *ENV_ONLY.items()):
            value = getattr(self, name)
            try:
                object.__setattr__(self, name, option.parse(value))
            except (TypeError, ValueError) as err:
                problem = f"expected {err}, not {value!r}"
                raise OptionError(name, problem, known=tuple(OPTIONS)) from None
        if self.executor == "rpc" and self.tracker is None:
            problem = "executor='rpc' needs it: 'host:port/device_key' of a TVM RPC tracker"
            raise OptionError("tracker", problem)
        if self.int8_weights and self.weight_bits == 4:
            problem = "4 contradicts int8_weights=True, which is weight_bits=8"
            raise OptionError("weight_bits", problem)
        if self.rounded_bits is not None and self.weights == "live":
            given = "int8_weights=True" if self.int8_weights else f"weight_bits={self.weight_bits}"
            problem = f"'live' keeps nothing of weights, {given} keeps them rounded"
            raise OptionError("weights", problem)

    @staticmethod
    def from_options(
        mode: str | None = None,
        options: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> Config:
        """Settings of ``options``, else of ``mode``, else of ``env`` (the process's by default).

        Raises:
            OptionError: A name is unknown or a value does not fit; the message says which would.
        """
        if mode is not None and mode not in MODES:
            raise OptionError(str(mode), "unknown mode", known=tuple(MODES), noun="mode")
        for name in options or {}:
            if name not in OPTIONS:
                raise OptionError(str(name), "unknown option", known=tuple(OPTIONS))
        given = _from_env(os.environ if env is None else env)
        for name, other in (("weight_bits", "int8_weights"), ("int8_weights", "weight_bits")):
            if name in (options or {}):  # what is given in code wins, in whichever words
                given.pop(other, None)
        return Config(**{**given, **MODES[mode or "default"], **(options or {})})

    def replace(self, **changes: Any) -> Config:
        """A copy with some settings changed, checked like the original."""
        known = {f.name for f in fields(self)}
        for name in changes:
            if name not in known:
                raise OptionError(name, "unknown option", known=tuple(OPTIONS))
        return dataclass_replace(self, **changes)

    @property
    def budget(self) -> Budget:
        """The effort's bounds, with ``trials`` and ``time_budget_s`` in their place where given.

        Explicit ``trials`` are the graph's to spread: they lift the effort's bound for each task.
        Effort ``none`` measures nothing, whatever the other two say.
        """
        preset = EFFORT[self.effort]
        if self.effort == "none":
            return preset
        return Budget(
            trials=self.trials,
            trials_per_task=preset.trials_per_task if self.trials is None else self.trials,
            time_s=preset.time_s if self.time_budget_s is None else self.time_budget_s,
        )

    @property
    def rounded_bits(self) -> int | None:
        """Bits to which weights are rounded, by ``weight_bits`` or by ``int8_weights``."""
        return 8 if self.int8_weights else self.weight_bits

    @property
    def cache_root(self) -> Path:
        """Where kernels are kept: ``cache_dir``, else the platform's user cache directory."""
        if self.cache_dir is not None:
            return Path(self.cache_dir)
        from platformdirs import user_cache_path

        try:
            path = user_cache_path("torch_pruner", appauthor=False)
        except RuntimeError:  # what new versions of platformdirs raise where old ones return "~/…"
            path = Path()
        if path.is_absolute():
            return path
        # No home directory: a user id that the system does not know (containers).
        return Path(tempfile.gettempdir()) / f"torch_pruner-{os.geteuid()}"

    def key_fields(self) -> dict[str, bool]:
        """The settings that change generated code, as fields for a cache key.

        ``objective`` is none of them: what was measured of a schedule is true whoever asks, and
        entries have what every objective chooses by (``compiler.objectives``).
        """
        return {"fast_math": self.fast_math, "library": self.library}


def environment() -> dict[str, str]:
    """A copy of the process's environment, for child processes and for ``torch-pruner doctor``."""
    return dict(os.environ)


def set_thread_defaults(threads: int) -> int:
    """Tell TVM's thread pools, one per calling thread, how to start; the user's setting wins.
    Returns how many threads a pool has, 0 where the user's setting is no number.

    A pool never grows, so it starts with a thread for every CPU, of which kernels use as many as
    they are configured for; the others sleep. A thread that waits for the next call does so for
    some milliseconds, which covers what is between two tokens, and not for the 200 that TVM would:
    for as long it takes a core from eager, and from whatever else the process does.
    """
    os.environ.setdefault("TVM_NUM_THREADS", str(max(threads, os.cpu_count() or 1)))
    os.environ.setdefault("TVM_BIND_THREADS", "0")
    os.environ.setdefault("TVM_THREAD_POOL_SPIN_COUNT", str(SPINS))
    most = os.environ["TVM_NUM_THREADS"]
    return int(most) if most.isdecimal() else 0


def use_one_thread() -> None:
    """Let kernels run on the thread that calls them, whatever was set before."""
    os.environ["TVM_NUM_THREADS"] = "1"


def c_compiler() -> str | None:
    """The program that links kernels: ``CC`` where set, else the first of ``COMPILERS`` found."""
    named = os.environ.get("CC")
    names = (named,) if named else COMPILERS
    return next((found for name in names if (found := shutil.which(name))), None)


def _from_env(env: Mapping[str, str]) -> dict[str, Any]:
    """The settings that environment variables give. Empty ones count as unset."""
    known = {**OPTIONS, **ENV_ONLY}
    found: dict[str, Any] = {}
    for variable in sorted(env):
        text = env[variable].strip()
        if not variable.startswith(PREFIX) or not text:
            continue
        name = variable.removeprefix(PREFIX).lower()
        name = ALIASES.get(name, name)
        if name not in known:
            message = "ignoring unknown environment variable %s; known ones: %s"
            log.warn_once(_logger, variable, message, variable, ", ".join(ENV_VARS))
            continue
        try:
            found[name] = known[name].read(text)
        except (TypeError, ValueError) as err:
            raise OptionError(variable, f"expected {err}, not {text!r}", known=ENV_VARS) from None
    return found
