"""Polynomials that stand for arrays. See the package's docstring."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

# An axis of the root. `forms.py` divides axes that a reshape divides, and numbers the parts.
Axes: TypeAlias = frozenset[int]
# Powers of atoms. Their product is a monomial.
Monomial: TypeAlias = frozenset[tuple["Atom", float]]
# A polynomial as part of an atom.
Key: TypeAlias = frozenset[tuple[Monomial, float]]

# More terms than any formula of an op has.
_MOST_TERMS = 40
# Sums that are smaller than this fraction of their terms are zero. Literals are rounded to float32:
# (1/768) * 768 is 1.00000003.
_ZERO = 1e-6


class TooLong(Exception):
    """A polynomial has more terms than any op's formula."""


@dataclasses.dataclass(frozen=True)
class Atom:
    """A variable of polynomials. `axes` are the root's axes over which it varies."""

    axes: Axes

    @functools.cached_property
    def is_open(self) -> bool:
        """Whether it has an array with an axis that is a `forms.Unknown`."""
        return any(atom.is_open for atom in self._inner())

    def _inner(self) -> Iterable[Atom]:
        """The atoms that it is made of."""
        return ()


@dataclasses.dataclass(frozen=True)
class Root(Atom):
    """The array that the search starts from."""


@dataclasses.dataclass(frozen=True)
class Leaf(Atom):
    """An array that is not computed from the root, or not by equations with a form.

    Attributes:
      var: its variable in the jaxpr.
      labels: for each axis of the variable, the root's axes that it lies along. An entry that is
        not yet known is a `forms.Unknown`.
    """

    var: Any
    labels: tuple[tuple[Any, ...], ...]

    @functools.cached_property
    def is_open(self) -> bool:
        return any(not isinstance(n, int) for axis in self.labels for n in axis)


@dataclasses.dataclass(frozen=True)
class Mean(Atom):
    """The mean of a monomial over some axes."""

    of: Monomial
    over: Axes

    def _inner(self) -> Iterable[Atom]:
        return [atom for atom, _ in self.of]


@dataclasses.dataclass(frozen=True)
class OneHot(Atom):
    """1 where the index along an axis equals an integer array, else 0.

    Attributes:
      index: the integers.
      over: the axis. A `forms.Unknown` until it is known.
    """

    index: Leaf
    over: Any

    @functools.cached_property
    def is_open(self) -> bool:
        return self.index.is_open or not isinstance(self.over, int)


@dataclasses.dataclass(frozen=True)
class Pick(Atom):
    """The element of a monomial at an index along an axis.

    Attributes:
      of: the monomial.
      index: the integers.
      over: the axis.
      fill: what an index outside of the axis gives: "nan", "nearest", "zero", or
        "constant": the nearest element, without a derivative.
    """

    of: Monomial
    index: Leaf
    over: int
    fill: str

    def _inner(self) -> Iterable[Atom]:
        return [self.index, *(atom for atom, _ in self.of)]


@dataclasses.dataclass(frozen=True)
class Function(Atom):
    """A function of a polynomial, such as tanh, or its maximum over some axes.

    "power" is the polynomial itself. It is an atom because of its exponents, such as -1/2.
    """

    name: str
    of: Key
    over: Axes = frozenset()

    def _inner(self) -> Iterable[Atom]:
        return [atom for monomial, _ in self.of for atom, _ in monomial]


ONE: Monomial = frozenset()


