"""Every choice that tuning has for a kernel computes the same, and the same bits each time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

import fl_pallas as fl
from fl_pallas.bridge import launch
from tests.oracle import relative_error
from tests.programs import BY_NAME
from tests.wide import wide_inputs

pytestmark = pytest.mark.gpu

# Of the norm: sums in another order, of numbers that were rounded to 16 bits.
ALIKE = 1e-2
NAMES = (
    *("causal_where", "softcap", "alibi", "sliding_window", "document_causal", "sink", "qk_norm", "evoformer_row"),
    *("differential", "t5_bias", "gqa_repeat", "ipa_scores", "mean_shift"),
)
# Of each kernel so many choices are timed, and launched so often: what copies overtake is seldom read too late.
CHOICES, TIMES = 16, 4


@pytest.mark.parametrize("name", NAMES)
def test_choices_agree(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    apart: list[str] = []

    def compared(
        self: launch.DirectKernel, launches: Sequence[launch._Launch], operands: Sequence[torch.Tensor], index: int
    ) -> list[Callable[[], None]]:
        outs = [launch._empty(*layout) for layout in self._outputs]
        coming = iter(outs)
        monkeypatch.setattr(launch, "_empty", lambda *_: next(coming))
        runs = made(self, launches, operands, index)
        monkeypatch.setattr(launch, "_empty", empty)
        first: list[torch.Tensor] = []
        for n, run in enumerate(runs):
            found, *others = (results(run, outs) for _ in range(TIMES))
            if not all(
                torch.equal(a.nan_to_num(), b.nan_to_num())
                for other in others
                for a, b in zip(found, other, strict=True)
            ):
                apart.append(f"choice {n} of {len(runs)}: other bits")
            first = first or found
            for a, b in zip(first, found, strict=True):
                if not torch.equal(a.isnan(), b.isnan()) or relative_error(b, a) > ALIKE:
                    apart.append(f"choice {n} of {len(runs)}: {relative_error(b, a):.1e} of {tuple(a.shape)}")
        held.append(outs)
        return runs

    def results(run: Callable[[], None], outs: list[torch.Tensor]) -> list[torch.Tensor]:
        for out in outs:
            out.zero_()
        run()
        torch.cuda.synchronize()
        return [out.clone() for out in outs]

    made, empty, held = launch.DirectKernel._runs, launch._empty, []
    monkeypatch.setattr(launch.DirectKernel, "_runs", compared)
    monkeypatch.setattr(fl.config, "cache", "off")
    monkeypatch.setattr(fl.config, "tune", CHOICES)
    case, device = BY_NAME[name], torch.device("cuda")
    inputs = wide_inputs(case, 1024, torch.bfloat16, device) or case.make_inputs(1024, torch.bfloat16, device)
    inputs = tuple(t.requires_grad_(t.is_floating_point()) for t in inputs)
    out = fl.compile(case.target(torch.bfloat16, device))(*inputs)
    out = out if isinstance(out, torch.Tensor) else out[0]
    out.backward(torch.randn_like(out))
    assert held and not apart
