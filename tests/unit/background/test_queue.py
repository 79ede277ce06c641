"""The queue of what is compiled in the background: order, errors, forks, ends. No compiler."""

from __future__ import annotations

import gc
import os
import threading
import time

import pytest

from torch_pruner.background.compile_process import CompileProcess
from torch_pruner.background.queue import Job, JobQueue
from torch_pruner.background.request import Answer, CompileRequest
from torch_pruner.compiler import elsewhere
from torch_pruner.compiler.choice import Choice
from torch_pruner.config import Config
from torch_pruner.exc import CompileError, WorkerDied
from torch_pruner.graph.ir import GraphBuilder
from torch_pruner.task import Candidate


def relu(rows=4):
    b = GraphBuilder()
    return b.finish([b.append("relu", [b.input(0, (rows, 8), "float32")], (rows, 8), "float32")])


class Process:
    """Answers at once, or raises what it is given."""

    def __init__(self, *outcomes):
        self.outcomes, self.asked, self.rested, self.closed = list(outcomes), [], 0, False

    def compile(self, request):
        self.asked.append(request)
        outcome = self.outcomes.pop(0) if self.outcomes else Answer({}, {})
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def rest(self):
        self.rested += 1

    def close(self):
        self.closed = True


class Steps(Job):
    def __init__(self, name, log, steps=1, work=lambda: None):
        self.name, self.log, self.left, self.work, self.errors = name, log, steps, work, []

    def step(self):
        self.left -= 1
        self.log.append(self.name)
        self.work()
        return self.left > 0

    def failed(self, error):
        self.errors.append(error)


@pytest.fixture
def queue():
    made = JobQueue(Process)
    yield made
    made.close()


def test_first_steps_come_first(queue):
    log, gate = [], threading.Event()
    jobs = [Steps("slow", log, 1, gate.wait), Steps("a", log, 3), Steps("b", log, 2)]
    for job in jobs:
        queue.submit(job)
    assert not queue.wait(0.05)
    gate.set()
    assert queue.wait(10)
    assert log == ["slow", "a", "b", "a", "b", "a"]


def test_what_nobody_can_call_is_not_compiled(queue):
    log, gate = [], threading.Event()
    first, gone = Steps("first", log, 1, gate.wait), Steps("gone", log)
    queue.submit(first)
    queue.submit(gone)
    del gone
    gc.collect()
    gate.set()
    assert queue.wait(10)
    assert log == ["first"]


def test_an_error_ends_its_job_and_no_other(queue):
    def fails():
        raise CompileError("it", "no")

    log = []
    bad, good = Steps("bad", log, 2, fails), Steps("good", log)
    queue.submit(bad)
    queue.submit(good)
    assert queue.wait(10)
    assert log == ["bad", "good"]
    assert [type(e) for e in bad.errors] == [CompileError]


def test_who_waits_hears_of_errors_that_are_to_be_heard_of_once(queue):
    def fails():
        job.error = ValueError("wrong")
        raise job.error

    job = Steps("bad", [], 1, fails)
    queue.submit(job)
    with pytest.raises(ValueError, match="wrong"):
        queue.wait(10)
    assert queue.wait(10)


def test_an_error_in_hearing_of_an_error_ends_nothing(queue):
    class Worse(Steps):
        def failed(self, error):
            raise RuntimeError("worse")

    def fails():
        raise ValueError("bad")

    bad, good = Worse("bad", [], 1, fails), Steps("good", [])
    queue.submit(bad)
    queue.submit(good)
    assert queue.wait(10)
    assert good.log == ["good"]


def test_graphs_are_compiled_by_the_process_for_a_step_and_for_nobody_else():
    choice = Choice(Candidate("rows", (("vl", 16),)), "untuned")
    process = Process(Answer({"w": choice}, {"build": 1.0}))
    queue, found = JobQueue(lambda: process), []

    def work():
        compiles = elsewhere.current()
        found.append(compiles(Config(), relu(), [(0, 1)], [(0, 1)]).choices)

    job = Steps("a", [], 1, work)
    queue.submit(job)
    assert queue.wait(10)
    queue.close()
    assert found == [{"w": choice}]
    assert process.asked[0].graph == relu()
    assert process.closed
    assert elsewhere.current() is None


