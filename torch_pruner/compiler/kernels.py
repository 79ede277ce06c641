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
from torch_pruner.compiler.choice import Choice, finite
from torch_pruner.compiler.company import in_company
from torch_pruner.compiler.executors import release_later
from torch_pruner.compiler.progress import ProgressLine
from torch_pruner.compiler.remembered import history, learned
from torch_pruner.compiler.vendor import wins, worth_vendor
from torch_pruner.families.library import FAMILY as LIBRARY
from torch_pruner.log import PhaseTimer, logger, warn_once
from torch_pruner.pareto import LATENCY, Finalist
from torch_pruner.report import Tuning
from torch_pruner.task import Candidate, MeasureInput, MeasureResult, Task

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
            choices |= _tune(missing, config, store, context, vendor, timer, found, executor())
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


def draft(task: Task) -> Candidate:
    """The schedule of least predicted latency, nothing measured."""
    return drafts(task)[0][1]


def drafts(task: Task) -> list[tuple[float, Candidate]]:
    """The draft of every family, and its predicted latency in seconds; the least comes first."""
    found = []
    for sketch in families.sketches_for(task):
        point = sketch.default()
        predicted = float(sketch.symbols(point[None]).latency_s[0])
        decisions = tuple(sorted(sketch.named(point).items()))
        found.append((predicted, Candidate(sketch.name, decisions)))
    return sorted(found, key=lambda draft: draft[0])


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
        seeds={t.workload: _seeds(t, known[t.workload][1], config) for t in tasks},
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
    choices = {}
    for task in tasks:
        found = outcome.tasks.get(task.workload)
        choice = _settle(task, found, config, executor, vendor)
        choices[task.workload] = _kept(task, choice, found, config, store, context)
    return choices


def _seeds(task: Task, known: Sequence[Candidate], config: Config) -> Sequence[Candidate]:
    """What is to be tried early: what is known from elsewhere, and the draft of the objective."""
    if config.objective != "memory":
        return known
    ranked = drafts(task)
    drafted = Choice(ranked[0][1], "untuned")
    finalists = objectives.of_drafts(task, drafted, ranked, config)
    return [*known, _preferred(drafted, finalists, task, config).candidate]


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


def _settle(
    task: Task,
    found: TaskOutcome | None,
    config: Config,
    executor: MeasureExecutor,
    vendor: Vendor | None,
) -> Choice:
    """The best measured schedule, the vendor's kernel if that is faster, or else the draft."""
    if found is None:
        return Choice(draft(task), "untuned")
    if found.best is None:
        return Choice(found.candidate or draft(task), "untuned", trials=found.trials)
    from torch_pruner.tuner.roofline import roofline_s

    best_s = found.best.latency_s
    # Timing the vendor's kernel costs up to half a second: not where it cannot win.
    possible = worth_vendor(task) and wins(roofline_s(task), best_s, task.threads)
    if vendor is not None and config.library and possible:
        vendor_s = vendor.latency_s(task.spec)
        if vendor_s is not None and wins(vendor_s, best_s, task.threads):
            # Ours was timed at another moment, perhaps a busier one: both once more, side by side.
            again = executor.race([MeasureInput(task, found.best.candidate)])[0]
            best_s = min(best_s, again.latency_s)
            vendor_s = min(vendor_s, vendor.latency_s(task.spec) or math.inf)
            if wins(vendor_s, best_s, task.threads):
                before_s = finite(best_s)
                return Choice(Candidate(LIBRARY.name), "library", vendor_s, before_s, found.trials)
    return Choice(found.best.candidate, "tuned", best_s, finite(found.first_s), found.trials)


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
