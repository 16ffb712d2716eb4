"""Views by strides as views that say what they read."""

from __future__ import annotations

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

import fl_pallas as fl
from fl_pallas.capture.aten import _as_strided
from tests.oracle import check_gradients, run_and_check
from tests.unrun import explain

sizes = st.lists(st.integers(1, 4), max_size=4)


@settings(max_examples=200, deadline=None)
@given(sizes, sizes, st.data(), st.sampled_from([0, 7]), st.none() | st.integers(0, 12))
def test_is_the_same_view(shape: list[int], size: list[int], data: st.DataObject, skipped: int, at: int | None) -> None:
    stride = data.draw(st.lists(st.integers(0, 7), min_size=len(size), max_size=len(size)))
    x = torch.arange(300)[skipped : skipped + torch.Size(shape).numel()].view(shape)
    try:
        there = x.as_strided(size, stride, at)
    except RuntimeError:  # beyond all memory
        assume(False)
    found = _as_strided(x, size, stride, at)
    torch.testing.assert_close(found, there)
    assert found.data_ptr() == there.data_ptr()


def chunks(x: Tensor, w: int) -> Tensor:
    """Longformer's: chunks of 2 · w tokens, each half in the next one too."""
    b, n, d = x.shape
    return x.as_strided((b, n // w - 1, 2 * w, d), (n * d, w * d, d, 1))


def chunked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (chunks(q, 8) @ chunks(k, 8).mT / 4).softmax(-1) @ chunks(v, 8)


def test_chunks_are_fused(device: torch.device) -> None:
    inputs = [torch.randn(2, 48, 16, device=device) for _ in range(3)]
    (graph,) = explain(chunked, *inputs).graphs
    assert len(graph.kernels) == 1 and not graph.fallbacks
    assert not any("as_strided" in name for name, _ in graph.left)
    run_and_check(chunked, fl.compile(chunked), inputs)
    check_gradients(chunked, fl.compile(chunked), inputs)


def test_writes_through_such_a_view(device: torch.device) -> None:
    """A band of a matrix of zeros, as dynamic convolutions have it."""

    def banded(w: Tensor, v: Tensor) -> Tensor:
        b, n, width = w.shape
        p = w.new_zeros(b, n, n + width - 1)
        p.as_strided((b, n, width), (n * (n + width - 1), n + width, 1)).copy_(w.softmax(-1))
        return p.narrow(2, width // 2, n) @ v

    inputs = [torch.randn(2, 20, 5, device=device), torch.randn(2, 20, 8, device=device)]
    run_and_check(banded, fl.compile(banded), inputs)
    check_gradients(banded, fl.compile(banded), inputs)