@dataclasses.dataclass(frozen=True)
class Polynomial:
    """A sum of monomials with coefficients."""

    terms: Mapping[Monomial, float]

    @property
    def key(self) -> Key:
        return frozenset((m, float(f"{c:.9g}")) for m, c in self.terms.items())

    @property
    def axes(self) -> Axes:
        return frozenset(a for m in self.terms for a in axes_of(m))

    @property
    def number(self) -> float | None:
        """The value of a constant, else None."""
        if not self.terms:
            return 0.0
        return self.terms.get(ONE) if len(self.terms) == 1 else None

    @property
    def single(self) -> tuple[Monomial, float] | None:
        """The only monomial and its coefficient, else None."""
        return next(iter(self.terms.items())) if len(self.terms) == 1 else None

    def __add__(self, other: Polynomial) -> Polynomial:
        terms = dict(self.terms)
        for monomial, c in other.terms.items():
            _add(terms, monomial, c)
        return _checked(terms)

    def __mul__(self, other: Polynomial) -> Polynomial:
        if len(self.terms) * len(other.terms) > _MOST_TERMS**2:
            raise TooLong
        terms: dict[Monomial, float] = {}
        for m, c in self.terms.items():
            for n, d in other.terms.items():
                _add(terms, product(m, n), c * d)
        return _checked(terms)

    def scaled(self, factor: float) -> Polynomial:
        return Polynomial({m: c * factor for m, c in self.terms.items()} if factor else {})

    def close_to(self, other: Polynomial, tolerance: float = 1e-5) -> bool:
        """Whether the monomials are the same and the coefficients are equal up to rounding."""
        if self.terms.keys() != other.terms.keys():
            return False
        return all(close(c, other.terms[m], tolerance) for m, c in self.terms.items())

    def without(self, monomials: Iterable[Monomial]) -> Polynomial:
        dropped = set(monomials)
        return Polynomial({m: c for m, c in self.terms.items() if m not in dropped})

    def divided(self, by: Monomial) -> Polynomial | None:
        """The quotient if each monomial has the factor `by`, else None."""
        inverse = frozenset((atom, -e) for atom, e in by)
        if not all(_divides(by, m) for m in self.terms):
            return None
        return Polynomial({product(m, inverse): c for m, c in self.terms.items()})

    def mapped(self, change: Callable[[Atom], Atom]) -> Polynomial:
        """Returns the polynomial with other atoms in place of the open ones."""
        if not any(atom.is_open for monomial in self.terms for atom, _ in monomial):
            return self
        terms: dict[Monomial, float] = {}
        for monomial, c in self.terms.items():
            _add(terms, map_monomial(monomial, change), c)
        return Polynomial(terms)


def close(a: float, b: float, tolerance: float = 1e-5) -> bool:
    return math.isclose(a, b, rel_tol=tolerance)


def constant(number: float) -> Polynomial:
    return Polynomial({ONE: number} if number else {})


def monomial_of(atom: Atom, exponent: float = 1) -> Monomial:
    return frozenset([(atom, float(exponent))])


def of_atom(atom: Atom, exponent: float = 1) -> Polynomial:
    return Polynomial({monomial_of(atom, exponent): 1.0})


def of_monomial(monomial: Monomial, factor: float = 1.0) -> Polynomial:
    return Polynomial({monomial: factor})


def axes_of(monomial: Monomial) -> Axes:
    return frozenset(a for atom, _ in monomial for a in atom.axes)


def product(m: Monomial, n: Monomial) -> Monomial:
    if not m or not n:
        return m or n
    powers = dict(m)
    for atom, e in n:
        powers[atom] = powers.get(atom, 0.0) + e
    return frozenset((atom, e) for atom, e in powers.items() if e)


def _divides(by: Monomial, monomial: Monomial) -> bool:
    powers = dict(monomial)
    return all(atom in powers and abs(powers[atom]) >= abs(e) for atom, e in by)


def map_monomial(monomial: Monomial, change: Callable[[Atom], Atom]) -> Monomial:
    return frozenset((_map_atom(atom, change), e) for atom, e in monomial)


def _map_atom(atom: Atom, change: Callable[[Atom], Atom]) -> Atom:
    if not atom.is_open:
        return atom
    if isinstance(atom, Mean):
        of = map_monomial(atom.of, change)
        return Mean(axes_of(of) - atom.over, of, atom.over)
    if isinstance(atom, Function):
        of = frozenset((map_monomial(m, change), c) for m, c in atom.of)
        return _function(atom.name, of, atom.over)
    if isinstance(atom, Pick):
        index: Any = change(atom.index)
        return _pick(map_monomial(atom.of, change), index, atom.over, atom.fill)
    return change(atom)


def _add(terms: dict[Monomial, float], monomial: Monomial, c: float) -> None:
    if monomial not in terms:
        if c:
            terms[monomial] = c
        return
    old = terms[monomial]
    if abs(old + c) <= _ZERO * abs(c):
        del terms[monomial]
    else:
        terms[monomial] = old + c


def _checked(terms: dict[Monomial, float]) -> Polynomial:
    if len(terms) > _MOST_TERMS:
        raise TooLong
    return Polynomial(terms)


