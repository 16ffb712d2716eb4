"""Streaming: dependent reductions over one axis become accumulators of one loop, where the laws allow.

Every sum of exp(a(x) + b(r))·… is kept as Σ exp(a - max a)·… about its own running maximum, so no
exponent is ever positive; what moved is multiplied in afterwards. Where no law takes a moving value
out of a reduction's body, the reduction waits for a later pass over the axis (recomputing, in linear
memory) in which that value is final.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field

from ..build import cast, negate, op, select, substitute
from ..dtype import is_float, is_int
from ..expr import Axis, Const, Expr, Op, Reduce, Ref, const, free_axes, index, raw_op, ref, walk
from ..inner import factors
from ..integer import bounds
from ..laws import Nonseparable, Scope, Term, non_negative, positive_factor, power_of_difference, separate, split_sum
from ..plan import Accumulator, Anchor, Loop, Step, Store, held_dtype
from ..remember import remembered
from .covered import streamed
from .fuse import Fused
from .terms import apart, plain_terms

# Comparisons, and what they are with their sides exchanged; and those that hold where they do not (NaN aside).
_MIRRORED = {"eq": "eq", "ge": "le", "le": "ge"}
_OPPOSITE = {"ne": "eq", "lt": "ge", "gt": "le"}


@dataclass
class _Pass:
    axis: Axis
    steps: list[Step] = field(default_factory=list)


@dataclass
class _Streams:
    """The loops under construction; `home` tells in which pass a reference is computed, `extremes` of what it is the
    max or min."""

    compute: str
    parallel: tuple[Axis, ...]
    passes: list[_Pass] = field(default_factory=list)
    home: dict[str, int] = field(default_factory=dict)
    known: dict[tuple, str] = field(default_factory=dict)
    positive: set[str] = field(default_factory=set)
    extremes: dict[str, tuple[str, Expr]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def parallel_axes(fused: Fused) -> tuple[Axis, ...]:
    """The axes of a kernel's outputs that its expressions depend on, in the order of the outputs."""
    return tuple(dict.fromkeys(a for o in fused.outputs for a in o.axes))


@remembered
def stream(fused: Fused, compute: str) -> tuple[tuple[Loop, ...], tuple[Store, ...], tuple[str, ...]]:
    """Reductions → (loops of accumulators with corrections, stores in their terms, notes)."""
    state = _Streams(compute, parallel_axes(fused))
    final: dict[Expr, Expr] = {}
    stores = []
    for out in fused.outputs:
        for r in streamed(out.expr, state.parallel):
            if r not in final:
                final[r] = _place(r, substitute(r.body, {}, final), state)
        stores.append(Store(out.name, out.axes, out.dtype, substitute(out.expr, {}, final), out.dims))
    loops = tuple(Loop(p.axis, tuple(p.steps)) for p in state.passes)
    return loops, tuple(stores), tuple(state.notes)


def _place(r: Reduce, body: Expr, state: _Streams) -> Expr:
    """Put a reduction into the earliest pass that can hold it; its final value in terms of references."""
    refs = {n.name for n in walk(body) if isinstance(n, Ref)}
    first = max((state.home[n] for n in refs), default=0)
    refused = ""
    for n in itertools.count(first):
        if n == len(state.passes):
            state.passes.append(_Pass(Axis(f"j{n}", r.axis.extent)))
        loop = state.passes[n]
        if loop.axis.extent != r.axis.extent:
            continue
        running = frozenset(name for name in refs if state.home[name] == n)
        scope = Scope(loop.axis, running, state.compute)
        try:
            value = _reduce(r, substitute(body, {r.axis: index(loop.axis)}), n, scope, state)
        except Nonseparable as reason:
            refused = f"a {r.kind} over {r.axis.extent} takes another pass: {reason}"
            continue
        if refused:
            state.notes.append(refused)
        return value
    raise AssertionError("unreachable")


def _reduce(r: Reduce, body: Expr, n: int, scope: Scope, state: _Streams) -> Expr:
    if scope.moves(body) and (found := _where_extreme(r, body, n, scope, state)) is not None:
        return found
    if r.kind == "sum":
        if scope.moves(body):
            terms = [part for t in separate(body, scope) for part in apart(t, r.dtype, scope)]
        else:
            terms = plain_terms(body, r.dtype, scope)
        values = [_term(t, r, n, scope, state) for t in terms]
        out = values[0]
        for v in values[1:]:
            out = scope.op("add", out, v)
        return out
    if r.kind in ("max", "min"):
        return _extreme(r, body, n, scope, state)
    if scope.moves(body):
        raise Nonseparable(f"`{r.kind}` of a moving value")
    return _accumulate(r.kind, body, r.dtype, None, None, n, state)


