"""Chooses how each kernel runs: cached, tuned, by the vendor's library, or untuned as drafted."""

from __future__ import annotations

import hashlib
import importlib
import json
import math
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from torch_pruner import exc, families
from torch_pruner.cache import EFFORTS, KernelEntry, KernelStore
from torch_pruner.compiler import objectives
from torch_pruner.compiler.alike import tuned
from torch_pruner.compiler.choice import Choice
from torch_pruner.compiler.company import in_company
from torch_pruner.compiler.drafting import drafts
from torch_pruner.compiler.executors import release_later
from torch_pruner.compiler.progress import ProgressLine
from torch_pruner.compiler.remembered import history, learned
from torch_pruner.compiler.settling import settled
from torch_pruner.log import PhaseTimer, logger, warn_once
from torch_pruner.pareto import LATENCY, Finalist
from torch_pruner.report import Tuning
from torch_pruner.task import Candidate, MeasureResult, Task

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch_pruner.compiler.context import Context
    from torch_pruner.compiler.vendor import Vendor
    from torch_pruner.config import Config
    from torch_pruner.tuner.measure.base import MeasureExecutor
    from torch_pruner.tuner.task_run import TaskOutcome

log = logger(__name__)


def choose(
    tasks: Sequence[Task],
    config: Config,
    store: KernelStore,
    context: Context,
    vendor: Vendor | None,
    timer: PhaseTimer,
    tunings: list[Tuning] | None = None,
    *,
    executor: Callable[[], MeasureExecutor] | None = None,
    may_tune: bool = True,
) -> dict[str, Choice]:
    """A choice for every task, by workload; misses are tuned, drafted or refused by ``config``.

    What tuning needs is timed by ``executor``, which is asked for when it is needed. How a search
    went is added to ``tunings``. Without ``may_tune`` what would be tuned is refused.
    """
    choices = look_up(tasks, config, store, context)
    missing = [t for t in tasks if t.workload not in choices]
    _remember(tasks, choices)
    if not missing:
        return choices
    if config.on_miss == "error":
        raise miss(missing, store, context, config)
    if (
        config.on_miss == "fallback"
        or config.budget.trials_per_task == 0
        or config.budget.trials == 0
    ):
        found_before = [choice.candidate for choice in choices.values()]
        return choices | _draft(missing, config, store, context, timer, found_before)
    if not may_tune:
        raise miss(missing, store, context, config)
    with store.claim(_claim_name(missing, context)):  # whoever comes second finds the work done
        choices |= look_up(missing, config, store, context)
        missing = [t for t in missing if t.workload not in choices]
        if missing:
            found = tunings if tunings is not None else []
            assert executor is not None, "tuning needs something that times"
            others = [choice.candidate for choice in choices.values()]
            own = (missing, others, config, store, context)
            choices |= _tune(*own, vendor, timer, found, executor())
            _remember(missing, choices)
    return choices


def _remember(tasks: Sequence[Task], choices: Mapping[str, Choice]) -> None:
    """What was tuned is drafted for kernels that differ in extents alone."""
    for task in tasks:
        choice = choices.get(task.workload)
        if choice is not None and choice.effort not in ("", "none"):
            tuned.note(task, choice.candidate)


def look_up(
    tasks: Sequence[Task], config: Config, store: KernelStore, context: Context
) -> dict[str, Choice]:
    """Kernels that the cache knows well enough: tuned with at least the effort that is asked for,
    and with what the objective chooses by.

    Under ``on_miss="fallback"`` whatever was completed will do.
    """
    found: dict[str, Choice] = {}
    for task in tasks:
        entry = store.get_kernel(context.kernel_key(task.workload))
        if entry is None or not _good_enough(entry, config) or objectives.lacks(entry, config):
            continue
        choice = Choice(
            Candidate.from_json(entry.candidate), "cache", entry.latency_s, entry.baseline_s,
            entry.trials, entry.effort if _is_tuned(entry) else "none",
        )  # fmt: skip
        choice = _preferred(choice, entry.finalists, task, config)
        if usable(choice.candidate, config):
            found[task.workload] = choice
    return found


def _preferred(choice: Choice, finalists: Sequence[Finalist], task: Task, config: Config) -> Choice:
    return objectives.preferred(choice, finalists, task, config, lambda c: usable(c, config))


def _good_enough(entry: KernelEntry, config: Config) -> bool:
    wanted = "none" if config.on_miss == "fallback" else config.effort
    if not entry.effort or EFFORTS.index(entry.effort) < EFFORTS.index(wanted):
        return False
    if wanted == "none" or _is_tuned(entry):
        return True
    # Of a search that came to its end no candidate worked: to search again is in vain.
    return config.on_miss == "tune" and entry.trials > 0


