"""What goes wrong in a first call: one warning, eager's result, the user's own inputs."""

import logging

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from torch_pruner.dynamo.run.checked import CheckedCall, run_eager
from torch_pruner.dynamo.run.first_call import FirstCall


def noisy(x):
    return [torch.bernoulli(torch.full_like(x, 0.5)) + x, x * 2]


def broken(args):
    torch.rand(3)  # drew before it failed
    raise IndexError("list index out of range")


def made(kind, gm, call, strict, failed):
    if kind is CheckedCall:
        return CheckedCall(gm, call, "g", strict=strict, failed=failed.append)
    return FirstCall(
        lambda args: run_eager(gm, args), call, "g", strict=strict, failed=failed.append
    )


@pytest.fixture
def gm():
    return make_fx(noisy, tracing_mode="fake")(torch.randn(4))


@pytest.mark.parametrize("kind", [CheckedCall, FirstCall])
def test_a_failure_is_one_warning_and_eagers_result(kind, gm, caplog):
    """It reached the user: the check compared results and caught nothing."""
    x, failed = torch.randn(4), []
    call = made(kind, gm, broken, False, failed)
    with caplog.at_level(logging.WARNING, "torch_pruner"):
        for seed in range(3):
            torch.manual_seed(seed)
            got = [*call([x]), torch.rand(2)]
            torch.manual_seed(seed)
            expected = [*run_eager(gm, [x]), torch.rand(2)]
            assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    assert len(failed) == 1
    (record,) = caplog.records
    assert "list index out of range" in record.getMessage()


@pytest.mark.parametrize("kind", [CheckedCall, FirstCall])
def test_strict_raises_what_went_wrong(kind, gm):
    with pytest.raises(IndexError, match="list index"):
        made(kind, gm, broken, True, [])([torch.randn(4)])


@pytest.mark.parametrize("kind", [CheckedCall, FirstCall])
def test_what_eager_raises_is_the_users_and_settles_nothing(kind):
    gm = make_fx(lambda x, i: [torch.embedding(x, i)])(torch.randn(4, 2), torch.tensor([0]))
    failed, calls = [], []

    def compiled(args):
        calls.append(args)
        return run_eager(gm, args)

    call, x = made(kind, gm, compiled, False, failed), torch.randn(4, 2)
    with pytest.raises(IndexError):
        call([x, torch.tensor([9])])
    calls.clear()
    assert torch.equal(call([x, torch.tensor([3])])[0], x[3:])
    assert len(calls) == 1
    assert not failed


def test_later_calls_are_not_watched(gm):
    calls = []

    def compiled(args):
        calls.append(args)
        return run_eager(gm, args) if len(calls) == 1 else broken(args)

    call = made(FirstCall, gm, compiled, False, [])
    call([torch.randn(4)])
    with pytest.raises(IndexError):
        call([torch.randn(4)])
