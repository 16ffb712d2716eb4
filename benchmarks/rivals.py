"""Who computes a problem: each rival turns it into a call without arguments, mask and bias made in advance."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import fl_pallas as fl

from .problem import Problem

Call = Callable[[], Any]


class Skipped(Exception):
    """A rival that does not take part, and why."""


def ours(p: Problem, fallback: str = "torch") -> Call:
    call = fl.compile(p.plain, fallback=fallback)
    return lambda: call(*p.inputs)


def eager(p: Problem) -> Call:
    return lambda: p.plain(*p.inputs)


def compiled(p: Problem, mode: str | None = None) -> Call:
    call = torch.compile(p.plain, dynamic=False, mode=mode, backend=_backend(p))
    return lambda: call(*p.inputs)


def compiled_max(p: Problem) -> Call:
    if p.inputs[0].device.type != "cuda":
        raise Skipped("max-autotune is for GPUs")
    return compiled(p, "max-autotune-no-cudagraphs")


def flex(p: Problem) -> Call:
    attend, form = _attend(p), _flex_form(p)
    mask = _block_mask(p) if p.mask_mod else None
    return lambda: form(attend, mask, *p.inputs)


def flex_and_mask(p: Problem, compiled: bool = False) -> Call:
    """The block mask is made anew by each call, as where documents or lengths change."""
    attend, form = _attend(p), _flex_form(p)
    if p.mask_mod is None:
        raise Skipped("there is no mask to make")
    return lambda: form(attend, _block_mask(p, compiled), *p.inputs)


def flex_and_compiled_mask(p: Problem) -> Call:
    if p.inputs[0].device.type != "cuda":
        raise Skipped("compiled mask creation is for GPUs")
    return flex_and_mask(p, compiled=True)


def sdpa(p: Problem) -> Call:
    """Whatever PyTorch picks."""
    if p.sdpa is None:
        raise Skipped("scaled_dot_product_attention cannot express it")
    call = p.sdpa()
    return lambda: call(*p.inputs)


def sdpa_by(backend: SDPBackend, p: Problem) -> Call:
    call = sdpa(p)

    def run() -> Any:
        with sdpa_kernel(backend):
            return call()

    return run


RIVALS: dict[str, Callable[[Problem], Call]] = {
    "ours": ours,
    "flex": flex,
    "flex_and_mask": flex_and_mask,
    "flex_and_compiled_mask": flex_and_compiled_mask,
    "sdpa": sdpa,
    "sdpa_flash": lambda p: sdpa_by(SDPBackend.FLASH_ATTENTION, p),
    "sdpa_cudnn": lambda p: sdpa_by(SDPBackend.CUDNN_ATTENTION, p),
    "compile": compiled,
    "compile_max": compiled_max,
    "eager": eager,
}
# These store scores, so that memory limits them.
UNFUSED = ("compile", "compile_max", "eager")


def _backend(p: Problem) -> str:
    """Inductor on a GPU. On a CPU the suite is only tried out, and nothing is generated."""
    return "inductor" if p.inputs[0].device.type == "cuda" else "eager"


def _attend(p: Problem) -> Callable[..., Any]:
    if p.inputs[0].device.type != "cuda":
        return flex_attention
    return torch.compile(flex_attention, dynamic=False)


def _flex_form(p: Problem) -> Callable[..., Any]:
    if p.flex is None:
        raise Skipped("FlexAttention cannot express it")
    return p.flex


def _block_mask(p: Problem, compiled: bool = False) -> Any:
    batches, queries, keys = p.mask_shape
    return create_block_mask(p.mask_mod, batches, None, queries, keys, p.inputs[0].device, _compile=compiled)
