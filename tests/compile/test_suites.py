"""Samples of the long suites: torch's operators and modules, transformers' models, training.

The suites themselves take an hour and more: ``python -m tests.suites.operators`` and its siblings.
"""

from __future__ import annotations

import pytest
import torch

from tests.suites import (
    architectures,
    cases,
    decoders,
    isolated,
    modules,
    onnx_fuzz,
    operators,
    programs,
    training,
)

pytestmark = [pytest.mark.tvm, pytest.mark.sampled(3)]

OPERATORS = (
    "add", "cat", "cumsum", "index_select", "linalg_norm", "masked_fill", "matmul",
    "nn_functional_conv1d", "nn_functional_gelu", "log_softmax",
    "nn_functional_avg_pool1d", "sort", "std", "where",
)  # fmt: skip
FEWER = dict.fromkeys(operators.SAMPLES, operators.TOGETHER // 2) | {"float32": 16}
MODULES = ("nn_BatchNorm2d", "nn_Conv1d", "nn_GroupNorm", "nn_Linear", "nn_SmoothL1Loss")


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, shared_cache):
    monkeypatch.setenv("TORCH_PRUNER_CACHE_DIR", str(shared_cache))
    torch._dynamo.reset()


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", OPERATORS)
def test_operators_agree(name):
    (op,) = [op for op in operators.operators() if op.formatted_name == name]
    outcome = operators.check(op, operators.OPTIONS, FEWER)
    assert outcome.status in ("compiled", "eager"), outcome.reason
    assert outcome.gradients == ("agree" if outcome.differentiable else "")


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("name", MODULES)
def test_modules_agree(name, mode):
    outcome = modules.check(f"{name}-{mode}")
    assert outcome.status in ("compiled", "eager"), outcome.reason


@pytest.mark.parametrize("name", ["swin", "mixtral"])
def test_architectures_agree(name):
    pytest.importorskip("transformers")
    outcome = architectures.check(name)
    assert outcome.status == "compiled", outcome.reason


@pytest.mark.parametrize("name", ["gemma3-by-config", "llama-by-config", "qwen3-lossless"])
def test_decoders_are_one_program_a_step(name, monkeypatch):
    monkeypatch.setenv("TORCH_PRUNER_EFFORT", "none")
    pytest.importorskip("transformers")
    outcome = decoders.check(name)
    assert outcome.status == "compiled", outcome.reason


def test_training_is_compiled():
    outcome = training.check("dcgan")
    assert outcome.status == "compiled", outcome.reason


@pytest.mark.filterwarnings("ignore")
def test_damaged_onnx_models_run_or_are_refused(monkeypatch):
    monkeypatch.setattr(onnx_fuzz, "_limit_addresses", lambda: None)
    outcomes = [onnx_fuzz.check(name) for name in onnx_fuzz.names()[3::100]]
    assert [o for o in outcomes if o.status == "failed"] == []
    assert {o.status for o in outcomes} == {"ran", "refused"}


@pytest.mark.parametrize(
    "name",
    [
        "special-over_minus_zero", "integer-mul-int8", "cast-float32-uint8", "view-expand-used",
        "mutation-row-part", "index-accumulate-grad", "scalar-add-dynamic", "unbacked-cat",
    ],
)  # fmt: skip
def test_cases_agree(name):
    outcome = cases.check(name)
    assert outcome.status != "failed", outcome.reason


@pytest.mark.parametrize(
    "name",
    [
        *map(str, range(9)), *(f"sizes-{n}" for n in range(6)),
        *(f"autocast-{n}" for n in range(3)),
    ],
)  # fmt: skip
def test_programs_agree(name):
    outcome = programs.check(name)
    assert outcome.status != "failed", f"{outcome.reason}\n{programs.text_of(name)}"


def test_programs_agree_on_cards(monkeypatch, tmp_path):
    """In a process of their own, whose only device is the card."""
    monkeypatch.setenv("TORCH_PRUNER_CACHE_DIR", str(tmp_path))
    names = ["card-0", "card-1", "card-2", "emulated-0"]
    outcomes = isolated.run_all("tests.suites.programs", names)
    assert [o.name for o in outcomes] == names
    assert [o for o in outcomes if o.status == "failed"] == []