def _term(t: Term, r: Reduce, n: int, scope: Scope, state: _Streams) -> Expr:
    """The sum of one term over the loop axis, as final value."""
    scale = t.hoisted
    anchor: tuple[Ref, Expr] | None = None
    other: Ref | None = None
    weight: Expr | None = None
    if t.exponent is not None:
        # exp(c·x - c·max x) as a power of two: one multiplication and one instruction on a GPU.
        core, factor = positive_factor(t.exponent)
        serving = _peak_of_all(t.exponent, t.offset, n, state)
        peak, kept = serving or (_accumulate("max", core, scope.dtype, None, None, n, state), None)
        assert isinstance(peak, Ref)
        if kept is not None:
            core, factor = state.extremes[peak.name][1], 1.0
        anchor = peak, scope.const(factor * math.log2(math.e))
        guard = _guard(peak, scope.dtype)
        weight = power_of_difference(cast(core, scope.dtype), guard, factor, scope.dtype)
        weight = weight if kept is None else select(kept, weight, scope.const(0.0))
        offset, other = _from_reference(peak, factor, t.offset, scope, state)
        scale = scope.op("mul", scale, scope.op("exp", offset))
    elif t.offset is not None:
        scale = scope.op("mul", scale, scope.op("exp", t.offset))
    for f in t.factors:
        weight = f if weight is None else op("mul", weight, f, dtype=f.dtype)
    if t.rounded and weight is not None:
        weight = scope.op("rounded", weight)
        weight = weight if t.last is None else op("mul", weight, t.last, dtype=t.last.dtype)
    value = _shifted(t, weight, anchor, r, n, scope, state)
    value = scope.op("mul", scale, value)
    value = _chosen(value, t, anchor[0] if anchor else None, other, n, scope, state)
    for gate in t.gates:
        value = select(gate, value, scope.const(0.0))
    return value


def _peak_of_all(exponent: Expr, offset: Expr | None, n: int, state: _Streams) -> tuple[Ref, Expr] | None:
    """The running maximum that an offset takes off, of which the exponent is what a mask keeps, and the mask: weights
    that it filled with a number before the softmax, and with 0 behind it. One reference serves all of them."""
    if not isinstance(exponent, Op) or exponent.name != "select" or offset is None:
        return None
    mask, _, low = exponent.args
    if not isinstance(low, Const) or low.value != -math.inf:
        return None
    for c, e in _scaled_terms(offset, 1.0):
        if c == -1.0 and isinstance(e, Ref) and _is_maximum(e, state) and state.home[e.name] == n:
            _, update = state.extremes[e.name]
            # (Where the mask filled with -inf, both are one.)
            if update is not exponent and select(mask, update, low) is exponent:
                return e, mask
    return None


def _chosen(value: Expr, t: Term, peak: Ref | None, other: Ref | None, n: int, scope: Scope, state: _Streams) -> Expr:
    """`value`, 0 where none of its elements was chosen, whatever has become of references.

    Args:
      peak: the running maximum that its exponents are taken about, which is -inf there.
      other: the one that their offset takes off. Where that is -inf, or the offset infinite, what was chosen is NaN.
    """
    if not t.chosen:
        return value
    zero, found = scope.const(0.0), None
    if t.kept and (peak is None or t.offset is not None):
        kept = functools.reduce(lambda a, b: op("and", a, b, dtype="bool"), t.kept)
        found = _accumulate("any", kept, "bool", None, None, n, state)
    if peak is None:
        return value if found is None else select(found, value, zero)
    if found is not None and t.offset is not None:
        least, most = scope.const(-math.inf), scope.const(math.inf)
        finite = op("lt", t.offset, most, dtype="bool") if other is None else op("ne", other, least, dtype="bool")
        zero = select(op("and", found, negate(finite), dtype="bool"), scope.const(math.nan), zero)
    return select(op("eq", peak, scope.const(-math.inf), dtype="bool"), zero, value)


