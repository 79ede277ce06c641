"""Generation of batches: what is asked of whom, and what the table says."""

from __future__ import annotations

import argparse

import pytest
import torch

from benchmarks import generation
from benchmarks.generation_job import NETWORKS, WAYS, GenerationJob, build, generate, prompts


@pytest.mark.parametrize("network", NETWORKS)
def test_every_network_generates_as_many_tokens(network):
    pytest.importorskip("transformers")
    job = GenerationJob(network, "padded", "eager", width=32, layers=1, tokens=3)
    tokens = generate(build(job), job)
    assert tokens.shape[0] == len(WAYS["padded"].prompts)
    assert torch.equal(tokens, generate(build(job), job))


@pytest.mark.parametrize(("network", "last"), [("llama", True), ("t5", False)])
def test_prompts_are_padded_where_models_want_it(network, last):
    given = prompts(GenerationJob(network, "padded", "eager"))
    mask = given["attention_mask"]
    assert mask.sum(1).tolist() == list(WAYS["padded"].prompts)
    assert bool(mask[:, -1].all()) is last
    assert bool(mask[:, 0].all()) is not last


def test_a_line_for_each_contestant():
    row = {
        "network": "llama", "way": "padded", "contestant": "blocking", "status": "ok",
        "programs": 3, "calls_s": [2.0, 0.5, 0.5], "stalls": [4, 1], "tokens_per_s": 1024.4,
        "same_tokens": [True, True], "error": "",
    }  # fmt: skip
    others = {"contestant": "inductor", "same_tokens": [True, False]}
    broken = {"contestant": "background", "status": "timeout"}
    lines = generation.render([row, row | others, row | broken]).splitlines()[2:]
    assert [c.strip() for c in lines[0].split("|")][3:-1] == [
        "blocking", "3", "2 s", "4", "500 ms", "1", "1024", "eager's",
    ]  # fmt: skip
    assert "OTHERS" in lines[1]
    assert "timeout" in lines[2]


def test_unknown_names_are_usage_errors():
    with pytest.raises(argparse.ArgumentTypeError, match="'nobody' is none of"):
        generation._names(WAYS, "padded,nobody")
