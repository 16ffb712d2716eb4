"""Attention of recent papers and model code, in their authors' styles: modules, losses, set and graph models."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .case import Case, Draw, qkv, qkv_and


def _scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])


def latent() -> nn.Module:
    """Multi-head latent attention: keys and values from a latent vector, a rotary part of its own."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wq = nn.Linear(32, 2 * 24, bias=False)
            self.wkv_a = nn.Linear(32, 16 + 8, bias=False)
            self.norm = nn.RMSNorm(16)
            self.wkv_b = nn.Linear(16, 2 * 32, bias=False)
            self.wo = nn.Linear(32, 32, bias=False)

        def rope(self, x: Tensor) -> Tensor:
            position = torch.arange(x.shape[-2], device=x.device, dtype=torch.float32)
            freq = 1e4 ** (-torch.arange(0, 8, 2, device=x.device, dtype=torch.float32) / 8)
            angle = torch.outer(position, freq)
            cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
            x1, x2 = x.chunk(2, -1)
            return torch.cat([x1 * cos - x2 * sin, x1 * sin + x2 * cos], -1)

        def forward(self, x: Tensor) -> Tensor:
            """x [b,s,32]."""
            b, s, _ = x.shape
            q, q_rope = self.wq(x).view(b, s, 2, -1).transpose(1, 2).split([16, 8], -1)
            c, k_rope = self.wkv_a(x).split([16, 8], -1)
            k, v = self.wkv_b(self.norm(c)).view(b, s, 2, -1).transpose(1, 2).split([16, 16], -1)
            k_rope = self.rope(k_rope.unsqueeze(1)).expand(-1, 2, -1, -1)
            q, k = torch.cat([q, self.rope(q_rope)], -1), torch.cat([k, k_rope], -1)
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            return self.wo(out.transpose(1, 2).flatten(-2))

    return Layer()


def latent_absorbed(q: Tensor, q_rope: Tensor, c: Tensor, k_rope: Tensor) -> Tensor:
    """The same on the latent vectors themselves: q [b,h,s,16], q_rope [b,h,s,8], c [b,s,16], k_rope [b,s,8]."""
    scores = (torch.einsum("bhsc,btc->bhst", q, c) + torch.einsum("bhsr,btr->bhst", q_rope, k_rope)) * 0.2
    mask = torch.full((q.shape[2], c.shape[1]), float("-inf"), device=q.device).triu_(1)
    weights = (scores + mask).softmax(dim=-1, dtype=torch.float32).type_as(q)
    return torch.einsum("bhst,btc->bhsc", weights, c)


