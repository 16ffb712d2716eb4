"""Which operands a GPU kernel is given copies of, and how those lie."""

import torch
from torch import Tensor

import fl_pallas as fl
from fl_pallas.bridge.layout import Readable


def test_keys_stored_across_are_copied_along_the_head_dimension():
    def attention(q: Tensor, k_across: Tensor, v: Tensor) -> Tensor:
        return (q @ k_across).softmax(-1) @ v

    q, v = (torch.randn(2, 64, 16, dtype=torch.bfloat16) for _ in range(2))
    k = torch.randn(2, 16, 64, dtype=torch.bfloat16)
    schedule = fl.explain(attention, q, k, v).graphs[0].schedule
    assert schedule is not None
    readable = Readable(schedule.kernels[0][0])
    given = dict(zip(schedule.program.by_name, (q, k, v)))
    read = dict(zip(readable.names, readable([given[n] for n in readable.names])))
    (copied,) = (n for n in read if read[n] is not given[n])
    assert given[copied] is k
    assert read[copied].stride() == (1024, 1, 16)
    assert torch.equal(read[copied], k)