def test_a_closed_queue_does_nothing_more(queue):
    gate, log = threading.Event(), []
    first, second = Steps("first", log, 1, gate.wait), Steps("second", log)
    queue.submit(first)
    queue.submit(second)
    while not log:
        time.sleep(0.001)
    closing = threading.Thread(target=queue.close)
    closing.start()
    gate.set()
    closing.join(10)
    assert not closing.is_alive()
    assert log == ["first"]
    queue.submit(Steps("late", log))
    assert queue.wait(1)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_child_begins_anew(queue, monkeypatch):
    monkeypatch.setattr("torch_pruner.background.queue.HOLD_S", 0.05)  # the step is a long one
    gate, log = threading.Event(), []
    busy, waiting = Steps("busy", log, 1, gate.wait), Steps("waiting", log)
    queue.submit(busy)
    queue.submit(waiting)
    while not log:
        time.sleep(0.001)
    pid = os.fork()
    if not pid:
        try:
            busy.work = lambda: None
            queue.poke()
            os._exit(0 if queue.wait(10) and log == ["busy", "busy", "waiting"] else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    gate.set()
    assert queue.wait(10)
    assert log == ["busy", "waiting"]


def test_requests_and_answers_survive_their_messages():
    request = CompileRequest(Config(effort="full", threads=3), relu(), ((1, 0),), ((0, 1),))
    assert CompileRequest.from_message(request.to_message()) == request
    choices = {
        "a": Choice(Candidate("rows", (("vl", 16),)), "tuned", 1e-6, 2e-6, 8, "quick"),
        "b": Choice(Candidate("metaschedule", trace="[[],[]]"), "untuned"),
    }
    answer = Answer(choices, {"build": 1.0})
    assert Answer.from_message(answer.to_message()) == answer


@pytest.mark.parametrize(
    "message",
    [
        {},
        {"choices": {"a": {}}, "seconds": {}},
        {"choices": {"a": 1}, "seconds": {}},
        {"choices": {}, "seconds": {"build": "long"}},
        {"choices": 3, "seconds": 4},
    ],
)
def test_what_is_no_answer_is_refused(message):
    with pytest.raises((KeyError, TypeError, ValueError, AttributeError)):
        Answer.from_message(message)


SERVICES = "tests.unit.background.services:"


def test_a_process_that_dies_is_started_again_once():
    process = CompileProcess(SERVICES + "dies_once")
    request = CompileRequest(Config(), relu(), ((0, 1),), ((0, 1),))
    process.compile(request)
    process.rest()
    process.close()


def test_a_process_that_always_dies_is_an_error():
    process = CompileProcess(SERVICES + "dies")
    with pytest.raises(WorkerDied):
        process.compile(CompileRequest(Config(), relu(), ((0, 1),), ((0, 1),)))
    process.close()
    with pytest.raises(WorkerDied):
        process.compile(CompileRequest(Config(), relu(), ((0, 1),), ((0, 1),)))


@pytest.mark.parametrize("name", ["refuses", "babbles"])
def test_what_a_process_says_is_wrong_is_raised(name):
    process = CompileProcess(SERVICES + name)
    with pytest.raises(CompileError, match=r"no room|an answer that is none"):
        process.compile(CompileRequest(Config(), relu(), ((0, 1),), ((0, 1),)))
    process.close()


def test_closing_ends_who_waits_for_an_answer():
    process, errors = CompileProcess(SERVICES + "hangs"), []

    def ask():
        try:
            process.compile(CompileRequest(Config(), relu(), ((0, 1),), ((0, 1),)))
        except WorkerDied as err:
            errors.append(err)

    thread = threading.Thread(target=ask)
    thread.start()
    time.sleep(0.5)
    process.close()
    thread.join(10)
    assert not thread.is_alive()
    assert len(errors) == 1
