"""The table of calls after a rest."""

from __future__ import annotations

from benchmarks import rest


def cells(text: str) -> list[list[str]]:
    return [[c.strip() for c in line.split("|")[1:-1]] for line in text.splitlines()]


def test_cells_are_medians_of_each_call():
    times = [[9e-3, 1e-3], [7e-3, 3e-3], [8e-3, 2e-3]]
    lines = cells(rest.render({"n": {"pruner": times, "eager": [[1.0, 2.0, 3.0]]}}))
    assert lines[0] == ["network", "", "call 1", "call 2", "call 3"]
    assert lines[2] == ["n", "pruner", "8 ms", "2 ms", ""]
    assert lines[3] == ["n", "eager", "1 s", "2 s", "3 s"]


def test_a_contestant_that_fails_is_named_and_the_status_says_so(monkeypatch, capsys):
    def launch(job, **_):
        if job.contestant == "eager":
            return {"status": "crash", "error": "SIGSEGV: no message"}
        return {"status": "ok", "seconds": [[1e-3] * job.calls] * job.rounds}

    monkeypatch.setattr(rest, "launch", launch)
    monkeypatch.setattr(rest, "write_json", lambda *_: None)
    assert rest.main(["--networks", "gmm_1", "--peers", "eager,pruner", "--turns", "2"]) == 1
    said = capsys.readouterr().out
    assert "gmm_1, eager: SIGSEGV" in said
    assert "| gmm_1 | pruner | 1 ms |" in said


def test_a_job_comes_back_from_json():
    job = rest.RestJob(network="gmm_1", contestant="pruner", options={"effort": "none"})
    assert rest.RestJob.from_json(job.to_json()) == job