def _from_reference(
    peak: Ref, factor: float, offset: Expr | None, scope: Scope, state: _Streams
) -> tuple[Expr, Ref | None]:
    """What is added to exponents that are taken about a running maximum: that, and their own offset; and the maximum
    that the offset takes off, if there is one."""
    if offset is not None and (moved := _cancelled(peak, factor, offset, scope, state)) is not None:
        return moved
    if offset is None:
        return scope.op("mul", _guard(peak, scope.dtype), scope.const(factor)), None
    # Where nothing was seen, all sums are 0: they stay so whatever is finite, however large (a maximum that is clamped
    # from below, at -10⁴), and become NaN where the offset is infinite, as PyTorch's `-inf + inf`.
    nothing = op("eq", peak, scope.const(-math.inf), dtype="bool")
    most = scope.const(math.inf)
    small = scope.op("min", offset, scope.const(0.0))
    unseen = select(op("eq", offset, most, dtype="bool"), most, small)
    reference = scope.op("mul", peak, scope.const(factor))
    return select(nothing, unseen, scope.op("add", reference, offset)), None


def _cancelled(peak: Ref, factor: float, offset: Expr, scope: Scope, state: _Streams) -> tuple[Expr, Ref] | None:
    """`peak · factor + offset`, and the running maximum of which the offset takes off so much; None if it does not.

    Of a row that a mask made large (-10⁹, the least number) both are large, and cancel: they are subtracted from each
    other as they are, before anything is multiplied by, or added to, what is left.
    """
    terms = dict[Expr, float]()
    for c, e in _scaled_terms(offset, 1.0):
        terms[e] = terms.get(e, 0.0) + c
    other = next((e for e, c in terms.items() if c == -factor and _is_maximum(e, state)), None)
    if not isinstance(other, Ref):
        return None
    moved = scope.op("mul", scope.op("sub", peak, other), scope.const(factor))
    for e, c in terms.items():
        if e is not other:
            moved = scope.op("add" if c > 0 else "sub", moved, scope.op("mul", e, scope.const(abs(c))))
    return moved, other


def _scaled_terms(e: Expr, by: float) -> list[tuple[float, Expr]]:
    """The terms of a sum, and by what number each is multiplied."""
    if isinstance(e, Op) and e.name == "neg":
        return _scaled_terms(e.args[0], -by)
    if isinstance(e, Op) and e.name in ("add", "sub"):
        return [*_scaled_terms(e.args[0], by), *_scaled_terms(e.args[1], by if e.name == "add" else -by)]
    if isinstance(e, Op) and e.name == "mul" and isinstance(e.args[1], Const):
        return _scaled_terms(e.args[0], by * float(e.args[1].value))
    return [(by, e)]


def _is_maximum(e: Expr, state: _Streams) -> bool:
    return isinstance(e, Ref) and state.extremes.get(e.name, ("", e))[0] == "max"


def _shifted(
    t: Term, weight: Expr | None, anchor: tuple[Ref, Expr] | None, r: Reduce, n: int, scope: Scope, state: _Streams
) -> Expr:
    """Σ weight · Π (a + b) about the running b's, moved to their final values (binomial expansion)."""
    if weight is None and not t.shifts:
        return scope.const(float(r.axis.extent))
    anchors = [_anchor(s.moving, n, scope, state) for s in t.shifts]
    which = range(len(t.shifts))
    sums: dict[tuple[int, ...], Expr] = {}
    for size in range(len(t.shifts) + 1):
        for subset in itertools.combinations(which, size):
            # Without a weight the empty product counts: what moves a sum is the number of indices seen so far.
            update = weight if weight is not None else scope.const(1.0)
            for k in subset:
                update = scope.op("mul", update, scope.op("add", t.shifts[k].varying, anchors[k]))

            def moved(name: str, subset: tuple[int, ...] = subset) -> Expr:
                own = ref(f"{name}.old", _axes_of(update, state), scope.dtype)  # noqa: B023
                total: Expr = own
                for smaller, value in list(sums.items()):
                    if set(smaller) < set(subset):
                        term: Expr = _old(value)
                        for k in set(subset) - set(smaller):
                            step = scope.op("sub", anchors[k], _old(anchors[k]))
                            term = scope.op("mul", term, step)
                        total = scope.op("add", total, term)
                return total

            correct = moved if subset else None
            sums[subset] = _accumulate("sum", update, r.dtype, anchor, correct, n, state)
    value = sums[tuple(which)]
    for subset, part in sums.items():
        if len(subset) < len(t.shifts):
            for k in set(which) - set(subset):
                part = scope.op("mul", part, scope.op("sub", t.shifts[k].moving, anchors[k]))
            value = scope.op("add", value, part)
    return value