def delta_rule(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """DeltaNet's parallel form to first order; beta [b,h,s]. One product feeds the other's values."""
    k = F.normalize(k, dim=-1)
    within = (k * beta[..., None]) @ k.mT
    u = v * beta[..., None] - torch.tril(within, -1) @ v
    return torch.tril(q @ k.mT) @ u


def taylor(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Based: exp to second order."""
    s = torch.einsum("bhid,bhjd->bhij", q, k) / q.shape[-1] ** 0.5
    a = (1 + s + s**2 / 2).tril()
    return torch.einsum("bhij,bhje->bhie", a, v) / (a.sum(-1, keepdim=True) + 1e-6)


def performer_linear(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    """Random features w [32,d], in linear time."""

    def phi(x: Tensor) -> Tensor:
        x = x / x.shape[-1] ** 0.25
        return torch.exp(x @ w.T - x.square().sum(-1, keepdim=True) / 2) / 32**0.5

    qp, kp = phi(q), phi(k)
    return qp @ (kp.mT @ v) / (qp @ kp.sum(-2).unsqueeze(-1))


def state_space_dual(x: Tensor, dt: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Mamba 2's quadratic form: x [b,s,h,p], dt [b,s,h], b, c [b,s,n]."""
    a = (-dt).cumsum(1).transpose(1, 2)
    keep = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
    decay = torch.exp((a[..., :, None] - a[..., None, :]).masked_fill(~keep, -torch.inf))
    return torch.einsum("bln,bsn,bhls,bsh,bshp->blhp", c, b, decay, dt, x)


def disentangled(q: Tensor, k: Tensor, v: Tensor, k_pos: Tensor, q_pos: Tensor) -> Tensor:
    """DeBERTa: content to position and position to content; k_pos, q_pos [h,32,d]."""
    s, t = q.shape[-2], k.shape[-2]
    rel = torch.arange(s, device=q.device)[:, None] - torch.arange(t, device=q.device)
    scale = math.sqrt(q.shape[-1] * 3)
    index = (rel + 16).clamp(0, 31)
    c2p = torch.gather(q @ k_pos.mT / scale, -1, index.expand(*q.shape[:2], s, t))
    index = (rel.T + 16).clamp(0, 31)
    p2c = torch.gather(k @ q_pos.mT / scale, -1, index.expand(*q.shape[:2], t, s)).mT
    return (q @ k.mT / scale + c2p + p2c).softmax(-1) @ v


def transformer_xl(q: Tensor, k: Tensor, v: Tensor, r: Tensor, u: Tensor, w: Tensor) -> Tensor:
    """The relative shift by padding and viewing; r [b,h,s,d], u, w [h,d]."""
    content, position = (q + u[:, None]) @ k.mT, (q + w[:, None]) @ r.mT
    b, h, n, m = position.shape
    position = F.pad(position, (1, 0)).view(b, h, m + 1, n)[:, :, 1:].view(b, h, n, m)
    scores = (content + position) / math.sqrt(q.shape[-1])
    scores.masked_fill_(torch.ones(n, m, dtype=torch.bool, device=q.device).triu(1), -torch.inf)
    return scores.softmax(-1) @ v


def pair_bias() -> nn.Module:
    """AlphaFold 3: attention with a bias from pairs, gated."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.pair_norm = nn.LayerNorm(32), nn.LayerNorm(8)
            self.q, self.kv = nn.Linear(32, 32), nn.Linear(32, 64, bias=False)
            self.bias, self.gate = nn.Linear(8, 2, bias=False), nn.Linear(32, 32, bias=False)
            self.out = nn.Linear(32, 32, bias=False)

        def forward(self, a: Tensor, z: Tensor, mask: Tensor) -> Tensor:
            """a [b,s,32], z [b,s,s,8], mask [b,s] of ones and zeros."""
            a = self.norm(a)
            q = self.q(a).unflatten(-1, (2, 16)).transpose(1, 2)
            k, v = self.kv(a).unflatten(-1, (2, 2, 16)).permute(2, 0, 3, 1, 4)
            bias = self.bias(self.pair_norm(z)).permute(0, 3, 1, 2)
            gate = torch.sigmoid(self.gate(a)).unflatten(-1, (2, 16)).transpose(1, 2)
            logits = q @ k.mT / 4 + bias + (mask[:, None, None] - 1) * 1e9
            return self.out((gate * (logits.softmax(-1) @ v)).transpose(1, 2).flatten(-2))

    return Layer()


def induced_set() -> nn.Module:
    """Set Transformer's ISAB: to a few learned points and back."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.points = nn.Parameter(torch.randn(1, 16, 32))
            self.q1, self.kv1 = nn.Linear(32, 32), nn.Linear(32, 64)
            self.q2, self.kv2 = nn.Linear(32, 32), nn.Linear(32, 64)

        def attend(self, q: Tensor, kv: Tensor) -> Tensor:
            q, k, v = (torch.cat(t.split(16, 2), 0) for t in (q, *kv.chunk(2, -1)))
            weights = torch.softmax(q.bmm(k.transpose(1, 2)) / math.sqrt(32), 2)
            return torch.cat((q + weights.bmm(v)).split(2, 0), 2)

        def forward(self, x: Tensor) -> Tensor:
            """x [2,s,32]."""
            h = self.attend(self.q1(self.points.repeat(x.size(0), 1, 1)), self.kv1(x))
            return self.attend(self.q2(x), self.kv2(h))

    return Layer()


def encoder_layer() -> nn.Module:
    """PyTorch's own layer, which in inference is one operation with a mask."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True, norm_first=True, activation="gelu")

        def forward(self, x: Tensor, padding: Tensor) -> Tensor:
            """x [b,s,32], padding bool [b,s]."""
            return self.layer(x, src_key_padding_mask=padding)

    return Layer()


def slots(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Slot attention, two rounds: softmax over the slots q [b,7,d], then a mean over the inputs k, v [b,s,d]."""
    for _ in range(2):
        weights = F.softmax(torch.einsum("bnd,bkd->bnk", k, q) * 0.25, dim=-1) + 1e-6
        weights = weights / weights.sum(dim=1, keepdim=True)
        q = torch.einsum("bnk,bnd->bkd", weights, v)
    return q


def sinkhorn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Two rounds of normalising rows and columns."""
    log = _scores(q, k)
    for _ in range(2):
        log = log - torch.logsumexp(log, -1, keepdim=True)
        log = log - torch.logsumexp(log, -2, keepdim=True)
    return log.exp() @ v


def dual_softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """LoFTR: softmax along the rows times softmax along the columns."""
    s = _scores(q, k)
    return (s.softmax(-1) * s.softmax(-2)) @ v


def laser(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention over exponentials of the values."""
    m = v.amax(-2, keepdim=True)
    return torch.log(_scores(q, k).softmax(-1) @ torch.exp(v - m)) + m


def layer_normed_scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.relu(F.layer_norm(_scores(q, k), (k.shape[-2],))) @ v / k.shape[-2]


def lowest_padding(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Left padding with the lowest finite number: a row that sees nothing is spread over all keys. mask [b,s]."""
    n = q.shape[2]
    scores = torch.baddbmm(q.new_zeros(1), q.flatten(0, 1), k.flatten(0, 1).mT, beta=0, alpha=0.25)
    scores = scores.view(*q.shape[:2], n, n)
    keep = torch.tril(torch.ones(n, n, dtype=torch.bool, device=q.device)) & mask.bool()[:, None, None]
    return scores.masked_fill(~keep, torch.finfo(scores.dtype).min).softmax(-1, dtype=torch.float32).to(q.dtype) @ v


def no_self(x: Tensor) -> Tensor:
    """Reformer: one tensor for queries and keys, nobody looks at itself (a write to the diagonal)."""
    scores = x @ F.normalize(x, dim=-1).mT
    scores.diagonal(dim1=-2, dim2=-1).fill_(-5e4)
    return scores.softmax(-1) @ x


def few_queries_max_plus(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Four queries, and max in place of the sum: no operand is smaller than the scores."""
    return (_scores(q, k)[..., None] + v[..., None, :, :]).amax(-2)


def graph_attention(left: Tensor, right: Tensor, w: Tensor, edges: Tensor) -> Tensor:
    """GATv2: left, right [n,h,f], w [h,f], edges bool [n,n]."""
    e = torch.einsum("ijhf,hf->ijh", F.leaky_relu(left.unsqueeze(1) + right.unsqueeze(0), 0.2), w)
    e = e.masked_fill(~edges.unsqueeze(-1), float("-inf"))
    return torch.einsum("ijh,jhf->ihf", F.softmax(e, dim=1), right)


def contrastive(a: Tensor, b: Tensor) -> Tensor:
    """InfoNCE over all pairs, a, b [n,d]: a loss without a second product."""
    logits = F.normalize(a, dim=-1) @ F.normalize(b, dim=-1).T / 0.07
    return (torch.logsumexp(logits, 1) - logits.diagonal()).mean()


def supervised_contrastive(x: Tensor, label: Tensor) -> Tensor:
    """A row's positives are a mask of pairs, which is counted by itself."""
    x = F.normalize(x, dim=-1)
    own = torch.eye(len(x), dtype=torch.bool, device=x.device)
    positive = (label[:, None] == label) & ~own
    scores = (x @ x.T / 0.2).masked_fill(own, -torch.inf)
    told = (scores - scores.logsumexp(-1, keepdim=True)).masked_fill(~positive, 0)
    return -(told.sum(-1) / positive.sum(-1).clamp(min=1)).mean()


def ranked_pairs(score: Tensor, grade: Tensor) -> Tensor:
    """RankNet: the mean over pairs of which one is graded higher; float16 holds no count of them."""
    higher = (grade[:, None] > grade).to(score.dtype)
    losses = F.softplus(score - score[:, None]) * higher
    return losses.sum(dtype=torch.float32) / higher.sum(dtype=torch.float32).clamp(min=1)


def divergence(q: Tensor, k: Tensor, q2: Tensor, k2: Tensor) -> Tensor:
    """KL between two heads' weights, as in distillation."""
    a, b = _scores(q, k).log_softmax(-1), _scores(q2, k2).log_softmax(-1)
    return (a.exp() * (a - b)).sum(-1)


def mixing_convolution() -> nn.Module:
    """Talking heads by 1 x 1 convolutions, before and after the softmax."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.after = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1, bias=False)

        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return self.after(self.before(_scores(q, k)).softmax(-1)) @ v

    return Layer()


def mixed_heads(q: Tensor, k: Tensor, v: Tensor, before: Tensor, after: Tensor) -> Tensor:
    """Talking heads by einsum, causal, mixed before and after the softmax."""
    scores = torch.einsum("bhij,hg->bgij", _scores(q, k), before)
    later = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).triu(1)
    weights = scores.masked_fill(later, -math.inf).softmax(-1)
    return torch.einsum("bgij,gh,bhjd->bhid", weights, after, v)


def grouped_rotary() -> nn.Module:
    """Llama's attention: keys of a head serve two, projections around."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.kv, self.o = (nn.Linear(32, 32, bias=False) for _ in range(3))
            self.register_buffer("frequency", 1e4 ** (-torch.arange(0, 8, 2) / 8))

        def rotated(self, x: Tensor) -> Tensor:
            position = torch.arange(x.shape[-2], device=x.device, dtype=self.frequency.dtype)
            angle = torch.outer(position, self.frequency).repeat(1, 2)
            turned = torch.cat((-x[..., 4:], x[..., :4]), -1)
            return x * angle.cos().to(x.dtype) + turned * angle.sin().to(x.dtype)

        def forward(self, x: Tensor) -> Tensor:
            """x [b,s,32]."""
            b, s, _ = x.shape
            q = self.rotated(self.q(x).view(b, s, 4, 8).transpose(1, 2))
            k, v = self.kv(x).view(b, s, 2, 2, 8).permute(2, 0, 3, 1, 4)
            k, v = (t[:, :, None].expand(b, 2, 2, s, 8).reshape(b, 4, s, 8) for t in (self.rotated(k), v))
            mask = torch.full((s, s), float("-inf"), device=x.device, dtype=x.dtype).triu(1)
            weights = (q @ k.mT / math.sqrt(8) + mask).softmax(-1)
            return self.o((weights @ v).transpose(1, 2).reshape(b, s, -1))

    return Layer()


def alibi_normed() -> nn.Module:
    """BLOOM's attention: slopes of heads, an output projection, a residual and a norm."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.o, self.norm = nn.Linear(32, 96), nn.Linear(32, 32), nn.LayerNorm(32)
            self.register_buffer("slopes", torch.tensor([0.5, 0.25]))

        def forward(self, x: Tensor) -> Tensor:
            """x [b,s,32]."""
            q, k, v = self.qkv(x).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
            i = torch.arange(x.shape[1], device=x.device)
            bias = self.slopes[:, None, None] * (i - i[:, None]).abs().neg().to(x.dtype)
            out = (q @ k.mT / 4 + bias).softmax(-1) @ v
            return self.norm(x + self.o(out.transpose(1, 2).flatten(-2)))

    return Layer()


def learned_queries() -> nn.Module:
    """Q-Former: every member of a batch is asked the same, and padded."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.queries = nn.Parameter(torch.randn(8, 32))
            self.q, self.kv, self.o = nn.Linear(32, 32), nn.Linear(24, 64), nn.Linear(32, 32)

        def forward(self, x: Tensor, padding: Tensor) -> Tensor:
            """x [b,s,24], padding bool [b,s]."""
            q = self.q(self.queries).expand(len(x), -1, -1).unflatten(-1, (2, 16)).transpose(1, 2)
            k, v = self.kv(x).unflatten(-1, (2, 2, 16)).permute(2, 0, 3, 1, 4)
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=~padding[:, None, None])
            return self.o(out.transpose(1, 2).flatten(-2)) + self.queries

    return Layer()


def retention_layer() -> nn.Module:
    """RetNet's layer: decays normalised by themselves, a group norm and a gate after them."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v, self.gate, self.out = (nn.Linear(32, 32, bias=False) for _ in range(5))
            self.norm = nn.GroupNorm(2, 32, affine=False)
            self.register_buffer("gamma", 1 - 2 ** (-5 - torch.arange(2).float()))

        def forward(self, x: Tensor) -> Tensor:
            """x [b,s,32]."""
            b, s, _ = x.shape
            q, k, v = (f(x).view(b, s, 2, 16).transpose(1, 2) for f in (self.q, self.k, self.v))
            i = torch.arange(s, device=x.device)
            distance = (i[:, None] - i).to(x.dtype)
            decay = torch.where(distance >= 0, self.gamma[:, None, None] ** distance.clamp(min=0), 0.0)
            decay = decay / decay.sum(-1, keepdim=True).sqrt()
            kept = (q @ k.mT / 4) * decay
            kept = kept / kept.detach().abs().sum(-1, keepdim=True).clamp(min=1)
            y = self.norm((kept @ v).transpose(1, 2).reshape(b * s, 32)).view(b, s, 32)
            return self.out(F.silu(self.gate(x)) * y)

    return Layer()


def token_ids() -> nn.Module:
    """A layer on embedded tokens, of which there are more than the tables have rows."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.places = nn.Embedding(11, 32), nn.Embedding(1024, 32)
            self.norm, self.qkv, self.out = nn.LayerNorm(32), nn.Linear(32, 96), nn.Linear(32, 11)

        def forward(self, ids: Tensor) -> Tensor:
            """ids [b,s] below 11."""
            x = self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device) % 1024)
            q, k, v = (t.unflatten(-1, (2, 16)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            return self.out(x + y.transpose(1, 2).flatten(-2))

    return Layer()


def shared_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q [b,s,d] of every member of a batch looks at the same k, v [s,d]."""
    return (q @ k.T / 4).softmax(-1) @ v


def _edges(g: Draw) -> Tensor:
    return g.bools(g.seq, g.seq, p=0.3) | torch.eye(g.seq, dtype=torch.bool, device=g.device)


def _left_padding(g: Draw) -> Tensor:
    return (torch.arange(g.seq, device=g.device) >= g.ints(0, g.seq, 2)[:, None]).long()


CASES = (
    Case("latent", latent, lambda g: (g.normal(2, g.seq, 32),), module=True),
    Case(
        "latent_absorbed",
        latent_absorbed,
        lambda g: (g.normal(1, 2, g.seq, 16), g.normal(1, 2, g.seq, 8), g.normal(1, g.seq, 16), g.normal(1, g.seq, 8)),
    ),
    Case("delta_rule", delta_rule, qkv_and(lambda g: g.uniform(1, 2, g.seq)), kernels=2),
    Case("taylor", taylor, qkv(d=8, dv=16)),
    # More keys than a few: of those, PyTorch's roundings cancel in the quotient, and say nothing of ours.
    Case(
        "performer_linear",
        performer_linear,
        lambda g: (*(g.normal(1, 2, g.seq + 15, 16) for _ in range(3)), g.normal(32, 16)),
        kernels=None,
    ),
    Case(
        "state_space_dual",
        state_space_dual,
        lambda g: (
            g.normal(1, g.seq, 2, 16),
            g.uniform(1, g.seq, 2, low=0.01, high=0.2),
            g.normal(1, g.seq, 8),
            g.normal(1, g.seq, 8),
        ),
    ),
    Case(
        "disentangled", disentangled, qkv_and(lambda g: g.normal(2, 32, 16), lambda g: g.normal(2, 32, 16)), kernels=3
    ),
    Case(
        "transformer_xl",
        transformer_xl,
        qkv_and(lambda g: g.normal(1, 2, g.seq, 16), lambda g: g.normal(2, 16), lambda g: g.normal(2, 16)),
    ),
    Case(
        "pair_bias",
        pair_bias,
        lambda g: (g.normal(1, g.seq, 32), g.normal(1, g.seq, g.seq, 8), g.bools(1, g.seq, p=0.9).to(g.dtype)),
        kernels=None,
        module=True,
    ),
    Case("induced_set", induced_set, lambda g: (g.normal(2, g.seq, 32),), kernels=None, module=True),
    Case(
        "encoder_layer",
        encoder_layer,
        lambda g: (g.normal(2, g.seq, 32), torch.arange(g.seq, device=g.device) >= g.lengths(2)[:, None]),
        module=True,
    ),
    Case("slots", slots, lambda g: (g.normal(2, 7, 16), g.normal(2, g.seq, 16), g.normal(2, g.seq, 16)), kernels=None),
    Case("sinkhorn", sinkhorn, qkv(h=1), kernels=5),
    Case("dual_softmax", dual_softmax, qkv(), kernels=2),
    Case("laser", laser, qkv()),
    Case("layer_normed_scores", layer_normed_scores, qkv()),
    Case("lowest_padding", lowest_padding, qkv_and(_left_padding, b=2)),
    Case("no_self", no_self, lambda g: (g.normal(2, g.seq, 16),)),
    Case(
        "few_queries_max_plus",
        few_queries_max_plus,
        lambda g: (g.normal(1, 1, 4, 16), g.normal(1, 1, g.seq, 16), g.normal(1, 1, g.seq, 16)),
    ),
    Case(
        "graph_attention",
        graph_attention,
        lambda g: (g.normal(g.seq, 2, 8), g.normal(g.seq, 2, 8), g.normal(2, 8), _edges(g)),
    ),
    Case("contrastive", contrastive, lambda g: (g.normal(g.seq, 32), g.normal(g.seq, 32))),
    Case("supervised_contrastive", supervised_contrastive, lambda g: (g.normal(g.seq, 32), g.ints(0, 5, g.seq))),
    Case("ranked_pairs", ranked_pairs, lambda g: (g.normal(g.seq), g.ints(0, 5, g.seq))),
    Case("divergence", divergence, lambda g: tuple(g.normal(1, 2, g.seq, 16) for _ in range(4))),
    Case(
        "mixing_convolution",
        mixing_convolution,
        lambda g: tuple(g.normal(1, 4, g.seq, 16) for _ in range(3)),
        kernels=None,
        module=True,
    ),
    Case("mixed_heads", mixed_heads, qkv_and(lambda g: g.normal(2, 2), lambda g: g.normal(2, 2), b=2), kernels=2),
    Case("grouped_rotary", grouped_rotary, lambda g: (g.normal(2, g.seq, 32),), module=True),
    Case("alibi_normed", alibi_normed, lambda g: (g.normal(2, g.seq, 32),), module=True),
    Case(
        "learned_queries",
        learned_queries,
        lambda g: (g.normal(2, g.seq, 24), torch.arange(g.seq, device=g.device) >= g.lengths(2)[:, None]),
        module=True,
    ),
    Case("retention_layer", retention_layer, lambda g: (g.normal(1, g.seq, 32),), module=True),
    Case("token_ids", token_ids, lambda g: (g.ints(0, 11, 8, g.seq),), module=True),
    Case("shared_keys", shared_keys, lambda g: (g.normal(2, g.seq, 16), g.normal(g.seq, 16), g.normal(g.seq, 16))),
)
