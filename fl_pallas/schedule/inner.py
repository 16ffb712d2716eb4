"""How a reduction is taken on tiles: as a matrix product, whole, or one index at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .build import substitute
from .dtype import is_float, is_int
from .expr import Axis, Expr, Index, Load, Op, Reduce, children, const, free_axes, index, reductions, ref, walk
from .integer import from_linear, linear

# Largest extent taken whole when the reduction is no matrix product (a vector of registers), or one of 16 bits; when it
# is a matrix product of float32 in parts, and when programs take that apart, and have no registers for more (of 256 and
# 512 features thousands of bytes spilled). As much of a longer one is taken at once.
MAX_WHOLE, MAX_PARTS, MAX_FLOAT32, CHUNK = 512, 256, 128, 64
# Least side of a matrix product.
ROWS = 16
# Numbers of bfloat16, 8 bits each, that a float32 is the sum of; and their bytes together.
PARTS, PARTS_BYTES = 3, 6


@dataclass(frozen=True)
class Product:
    """A sum over `axis` of left · right · scale: a matrix product where the two sides share no other axis.

    left and right hold the factors that vary along the axis; `scale` those that do not.
    """

    left: tuple[Expr, ...]
    right: tuple[Expr, ...]
    scale: tuple[Expr, ...]


def parts_of(e: Expr) -> tuple[Expr, ...]:
    """The numbers of bfloat16 whose sum a float32 is loaded as, the largest first; none of anything else."""
    return e.args if isinstance(e, Op) and e.name == "joined" else ()


def is_loaded(f: Expr) -> bool:
    """Whether a factor goes to the matrix unit as it lies in memory."""
    return isinstance(f, Load) or bool(parts_of(f))


def factors(e: Expr) -> list[Expr]:
    """The factors of a product, in order."""
    if isinstance(e, Op) and e.name == "mul":
        return [f for a in e.args for f in factors(a)]
    if isinstance(e, Op) and e.name == "neg" and is_float(e.dtype):
        return [const(-1.0, e.dtype), *factors(e.args[0])]
    return [e]


def as_product(body: Expr, axis: Axis, tiled: frozenset[Axis]) -> Product | None:
    """`body` as a matrix product over `axis`, or None.

    The factors that vary along the axis are grouped so that factors sharing a tiled axis stay
    together; two groups or more make a product. `tiled` are all axes wider than one index.
    """
    groups, plain, scale = grouped(body, axis, tiled)
    if len(groups) < 2:
        return None
    # What is a load alone goes to the matrix unit as it lies in memory: a vector scales another side.
    scaled = next((n for n, g in enumerate(groups) if not all(map(is_loaded, g))), 0)
    groups[scaled] = (*groups[scaled], *plain)
    first, *rest = groups
    return Product(first, tuple(f for g in rest for f in g), scale)


def multiplied_in(p: Product, dtype: str) -> tuple[str, str]:
    """The types in which a product's sides are multiplied, `dtype` being that of its sum.

    Products of numbers of 16 bits are exact in 32: sides that were cast alone are multiplied as they lie in memory, at
    several times the rate. So is bfloat16 beside float32, which is the sum of a few such numbers: its "parts". Where
    one side is loaded in parts, the other is multiplied in parts as well.
    """
    sides = (p.left, p.right)
    kinds = [side[0].dtype if len(side) == 1 and isinstance(side[0], Load) else dtype for side in sides]
    if dtype == "f32" and any(len(side) == 1 and parts_of(side[0]) for side in sides):
        left, right = (kind if kind == "bf16" else "parts" for kind in kinds)
        return left, right
    narrow = {*kinds} in ({"bf16"}, {"f16"}, {"bf16", "f32"})
    left, right = kinds if dtype == "f32" and narrow else (dtype, dtype)
    return left, right


def within_sides(p: Product, tiled: frozenset[Axis]) -> Product:
    """The same product, its scale multiplied into a side where that has its axes.

    In a type of small range (float16) a side may have no room for its numbers before they are scaled, or after.
    """
    sides = {"left": p.left, "right": p.right}
    order = sorted(sides, key=lambda name: all(isinstance(f, Load) for f in sides[name]))
    rest: list[Expr] = []
    for f in p.scale:
        own = free_axes(f) & tiled
        place = next((n for n in order if own <= frozenset().union(*map(free_axes, sides[n]))), None)
        if place is None:
            rest.append(f)
        else:
            sides[place] = (*sides[place], f)
    return Product(sides["left"], sides["right"], tuple(rest))


def as_vector_product(body: Expr, axis: Axis, tiled: frozenset[Axis]) -> Product | None:
    """`body` as a vector along `axis` (left) times a matrix, or None."""
    groups, plain, scale = grouped(body, axis, tiled)
    return Product(plain, groups[0], scale) if plain and len(groups) == 1 else None


def grouped(
    body: Expr, axis: Axis, tiled: frozenset[Axis]
) -> tuple[list[tuple[Expr, ...]], tuple[Expr, ...], tuple[Expr, ...]]:
    """The factors that vary along `axis`, in groups that share no other tiled axis; those with none; the rest."""
    varying = [f for f in factors(body) if axis in free_axes(f)]
    scale = tuple(f for f in factors(body) if axis not in free_axes(f))
    groups: list[tuple[frozenset[Axis], list[Expr]]] = []
    plain: list[Expr] = []
    for f in varying:
        own = (free_axes(f) & tiled) - {axis}
        if not own:
            plain.append(f)
            continue
        touching = [g for g in groups if g[0] & own]
        merged = own.union(*(g[0] for g in touching)), [*(x for g in touching for x in g[1]), f]
        groups = [g for g in groups if g not in touching] + [merged]
    return [tuple(g[1]) for g in groups], tuple(plain), scale


@dataclass(frozen=True)
class Sheared:
    """A sum of q[i, r] · t[j - i + c, r] over r, say: a matrix product by position, and each element's own place in it.

    The positions j - i of a tile are few, a window as wide as both of its sides together.

    Attributes:
      kept: the axis that a side of the product has (i).
      gone: the axis that only positions have (j).
      sign: a position is the index along `gone`, plus `sign` times that along `kept`.
      window: the axis of positions, in place of `gone`.
      position: the reference that stands for the position in `product`.
      product: over `kept` and `window`.
    """

    kept: Axis
    gone: Axis
    sign: int
    window: Axis
    position: str
    product: Product

    def width(self, kept: int, gone: int) -> int:
        """Side of the window for tiles of these sides."""
        return power_of_two(kept + gone - 1)


def as_sheared(body: Expr, axis: Axis, tiled: frozenset[Axis]) -> Sheared | None:
    """`body` as a matrix product over `axis` of which each element takes a place of its own, or None."""
    others = tiled - {axis}
    if len(free_axes(body) & others) != 2:
        return None
    found = {n: p for f in factors(body) if axis in free_axes(f) for n, p in positions(f, others)}
    if len(signs := {p[1] * p[2] for p in found.values()}) != 1:
        return None
    (sign,) = signs
    for gone in free_axes(body) & others:
        (kept,) = free_axes(body) & others - {gone}
        window = Axis(f"%{gone}{'+-'[sign < 0]}{kept}", power_of_two(covering_tile(kept) + covering_tile(gone)))
        position = ref(window.name, (window,), "i64")
        replaced: dict[Expr, Expr] = {}
        for n, (first, a, b, terms, c) in found.items():
            replaced[n] = from_linear(({**terms, position: a if first == gone else b}, c), n.dtype)
        product = as_product(substitute(body, {}, replaced), axis, tiled | {window})
        if product is None:
            continue
        sides = [
            frozenset().union(*map(free_axes, side)) & (tiled | {window}) for side in (product.left, product.right)
        ]
        if {axis, window} in sides and {axis, kept} in sides:
            return Sheared(kept, gone, sign, window, window.name, product)
    return None


def as_shifted(body: Expr, axis: Axis, tiled: frozenset[Axis]) -> Sheared | None:
    """A sum of w[i, j] · t[j - i + c, d] over j as a product over the window of positions, in which each w[i, j] has a
    place of its own; or None. The first side of `product` is w, before it takes that."""
    for kept in free_axes(body) & tiled - {axis}:
        own = frozenset((kept, axis))
        loaded = [f for f in factors(body) if isinstance(f, Load) and (free_axes(f) & tiled) - own]
        weights = tuple(f for f in factors(body) if f not in loaded)
        if len(loaded) != 1 or frozenset().union(*map(free_axes, weights)) & tiled != own:
            continue
        found = dict(positions(loaded[0], own))
        if len(found) != 1:
            continue
        ((n, (first, a, b, terms, c)),) = found.items()
        window = Axis(f"%{axis}{'+-'[a * b < 0]}{kept}", power_of_two(covering_tile(kept) + covering_tile(axis)))
        position = ref(window.name, (window,), "i64")
        place = from_linear(({**terms, position: a if first == axis else b}, c), n.dtype)
        table = substitute(loaded[0], {}, {n: place})
        if not free_axes(table) & own:
            return Sheared(kept, axis, a * b, window, window.name, Product(weights, (table,), ()))
    return None


Position = tuple[Axis, int, int, dict[Expr, int], int]


def positions(e: Expr, tiled: frozenset[Axis]) -> Iterator[tuple[Expr, Position]]:
    """What `e` takes from the sum or difference of two indices: the node, the first axis, the factors of both (1 or
    -1), and the other terms and the constant of its linear form."""
    seen: set[Expr] = set()
    stack = [e]
    while stack:
        n = stack.pop()
        if n in seen or len(free_axes(n) & tiled) < 2:
            continue
        seen.add(n)
        if is_int(n.dtype):
            terms, c = linear(n)
            wide = [t for t in terms if free_axes(t) & tiled]
            plain = [t for t in wide if isinstance(t, Index) and abs(terms[t]) == 1]
            if len(wide) == len(plain) == 2:
                first, second = plain
                others = {t: k for t, k in terms.items() if t not in wide}
                yield n, (first.axis, terms[first], terms[second], others, c)
                continue
        stack += reversed(children(n))


def over_distances(e: Expr, i: Axis, j: Axis) -> tuple[Expr, Axis, int, int] | None:
    """What i - j, or i + j, alone decides, over an axis of distances, which begin at 0.

    Returns: `e` over that axis; the axis; s and the least distance l: the index is i + s * j - l. None if both axes
    are in it in another way.
    """
    pair = frozenset((i, j))
    if not pair <= free_axes(e) or i.size is not None or j.size is not None:
        return None
    found = dict(positions(e, pair))
    signs = {a * b for _, a, b, _, _ in found.values()}
    if len(signs) != 1:
        return None
    (sign,) = signs
    along, least = Axis(f"{i}{'+-'[sign < 0]}{j}", i.extent + j.extent - 1), min(0, sign * (j.extent - 1))
    here = {
        n: from_linear(({**terms, index(along): k}, c + k * least), n.dtype)
        for n, (first, a, b, terms, c) in found.items()
        for k in [a if first == i else b]
    }
    e = substitute(e, {}, here)
    return None if free_axes(e) & pair else (e, along, sign, least)


def is_product_of_loop(update: Expr, axis: Axis, tiled: frozenset[Axis]) -> bool:
    """Whether what a loop sums over its axis is taken by the matrix units."""
    return as_product(update, axis, tiled) is not None or as_shifted(update, axis, tiled) is not None


def is_matrix_product(body: Expr, axis: Axis, tiled: frozenset[Axis]) -> bool:
    """Whether the sum of `body` over `axis` is taken by the matrix units."""
    return as_product(body, axis, tiled) is not None or as_sheared(body, axis, tiled) is not None


def is_sequential(r: Reduce, tiled: frozenset[Axis]) -> bool:
    """Whether an inner reduction is taken one index at a time: no product, and its body is no vector; nor is its axis
    among those that are `tiled`, which a tile then has whole."""
    if r.axis in tiled:
        return False
    if r.kind == "sum" and is_matrix_product(r.body, r.axis, tiled | {r.axis}):
        wide = [n for n in walk(r.body) if r.dtype == n.dtype == "f32" and is_loaded(n)]
        return r.axis.extent > (MAX_WHOLE if not wide else MAX_PARTS if any(map(parts_of, wide)) else MAX_FLOAT32)
    others = (free_axes(r.body) & tiled) - {r.axis}
    return len(others) >= 2 or r.axis.extent > MAX_WHOLE or any(r.axis in free_axes(n) for n in reductions(r.body))


def power_of_two(n: int) -> int:
    """The least power of two that is at least n."""
    return 1 << max(0, n - 1).bit_length()


def covering_tile(axis: Axis) -> int:
    """Side of a tile that covers `axis` whole; at least the least side of a matrix product."""
    return max(ROWS, power_of_two(axis.extent))
