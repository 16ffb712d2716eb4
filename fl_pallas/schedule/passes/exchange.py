"""Sums exchanged: Σⱼ p(i, j) · Σ_d g(i, d) · v(j, d) = Σ_d g(i, d) · Σⱼ p(i, j) · v(j, d), the inner sum being known.

A backward pass asks for the left side (the inner product of a row of weights with its gradient); the forward pass has
made Σⱼ p·v, and what was a loop over j becomes a short sum over d. FlashAttention-2 (arXiv 2307.08691, section 2.3)
has this as a step of its own; here it is a law of sums.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..build import dimensions, negate, op, reduce, rewrite, row_major, select, substitute, with_children
from ..dtype import is_float, itemsize
from ..expr import (
    Axis,
    Const,
    Expr,
    Index,
    Load,
    Op,
    Reduce,
    children,
    const,
    free_axes,
    index,
    load,
    loads,
    reductions,
    sources,
    walk,
)
from ..integer import floordiv, from_linear, is_inside, linear
from ..laws import is_narrow
from ..program import Program, Value
from ..remember import remembered
from .fuse import Fused, Output
from .residual import with_residuals
from .resolve_views import inlined
from .split_reductions import split, split_reductions

# Ways of pairing the factors of two products that are looked at.
MAX_PAIRINGS = 120
# Terms of a sum that are looked at.
MAX_TERMS = 64
Binding = dict[Axis, Expr]
_Alike = dict[tuple[Expr, Expr], int]
_Bound = frozenset[tuple[Axis, Expr]]


def exchange(
    groups: tuple[Fused, ...], program: Program, facts: Sequence[Value], name: str, compute: str
) -> tuple[tuple[Fused, ...], tuple[Fused, ...]]:
    """Before: `sum[j](p(i, j) * sum[d](g[i, d] * v[j, d]))` in one of the kernels. After: a load of what a kernel of
    its own stores, `sum[d](g[i, d] * out[i, d])`.

    Sums over tensors that were put together are known whole; and in their parts, where gradients have those. All that
    is left of them falls into parts here.

    Args:
      program: what the groups are of; its other values may be parts of what is known.
      facts: operands of which is known what they are, `expr` in terms of other operands.
      name: begins the names of what the first kernels store.
      compute: the type that kernels compute in.

    Returns: those kernels, and the others.
    """
    first, groups, near = _exchange(groups, program, facts, name, compute)
    first, groups = (tuple(map(split_reductions, kernels)) for kernels in (first, groups))
    facts = [f if f.expr is None else replace(f, expr=split(f.expr)) for f in facts]
    of_parts, groups, near_parts = _exchange(groups, program, facts, f"{name}_s", compute)
    near = {stands: split(e) for stands, e in near.items()} | near_parts
    return (*first, *of_parts), with_residuals(groups, near)


def _exchange(
    groups: tuple[Fused, ...], program: Program, facts: Sequence[Value], name: str, compute: str
) -> tuple[tuple[Fused, ...], tuple[Fused, ...], dict[Load, Expr]]:
    """`exchange` of sums as they are; and the sums that are near what is loaded in their place."""
    found = (r for g in groups for o in g.outputs for r in reductions(o.expr))
    # In the dimensions of the gradient first: those are what the user sees, more often than not.
    known = sorted((k for f in facts for k in _known(f)), key=lambda k: len(k.axes) > len(k.place))
    if not known:
        return (), groups, {}
    sums = _Sums(known, name, compute)
    pointwise = _written_out(groups, program)
    made: dict[str, Value] = {}
    told = {r: sums.of(inlined(r, pointwise, made)) for r in dict.fromkeys(found)}
    held: dict[Expr, Expr] = {r: e for r, e in told.items() if e is not None}
    if not held:
        return (), groups, {}
    first: dict[tuple[Axis, ...], list[Output]] = {}
    asked = {n.source for e in held.values() for n in loads(e)}
    for o in sums.made.values():
        if o.name in asked:  # and not for a sum another term of which is not known
            first.setdefault(o.axes, []).append(o)
    rest = tuple(Fused(tuple(replace(o, expr=substitute(o.expr, {}, held)) for o in g.outputs)) for g in groups)
    whole = {f.name: f for f in facts if isinstance(f.expr, Reduce)}
    near = {e: _by_own_sum(r, whole) for r, e in held.items() if isinstance(e, Load) and isinstance(r, Reduce)}
    return tuple(Fused(tuple(outputs)) for outputs in first.values()), rest, near


def short_first(first: tuple[Fused, ...], rest: tuple[Fused, ...]) -> tuple[tuple[Fused, ...], tuple[Fused, ...]]:
    """What `exchange` returns, with kernels that sum what other sums make (a row's, of what its weights averaged)
    among the others, which have those sums too."""
    short = tuple(kernel for kernel in first if not _is_nested(kernel))
    return short, (*(kernel for kernel in first if _is_nested(kernel)), *rest)


def _is_nested(kernel: Fused) -> bool:
    return any(reductions(r.body) for o in kernel.outputs for r in reductions(o.expr))


def _by_own_sum(r: Reduce, made: Mapping[str, Value]) -> Expr:
    """`sum[j](g * x / l)`, with l the sum of x that another kernel made, as `sum[j](g * x) / sum[j](x)`.

    Scores are rounded in one way here and in another there (a product and a sum at once, or in turn). Weights that add
    up to 1 + ε would leave ε of the sum in each row; of 16 bits more than that is rounded off.
    """
    for n in walk(r.body) if not is_narrow(r) else ():
        if not isinstance(n, Op) or n.name != "div" or not isinstance(n.args[1], Load):
            continue
        x, (f, at) = n.args[0], (made.get(n.args[1].source), n.args[1].index)
        below = reduce("sum", r.axis, x, r.dtype)
        if f is not None and f.expr is not None and substitute(f.expr, dict(zip(f.axes, at, strict=True))) is below:
            undivided = _exchanging_factor(r.body, n, x)
            if undivided is not None:
                return op("div", reduce("sum", r.axis, undivided, r.dtype), below, dtype=r.dtype)
    return r


def _exchanging_factor(e: Expr, factor: Expr, other: Expr) -> Expr | None:
    """`e`, a product, with another factor in the place of one; None if that is none (of an exponent, weights are none).

    It may be twice: weights squared are divided once here.
    """
    if e is factor:
        return other
    if not isinstance(e, Op) or e.name not in ("mul", "div", "neg", "select"):
        return None
    at = [1] if e.name == "select" else range(2) if e.name == "mul" else [0]
    if e.name == "select" and not (isinstance(e.args[2], Const) and e.args[2].value == 0):
        return None
    for n in at:
        made = _exchanging_factor(e.args[n], factor, other)
        if made is not None:
            return with_children(e, (*e.args[:n], made, *e.args[n + 1 :]))
    return None


def _written_out(groups: tuple[Fused, ...], program: Program) -> dict[str, Value]:
    """The values that are known element by element of what the kernels load, or of tensors that are there in any case:
    to load anything else, PyTorch would have to compute it.
    """
    there = {n.source for g in groups for o in g.outputs for n in loads(o.expr)}
    there |= {v.name for v in program.values if v.expr is None}
    found: dict[str, Value] = {}
    for v in program.values:
        if v.expr is not None and not reductions(v.expr) and there.issuperset(v.reads):
            there.add(v.name)
            found[v.name] = v
    return found


@dataclass(frozen=True)
class _Known:
    """A sum that an operand holds at `place`, over `axes`: those of the operand, or several that one of it flattens."""

    name: str
    dtype: str
    axes: tuple[Axis, ...]
    sum: Reduce
    place: tuple[Expr, ...]


@remembered
def _known(fact: Value) -> tuple[_Known, ...]:
    """What a fact says: in its own axes, and in those that any of them flatten. (A mask of blocks takes quotients of
    rows too, which flatten nothing.) Nothing where it rounds more than its gradient may."""
    if fact.expr is None or rounds_away(fact):
        return ()
    found: list[_Known] = []
    for parts in itertools.product(*(dict.fromkeys(((a,), _parts(a, fact.expr))) for a in fact.axes)):
        mapping = {a: row_major(map(index, p), p) for a, p in zip(fact.axes, parts, strict=True)}
        expr = substitute(fact.expr, mapping)
        if isinstance(expr, Reduce) and expr.kind == "sum":
            place = tuple(mapping[a] for a in fact.axes)
            found.append(_Known(fact.name, fact.dtype, tuple(a for p in parts for a in p), expr, place))
    return tuple(found)


def rounds_away(fact: Value) -> bool:
    """Whether a fact is kept in 16 bits, and made by weights of products of more bits alone: gradients of those have
    32 bits, and PyTorch's row sums the weights' own."""
    products = [n for r in reductions(fact.expr) for n in reductions(r.body)] if fact.expr is not None else []
    scores = [n for n in products if n.kind == "sum" and not reductions(n.body)]
    return itemsize(fact.dtype) == 2 and bool(scores) and all(itemsize(n.dtype) > 2 for n in scores)


def _parts(axis: Axis, e: Expr) -> tuple[Axis, ...]:
    """The axes that `axis` flattens, by the quotients and remainders that `e` takes of it; itself if there are none."""
    divisions = (n.args for n in walk(e) if isinstance(n, Op) and n.name in ("floordiv", "mod"))
    steps = {int(n.value) for whole, n in divisions if whole is index(axis) and isinstance(n, Const)}
    return tuple(dimensions(axis, steps))


@dataclass(frozen=True)
class _Sums:
    """Sums that are known.

    Attributes:
      known: what operands hold.
      name: begins the names of what is made of it.
      compute: the type of that.
      made: what has been made so far, by what it is.
      asked: what has become of each sum that was asked for.
    """

    known: Sequence[_Known]
    name: str
    compute: str
    made: dict[Expr, Output] = field(default_factory=dict)
    asked: dict[Expr, Expr | None] = field(default_factory=dict)

    def of(self, r: Expr) -> Expr | None:
        """`r` by loads of what is made of known sums: whole, or term by term; None if it is not known."""
        return self._of(r, [MAX_TERMS])

    def _of(self, r: Expr, left: list[int]) -> Expr | None:
        """`r`, a term of what was asked for, of which so many more may be looked at: products of sums have as many as
        the product of their lengths."""
        if not isinstance(r, Reduce) or r.kind != "sum":
            return None
        if r not in self.asked and left[0]:
            left[0] -= 1
            short = next((s for k in self.known if (s := _exchanged(r, k)) is not None), None)
            self.asked[r] = self._term_by_term(r, left) if short is None else self._loaded(*short)
        return self.asked.get(r)

    def _loaded(self, short: Reduce, place: Binding, others: tuple[Expr, ...]) -> Expr:
        """A load of what a kernel of its own stores, which makes `short` of the axes of `place`; times `others`."""
        own = {a: Axis(f"x{n}", a.extent) for n, a in enumerate(place)}
        # As it is stored, so that gradients whose sums PyTorch would round, and others, share it.
        expr = reduce(short.kind, short.axis, short.body, self.compute)
        expr = substitute(expr, {a: index(b) for a, b in own.items()})
        stored = Output(f"{self.name}_d{len(self.made)}", tuple(own.values()), self.compute, expr)
        result: Expr = load(self.made.setdefault(expr, stored).name, tuple(place.values()), self.compute)
        for e in others:
            result = op("mul", result, e, dtype=self.compute)
        return result

    def _term_by_term(self, r: Reduce, left: list[int]) -> Expr | None:
        """Σ (a + b) p as Σ a p + Σ b p, and, of heads put together, Σ (a where c, else 0) p as Σ a p where c."""
        factors = _factors(r.body)
        for n, e in enumerate(factors):
            rest = (*factors[:n], *factors[n + 1 :])
            if isinstance(e, Op) and e.name == "add" and is_float(e.dtype):
                terms: list[Expr] = []
                for a in e.args:
                    term = self._of(_product(r, (a, *rest)), left)
                    if term is None:
                        return None
                    terms.append(term)
                return op("add", *terms, dtype=self.compute)
            if isinstance(e, Op) and e.name == "select" and r.axis not in free_axes(e.args[0]):
                condition, a, other = children(_canonical(e))
                if isinstance(other, Const) and other.value == 0:
                    there, back = _where(condition)
                    known = self._of(substitute(_product(r, (a, *rest)), there), left)
                    if known is None:
                        return None
                    return select(condition, substitute(known, back), const(0.0, self.compute))
        return None


def _product(r: Reduce, factors: Sequence[Expr]) -> Expr:
    body, *rest = factors
    for e in rest:
        body = op("mul", body, e, dtype=r.body.dtype)
    return reduce("sum", r.axis, body, r.dtype)


def _where(condition: Expr) -> tuple[Binding, Binding]:
    """What an index is where a condition holds that asks for its remainder, in terms of the quotient; and the quotient
    in terms of the index. Nothing for other conditions."""
    if isinstance(condition, Op) and condition.name == "eq":
        of, rest = condition.args
        if isinstance(of, Op) and of.name == "mod" and isinstance(rest, Const):
            i, by = of.args
            if isinstance(i, Index) and isinstance(by, Const) and i.axis.extent % by.value == 0:
                n = int(by.value)
                quotient = Axis(f"{i.axis.name}_{n}", i.axis.extent // n)
                whole = from_linear(({index(quotient): n}, int(rest.value)), i.dtype)
                return {i.axis: whole}, {quotient: floordiv(i, n, i.dtype)}
    return {}, {}


def _exchanged(r: Expr, known: _Known) -> tuple[Reduce, Binding, tuple[Expr, ...]] | None:
    """`r` as a sum over an axis of what is known; and its free axes, in the order of those, with the index that `r` has
    for each (a query's own, or along a relative shift); and what is left to multiply it by. None if it is none.
    """
    if not isinstance(r, Reduce) or r.kind != "sum" or r.axis.extent != known.sum.axis.extent:
        return None
    if not sources(known.sum) <= sources(r):
        return None
    own = _apart(_factors(r.body), r.axis)
    for n, inner in enumerate(own):
        if not isinstance(inner, Reduce) or inner.kind != "sum":
            continue
        parts = _factors(inner.body)
        if not any(r.axis in free_axes(p) for p in parts):
            continue
        found = _matched(known.sum, (*own[:n], *own[n + 1 :], *parts), r.axis)
        if found is None:
            continue
        binding, left = found
        still = [p for p in left if inner.axis in free_axes(p)]
        others = tuple(p for p in left if inner.axis not in free_axes(p))
        if not still:
            continue
        if any(a.extent > 1 and a not in binding for a in known.axes):
            continue
        bound = {a: binding.get(a, index(a)) for a in known.axes}
        # Of heads put together, and of features in parts, some lie beyond those that are known. (Where a relative shift
        # leads beyond, a mask does not look.)
        if any(
            (len(free_axes(i)) < 2 or inner.axis in free_axes(i)) and not is_inside(i, a.extent)
            for a, i in bound.items()
        ):
            continue
        # Features of two axes that are summed as one stay parts of that sum.
        given = {a: i for a, i in bound.items() if isinstance(i, Op) and inner.axis not in free_axes(i)}
        computed: dict[Expr, Expr] = {i: index(a) for a, i in given.items()}
        bound = {a: computed.get(i, i) for a, i in bound.items()}
        body: Expr = load(known.name, tuple(substitute(i, bound) for i in known.place), known.dtype)
        turned = {b: e for a, i in given.items() for b, e in _solved(i, a).items()}
        for p in still:
            body = op("mul", substitute(p, turned, computed), body, dtype=inner.body.dtype)
        short = reduce("sum", inner.axis, body, r.body.dtype)
        outer = [i for i in bound.values() if isinstance(i, Index) and i.axis != inner.axis]
        place: Binding = {i.axis: given.get(i.axis, i) for i in outer}
        if isinstance(short, Reduce) and frozenset(place) == free_axes(short):
            return short, place, others
    return None


def _solved(i: Expr, axis: Axis) -> Binding:
    """The one axis of `i` in terms of `axis`, the index along which is `i` (reversed, along a running sum's gradient);
    nothing if there are several.
    """
    terms, constant = linear(i)
    ((e, step),) = terms.items() if len(terms) == 1 else ((i, 0),)
    if not isinstance(e, Index) or abs(step) != 1:
        return {}
    return {e.axis: from_linear(({index(axis): step}, -step * constant), i.dtype)}


@remembered
def _factors(e: Expr) -> tuple[Expr, ...]:
    if isinstance(e, Op) and e.name == "mul":
        return (*_factors(e.args[0]), *_factors(e.args[1]))
    if isinstance(e, Op) and e.name == "div" and is_float(e.dtype) and not isinstance(e.args[0], Const):
        return (*_factors(e.args[0]), op("div", const(1.0, e.dtype), e.args[1], dtype=e.dtype))
    if isinstance(e, Op) and e.name == "neg":
        return (const(-1.0, e.dtype), *_factors(e.args[0]))
    return (e,)


def _apart(factors: Iterable[Expr], axis: Axis) -> tuple[Expr, ...]:
    """Factors, of which those that a mask along `axis` makes 0 are what is left and the mask: a program masks weights
    behind the softmax, and their gradient is what is masked then, by the same."""
    found: list[Expr] = []
    for f in factors:
        e = _canonical(f) if isinstance(f, Op) and f.name == "select" and is_float(f.dtype) else f
        if isinstance(e, Op) and e.name == "select" and axis in free_axes(e.args[0]):
            condition, kept, other = e.args
            parts = _factors(kept)
            if isinstance(other, Const) and other.value == 0 and all(_is_finite(p, axis) for p in parts):
                found += [*parts, condition]
                continue
        found.append(f)
    return tuple(found)


def _is_finite(e: Expr, axis: Axis) -> bool:
    """Whether what a mask makes 0 is a weight of a softmax, or a sum of products: of an infinity that another factor
    is masked beside, 0 times as much is NaN in PyTorch."""
    weight = isinstance(e, Op) and e.name == "exp" and isinstance(e.args[0], Op) and e.args[0].name == "sub"
    return weight or axis not in free_axes(e) or isinstance(e, Reduce)


def _matched(known: Reduce, factors: tuple[Expr, ...], axis: Axis) -> tuple[Binding, tuple[Expr, ...]] | None:
    """The indices that make the product under `known` the product of `factors`, its axis being `axis`, but for factors
    that do not vary along it; and those. None if there are none.
    """
    wanted, factors = (tuple(map(_canonical, fs)) for fs in (_apart(_factors(known.body), known.axis), factors))
    pairings = _pairings(wanted, factors, {known.axis: index(axis)})
    for binding, order, left in itertools.islice(pairings, MAX_PAIRINGS):
        if any(axis in free_axes(f) for f in left):
            continue
        pairs = list(zip(wanted, order, strict=True))
        # Again: what only arithmetic tells may have waited for what was bound last.
        if all(_unify(a, b, binding) for a, b in pairs) and all(substitute(a, binding) is b for a, b in pairs):
            return binding, left
    return None


def _pairings(
    wanted: tuple[Expr, ...], factors: tuple[Expr, ...], binding: Binding
) -> Iterator[tuple[Binding, tuple[Expr, ...], tuple[Expr, ...]]]:
    """What may bind each of `wanted` to a factor of its own; those, in order; and the factors that are left."""
    if not wanted:
        yield binding, (), factors
    for n, factor in enumerate(factors if wanted else ()):
        own = dict(binding)
        if factor not in factors[:n] and _unify(wanted[0], factor, own):
            for found, order, left in _pairings(wanted[1:], (*factors[:n], *factors[n + 1 :]), own):
                yield found, (factor, *order), left


@remembered
def _canonical(e: Expr) -> Expr:
    """`e` with its selections the right way round: the constant last."""

    def rule(n: Expr) -> Expr:
        if (
            isinstance(n, Op)
            and n.name == "select"
            and isinstance(n.args[1], Const)
            and not isinstance(n.args[2], Const)
        ):
            return select(negate(n.args[0]), n.args[2], n.args[1])
        return n

    return rewrite(e, rule)


def _unify(known: Expr, other: Expr, binding: Binding) -> bool:
    """Bind the free axes of `known` to what stands in their place in `other`; whether the two may be equal then.

    The terms of arithmetic on indices come in any order: it tells of one axis, once all others are bound.
    """
    return _unified(known, other, binding, {}, {})


def _unified(known: Expr, other: Expr, binding: Binding, alike: _Alike, inside: dict[_Bound, _Alike]) -> bool:
    """`_unify`, where pairs are `alike` that were found so when so many axes were bound, and those `inside` of
    reductions by what was bound in front of their bodies: what is part of many others is looked at once."""
    if alike.get((known, other)) == len(binding):
        return True
    same = _are_alike(known, other, binding, alike, inside)
    if same:
        alike[known, other] = len(binding)
    return same


def _are_alike(known: Expr, other: Expr, binding: Binding, alike: _Alike, inside: dict[_Bound, _Alike]) -> bool:
    if isinstance(known, Index):
        return binding.setdefault(known.axis, other) is other
    if isinstance(known, Const):
        return known is other
    if type(known) is not type(other):
        return False
    if isinstance(known, Reduce) and isinstance(other, Reduce):
        if (known.kind, known.axis.extent, known.dtype) != (other.kind, other.axis.extent, other.dtype):
            return False
        outer = binding.pop(known.axis, None)
        binding[known.axis] = index(other.axis)
        bound = frozenset(binding.items())
        same = _unified(known.body, other.body, binding, inside.setdefault(bound, {}), inside)
        del binding[known.axis]
        if outer is not None:
            binding[known.axis] = outer
        return same
    if isinstance(known, Op) and not is_float(known.dtype):
        _solve(known, other, binding)
        return True
    if isinstance(known, Op) and isinstance(other, Op) and known.name != other.name:
        return False
    if isinstance(known, Load) and isinstance(other, Load) and known.source != other.source:
        return False
    pairs: Iterator[tuple[Expr, Expr]] = zip(children(known), children(other))
    return all(_unified(a, b, binding, alike, inside) for a, b in pairs)


def _solve(known: Expr, other: Expr, binding: Binding) -> None:
    """Bind the one axis of `known` that is not bound yet, if that may make it equal to `other`: sums of indices both,
    the axis alone or divided (a batch and its heads as one dimension)."""
    unbound = free_axes(known) - binding.keys()
    if len(unbound) != 1:
        return
    (axis,) = unbound
    own, constant = linear(substitute(known, binding))
    theirs, there = linear(other)
    step = own.pop(index(axis), 0)
    left = {e: n for e in {*own, *theirs} if (n := theirs.get(e, 0) - own.get(e, 0))}
    if constant == there and len(left) == 1 and step in left.values():
        (binding[axis],) = left
    elif constant == there and len(left) == 2 and sum(left.values()) == 0:
        divided, other = sorted(left, key=lambda e: axis not in free_axes(e))
        if isinstance(divided, Op) and isinstance(other, Op) and divided.args[0] is index(axis):
            if (divided.name, *divided.args[1:]) == (other.name, *other.args[1:]):
                binding[axis] = other.args[0]
