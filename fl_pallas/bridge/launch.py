"""The direct road: kernels compiled by Triton, launched on PyTorch's current stream and memory.

JAX only writes the Triton IR down; its runtime is not involved, and its GPU backend is never started.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch._C._dynamo import guards

from .. import cache
from ..capture.dtypes import torch_dtype
from ..errors import Unsupported
from ..kernels.blocks import ENGINE, Block
from ..kernels.lower import ALIGNMENT, Lowered
from ..kernels.lowering import Lowering
from ..kernels.sizes import Laid, Mismatch, generalise, is_short, laid, opened, programs_of, sizes_of
from ..kernels.triton import contiguous, grid_size
from ..schedule.plan import Choices, KernelPlan, operand_names
from .descriptors import Descriptors
from .dlpack import float32_products, matmul_precision
from .layout import spec_of
from .order import Order, alignment, order
from .plain import is_plain, plain
from .tuning import fastest, level

if TYPE_CHECKING:
    from ..kernels.fit import Fitted

# Compiled versions of one kernel (shapes, strides, types, alignments, devices) kept at a time.
MAX_VERSIONS = 64
OLDEST = (8, 0)
# Of a kernel for short loops of many lengths, what takes so many times the least at one length may be the fastest at
# another, and the other way round: narrow tiles and few stages lose least (at 260 a third, of what is level at 514).
LEVEL = 1.1


def unavailable(device: torch.device) -> str | None:
    """Why kernels cannot take the direct road to this device; None if they can."""
    if device.type != "cuda" or torch.version.hip is not None:
        return "the direct road is for NVIDIA GPUs"
    if importlib.util.find_spec("triton") is None:
        return "the direct road needs the package triton"
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < OLDEST:
        return f"sm_{major}{minor} is older than sm_{OLDEST[0]}{OLDEST[1]}"
    return None


@dataclass(frozen=True)
class _Launch:
    """One compiled version of a kernel, loaded on a device.

    Attributes:
      run: triton's launcher: (grid, stream, function, metadata, hooks, pointers) → None.
      programs: number of programs, along x.
      fixed: its arguments between stream and operands.
      kernel: keeps the loaded code alive.
      sizes: keeps what a kernel of several sizes is given alive; None for one that needs nothing.
      blocks: of which it takes descriptors, after the pointers; and how Triton wants each to be.
    """

    run: Callable[..., None]
    programs: int
    fixed: tuple[Any, ...]
    kernel: Any
    sizes: torch.Tensor | None = None
    blocks: tuple[tuple[Block, dict[str, Any]], ...] = ()

    def descriptors(self, operands: Sequence[torch.Tensor]) -> Descriptors | None:
        """What makes the descriptors for operands that lie as these; None for a kernel that takes none."""
        return Descriptors(self.blocks, operands) if self.blocks else None


@dataclass(frozen=True)
class _Version:
    """What a call with tensors of certain layouts does.

    Attributes:
      device: where it runs.
      moved: operands (by position) that are copied to the device first, their sign bit resolved.
      launch: None for a kernel of no programs.
      descriptors: of blocks, given to the launch besides; None for none.
    """

    device: torch.device
    moved: tuple[int, ...]
    launch: _Launch | None
    descriptors: Descriptors | None = None


@dataclass(frozen=True)
class _Latest:
    """What the last call did, which the next does too if nothing changed.

    Attributes:
      key: what must be equal besides layouts.
      alike: whether tensors lie as those of that call.
    """

    key: tuple[Any, ...]
    alike: Callable[..., bool]
    version: _Version


@dataclass(frozen=True)
class _Member:
    """A kernel of a family, under one of its choices.

    Attributes:
      where: it can run: device, precision, alignments.
      kernel: with all its choices.
      laid: under the choice that is the fastest for short loops, or for long ones.
      short: which of the two.
      launch: its code.
    """

    where: tuple[Any, ...]
    kernel: Laid
    laid: Laid
    short: bool
    launch: _Launch

    def suits(self, own: Laid) -> bool:
        """Whether its choice was made for loops as those of `own`."""
        return not self.laid.sizes or own.plan.minor or self.short == is_short(own)


# Compiles a kernel, and tells under which choices.
Build = Callable[[Laid], tuple[_Launch, Choices]]


class Family:
    """The kernels of one function: where two differ in sizes alone, a third serves both and all further ones.

    Of a minor kernel already the first serves all. Of those that one kernel serves, short loops have a choice of their
    own among those that were compiled.
    """

    def __init__(self) -> None:
        self.members: list[_Member] = []
        # What was compiled ahead of the call that will time it, by the key of its order; of a kernel of several sizes
        # there are two such calls.
        self.fitted: dict[str, tuple[Fitted, ...]] = {}
        self.lock = threading.RLock()

    def launch(self, where: tuple[Any, ...], own: Laid, build: Build, index: int) -> _Launch:
        """Code for `own`: that of a member that does the same, or of a new one.

        Args:
          where: what members must share besides structure.
          build: compiles a kernel.
          index: of the device.
        """
        with self.lock:
            near = [m for m in self.members if m.where == where]
            for m in sorted(filter(lambda m: m.suits(own), near), key=lambda m: -m.laid.sizes):
                with contextlib.suppress(Mismatch):
                    return _given(m.launch, m.laid, own, index)
            for kernel in self._wanted(near, own):
                with contextlib.suppress(Mismatch):
                    made = self._made(where, kernel, own, build)
                    return _given(made.launch, made.laid, own, index)
        raise AssertionError("a kernel does what it was made for")

    def missing(self, where: tuple[Any, ...], own: Laid) -> Laid | None:
        """The kernel that `launch` would build; None if a member serves."""
        with self.lock:
            near = [m for m in self.members if m.where == where]
            served = any(_alike(own, m.laid) for m in near)
            return None if served else next(self._wanted(near, own))

    def _wanted(self, near: Sequence[_Member], own: Laid) -> Iterator[Laid]:
        """The kernels to build for `own`, the first that can be: of several sizes where it is known what varies."""
        if not torch.cuda.is_current_stream_capturing():  # see _given
            yield from (m.kernel for m in near if m.laid.sizes and _alike(own, m.laid))
            if own.plan.minor:
                with contextlib.suppress(Mismatch):
                    yield opened(own)
            for m in near:
                if not m.laid.sizes:
                    with contextlib.suppress(Mismatch):
                        # Where strides turned out less even than those of the first two, nothing more is supposed.
                        first = not any(_alike(m.laid, other.laid) for other in near if other.laid.sizes)
                        yield generalise(m.laid, own, units=first)
        yield own

    def _made(self, where: tuple[Any, ...], kernel: Laid, own: Laid, build: Build) -> _Member:
        launch, choices = build(kernel)
        chosen = replace(kernel, plan=kernel.plan.with_choices(choices))
        made = _Member(where, kernel, chosen, is_short(own), launch)
        self.members = [*self.members[-MAX_VERSIONS:], made]
        return made


def _alike(own: Laid, general: Laid) -> bool:
    """Whether `general` can do what `own` does."""
    with contextlib.suppress(Mismatch):
        sizes_of(general, own)
        return True
    return False


def _given(launch: _Launch, general: Laid, own: Laid, index: int) -> _Launch:
    """The launch of a kernel of several sizes for those of `own`.

    Raises: Mismatch.
    """
    sizes = sizes_of(general, own)
    if not sizes:
        return launch
    if torch.cuda.is_current_stream_capturing():
        raise Mismatch("sizes cannot be sent to the GPU while a CUDA graph is recorded")
    given = torch.tensor(sizes, dtype=torch.int32).to(torch.device("cuda", index))
    return replace(launch, programs=programs_of(general, own), fixed=(*launch.fixed, given.data_ptr()), sizes=given)


class DirectKernel:
    """A KernelPlan that runs on CUDA tensors, without JAX's runtime.

    Args:
      plan: what to compute.
      device: where to run a kernel that has no operands.
      tune: how many of the plan's choices are compiled and timed, by the first call of each layout;
        with 0 or 1 the first that fits is taken.
      family: the kernels of the same function.
    """

    def __init__(
        self, plan: KernelPlan, device: torch.device | None = None, tune: int = 0, family: Family | None = None
    ):
        self.plan, self.names, self.tune = plan, operand_names(plan), tune
        self.family = family or Family()
        self._device = device
        self._programs = grid_size(plan)
        self._outputs = [(s.shape, contiguous(s.shape, s.dtype).strides, torch_dtype(s.dtype)) for s in plan.stores]
        # A product of float32 matrices follows PyTorch's setting.
        self._follows_precision = plan.compute == "f32"
        self._versions: dict[tuple[Any, ...], _Version] = {}
        self._latest: _Latest | None = None
        self._lock = threading.Lock()

    def __call__(self, operands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run on the tensors named by `names`; returns the plan's stores, each a new tensor.

        Raises: Unsupported if the kernel cannot be compiled for, or does not fit on, the device.
        """
        # What another version may be needed for besides layouts, and what the layouts of the last call still are.
        pointers = [t.data_ptr() for t in operands]
        key: tuple[Any, ...] = (
            float32_products() if self._follows_precision else None,
            *[p & (ALIGNMENT - 1) for p in pointers],
        )
        latest = self._latest
        if latest is not None and latest.key == key and latest.alike(*operands):
            version = latest.version
        else:
            version = self._version(key, operands)
        if version.moved:
            operands = _moved(operands, version.moved, version.device)
            pointers = [t.data_ptr() for t in operands]
        index = version.device.index
        if torch.cuda.current_device() == index:
            return self._launched(version, index, pointers)
        with torch.cuda.device(index):
            return self._launched(version, index, pointers)

    def _launched(self, version: _Version, index: int, pointers: list[int]) -> list[torch.Tensor]:
        """The outputs, of a launch on the current device."""
        results = [_empty(*layout) for layout in self._outputs]
        launch, descriptors = version.launch, version.descriptors
        if launch is not None:
            blocks = () if descriptors is None else descriptors.at(pointers)
            pointers += [t.data_ptr() for t in results]
            launch.run(launch.programs, 1, 1, _stream(index), *launch.fixed, *pointers, *blocks)
        return results

    def _version(self, small: tuple[Any, ...], operands: Sequence[torch.Tensor]) -> _Version:
        """The version for these operands, made if there is none; remembered as the latest."""
        layouts = [(t.shape, t.stride(), t.dtype, t.get_device(), is_plain(t)) for t in operands]
        key = (*small, *layouts)
        version = self._versions.get(key) or self._prepare(key, operands)
        self._latest = _Latest(small, _alike_check(operands), version)
        return version

    def lowered(self, operands: Sequence[torch.Tensor]) -> Lowered:
        """The kernel's Triton IR for operands with these shapes, strides, types and addresses. Needs no GPU.

        Raises: Unsupported.
        """
        kernel = laid(self.plan, tuple(map(spec_of, operands)))
        aligned = tuple(alignment(t.data_ptr()) for t in operands)
        return Lowering(kernel, aligned, ENGINE, matmul_precision(False))(self.plan)

    def _place(self, operands: Sequence[torch.Tensor]) -> torch.device:
        device = next((t.device for t in operands if t.is_cuda), self._device)
        if device is None or device.type != "cuda":
            raise Unsupported(self.plan.name, "the direct road needs tensors on an NVIDIA GPU")
        return device if device.index is not None else torch.device("cuda", torch.cuda.current_device())

    def _prepare(self, key: tuple[Any, ...], operands: Sequence[torch.Tensor]) -> _Version:
        with self._lock:
            found = self._versions.get(key)
            if found is not None:
                return found
            device = self._place(operands)
            # PyTorch lets a CPU tensor of no dimensions take part in computations on a GPU.
            moved = tuple(n for n, t in enumerate(operands) if t.device != device or not is_plain(t))
            operands = _moved(operands, moved, device)
            launch = descriptors = None
            if self._programs:
                launch = self._built(operands, device.index)  # type: ignore[arg-type]
                descriptors = launch.descriptors(operands)
            while len(self._versions) >= MAX_VERSIONS:
                del self._versions[next(iter(self._versions))]
            self._versions[key] = version = _Version(device, moved, launch, descriptors)
            return version

    def _built(self, operands: Sequence[torch.Tensor], index: int) -> _Launch:
        """Code for these operands: the family's, or new."""
        aligned, own, where = self._laid(operands, index)

        def build(kernel: Laid) -> tuple[_Launch, Choices]:
            return self._compiled(order(kernel, aligned, index, self.tune), operands, own)

        return self.family.launch(where, own, build, index)

    def ahead(self, operands: Sequence[torch.Tensor]) -> Order | None:
        """What the next call with operands like these will compile; None if nothing.

        Args:
          operands: on the kernel's device, or on none (PyTorch's "meta") where another kernel will make them.
        """
        device = self._place(operands)
        if not self._programs or any(t.device.type not in (device.type, "meta") or not is_plain(t) for t in operands):
            return None
        aligned, own, where = self._laid(operands, device.index)
        kernel = self.family.missing(where, own)
        made = None if kernel is None else order(kernel, aligned, device.index, self.tune)
        return None if made is None or _kept(made, own) is not None else made

    def like_results(self) -> list[torch.Tensor]:
        """Tensors without memory, that lie as what the kernel stores."""
        layouts: Any = self._outputs  # of numbers, no sizes known at launch only
        return [torch.empty_strided(shape, strides, dtype=dtype, device="meta") for shape, strides, dtype in layouts]

    def _laid(self, operands: Sequence[torch.Tensor], index: int) -> tuple[tuple[int, ...], Laid, tuple[Any, ...]]:
        """How operands lie: alignments, with the plan, and what kernels must share to serve each other."""
        aligned = tuple(alignment(t.data_ptr()) for t in operands)
        return aligned, laid(self.plan, tuple(map(spec_of, operands))), (index, float32_products(), aligned)

    def _compiled(self, wanted: Order, operands: Sequence[torch.Tensor], own: Laid) -> tuple[_Launch, Choices]:
        """The kernel as it was kept on disk, or made; and under which choice."""
        from ..kernels.compiler import address

        plan = wanted.kernel.plan
        kept = _kept(wanted, own)
        every = [replace(c, blocks=True, guesses=True) for c in (plan.choices, *plan.others)]
        if kept is not None:
            lowered = Lowered.from_json(kept["lowered"])
            code = _code(kept["code"], lowered, wanted)
            ways = {"blocks": kept["blocks"], "guesses": kept["guesses"]}
            return self._load(lowered, code, wanted.index), replace(every[kept["choice"]], **ways)

        made, launch = self._best(wanted, operands, own)
        choices = made.choices
        number = every.index(replace(choices, blocks=True, guesses=True))
        entry = {"lowered": made.lowered.to_json(), "code": address(launch.kernel), "choice": number}
        entry |= {"blocks": choices.blocks, "guesses": choices.guesses}
        cache.write(wanted.key, {**(cache.read(wanted.key) or {}), _loops(own): entry})
        return launch, made.choices

    def _best(self, wanted: Order, operands: Sequence[torch.Tensor], own: Laid) -> tuple[Fitted, _Launch]:
        """The kernel under the choice that is fastest, or fits first; and its code."""
        from ..kernels.fit import workers

        kernel, index = wanted.kernel, wanted.index

        def loaded(made: Fitted) -> _Launch:
            return self._load(made.lowered, _code(made.cubin.address, made.lowered, wanted), index)

        fitted = self.family.fitted.pop(wanted.key, None) or wanted.fitted()
        if kernel.sizes and not kernel.plan.minor:
            self.family.fitted[wanted.key] = fitted
        if len(fitted) == 1:
            return fitted[0], loaded(fitted[0])
        launches = [*workers().map(loaded, fitted)]
        plans = [replace(kernel, plan=kernel.plan.with_choices(f.choices)) for f in fitted]
        given = [_given(launch, general, own, index) for launch, general in zip(launches, plans, strict=True)]
        with torch.cuda.device(index):
            runs = self._runs(given, operands, index)
            if kernel.sizes and is_short(own):
                best = min(level(runs, LEVEL), key=lambda n: _width(fitted[n].choices))
            else:
                best = fastest(runs)
        return fitted[best], launches[best]

    def _runs(
        self, launches: Sequence[_Launch], operands: Sequence[torch.Tensor], index: int
    ) -> list[Callable[[], None]]:
        """Launches on these operands, of the current device, that may be repeated."""
        pointers = [t.data_ptr() for t in (*operands, *[_empty(*layout) for layout in self._outputs])]
        made = [v.descriptors(operands) for v in launches]
        blocks = [() if d is None else d.at(pointers) for d in made]
        return [
            lambda v=v, b=b: v.run(v.programs, 1, 1, _stream(index), *v.fixed, *pointers, *b)
            for v, b in zip(launches, blocks, strict=True)
        ]

    def _load(self, lowered: Lowered, kernel: Any, index: int) -> _Launch:
        """A kernel that Triton has compiled, loaded on the device `index`."""
        from ..kernels.launcher import load  # triton is not everywhere

        if kernel.metadata.global_scratch_size or kernel.metadata.profile_scratch_size:
            raise Unsupported(lowered.name, "Triton wants scratch memory for it")
        blocks = tuple(zip(lowered.blocks, kernel.metadata.tensordesc_meta or (), strict=True))
        with torch.cuda.device(index):
            try:
                made = load(kernel, *lowered.arguments, index)
            except Exception as e:  # out of shared memory, no C compiler, a driver too old, ...
                raise Unsupported(lowered.name, f"cannot be loaded on {torch.cuda.get_device_name(index)}: {e}") from e
        return _Launch(made.run, lowered.programs, made.fixed, kernel, blocks=blocks)


