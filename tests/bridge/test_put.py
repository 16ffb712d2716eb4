"""What is added up by position, in functions that Inductor makes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import fl_pallas as fl
from fl_pallas.bridge import put
from fl_pallas.bridge.put import by_sums, put_sum
from tests.oracle import check_gradients

aten = torch.ops.aten


def first(x: Tensor, at: Tensor, values: Tensor) -> Tensor:
    return aten.index_put(x, [at], values, True)


def both(x: Tensor, at: Tensor, values: Tensor) -> Tensor:
    """Of negative positions too."""
    return aten.index_put(x, [at, at % 3 - 3], values[..., 0], True)


def one(x: Tensor, at: Tensor, values: Tensor) -> Tensor:
    """One value for all positions."""
    return aten.index_put(x, [at], values[0, :1], True)


def second(x: Tensor, at: Tensor, values: Tensor) -> Tensor:
    return aten.index_put(x, [None, at % 3], values.mT[:1, :50], True)


def grid(x: Tensor, at: Tensor, values: Tensor) -> Tensor:
    """Rows and columns of images, of which all have the same (a table of biases that is resized)."""
    seen = values[:9, :1, None] * values[9:14, 1:2] + values[14:20, 2]
    return aten.index_put(x.reshape(9, 2, 2), [None, at[:5, None] % 2, at[:6] % 2], seen, True)


def apart(x: Tensor, at: Tensor, values: Tensor) -> Tensor:
    return aten.index_put(x[:, None], [at, None, at % 4], values[:, :1], True)


FUNCTIONS: list[Callable[[Tensor, Tensor, Tensor], Tensor]] = [first, both, one, second, grid, apart]


@pytest.mark.parametrize("most", [2**31, 10])
@pytest.mark.parametrize("fn", FUNCTIONS)
def test_the_same_sums(fn: Callable, most: int, monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    monkeypatch.setattr(put, "MOST", most)
    x, at, values = torch.randn(9, 4), torch.randint(-9, 9, (50,)), torch.randn(50, 4)
    x, at, values = (t.to(device) for t in (x, at, values))
    made = make_fx(fn, decomposition_table=by_sums({}))(x, at, values)
    calls = {n.target for n in made.graph.nodes}
    assert aten.index_put.default not in calls
    assert (torch.ops.fl_pallas.put_sum.default in calls) == (most == 10 or fn is apart)
    torch.testing.assert_close(made(x, at, values), fn(x, at, values))
    assert torch.equal(made(x, at, values), made(x, at, values))


def test_narrow_numbers_are_added_up_in_float32() -> None:
    at, values = torch.zeros(4096, dtype=torch.int64), torch.ones(4096, dtype=torch.bfloat16)
    x = torch.zeros(2, dtype=torch.bfloat16)
    made = make_fx(lambda x, i, v: aten.index_put(x, [i], v, True), decomposition_table=by_sums({}))(x, at, values)
    assert made(x, at, values).tolist() == [4096, 0]


def test_what_replaces_stays() -> None:
    at, values, x = torch.tensor([1, 0]), torch.randn(2), torch.randn(3)
    made = make_fx(lambda x, i, v: aten.index_put(x, [i], v), decomposition_table=by_sums({}))(x, at, values)
    assert [n.target for n in made.graph.nodes if n.op == "call_function"] == [aten.index_put.default]


def test_is_an_operation_of_pytorch() -> None:
    torch.library.opcheck(put_sum, (torch.zeros(3), [torch.tensor([1, 1])], torch.ones(2)))


def test_gradient_of_a_table(device: torch.device) -> None:
    """Of nine biases by distance, beside scores that no kernel takes."""

    def fn(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
        i, j = (torch.arange(n.shape[-2], device=q.device) for n in (q, k))
        return torch.sigmoid(q @ k.mT + table[(i[:, None] - j).clamp(-4, 4) + 4]) @ v

    given = [torch.randn(2, 3, n, 8, device=device).to(torch.bfloat16) for n in (1, 70, 70)]
    check_gradients(fn, fl.compile(fn), [*given, torch.randn(9, device=device).to(torch.bfloat16)])
