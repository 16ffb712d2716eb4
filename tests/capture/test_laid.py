"""Results of PyTorch's attention functions lie as PyTorch's kernels lay them, inside of what is compiled."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import flex_attention as module

import fl_pallas as fl
from tests.oracle import check_gradients, run_and_check


def heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (2, -1)).transpose(1, 2)


def attended(x: Tensor, w: Tensor) -> Tensor:
    q, k, v = (heads(t) for t in (x @ w).chunk(3, -1))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def viewed(x: Tensor, w: Tensor) -> Tensor:
    """`view` takes what lies so, and nothing else."""
    return attended(x, w).view(*x.shape)


def reshaped(x: Tensor, w: Tensor) -> Tensor:
    """The same in float64, in which attention on a GPU lies otherwise."""
    return attended(x, w).reshape(*x.shape)


def viewed_flex(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return module.flex_attention(heads(q), heads(k), heads(v)).transpose(1, 2).view(*q.shape)


def step(device: torch.device) -> list[Tensor]:
    return [torch.randn(2, 40, 32, device=device), torch.randn(32, 96, device=device)]


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_view_of_heads_side_by_side(dynamic: bool, device: torch.device) -> None:
    compiled = fl.compile(viewed, fallback="error", dynamic=dynamic)
    run_and_check(reshaped, compiled, step(device))
    check_gradients(reshaped, compiled, step(device))


def test_a_view_of_flex_attentions(device: torch.device) -> None:
    x = [torch.randn(2, 40, 32, device=device) for _ in range(3)]
    found = fl.compile(viewed_flex, fallback="error")(*x)
    q, k, v = map(heads, x)
    want = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x[0].shape)
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore::fl_pallas.FallbackWarning")
def test_what_pytorch_refuses_once_it_runs(device: torch.device) -> None:
    """In its own words, whether gradients are asked for or not."""
    if device.type == "cuda":
        pytest.skip("PyTorch's attention for GPUs takes any probability")

    def dropped(q: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, q, q, dropout_p=1.5)

    for trained in (False, True):
        x = torch.randn(1, 2, 8, 16, device=device, requires_grad=trained)
        with pytest.raises(RuntimeError, match="between 0 and 1"):
            fl.compile(dropped)(x)