def _old(e: Expr) -> Expr:
    """The value of a reference before the current tile."""
    if isinstance(e, Ref):
        return ref(f"{e.name}.old", e.axes, e.dtype)
    return e


def _anchor(value: Expr, n: int, scope: Scope, state: _Streams) -> Expr:
    key = ("anchor", n, value)
    if key not in state.known:
        name = f"c{sum(k[0] == 'anchor' for k in state.known)}"
        state.known[key] = name
        state.home[name] = n
        state.passes[n].steps.append(Anchor(name, _axes_of(value, state), value))
    return ref(state.known[key], _axes_of(value, state), scope.dtype)


def _where_extreme(r: Reduce, body: Expr, n: int, scope: Scope, state: _Streams) -> Expr | None:
    """A reduction of what stands where something equals its running extremum (positions, how many, a sum over them):
    once the extremum moves, nothing that was seen before equals it. None if the body is something else.
    """
    parts = factors(body) if r.kind == "sum" else [body]
    moving = [f for f in parts if scope.varies(f) and scope.moves(f)]
    found = _chosen_at(moving[0], scope, state) if len(moving) == 1 else None
    if found is None:
        return None
    chosen, peak = found
    _, then, outside = chosen.args
    if not isinstance(outside, Const) or not _is_neutral(outside, then, r.kind):
        return None
    if scope.moves(then) or peak.name not in scope.running:
        return None
    inside = [chosen if f is moving[0] else f for f in parts if scope.varies(f)]
    update = functools.reduce(lambda a, b: op("mul", a, b, dtype=r.dtype), inside)
    before = ref(f"{peak.name}.old", peak.axes, peak.dtype)
    same = op("or", op("eq", before, peak, dtype="bool"), op("isnan", before, dtype="bool"), dtype="bool")

    def kept(name: str) -> Expr:
        own = ref(f"{name}.old", _axes_of(update, state), held_dtype(r.kind, update, state.compute))
        return select(same, own, const(outside.value, own.dtype))

    value = _accumulate(r.kind, update, r.dtype, None, kept, n, state)
    state.notes.append(f"{getattr(value, 'name', '')} begins anew when {peak.name} moves")
    for f in parts:
        if not scope.varies(f):
            value = scope.op("mul", value, f)
    return value


def _is_neutral(outside: Const, then: Expr, kind: str) -> bool:
    """Whether a reduction of `then` somewhere and of `outside` elsewhere is that of `then`, if that is anywhere."""
    if kind == "sum":
        return outside.value == 0
    span = bounds(then) if is_int(then.dtype) else None
    if kind == "min":
        return outside.value == math.inf or span is not None and span[1] <= outside.value
    return kind == "max" and (outside.value == -math.inf or span is not None and span[0] >= outside.value)


def _chosen_at(e: Expr, scope: Scope, state: _Streams) -> tuple[Op, Ref] | None:
    """`e` as a choice by what equals its running extremum, and that; None if it is none."""
    if not isinstance(e, Op) or e.name != "select":
        return None
    test, then, other = e.args
    opposite = negate(test)
    if isinstance(test, Op) and test.name in _OPPOSITE:
        opposite = op(_OPPOSITE[test.name], *test.args, dtype="bool")
    for where, chosen, rest in ((test, then, other), (opposite, other, then)):
        tests = where.args if isinstance(where, Op) and where.name == "or" else (where,)
        same = [_equals_extreme(t, state) for t in tests]
        found = next((s for s in same if s is not None), None)
        others = [t for t, s in zip(tests, same, strict=True) if s is None]
        if found is not None and not any(map(scope.moves, others)):
            whole = functools.reduce(lambda a, b: op("or", a, b, dtype="bool"), (found[0], *others))
            made = raw_op("select", (whole, chosen, rest), e.dtype)
            assert isinstance(made, Op)
            return made, found[1]
    return None


