"""What a forward pass keeps for a backward pass: bytes against recomputation."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, replace

from ...errors import Unsupported
from ..build import COMPARISONS, row_major, substitute
from ..dtype import is_float, is_int, itemsize
from ..expr import Expr, Load, Op, index, load, loads, reductions, sources, walk
from ..integer import linear
from ..program import PART, Program, Value, compute_of, depends
from .again import grow_again, original
from .blow_ups import given_or_returned
from .copies import copied, seen_through
from .exchange import exchange, rounds_away
from .fuse import fuse
from .grow_regions import grow_regions
from .resolve_views import inline_load, inlined, resolve_views, root_of
from .rounded import grow_rounded
from .scans import grow_scanned, opened_scans, scans
from .surround import is_rounded
from .weights import tokens_of


@dataclass(frozen=True)
class Kept:
    """What the backward pass reads of the forward pass.

    Attributes:
      names: of values, inputs among them.
      exact: those of 16 bits that are statistics of a row in a kernel, where they have 32: what is computed again with
        them would not be what it was. Sums of values, which are as large as the result, are kept as PyTorch keeps them.
      facts: values of `names` that are known to be certain sums, in terms of others.
      copies: for values of `names`, the views that lead to what is read in their stead.
      tokens: matrices of `names` that are computed, and not of weights alone.
    """

    names: frozenset[str]
    exact: frozenset[str]
    facts: tuple[Value, ...]
    copies: tuple[tuple[Value, ...], ...] = ()
    tokens: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Compared:
    """Comparisons with an extremum that a gradient goes by, of what kernels would compute again.

    Attributes:
      names: of these.
      linear: those of them whose extremum is of nothing that has both sides of a join.
      reduced: names of the values that kernels reduce something to.
    """

    names: frozenset[str]
    linear: frozenset[str]
    reduced: frozenset[str]


def keep(
    joint: Program, forward: tuple[str, ...], backward: tuple[str, ...], offered: tuple[str, ...] = ()
) -> Kept | Compared:
    """What the backward pass of a joint Program reads from memory; all else of the forward pass it computes again.

    Args:
      joint: both passes; inputs of the backward pass alone are named "tangents…".
      forward, backward: names of the results of either.
      offered: names of sums that the forward pass can make besides, for the backward pass alone.

    Returns: that; or, where a gradient goes to the scores that equal their maximum, those comparisons: scores that are
    computed again may not equal it.

    Raises: Unsupported where there are more such maxima than all that is given or returned has elements.
    """
    later: set[str] = set()
    for v in joint.values:
        if v.name.startswith("tangents") or later.intersection(v.reads):
            later.add(v.name)
    # Scans of the forward pass that kernels do are done again; those of gradients are their transposes.
    ahead = replace(grow_scanned(replace(joint, outputs=forward))[0], outputs=joint.outputs)
    joint = opened_scans(ahead, {name: scan for name, scan in scans(ahead).items() if name in later})
    later |= {v.name for v in joint.values if later.intersection(v.reads)}
    _, _, rounded = grow_rounded(replace(joint, outputs=forward))
    whole = resolve_views(replace(joint, outputs=(*forward, *backward, *offered)), rounded=rounded)
    # Positions, and how many there are of something: computed again, they might be others.
    positions = tuple(v.name for v in whole.values if v.name not in later and _is_found(whole, v))
    cheap, statistics, fused, large = _kept(replace(joint, outputs=(*forward, *positions, *offered)))
    saved: set[str] = set()
    stack = [root_of(whole, name) for name in backward]
    seen: set[str] = set()
    while stack:
        v = whole.by_name[stack.pop()]
        if v.name in seen:
            continue
        seen.add(v.name)
        # What PyTorch computes, a dropout's mask among it, is kept even where the forward pass has no use for it.
        if v.name not in later and (v.expr is None or v.name in cheap):
            saved.add(v.name)
        else:
            stack += v.reads
    asked = [v for v in whole.values if v.name in seen or v.name in later]
    extrema = {v.name: compared for v in asked if (compared := _extrema(whole, v, saved - fused))}
    limit = given_or_returned(replace(joint, outputs=forward))
    for v in asked:
        counted = extrema.get(v.name, {v.name} & {*positions})
        if any(whole.by_name[name].numel > limit for name in counted):
            why = "the gradient goes to what equals the maximum, and there are as many maxima as scores (detach them)"
            raise Unsupported("a maximum that needs a gradient", why, v.where)
    if extrema:
        of_large = {name for name, tops in extrema.items() for top in tops if large & _roots(whole, top)}
        reduced = frozenset(v.name for v in whole.values if v.name in fused and v.expr and reductions(v.expr))
        linear = frozenset(map(original, extrema.keys() - of_large))
        return Compared(frozenset(map(original, extrema)), linear, reduced)
    saved |= _rounded_again(whole, backward, saved, fused - later)
    # A result may be known in the dimensions in which the user sees it, and in those of the product that made it. Where
    # both are the same memory the result is kept: PyTorch then knows that it must not be written to.
    sums = {v.name: v.numel for v in whole.values if v.name in cheap - later and _is_sum(v)}
    seen_as = (v for v in whole.values if sums.get(root_of(whole, v.name)) == v.numel and v.name not in later)
    ordered = sorted(seen_as, key=lambda v: not (v.name in forward and _lies_as_made(whole, v)))
    unsaved = {v.name: v for v in whole.values if v.expr is not None and v.name not in saved and v.op != PART}
    made: dict[str, Value] = {}
    facts = tuple(replace(v, expr=inlined(v.expr, unsaved, made)) for v in ordered if v.expr is not None)
    wide = {f.name for f in facts if rounds_away(f)}
    facts = tuple(f for f in facts if f.name not in wide or not whole.by_name[f.name].is_view)
    used = _used(whole, backward, saved, tuple(replace(f, dtype="f32") if f.name in wide else f for f in facts))
    known = used | {f.name for f in facts if f.name in saved}
    again = {root_of(whole, r) for v in whole.values if v.name in seen - saved - later for r in v.reads}
    widest = max(whole.by_name[name].numel for name in forward)
    sixteen = (whole.by_name[n] for n in saved & statistics if itemsize(whole.by_name[n].dtype) == 2)
    exact = frozenset(v.name for v in sixteen if v.name in again or v.numel < widest) | (used & wide)
    facts = tuple(f for f in facts if f.name in known)
    chains = {n: chain for n in saved & fused - exact if (chain := copied(joint, n, fused, later))}
    copies = {n: chain[-1].name for n, chain in chains.items()}
    casts = {n: cast for n in saved - known - statistics if (cast := _rounded_alone(joint, n, {*forward}))}
    names = frozenset(copies.get(n) or (casts[n].name if n in casts else n) for n in saved | known)
    facts = tuple(_with_casts(seen_through(chains[f.name], f) if f.name in chains else f, casts) for f in facts)
    return Kept(names, exact, facts, tuple(chains.values()), tokens_of(joint, names))


def _kept(viewed: Program) -> tuple[frozenset[str], frozenset[str], frozenset[str], frozenset[str]]:
    """Names of the values of a forward Program, with its views, that may be kept, of those among them that are
    statistics of a row, of all that kernels compute, and of what of it is large.

    What PyTorch computes may, as PyTorch itself would. Of what kernels compute, their results may, and reductions that
    have lost a side of the blow-up, or that results are made of (the statistics); the rest is a blow-up, or cheap.
    """
    program, growth, _ = grow_rounded(viewed)
    parts = _parts_of_results(program)
    found = {v.name for v in program.values if not v.is_view}
    statistics: set[str] = set()
    fused: set[str] = set()
    for region in growth.regions:
        fused.update(region.members)
        results = {root_of(program, name) for name in region.outputs}
        later, of_rows = {*region.large}, set[str]()
        for v in (program.by_name[m] for m in region.members):
            if not later.isdisjoint(v.reads):
                later.add(v.name)
            if v.name in later - region.large and _is_of_rows(v, region.large, later - region.large - of_rows):
                of_rows.add(v.name)
            if v.name in results and v.op != PART:
                if v.name in of_rows and itemsize(v.dtype) > 2:  # and only then rounded, as PyTorch's logsumexp is
                    statistics.add(v.name)
                continue
            # What comes before scores may be as large: tags that a pair shares, counted, or a pair's row of a table.
            if v.expr is not None and reductions(v.expr) and v.name in (later - region.large) | parts and v.op != PART:
                statistics.add(v.name)
            else:
                found.discard(v.name)
    large = frozenset[str]().union(*(region.large for region in growth.regions))
    return frozenset(found), frozenset(statistics), frozenset(fused), large


def _parts_of_results(program: Program) -> frozenset[str]:
    """Sums that results are made of element by element, no larger than these, of what is larger than any: AFT's, which
    have both sides of the blow-up."""
    widest = max((program.by_name[name].numel for name in program.outputs), default=0)
    found: set[str] = set()
    stack, seen = [*program.outputs], {*program.outputs}
    while stack:
        v = program.by_name[stack.pop()]
        if v.expr is None or reductions(v.expr):
            if v.numel <= widest < max((program.by_name[r].numel for r in v.reads), default=0):
                found.add(v.name)
            continue
        stack += {*v.reads} - seen
        seen.update(v.reads)
    return frozenset(found)


def _is_of_rows(v: Value, large: Set[str], others: Set[str]) -> bool:
    """Whether `v` is a statistic of rows (their logsumexp): made of what is large by itself, and not of features that
    were summed, which are among `others`."""
    return v.expr is not None and others.isdisjoint(v.reads) and all(sources(r) <= large for r in reductions(v.expr))


def inner(program: Program) -> frozenset[str]:
    """Names of the values that kernels compute because they reduce them: those of a blow-up, and what it is made with
    that is as large, or larger than all the kernels read and write.
    """
    resolved = resolve_views(program)
    _, program, growth, _ = grow_again(program, resolved, grow_regions(resolved), frozenset())
    found: set[str] = set()
    for region in growth.regions:
        members = set(region.members)
        around = {r for m in members for r in program.by_name[m].reads}.difference(members).union(region.outputs)
        own, outer = (max(program.by_name[name].numel for name in names) for names in (members, around))
        reduced: set[str] = set()
        for m in reversed(region.members):
            v = program.by_name[m]
            users = [program.by_name[u] for u in program.users[m] if u in members]
            if any(u.name in reduced or u.expr is not None and reductions(u.expr) for u in users):
                reduced.add(m)
                if members.intersection(v.reads) or v.numel > outer or v.numel == own:
                    found.add(m)
    return frozenset(map(original, found))


def _extrema(program: Program, v: Value, saved: set[str]) -> set[str]:
    """The extrema that `v` asks which floats equal, other than those `saved`, which are what they were."""
    tests = [n for n in walk(v.expr) if isinstance(n, Op) and n.name in COMPARISONS] if v.expr is not None else []
    found: set[str] = set()
    for n in tests:
        # With a bound made of the extremum a bit more or less is no matter.
        if n.name != "eq" and not all(isinstance(a, Load) for a in n.args):
            continue
        left, right = ({m.source for m in loads(a)} if is_float(a.dtype) else set[str]() for a in n.args)
        if not left or not right or left | right <= saved:
            continue
        for these, others in ((left, right), (right, left)):
            extrema = {root for s in these - others if _is_extremum(program.by_name[root := root_of(program, s)])}
            if n.name != "eq":
                extrema = {s for s in extrema if _reduces(program, s, others)}
            found |= {s for s in extrema if _is_asked_of_elements(program, v, s, others)}
    return found


def _reduces(program: Program, extremum: str, others: set[str]) -> bool:
    """Whether an extremum is of one of these as it is: by how much others are less, a bit more or less is no matter."""
    return not _roots(program, extremum).isdisjoint(root_of(program, name) for name in others)


def _roots(program: Program, name: str) -> set[str]:
    """What a value reads, no views."""
    return {root_of(program, r) for r in program.by_name[name].reads}


def _is_asked_of_elements(program: Program, v: Value, extremum: str, others: set[str]) -> bool:
    """Whether `v` compares an extremum with what it is one of, and not row by row with another number, as
    `torch.maximum` of two extrema does.
    """
    elements = v.numel > program.by_name[extremum].numel or depends(program, {extremum}, others)
    return elements and not depends(program, others, {extremum})


def _is_found(program: Program, v: Value) -> bool:
    """Whether `v` is an integer that is found among floats, or by what they are compared with."""
    found = reductions(v.expr) if v.expr is not None and is_int(v.dtype) else []
    return any(_is_of_floats(program, n.source) for r in found for n in loads(r) if not is_int(n.dtype))


def _is_of_floats(program: Program, name: str) -> bool:
    """Whether a value is a float, or made of one."""
    stack, seen = [name], {name}
    while stack:
        v = program.by_name[stack.pop()]
        if is_float(v.dtype):
            return True
        stack += {*v.reads} - seen
        seen.update(v.reads)
    return False


def _is_extremum(v: Value) -> bool:
    return v.expr is not None and any(r.kind in ("max", "min") for r in reductions(v.expr))


def _is_sum(v: Value) -> bool:
    return v.expr is not None and any(r.kind == "sum" for r in reductions(v.expr))


def _lies_as_made(program: Program, v: Value) -> bool:
    """Whether a value, perhaps a view of another, has its elements in the order in which they were computed."""
    e = v.expr
    while v.is_view and isinstance(e, Load) and program.by_name[e.source].is_view:
        e = inline_load(e, program.by_name[e.source])
    if not v.is_view or not isinstance(e, Load):
        return True
    made = row_major(e.index, program.by_name[e.source].axes)
    return linear(made) == linear(row_major(map(index, v.axes), v.axes))


def _rounded_again(program: Program, backward: tuple[str, ...], saved: set[str], fused: Set[str]) -> set[str]:
    """What PyTorch would compute for products of 16 bits of the backward pass, and kernels of the forward pass compute
    by themselves, and round elsewhere: statistics that are kept would not be of it."""
    alone = _alone(program, backward, saved)
    inside = {m for region in grow_regions(alone).regions for m in region.members}
    left = (v for v in alone.values if v.name in fused - inside and v.expr is not None and not v.is_view)
    return {v.name for v in left if is_rounded(alone, v, inside)}


def _rounded_alone(joint: Program, name: str, results: Set[str]) -> Value | None:
    """The cast to fewer bits that alone reads a value; None if there is none."""
    users = joint.users[name]
    cast = joint.by_name[users[0]] if len(users) == 1 and name not in results else None
    if cast is None or not cast.is_view or not is_float(cast.dtype):
        return None
    return cast if itemsize(cast.dtype) < itemsize(joint.by_name[name].dtype) else None


def _with_casts(fact: Value, casts: Mapping[str, Value]) -> Value:
    """A fact in terms of the casts of values in their place."""
    assert fact.expr is not None
    read = (n for n in loads(fact.expr) if n.source in casts)
    held: dict[Expr, Expr] = {n: load(casts[n.source].name, n.index, casts[n.source].dtype) for n in read}
    return replace(fact, expr=substitute(fact.expr, {}, held))


def _alone(program: Program, backward: tuple[str, ...], saved: set[str], facts: tuple[Value, ...] = ()) -> Program:
    """The backward pass, what is saved given to it."""
    values = tuple(replace(v, expr=None, op="input", reads=()) if v.name in saved else v for v in program.values)
    return resolve_views(Program(values, backward, facts, tokens=tokens_of(program, saved)))


def _used(program: Program, backward: tuple[str, ...], saved: set[str], facts: tuple[Value, ...]) -> set[str]:
    """The facts by which sums of the backward pass are exchanged."""
    alone = _alone(program, backward, saved, facts)
    regions = (fuse(alone, region) for region in grow_regions(alone).regions)
    found = (exchange(groups, alone, facts, "", compute_of(alone))[0] for groups in regions)
    known = {f.name for f in facts}
    return {n.source for kernels in found for k in kernels for o in k.outputs for n in loads(o.expr)} & known