def _kept(wanted: Order, own: Laid) -> dict[str, Any] | None:
    """What the cache on disk has of a kernel, under its choice for loops as those of `own`; None if nothing."""
    return (cache.read(wanted.key) or {}).get(_loops(own))


def _code(address: dict[str, Any], lowered: Lowered, wanted: Order) -> Any:
    """Triton's CompiledKernel, from where its cache keeps it; compiled again where it is gone.

    Raises: Unsupported.
    """
    from ..kernels.cubin import compile_kernel, kept_kernel  # triton is not everywhere

    return kept_kernel(address) or compile_kernel(lowered, wanted.capability)


def _width(choices: Choices) -> tuple[int, int, bool]:
    """How much a tile computes in vain where a loop ends early; less is less."""
    return math.prod(n for _, n in choices.tiles), choices.stages, choices.guesses


def _loops(own: Laid) -> str:
    return "short" if is_short(own) else "long"


def _moved(operands: Sequence[torch.Tensor], which: tuple[int, ...], device: torch.device) -> list[torch.Tensor]:
    """Operands, `which` of them as the device can read them."""
    return [_readable(t, device) if n in which else t for n, t in enumerate(operands)]


def _readable(t: torch.Tensor, device: torch.device) -> torch.Tensor:
    if t.device.type == "cpu" and not t.dim():
        # A copy would wait for the GPU, and could not be recorded in a CUDA graph.
        return torch.full((), t.item(), dtype=t.dtype, device=device)
    return plain(t.to(device))


def _alike_check(operands: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """Tells whether other tensors have the types, devices, shapes and strides of these; it may err to the safe side."""
    # What TorchDynamo guards tensors with, in one call.
    sizes, strides = [list(t.shape) for t in operands], [list(t.stride()) for t in operands]
    return guards.TensorGuards(*operands, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check  # type: ignore


def current_stream() -> int | None:
    """The address of the current stream, 0 without a GPU; None while a CUDA graph is captured."""
    if not torch.cuda.is_available():
        return 0
    return None if torch.cuda.is_current_stream_capturing() else _stream(torch.cuda.current_device())


def _public_stream(index: int) -> int:
    return torch.cuda.current_stream(index).cuda_stream


def _public_empty(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype, device="cuda")


# The private ones make no Stream object and parse no arguments; what torch.compile generates calls them too. CPU builds
# lack the first.
_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", _public_stream)
_empty: Callable[..., torch.Tensor] = getattr(guards, "_empty_strided_cuda", _public_empty)