def _is_tuned(entry: KernelEntry) -> bool:
    return entry.source != "untuned"


def usable(candidate: Candidate, config: Config) -> bool:
    """Whether this process may run what another one found."""
    if not families.knows(candidate.sketch):
        return False
    family = families.named(candidate.sketch)
    return family.allowed() and (family.generated or config.library)


def miss(
    tasks: Sequence[Task], store: KernelStore, context: Context, config: Config
) -> exc.CacheMiss:
    """Says that these kernels are missing, and how the nearest entry differs from the first."""
    key = context.kernel_key(tasks[0].workload)
    entry, nearest = store.get_kernel(key), store.nearest(key)
    differs = key.diff(nearest) if nearest else {}
    if entry is not None and _good_enough(entry, config) and objectives.lacks(entry, config):
        differs = {"objective": (config.objective, LATENCY.name)}
    others = [task.name for task in tasks[1:]]
    return exc.CacheMiss(tasks[0].name, differs, context.hint, others)


def _claim_name(tasks: Sequence[Task], context: Context) -> str:
    names = sorted(context.kernel_key(t.workload).digest() for t in tasks)
    return hashlib.sha256("".join(names).encode()).hexdigest()


def _draft(
    tasks: Sequence[Task],
    config: Config,
    store: KernelStore,
    context: Context,
    timer: PhaseTimer,
    others: Sequence[Candidate] = (),
) -> dict[str, Choice]:
    """Drafts of ``tasks``, in a program beside kernels that ``others`` are."""
    if config.on_miss == "fallback":
        warn_once(
            log,
            f"untuned {context.hint}",
            "%d kernels run untuned; tune them with: %s",
            len(tasks),
            context.hint,
        )
    choices = {}
    with timer.phase("draft"):
        drafted = [drafts(task) for task in tasks]
        for task, ranked in zip(tasks, in_company(tasks, drafted, others), strict=True):
            predicted_s, candidate = ranked[0]
            alike = tuned.schedule_for(task, predicted_s)
            alike = alike if alike is not None and usable(alike, config) else None
            choice = Choice(alike or candidate, "untuned")
            finalists = objectives.of_drafts(task, choice, ranked, config)
            # What runs untuned for now is noted, for ``compiler.seen`` to find.
            wanted = config.effort == "none" and config.on_miss == "tune"
            effort = "none" if wanted else ""
            if wanted or config.on_miss == "fallback":
                publish(task, choice, store, context, effort=effort, finalists=finalists)
            choices[task.workload] = _preferred(choice, finalists, task, config)
    return choices


def _tune(
    tasks: Sequence[Task],
    others: Sequence[Candidate],
    config: Config,
    store: KernelStore,
    context: Context,
    vendor: Vendor | None,
    timer: PhaseTimer,
    tunings: list[Tuning],
    executor: MeasureExecutor,
) -> dict[str, Choice]:
    from torch_pruner.tuner import make_strategy
    from torch_pruner.tuner.session import TuningSession

    keys = {t.workload: context.kernel_key(t.workload) for t in tasks}
    known = {w: history.of(store, k, lambda c: usable(c, config)) for w, k in keys.items()}
    best: dict[str, float] = {}
    trials = {w: len(results) for w, (results, _) in known.items()}
    line = ProgressLine(config.progress, len(tasks))

    def keep(task: Task, result: MeasureResult) -> None:
        store.add_records(keys[task.workload], [history.record_of(result)])
        line.update(task, result)
        trials[task.workload] += 1
        if result.latency_s < best.get(task.workload, math.inf):
            best[task.workload] = result.latency_s
            count = trials[task.workload]
            choice = Choice(result.candidate, "tuned", result.latency_s, trials=count)
            publish(task, choice, store, context, effort="")

    cost_model = learned.cost_model_for(config, context.target)
    session = TuningSession(
        tasks=tasks,
        strategy_factory=lambda task: make_strategy(config.strategy, cost_model, config.seed),
        sketches_for=families.sketches_for,
        executor=executor,
        budget=config.budget,
        on_result=keep,
        seed=config.seed,
        history={w: results for w, (results, _) in known.items()},
        seeds=_seeds(tasks, others, {w: early for w, (_, early) in known.items()}, config),
        objective=objectives.objective_of(config),
        footprint=objectives.footprint,
        timer=timer,
        spent_s=timer.elapsed_s if config.time_budget_s else 0.0,
        to_build=len(tasks) if config.time_budget_s else 0,
    )
    _import_ahead()
    try:
        outcome = session.run()
    finally:
        line.close()
        release_later()
    tunings.append(Tuning(f"{config.strategy}/{config.cost_model}", outcome.curve))
    if outcome.interrupted:  # what was measured is in the store already
        raise KeyboardInterrupt
    learned.keep(cost_model, config, context.target)
    vendor = None if config.time_budget_s and timer.elapsed_s > config.time_budget_s else vendor
    own = (config, store, context)
    return _chosen(tasks, [outcome.tasks.get(w) for w in keys], others, *own, executor, vendor)


