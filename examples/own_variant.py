"""An attention of your own, in plain PyTorch; change it and run again.    python examples/own_variant.py"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from common import DEVICE, console, finish, run, where
from torch import Tensor, nn

import fl_pallas as fl


class ForgetfulAttention(nn.Module):
    """Keys fade with distance at a rate that each query chooses, and the output is divided by the row's entropy."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.rate = nn.Linear(dim, heads)
        self.out = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """x [b,s,dim] -> [b,s,dim]."""
        b, s, dim = x.shape
        q, k, v = self.qkv(x).view(b, s, 3, self.heads, dim // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        i = torch.arange(s, device=x.device)
        distance = (i[:, None] - i[None, :]).clamp(min=0)
        fading = F.softplus(self.rate(x)).transpose(1, 2)[..., None]  # [b,h,s,1]
        scores = q @ k.mT * q.shape[-1] ** -0.5 - fading * torch.log1p(distance)
        scores = scores.masked_fill(i[:, None] < i[None, :], float("-inf"))
        logp = F.log_softmax(scores, dim=-1)
        p = logp.exp()
        entropy = -(p * logp.masked_fill(i[:, None] < i[None, :], 0.0)).sum(-1, keepdim=True)
        out = p @ v / (1.0 + entropy)
        return self.out(out.transpose(1, 2).reshape(b, s, dim))


def main() -> None:
    torch.manual_seed(0)
    module = ForgetfulAttention(64, 2).to(DEVICE).requires_grad_(False)
    x = torch.randn(1, 256, 64, device=DEVICE)
    console.print(f"on {where()}")
    fl.explain(module, x).show()
    finish([run("ForgetfulAttention", module, [x])], "Your variant")


if __name__ == "__main__":
    main()
