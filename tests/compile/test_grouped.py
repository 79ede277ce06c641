"""Rows in groups, each group times a matrix of its own, as experts of a mixture have them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torch_pruner

pytestmark = pytest.mark.tvm

OPTIONS = {"effort": "none", "strict": True}
GROUPS, DEPTH, COLUMNS = 4, 32, 48


class Experts(nn.Module):
    """Products of rows that lie in order of their groups. ``own``: torch's operator, for bfloat16;
    else that of transformers."""

    def __init__(self, *, own: bool, along_k: bool = True) -> None:
        super().__init__()
        shape = (GROUPS, COLUMNS, DEPTH) if along_k else (GROUPS, DEPTH, COLUMNS)
        self.matrices = nn.Parameter(torch.randn(shape) * 0.1)
        self.own, self.along_k = own, along_k

    def forward(self, x: Tensor, groups: Tensor) -> Tensor:
        ends = torch.bincount(groups, minlength=GROUPS).cumsum(0).to(torch.int32)
        matrices = self.matrices.transpose(1, 2) if self.along_k else self.matrices
        if self.own:
            return torch.nn.functional.grouped_mm(x, matrices, offs=ends).relu()
        found: Tensor = torch.ops.transformers.grouped_mm_fallback(x, matrices, ends)
        return found.relu()


def rows(count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return torch.randn(count, DEPTH).to(dtype), torch.randint(0, GROUPS, (count,)).sort().values


@pytest.fixture(autouse=True)
def of_transformers() -> None:
    pytest.importorskip("transformers.integrations.moe")


def compiled(model: nn.Module, **how: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(model, backend="pruner", options=OPTIONS, **how)


@pytest.mark.parametrize("along_k", [True, False])
@pytest.mark.parametrize("own", [True, False], ids=["torch", "transformers"])
def test_groups_change_from_call_to_call(own: bool, along_k: bool) -> None:
    torch.manual_seed(0)
    dtype = torch.bfloat16 if own else torch.float32
    model = Experts(own=own, along_k=along_k).to(dtype)
    run = compiled(model, dynamic=False)
    with torch.no_grad():
        for _ in range(4):
            given = rows(12, dtype)
            torch.testing.assert_close(run(*given), model(*given))
        x = given[0]
        one = (x, torch.full((12,), GROUPS - 1))
        torch.testing.assert_close(run(*one), model(*one))
    report = torch_pruner.last_report()
    assert report is not None
    assert not any("grouped" in f.node for f in report.ops_fallback)


def test_the_number_of_rows_varies() -> None:
    model = Experts(own=False)
    run = compiled(model, dynamic=True)
    with torch.no_grad():
        for count in (12, 40, 7, 64):
            given = rows(count, torch.float32)
            torch.testing.assert_close(run(*given), model(*given))


def test_gradients() -> None:
    model, other = Experts(own=False), Experts(own=False)
    other.load_state_dict(model.state_dict())
    run = compiled(model, dynamic=False)
    for _ in range(2):
        x, groups = rows(20, torch.float32)
        for call in (run, other):
            call(x, groups).square().sum().backward()
    torch.testing.assert_close(model.matrices.grad, other.matrices.grad)


def test_large_groups_of_bfloat16_along_columns_stay_with_eager() -> None:
    model = Experts(own=True, along_k=False).to(torch.bfloat16)
    run = compiled(model, dynamic=False)
    given = rows(17 * GROUPS, torch.bfloat16)
    with torch.no_grad():
        torch.testing.assert_close(run(*given), model(*given))
    report = torch_pruner.last_report()
    assert report is not None
    assert any("grouped" in f.node for f in report.ops_fallback)
