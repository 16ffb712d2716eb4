"""What TorchDynamo gives no graph of is told of, with its line, and refused where the user asks for that."""

import contextlib
import warnings

import pytest
import torch

import fl_pallas as fl


def _attend(q, k, v):
    return (q @ k.mT).softmax(-1) @ v


def _noisy(q, k, v):
    for _ in range(2):
        print(end="")
        q = _attend(q, k, v)
    return q


@contextlib.contextmanager
def _announced():
    print(end="")
    yield


def _in_context(q, k, v):
    with _announced():
        return (q @ k.mT).softmax(-1) @ v


def _in_foreign_context(q, k, v):
    q = q * 2
    with contextlib.ExitStack() as stack:
        stack.enter_context(_announced())
        return (q @ k.mT).softmax(-1) @ v


def _in_turn(q, k, v):
    for head in range(q.shape[1]):
        yield (q[:, head] @ k[:, head].mT).softmax(-1) @ v[:, head]


class _Model(torch.nn.Module):
    def forward(self, q, k, v):
        with _announced():
            return (q @ k.mT).softmax(-1) @ v


def _inputs():
    return [torch.randn(1, 2, 40, 8) for _ in range(3)]


def _told(fn, *args):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        out = fn(*args)
    return out, [w for w in caught if issubclass(w.category, fl.FallbackWarning)]


@pytest.mark.parametrize("fn", [_noisy, _in_context, _in_foreign_context, _in_turn, _Model()])
def test_told(fn):
    args = _inputs()
    out, told = _told(fl.compile(fn), *args)
    want, got = fn(*args), out
    if fn is _in_turn:
        want, got = torch.stack(list(want)), torch.stack(list(got))
    torch.testing.assert_close(got, want)
    assert len(told) == 1 and told[0].filename == __file__, [str(w.message) for w in told]
    # Its code is not looked at again: what was found then is still known.
    assert fl.explain(fn, *args).fallbacks and "runs in PyTorch" in str(fl.explain(fn, *args))
    with pytest.raises(fl.Unsupported, match=r"test_skipped\.py:\d+"):
        fl.compile(fn, fallback="error")(*args)


def test_functions_inside_are_fused():
    assert fl.explain(_noisy, *_inputs()).kernel_count == 1


def test_of_no_tensors():
    out, told = _told(fl.compile(lambda *_: 3, fallback="error"), *_inputs())
    assert out == 3 and not told