def mean(p: Polynomial, over: Axes) -> Polynomial:
    """The mean over axes. Factors that do not vary over these axes stay outside."""
    terms: dict[Monomial, float] = {}
    for monomial, c in p.terms.items():
        inner = frozenset((atom, e) for atom, e in monomial if atom.axes & over)
        outer = monomial - inner
        if inner:
            outer = product(outer, frozenset([(_mean_of(inner, over), 1.0)]))
        _add(terms, outer, c)
    return _checked(terms)


def total(p: Polynomial, over: Axes, count: int, copies: int) -> Polynomial:
    """The sum over axes with `count` elements, with `copies` equal ones.

    A sum of x times a one-hot array picks from x.
    """
    hot = {
        a for m in p.terms for a, e in m if isinstance(a, OneHot) and e == 1 and over == {a.over}
    }
    if len(hot) != 1:
        return mean(p, over).scaled(count)
    (one_hot,) = hot
    factor: Monomial = frozenset([(one_hot, 1.0)])
    times_hot = Polynomial({m: c for m, c in p.terms.items() if factor <= m})
    picked = times_hot.divided(factor)
    assert picked is not None
    rest = mean(p.without(times_hot.terms), over).scaled(count)
    return pick(picked, one_hot.index, one_hot.over, "zero").scaled(copies) + rest


def _mean_of(inner: Monomial, over: Axes) -> Mean:
    over = over & axes_of(inner)
    if len(inner) == 1:
        ((atom, e),) = inner
        if isinstance(atom, Mean) and e == 1:  # a mean of means
            return Mean(atom.axes - over, atom.of, atom.over | over)
    return Mean(axes_of(inner) - over, inner, over)


def pick(p: Polynomial, index: Leaf, over: int, fill: str) -> Polynomial:
    """The elements at an index. Factors that do not vary along the axis stay outside."""
    terms: dict[Monomial, float] = {}
    for monomial, c in p.terms.items():
        inner = frozenset((atom, e) for atom, e in monomial if over in atom.axes)
        # What does not vary is the same for each index. An index outside may still change it.
        same = not inner and fill == "nearest"
        picked = frozenset([] if same else [(_pick(inner, index, over, fill), 1.0)])
        _add(terms, product(monomial - inner, picked), c)
    return _checked(terms)


def _pick(of: Monomial, index: Leaf, over: int, fill: str) -> Pick:
    return Pick((axes_of(of) - {over}) | index.axes, of, index, over, fill)


def function(name: str, p: Polynomial, over: Axes = frozenset()) -> Polynomial:
    return of_atom(_function(name, p.key, over))


def _function(name: str, of: Key, over: Axes) -> Function:
    return Function(frozenset(a for m, _ in of for a in axes_of(m)) - over, name, of, over)


def power(p: Polynomial, exponent: float) -> Polynomial:
    """A power of p. Whole powers are multiplied out. Other sums become an atom "power"."""
    if p.single is not None:
        monomial, c = p.single
        whole = exponent == int(exponent)
        # sqrt(x²) is |x|: only powers of sums, which are positive, may be combined.
        if whole or all(isinstance(a, Function) and a.name == "power" for a, _ in monomial):
            if c < 0 and not whole:
                raise TooLong
            raised = frozenset((atom, e * exponent) for atom, e in monomial)
            return Polynomial({raised: c**exponent})
    if exponent == int(exponent) and 0 <= exponent <= 4:
        result = constant(1.0)
        for _ in range(int(exponent)):
            result = result * p
        return result
    # Without a common factor: sqrt(4 v + 4 e) is 2 sqrt(v + e).
    factor = max((c for m, c in p.terms.items() if m), default=0.0)
    if factor <= 0:
        raise TooLong  # no op has this
    base = p.scaled(1 / factor)
    return of_atom(_function("power", base.key, frozenset()), exponent).scaled(factor**exponent)


def from_key(key: Key) -> Polynomial:
    return Polynomial(dict(key))


def atoms_of(terms: Iterable[tuple[Monomial, float]]) -> set[Atom]:
    """The atoms of a polynomial, with those inside of functions."""
    found: set[Atom] = set()
    for monomial, _ in terms:
        for atom, _ in monomial:
            found.add(atom)
            if isinstance(atom, Function):
                found |= atoms_of(atom.of)
    return found
