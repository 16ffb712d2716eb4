"""What the suite measures: groups of cells, each a problem, the rivals that take part, and how they are measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch

from . import decode, pairs, science, variants, vision
from .problem import Problem
from .variants import MASKED, VARIANTS

GIB = 2**30
SDPA = ("sdpa_flash", "sdpa_cudnn")
COMPILERS = ("compile", "compile_max")
# Whatever suits two minutes.
SHORT = {
    "flex/softcap/D64/S4096": ("ours", "flex"),
    "flex/causal/D64/S4096": ("ours", "flex", "flex_and_mask", *SDPA),
    "flex/documents/D64/S4096": ("ours", "flex", "flex_and_mask"),
    "differential/outputs/D64/S4096": ("ours", "compile", "eager"),
    "evoformer/D64/B8": ("ours", "compile", "eager"),
    "decode/plain/B8/S8192": ("ours", "sdpa", "flex"),
    "host/full": ("ours", "sdpa", "flex"),
    "training/flex/causal/D64/S4096": ("ours", "flex", *SDPA),
    "memory/causal": ("ours",),
    "compile/causal": ("ours",),
}


@dataclass(frozen=True)
class Cell:
    """One line of a table.

    Attributes:
      name: group/variant/shape.
      make: draws the problem on a device.
      rivals: who takes part.
      kind: "kernel", "training", "host", "training_host", "compile", "training_compile", "lengths" or "memory": what is
        measured.
      score_bytes: rivals that store the scores are skipped where these take more, 16-bit.
      shape: its sizes, for the tables.
    """

    name: str
    make: Callable[[torch.device], Problem]
    rivals: tuple[str, ...]
    kind: str = "kernel"
    score_bytes: int = 8 * GIB
    shape: dict[str, int] = field(default_factory=dict)

    @property
    def group(self) -> str:
        return self.name.partition("/")[0]


@dataclass(frozen=True)
class Sizes:
    """The sizes of a run; those of a GPU, or tiny ones to try the suite out on a CPU in interpret mode."""

    seqs: tuple[int, ...] = (512, 1024, 2048, 4096, 8192, 16384)
    gqa_seqs: tuple[int, ...] = (1024, 4096, 16384)
    dims: tuple[int, ...] = (64, 128)
    tokens: int = 16384
    width: int = 2048
    heads: tuple[int, int] = (32, 8)
    evoformer: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    rows: int = 256
    triangles: tuple[int, ...] = (128, 256, 384)
    residues: tuple[int, ...] = (256, 512, 1024)
    points: int = 8192
    retrieval: tuple[int, int, int, int, int] = (64, 512, 32, 128, 128)
    graphs: tuple[int, int, int, int, int] = (16, 8, 256, 32, 64)
    windows: tuple[int, int, int, int, int] = (64, 8, 7, 6, 32)
    image: tuple[int, int, int, int] = (2, 12, 64, 64)
    patches: tuple[int, int, int, int, int] = (256, 12, 50, 50, 64)
    captions: tuple[int, int, int, int, int] = (8, 8, 4096, 77, 64)
    latents: tuple[int, int, int, int, int] = (16, 8, 64, 4096, 64)
    wide: tuple[int, int, int] = (2, 1024, 2048)
    decode_seqs: tuple[int, ...] = (1024, 8192, 65536)
    decode_batches: tuple[int, ...] = (1, 8, 64)
    host_seq: int = 512
    longest: int = 262144
    lengths: tuple[int, int, int] = (200, 256, 4096)
    dtype: torch.dtype = torch.bfloat16

    @property
    def main_seqs(self) -> tuple[int, ...]:
        """Where the slow rivals take part."""
        return (4096,) if 4096 in self.seqs else self.seqs


TINY = Sizes(
    seqs=(48,), gqa_seqs=(48,), dims=(16,), tokens=96, width=32, heads=(4, 2), evoformer=(1,), rows=24,
    triangles=(20,), residues=(20,), points=40, retrieval=(2, 3, 8, 24, 16), graphs=(1, 2, 24, 16, 8),
    windows=(1, 2, 4, 2, 16), image=(1, 2, 5, 16), patches=(2, 2, 17, 17, 16), captions=(1, 2, 40, 9, 16),
    latents=(1, 2, 8, 40, 16), wide=(1, 32, 48),
    decode_seqs=(64,), decode_batches=(2,), host_seq=64, longest=96,
    lengths=(3, 20, 40), dtype=torch.float32,
)  # fmt: skip


def cells(sizes: Sizes) -> dict[str, Cell]:
    """Every cell by its name, in the order in which they run."""
    found = [c for group in GROUPS.values() for c in group(sizes)]
    return {c.name: c for c in found}


def flex(z: Sizes) -> Iterator[Cell]:
    for s in sorted(z.seqs, key=lambda s: s != 4096):  # the bars of mask creation are at 4096
        for d in z.dims:
            for name in VARIANTS:
                b, h = max(1, z.tokens // s), z.width // d
                rivals = ("ours", "flex", "compile", "eager")
                if name in MASKED:
                    rivals += ("flex_and_mask",)
                    if s in z.main_seqs:
                        rivals += ("flex_and_compiled_mask",)
                if s in z.main_seqs:
                    rivals += ("compile_max",)
                if name in ("full", "causal"):
                    rivals += SDPA
                elif name != "softcap":
                    rivals += ("sdpa",)
                yield Cell(
                    f"flex/{name}/D{d}/S{s}",
                    lambda device, n=name, b=b, h=h, s=s, d=d: variants.attention(n, b, h, s, d, device, z.dtype),
                    rivals,
                    shape={"b": b, "h": h, "s": s, "d": d},
                )


def gqa(z: Sizes) -> Iterator[Cell]:
    h, g = z.heads
    for name in ("full", "causal", "documents"):
        for d in z.dims:
            for s in z.gqa_seqs:
                b = max(1, z.tokens // s)
                yield Cell(
                    f"gqa/{name}/D{d}/S{s}",
                    lambda device, n=name, b=b, s=s, d=d: variants.attention(n, b, h, s, d, device, z.dtype, g),
                    ("ours", "flex", *(SDPA if name != "documents" else ("sdpa",))),
                    shape={"b": b, "h": h, "g": g, "s": s, "d": d},
                )


def differential(z: Sizes) -> Iterator[Cell]:
    for form in ("outputs", "weights"):
        for d in z.dims:
            for s in z.seqs if form == "outputs" else z.main_seqs:
                b, h = max(1, z.tokens // s), z.width // d
                yield Cell(
                    f"differential/{form}/D{d}/S{s}",
                    lambda device, f=form, b=b, h=h, s=s, d=d: science.differential(f, b, h, s, d, device, z.dtype),
                    ("ours", *COMPILERS, "eager", "flex", "sdpa"),
                    score_bytes=24 * GIB,
                    shape={"b": b, "h": h, "s": s, "d": d},
                )


def evoformer(z: Sizes) -> Iterator[Cell]:
    for d in z.dims:
        for b in z.evoformer:
            compilers = COMPILERS if b in (1, 8) else ("compile",)  # max-autotune takes its time
            yield Cell(
                f"evoformer/D{d}/B{b}",
                lambda device, b=b, d=d: science.evoformer(b, z.rows, z.rows, 4, d, device, z.dtype),
                ("ours", *compilers, "eager", "flex", "sdpa"),
                shape={"b": b, "n": z.rows, "s": z.rows, "h": 4, "d": d},
            )


def ipa(z: Sizes) -> Iterator[Cell]:
    for s in z.residues:
        yield Cell(
            f"ipa/S{s}",
            lambda device, s=s: science.invariant_point(s, 12, 16, 4, 128, device, z.dtype),
            ("ours", *COMPILERS, "eager"),
            shape={"s": s, "h": 12},
        )


def triangle(z: Sizes) -> Iterator[Cell]:
    for n in z.triangles:
        yield Cell(
            f"triangle/N{n}",
            lambda device, n=n: science.triangle(n, 4, 32, device, z.dtype),
            ("ours", *COMPILERS, "eager"),
            shape={"n": n, "h": 4, "d": 32},
        )


def pairwise(z: Sizes) -> Iterator[Cell]:
    rivals = ("ours", "compile", "eager")
    for name, fn, batch, n in (
        ("forces", pairs.forces, 1, z.points),
        ("phases", pairs.phases, 1, z.points),
        ("energy", pairs.energy_distance, 1, z.points),
        ("chamfer", pairs.chamfer, 8, z.points // 2),
    ):
        yield Cell(
            f"pairs/{name}",
            lambda device, fn=fn, batch=batch, n=n: pairs.points(fn, batch, n, device),
            rivals,
            shape={"b": batch, "n": n},
        )
    for name, make, letters, sizes in (
        ("retrieval", pairs.retrieval, "bnijd", z.retrieval),
        ("edges", pairs.edges, "bhndc", z.graphs),
    ):
        yield _sized(f"pairs/{name}", make, letters, sizes, z.dtype, rivals)


def images(z: Sizes) -> Iterator[Cell]:
    for name, make, letters, sizes in (
        ("windows", vision.windows, "bwshd", z.windows),
        ("decomposed", vision.positions, "bhsd", z.image),
        ("patches", vision.tokens, "bhqkd", z.patches),
        ("captions", vision.tokens, "bhqkd", z.captions),
        ("latents", vision.tokens, "bhqkd", z.latents),
    ):
        yield _sized(f"vision/{name}", make, letters, sizes, z.dtype, ("ours", "compile", "eager"))


def wide(z: Sizes) -> Iterator[Cell]:
    """Attention in float32, whatever the others are in."""
    for name in ("full", "causal"):
        for d in z.dims:
            b, h, s = z.wide[0], z.wide[1] // d, z.wide[2]
            yield Cell(
                f"float32/{name}/D{d}",
                lambda device, n=name, b=b, h=h, s=s, d=d: variants.attention(n, b, h, s, d, device, torch.float32),
                ("ours", "flex", "sdpa", "compile", "eager"),
                shape={"b": b, "h": h, "s": s, "d": d},
            )


def _sized(
    name: str,
    make: Callable[..., Problem],
    letters: str,
    sizes: Sequence[int],
    dtype: torch.dtype,
    rivals: tuple[str, ...],
) -> Cell:
    """A cell whose problem takes its sizes in order, each of which has a letter."""
    shape = dict(zip(letters, sizes, strict=True))
    return Cell(name, lambda device: make(*sizes, device, dtype), rivals, shape=shape)


def decoding(z: Sizes) -> Iterator[Cell]:
    h, g = z.heads
    d = z.dims[-1]
    for name in decode.DECODE:
        for b in z.decode_batches:
            for s in z.decode_seqs:
                yield Cell(
                    f"decode/{name}/B{b}/S{s}",
                    lambda device, n=name, b=b, s=s: decode.decode(n, b, h, g, s, d, device, z.dtype),
                    ("ours", "sdpa", "flex"),
                    shape={"b": b, "h": h, "g": g, "s": s, "d": d},
                )


def _small(name: str, z: Sizes) -> Callable[[torch.device], Problem]:
    return lambda device: variants.attention(name, 1, 2, z.host_seq, z.dims[0], device, z.dtype)


def host(z: Sizes) -> Iterator[Cell]:
    for name in ("full", "causal"):
        yield Cell(f"host/{name}", _small(name, z), ("ours", "sdpa", "flex", "compile"), "host")


def first_calls(z: Sizes) -> Iterator[Cell]:
    s, d = z.seqs[len(z.seqs) // 2], z.dims[0]
    for name in ("causal", "softcap"):
        yield Cell(
            f"compile/{name}",
            lambda device, n=name: variants.attention(n, 4, z.width // d, s, d, device, z.dtype),
            ("ours", "flex"),
            "compile",
        )


def first_steps(z: Sizes) -> Iterator[Cell]:
    for cell in first_calls(z):
        yield replace(cell, name=f"training_{cell.name}", kind="training_compile")


def lengths(z: Sizes) -> Iterator[Cell]:
    b, h, d = 4, z.width // z.dims[0], z.dims[0]
    for name in ("full", "causal", "documents"):
        # The problem is the longest one; measuring draws the others.
        yield Cell(
            f"lengths/{name}",
            lambda device, n=name, s=z.lengths[2]: variants.attention(n, b, h, s, d, device, z.dtype),
            ("ours",),
            "lengths",
            shape={"b": b, "h": h, "d": d, "count": z.lengths[0], "least": z.lengths[1], "most": z.lengths[2]},
        )


def memory(z: Sizes) -> Iterator[Cell]:
    s, d = z.longest, z.dims[0]
    for name in ("causal", "sliding", "documents"):
        yield Cell(
            f"memory/{name}",
            lambda device, n=name: variants.attention(n, 1, 8, s, d, device, z.dtype),
            ("ours",),
            "memory",
            shape={"b": 1, "h": 8, "s": s, "d": d},
        )


def training(z: Sizes) -> Iterator[Cell]:
    """The cells of the forward groups, their gradients; FlexAttention's variants where it can take them."""
    groups = (flex(z), differential(z), evoformer(z), ipa(z), pairwise(z), images(z), wide(z))
    for cell in (c for group in groups for c in group):
        kept = ("ours", "flex", "compile", *SDPA, *(("sdpa",) if cell.group == "float32" else ()))
        rivals = tuple(r for r in cell.rivals if r in kept)
        if cell.group == "flex" and cell.name.split("/")[1] not in ("full", "softcap"):
            rivals = tuple(r for r in rivals if r != "compile")
        yield replace(cell, name=f"training/{cell.name}", rivals=rivals, kind="training")


def training_host(z: Sizes) -> Iterator[Cell]:
    for cell in host(z):
        yield replace(cell, name=cell.name.replace("host/", "training_host/"), kind="training_host")


GROUPS: dict[str, Callable[[Sizes], Iterator[Cell]]] = {
    "flex": flex,
    "gqa": gqa,
    "evoformer": evoformer,
    "differential": differential,
    "ipa": ipa,
    "triangle": triangle,
    "pairs": pairwise,
    "vision": images,
    "float32": wide,
    "decode": decoding,
    "host": host,
    "compile": first_calls,
    "lengths": lengths,
    "memory": memory,
    "training": training,
    "training_host": training_host,
    "training_compile": first_steps,
}
