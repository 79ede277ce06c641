"""How the long suites compare: eager decides, and double precision where eager rounds, too."""

from __future__ import annotations

import pytest
import torch

from tests.suites.isolated import compare, compare_gradients, gradients


def test_numbers_far_from_eager_s_are_wrong() -> None:
    compare(torch.tensor([1.0]), torch.tensor([1.0 + 1e-6]))
    with pytest.raises(AssertionError):
        compare(torch.tensor([1.0]), torch.tensor([1.01]))


def test_who_is_nearer_to_the_truth_is_right() -> None:
    eager, truth = torch.tensor([3e-5, 2.0]), torch.tensor([0.0, 2.0], dtype=torch.float64)
    compare(torch.tensor([0.0, 2.0]), eager, truth)
    with pytest.raises(AssertionError):
        compare(torch.tensor([-4e-5, 2.0]), eager, truth)
    with pytest.raises(AssertionError):
        compare(torch.tensor([0.0, 2.1]), eager, truth)
    with pytest.raises(AssertionError):
        compare(torch.tensor([float("nan"), 2.0]), eager, truth)


def test_another_shape_or_type_is_wrong_whatever_the_numbers() -> None:
    eager, truth = torch.zeros(2), torch.zeros(2, dtype=torch.float64)
    with pytest.raises(AssertionError):
        compare(torch.zeros(1, 2), eager, truth)
    with pytest.raises(AssertionError):
        compare(truth, eager, truth)


def test_gradients_in_double_precision_are_of_the_same_sum() -> None:
    narrow = torch.arange(3.0, requires_grad=True)
    wide = torch.arange(3.0, dtype=torch.float64, requires_grad=True)
    (a,), (b,) = gradients(narrow**2, [narrow]), gradients(wide**2, [wide])
    assert b.dtype is torch.float64
    torch.testing.assert_close(a, b.float())


def test_a_gradient_that_is_missing_has_to_be_zero() -> None:
    compare_gradients([None], [torch.zeros(2)])
    with pytest.raises(AssertionError):
        compare_gradients([None], [torch.ones(2)])
    with pytest.raises(AssertionError):
        compare_gradients([torch.zeros(2)], [torch.ones(2)], [torch.ones(2)])