def _chosen(
    tasks: Sequence[Task],
    found: Sequence[TaskOutcome | None],
    others: Sequence[Candidate],
    config: Config,
    store: KernelStore,
    context: Context,
    executor: MeasureExecutor,
    vendor: Vendor | None,
) -> dict[str, Choice]:
    """What comes of a search, published."""
    keys = [context.kernel_key(task.workload) for task in tasks]
    times = [history.measured(store, key, lambda c: usable(c, config)) for key in keys]
    choices = settled(tasks, found, times, others, config, executor, vendor)
    return {
        task.workload: _kept(task, choice, result, config, store, context)
        for task, choice, result in zip(tasks, choices, found, strict=True)
    }


def _seeds(
    tasks: Sequence[Task],
    others: Sequence[Candidate],
    known: Mapping[str, Sequence[Candidate]],
    config: Config,
) -> dict[str, list[Candidate]]:
    """What is to be tried early, by workload: what is known from elsewhere, the draft in a program
    beside kernels that ``others`` are, where alone another one comes first, and the draft of the
    objective."""
    found = {workload: list(seeds) for workload, seeds in known.items()}
    alone = [drafts(task) for task in tasks]
    for task, own, ranked in zip(tasks, alone, in_company(tasks, alone, others), strict=True):
        if ranked[0][1] != own[0][1]:
            found[task.workload].append(ranked[0][1])
        if config.objective == "memory":
            drafted = Choice(ranked[0][1], "untuned")
            finalists = objectives.of_drafts(task, drafted, ranked, config)
            found[task.workload].append(_preferred(drafted, finalists, task, config).candidate)
    return found


def _kept(
    task: Task,
    choice: Choice,
    found: TaskOutcome | None,
    config: Config,
    store: KernelStore,
    context: Context,
) -> Choice:
    """The choice of a search, published; what the next process will find.

    What was not measured is not tuned: it is noted, and searched for by who comes next.
    """
    ended = choice.source != "untuned" or (found is not None and found.exhausted)
    effort = config.effort if ended else ""
    finalists = found.finalists if found is not None else ()
    # The library is faster by more than a tie; where nothing worked, to search again is in vain.
    if choice.source == "library" or (ended and not finalists):
        finalists = objectives.alone(task, choice)
    stored = publish(task, choice, store, context, effort=effort, chosen=True, finalists=finalists)
    choice = replace(_as_stored(choice, stored), effort=effort)
    return _preferred(choice, stored.finalists, task, config)


def _as_stored(choice: Choice, stored: KernelEntry) -> Choice:
    """The entry that the next process will find: another may have stored a better one meanwhile."""
    candidate = Candidate.from_json(stored.candidate)
    if candidate == choice.candidate:
        return choice
    return replace(choice, candidate=candidate, latency_s=stored.latency_s)


def _import_ahead() -> None:
    """Import the code generator, and so TVM, which takes seconds, while the workers start, too.

    TVM imports ml_dtypes, which adds to tables of numpy that numpy.ma walks when it is first used:
    both are imported here, before another thread can do one during the other.
    """
    for name in ("numpy.ma", "ml_dtypes"):
        importlib.import_module(name)
    # A process that ends waits for it: one that was taken down in the middle of it was aborted.
    load = threading.Thread(
        target=importlib.import_module, args=("torch_pruner.codegen.build.program",), daemon=False
    )
    load.start()


def publish(
    task: Task,
    choice: Choice,
    store: KernelStore,
    context: Context,
    *,
    effort: str,
    chosen: bool = False,
    finalists: Sequence[Finalist] = (),
) -> KernelEntry:
    """Store a kernel's entry; the entry that is there afterwards.

    ``choice`` is what latency chooses, whatever the objective.
    """
    assert choice.source != "cache"
    entry = KernelEntry(
        key=context.kernel_key(task.workload),
        candidate=choice.candidate.to_json(),
        latency_s=choice.latency_s,
        baseline_s=choice.before_s,
        source=choice.source,
        trials=choice.trials,
        effort=effort,
        task=task.name,
        workload_text=json.dumps(task.spec.to_json(), separators=(",", ":")),
        provenance={"time": time.time()},
        finalists=tuple(finalists),
    )
    return store.put_kernel(entry, chosen=chosen)