def _equals_extreme(test: Expr, state: _Streams) -> tuple[Expr, Ref] | None:
    """`x == max x`, or `x >= max x`, without factors; and the reference to the running maximum. None if it is none."""
    if not isinstance(test, Op) or test.name not in _MIRRORED:
        return None
    for name, x, peak in ((test.name, *test.args), (_MIRRORED[test.name], *test.args[::-1])):
        core, factor = peak.args if isinstance(peak, Op) and peak.name == "mul" else (peak, None)
        kind, update = state.extremes.get(core.name, ("", None)) if isinstance(core, Ref) else ("", None)
        own = positive_factor(x) if factor is not None else (x, None)
        same = own[0] is update and (factor is None or isinstance(factor, Const) and factor.value == own[1])
        if same and name in ("eq", {"max": "ge", "min": "le"}[kind]):
            assert isinstance(core, Ref)
            return op("eq", own[0], core, dtype="bool"), core
    return None


def _extreme(r: Reduce, body: Expr, n: int, scope: Scope, state: _Streams) -> Expr:
    """max or min of a body: + distributes, non-negative factors commute, exp is increasing."""
    if not scope.moves(body):
        return _peak(r, body, n, scope, state)
    name = getattr(body, "name", "")
    args: tuple[Expr, ...] = getattr(body, "args", ())
    if name == "exp":
        return scope.op("exp", _extreme(r, args[0], n, scope, state))  # type: ignore
    if name in ("mul", "div"):
        for k in (0, 1) if name == "mul" else (0,):
            factor = args[1 - k]
            if not scope.varies(factor) and non_negative(factor, frozenset(state.positive)):
                return scope.op(name, _extreme(r, args[k], n, scope, state), factor)
    varying, moving = split_sum(body, scope)
    assert varying is not None
    peak = _peak(r, varying, n, scope, state)
    if moving is None:
        return peak
    core, factor = positive_factor(peak)
    moved = _cancelled(core, factor, moving, scope, state) if isinstance(core, Ref) else None
    return scope.op("add", peak, moving) if moved is None else moved[0]


def _peak(r: Reduce, body: Expr, n: int, scope: Scope, state: _Streams) -> Expr:
    """max or min of a body that does not move, a positive constant factor taken out of it."""
    core, factor = positive_factor(body) if is_float(body.dtype) and r.kind == "max" else (body, 1.0)
    peak = _accumulate(r.kind, core, r.dtype, None, None, n, state)
    return peak if factor == 1.0 else scope.op("mul", peak, scope.const(factor))


def _accumulate(
    kind: str,
    update: Expr,
    dtype: str,
    anchor: tuple[Ref, Expr] | None,
    moved: Callable[[str], Expr] | None,
    n: int,
    state: _Streams,
) -> Expr:
    """The reference to the accumulator with this update, made if it is new.

    Args:
      anchor: the maximum its weights are taken about, and their base as a factor of the exponent of 2.
      moved: its old value after the references of its shifts moved, given its name.
    """
    axes = _axes_of(update, state)
    held = held_dtype(kind, update, state.compute)
    key = (kind, n, update, dtype, anchor, moved is not None)
    if key in state.known:
        return ref(state.known[key], axes, held)
    letter = "m" if kind in ("max", "min") else "a"
    name = f"{letter}{sum(v[0] == letter for v in state.known.values())}"
    state.known[key] = name
    state.home[name] = n
    if kind in ("max", "min"):
        state.extremes[name] = kind, update
    if kind == "sum" and non_negative(update, frozenset(state.positive)):
        state.positive.add(name)
    old = moved(name) if moved else None
    if anchor is not None:
        peak, base = anchor
        before = ref(f"{peak.name}.old", peak.axes, state.compute)
        own = old if old is not None else ref(f"{name}.old", axes, held)
        old = op("mul", own, _factor(before, peak, base, state.compute), dtype=held)
        state.notes.append(f"{name} is taken about {peak.name}, and multiplied when {peak.name} moves")
    state.passes[n].steps.append(Accumulator(name, kind, axes, update, dtype, old))
    return ref(name, axes, held)


def _factor(before: Expr, after: Expr, base: Expr, dtype: str) -> Expr:
    """2 ** (base · (before - after)), 0 where nothing finite has been seen before."""
    difference = op("sub", before, _guard(after, dtype), dtype=dtype)
    return op("exp2", op("mul", difference, base, dtype=dtype), dtype=dtype)


def _guard(peak: Expr, dtype: str) -> Expr:
    """A maximum as reference: 0 in place of -inf, so that -inf - reference stays -inf."""
    low = const(-math.inf, dtype)
    return select(op("eq", peak, low, dtype="bool"), const(0.0, dtype), peak)


def _axes_of(e: Expr, state: _Streams) -> tuple[Axis, ...]:
    free = free_axes(e)
    return tuple(a for a in state.parallel if a in free)
