"""What each primitive of JAX does to forms."""

# JAX declares the types of variables without shapes.
# pyright: reportAttributeAccessIssue=false
from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun

from jax_gradops._fuse import forms, polynomial
from jax_gradops._fuse.forms import Form, NoForm
from jax_gradops._fuse.polynomial import Function, Mean, Polynomial
from jax_gradops._fuse.program import is_float

Rule = Callable[[JaxprEqn, Sequence[Form]], Form]


def apply(equation: JaxprEqn, operands: Sequence[Form]) -> Form:
    """The form of the result of an equation.

    Raises:
      NoForm: if the result has no form.
    """
    rule = RULES.get(equation.primitive.name)
    if rule is None or len(equation.outvars) != 1:
        raise NoForm("")
    try:
        form = rule(equation, operands)
    except (polynomial.TooLong, OverflowError, ZeroDivisionError):
        raise NoForm("") from None
    # In x[:, :, None] - x[:, None, :], a polynomial cannot tell one x from the other.
    labels = [p.label for axis in form.dims for p in axis if p.label is not None]
    if len(set(labels)) < len(labels):
        raise NoForm("one axis of an array lies along two axes of a value")
    return form


def of_literal(literal: Literal) -> Form:
    """A number, or an array whose elements are all equal."""
    value = np.asarray(literal.val)
    if value.size != 1 or np.iscomplexobj(value):
        raise NoForm("")
    if value.dtype == bool or np.issubdtype(value.dtype, np.integer):
        return forms.of_number(float(value.item()), value.shape)
    try:
        return forms.of_number(
            exact(float(value.astype(np.float64).item()), value.dtype), value.shape
        )
    except (TypeError, ValueError):  # keys of random numbers
        raise NoForm("") from None


def exact(number: float, dtype: Any) -> float:
    """The number that a float32 literal was rounded from, if it is a fraction of a whole number.

    1/768 in float32 is 0.0013020834. The exact fraction lets terms cancel.
    """
    if number == 0 or not math.isfinite(number) or dtype != np.float32:
        return number
    whole = round(1 / number)
    if 0 < abs(whole) < 1 << 24 and np.asarray(1 / whole, dtype) == np.asarray(number, dtype):
        return 1 / whole
    return number


# --- Elementwise ---------------------------------------------------------------------------------


def _elementwise(compute: Callable[..., Polynomial]) -> Rule:
    def rule(equation: JaxprEqn, operands: Sequence[Form]) -> Form:
        polynomials, dims = forms.together(operands)
        return Form(compute(*polynomials), dims)

    return rule


def _div(equation: JaxprEqn, operands: Sequence[Form]) -> Form:
    if not is_float(equation.outvars[0].aval.dtype):
        raise NoForm("")  # a quotient of integers is rounded
    (a, b), dims = forms.together(operands)
    return Form(a * polynomial.power(b, -1), dims)


def _pow(equation: JaxprEqn, operands: Sequence[Form]) -> Form:
    exponent = operands[1].polynomial.number
    if exponent is None:
        raise NoForm("")
    return Form(polynomial.power(operands[0].polynomial, exponent), operands[0].dims)


def _tanh(p: Polynomial) -> Polynomial:
    return _odd("tanh", p)


def _odd(name: str, p: Polynomial) -> Polynomial:
    """f(-p) is -f(p): the sign is that of some coefficient."""
    if not p.terms:
        return p
    _, c = min(p.terms.items(), key=lambda term: (-len(term[0]), _total(term[0]), abs(term[1])))
    if c < 0:
        return polynomial.function(name, p.scaled(-1)).scaled(-1)
    return polynomial.function(name, p)


def _total(monomial: polynomial.Monomial) -> float:
    return sum(e for _, e in monomial)


def _erfc(p: Polynomial) -> Polynomial:
    return polynomial.constant(1.0) + _odd("erf", p).scaled(-1)


def _logistic(p: Polynomial) -> Polynomial:
    """In terms of tanh, so that a GELU by logistic is found too."""
    return polynomial.constant(0.5) + _tanh(p.scaled(0.5)).scaled(0.5)


def _exp(p: Polynomial) -> Polynomial:
    return polynomial.function("exp", p)


def _log(p: Polynomial) -> Polynomial:
    """log(c mean(exp(x + shift))) is log(c mean(exp(x))) + shift.

    The shift is what does not vary over the axes of the mean.
    """
    found = _mean_of_exp(p)
    if found is None:
        return polynomial.function("log", p)
    mean, exponent = found
    shift = exponent.without(m for m in exponent.terms if polynomial.axes_of(m) & mean.over)
    unshifted = polynomial.mean(_exp(exponent.without(shift.terms)), mean.over)
    factor = next(iter(p.terms.values()))
    return polynomial.function("log", unshifted.scaled(factor)) + shift


def _mean_of_exp(p: Polynomial) -> tuple[Mean, Polynomial] | None:
    """The mean, and the exponent, if p is a number times the mean of exponentials."""
    atoms = list(p.single[0]) if p.single is not None else []
    if len(atoms) != 1 or not isinstance(atoms[0][0], Mean) or atoms[0][1] != 1:
        return None
    mean = atoms[0][0]
    inner = list(mean.of)
    if len(inner) != 1 or not isinstance(inner[0][0], Function):
        return None
    function, exponent = inner[0]
    if function.name != "exp" or exponent != 1:
        return None
    return mean, polynomial.from_key(function.of)


def _max(a: Polynomial, b: Polynomial) -> Polynomial:
    if a.number is not None:
        a, b = b, a
    bound = b.number
    if bound is None:
        raise NoForm("")
    if bound == -math.inf or (bound <= 0 and is_positive(a)):
        return a
    raise NoForm("")


def is_positive(p: Polynomial) -> bool:
    """Whether this is a mean of squares, a variance of the root, or a sum of exponentials."""
    if p.single is not None:
        monomial, c = p.single
        return c > 0 and all(_positive(atom, e) for atom, e in monomial)
    if len(p.terms) == 2:
        squares = [m for m in p.terms if _is_mean_of_square(m)]
        if len(squares) == 1:
            ((mean, _),) = squares[0]
            square = frozenset([(_root_mean(mean), 2.0)])
            return close_terms(p, squares[0], square)
    return False


def close_terms(p: Polynomial, plus: polynomial.Monomial, minus: polynomial.Monomial) -> bool:
    c = p.terms.get(plus, 0.0)
    return c > 0 and polynomial.close(-p.terms.get(minus, 0.0), c)


def _is_mean_of_square(monomial: polynomial.Monomial) -> bool:
    if len(monomial) != 1:
        return False
    ((atom, e),) = monomial
    return e == 1 and isinstance(atom, Mean) and len(atom.of) == 1 and next(iter(atom.of))[1] == 2


def _root_mean(mean_of_square: Any) -> Mean:
    ((atom, _),) = mean_of_square.of
    return Mean(mean_of_square.axes, frozenset([(atom, 1.0)]), mean_of_square.over)


def _positive(atom: polynomial.Atom, exponent: float) -> bool:
    if exponent % 2 == 0:
        return True
    if isinstance(atom, Mean):
        return all(_positive(a, e) for a, e in atom.of)
    if not isinstance(atom, Function):
        return False
    return atom.name == "exp" or (atom.name == "power" and exponent != round(exponent))


def _abs(p: Polynomial) -> Polynomial:
    if is_positive(p):
        return p
    raise NoForm("")


def _same(equation: JaxprEqn, operands: Sequence[Form]) -> Form:
    return operands[0]


def _cast(equation: JaxprEqn, operands: Sequence[Form]) -> Form:
    old, new = equation.invars[0].aval.dtype, equation.params["new_dtype"]
    p = operands[0].polynomial
    free = p.number is not None or any(
        isinstance(atom, polynomial.OneHot) for m in p.terms for atom, _ in m
    )
    if not free and not (is_float(old) and is_float(new)):
        raise NoForm("")
    if p.number is not None and not is_float(new) and p.number not in (0, 1):
        if np.dtype(new) == bool or p.number != round(p.number):
            raise NoForm("")
    return operands[0]


def _integer_pow(equation: JaxprEqn, operands: Sequence[Form]) -> Form:
    return Form(polynomial.power(operands[0].polynomial, equation.params["y"]), operands[0].dims)


def _compare(compute: Callable[[float, float], bool]) -> Rule:
    """Comparisons of numbers, as `jnp.var` has one of its number of elements."""

    def rule(equation: JaxprEqn, operands: Sequence[Form]) -> Form:
        a, b = (f.polynomial.number for f in operands)
        if a is None or b is None:
            raise NoForm("")
        return Form(polynomial.constant(float(compute(a, b))), operands[0].dims)

    return rule


def _select(equation: JaxprEqn, operands: Sequence[Form]) -> Form:
    """A known choice, a one-hot array of two numbers, or the largest number of a row if finite."""
    which, *cases = operands
    number = which.polynomial.number
    if number is not None:
        return cases[int(number)]
    polynomials, dims = forms.together(operands)
    condition, no, yes = polynomials
    single = condition.single
    if single is not None and [type(atom) for atom, _ in single[0]] == [polynomial.OneHot]:
        if no.number is not None and yes.number is not None:
            return Form(no + condition * (yes + no.scaled(-1)), dims)
    if no.number == 0 and single is not None and len(single[0]) == 1:
        ((atom, _),) = single[0]
        if isinstance(atom, Function) and atom.name == "is_finite" and atom.of == yes.key:
            return Form(polynomial.function("finite", yes), dims)
    raise NoForm("")


def _function_of(name: str) -> Rule:
    def rule(equation: JaxprEqn, operands: Sequence[Form]) -> Form:
        return Form(polynomial.function(name, operands[0].polynomial), operands[0].dims)

    return rule


# --- Shapes and reductions -----------------------------------------------------------------------


def _broadcast(equation: JaxprEqn, operands: Sequence[Form]) -> Form:
    shape = equation.params["shape"]
    return forms.broadcast(operands[0], shape, equation.params["broadcast_dimensions"])


def _reshape(equation: JaxprEqn, operands: Sequence[Form]) -> Form:
    if equation.params.get("dimensions") is not None:
        raise NoForm("")
    return forms.reshape(operands[0], equation.outvars[0].aval.shape)


def _expand_dims(equation: JaxprEqn, operands: Sequence[Form]) -> Form:
    return forms.reshape(operands[0], equation.outvars[0].aval.shape)


def _transpose(equation: JaxprEqn, operands: Sequence[Form]) -> Form:
    return forms.transpose(operands[0], equation.params["permutation"])


def _reduce_sum(equation: JaxprEqn, operands: Sequence[Form]) -> Form:
    form = operands[0]
    over, copies, dims = forms.reduce(form, equation.params["axes"])
    known = {p.label: p.size for axis in form.dims for p in axis}
    count = copies * math.prod(known[label] for label in over)
    return Form(polynomial.total(form.polynomial, over, count, copies), dims)


def _reduce_max(equation: JaxprEqn, operands: Sequence[Form]) -> Form:
    over, _, dims = forms.reduce(operands[0], equation.params["axes"])
    return Form(polynomial.function("max", operands[0].polynomial, over), dims)


def _product(equation: JaxprEqn, operands: Sequence[Form]) -> Form:
    """A product without a sum, as of ``einsum("...k,k->...k", x, scale)``."""
    if _contracts(equation):
        raise NoForm("")
    ((_, _), batch) = equation.params["dimension_numbers"]
    free = [
        [i for i in range(len(f.dims)) if i not in b] for f, b in zip(operands, batch, strict=True)
    ]
    if all(free):
        raise NoForm("")
    a, b = (
        [*(f.dims[i] for i in of), *(f.dims[i] for i in rest)]
        for f, of, rest in zip(operands, batch, free, strict=True)
    )
    a, b = (x + [()] * (max(len(a), len(b)) - len(x)) for x in (a, b))
    forms_of = [Form(f.polynomial, tuple(d)) for f, d in zip(operands, (a, b), strict=True)]
    (left, right), dims = forms.together(forms_of)
    return Form(left * right, dims)


def is_known(equation: JaxprEqn) -> bool:
    """Whether there is a rule. A matrix product has none."""
    return equation.primitive.name in RULES and not _contracts(equation)


def _contracts(equation: JaxprEqn) -> bool:
    name = equation.primitive.name
    return name == "dot_general" and any(equation.params["dimension_numbers"][0])


def _gather(equation: JaxprEqn, operands: Sequence[Form]) -> Form:
    """One element of each row, as by `take_along_axis`; or the only element of an axis."""
    x, index = operands
    how, slices = equation.params["dimension_numbers"], equation.params["slice_sizes"]
    shape = equation.invars[0].aval.shape
    if len(how.start_index_map) != 1 or index.dims[-1]:
        raise NoForm("")
    (axis,) = map(int, how.start_index_map)
    batch = dict(zip(how.start_indices_batching_dims, how.operand_batching_dims, strict=True))
    if slices[axis] != 1 or any(
        slices[i] != shape[i] for i in range(len(shape)) if i != axis and i not in batch.values()
    ):
        raise NoForm("")
    # The axes of x that stay, in order: those that are taken whole.
    kept = [() if i == axis else x.dims[i] for i in range(len(shape))
            if i not in batch.values() and i not in how.collapsed_slice_dims]  # fmt: skip
    known: dict[forms.Unknown, tuple[forms.Part, ...]] = {}
    rows = [forms.merged(index.dims[i], x.dims[batch[i]], known) if i in batch else index.dims[i]
            for i in range(len(index.dims) - 1)]  # fmt: skip
    offsets = set(map(int, how.offset_dims))
    dims = tuple((kept if i in offsets else rows).pop(0) for i in range(len(kept) + len(rows)))
    dims = tuple(forms.resolved(axis, known) for axis in dims)
    x, index = (Form(forms.resolve(f.polynomial, known), f.dims) for f in (x, index))
    if index.polynomial.number is not None:
        if index.polynomial.number != 0 or shape[axis] != 1:
            raise NoForm("")
        return Form(x.polynomial, dims)
    return Form(_picked(equation, x, index, axis), dims)


def _picked(equation: JaxprEqn, x: Form, index: Form, axis: int) -> Polynomial:
    parts = x.dims[axis]
    if len(parts) != 1 or not isinstance(parts[0].label, int):
        raise NoForm("")
    leaf = _integers(index.polynomial)
    value = equation.params.get("fill_value")
    if value is not None and not np.isnan(value):
        raise NoForm("")
    fills = {"FILL_OR_DROP": "nan", "CLIP": "nearest"}
    fill = fills.get(equation.params["mode"].name, "constant")
    return polynomial.pick(x.polynomial, leaf, parts[0].label, fill)


def _integers(p: Polynomial) -> polynomial.Leaf:
    """The array of integers that a polynomial is."""
    atoms = [atom for monomial in p.terms for atom, _ in monomial]
    if len(atoms) != 1 or not isinstance(atoms[0], polynomial.Leaf):
        raise NoForm("")
    if p.terms != polynomial.of_atom(atoms[0]).terms:
        raise NoForm("")
    return atoms[0]


def one_hot(equation: JaxprEqn, axis: int, index: Form) -> Form:
    """The comparison of integers with 0, 1, 2, … along an axis."""
    leaf, shape = _integers(index.polynomial), equation.outvars[0].aval.shape
    if len(index.dims) != len(shape) or any(p.label is not None for p in index.dims[axis]):
        raise NoForm("")
    over = forms.Unknown(equation.outvars[0], axis, 0)
    atom = polynomial.OneHot(frozenset(), leaf, over)  # pyright: ignore[reportArgumentType]
    dims = list(index.dims)
    dims[axis] = (forms.Part(over, shape[axis]),)
    return Form(polynomial.of_atom(atom), tuple(dims))


def _custom_jvp(equation: JaxprEqn, operands: Sequence[Form]) -> Form:
    """`jax.nn.relu`. Its derivative at 0 is 0, as the ops' is, and `jnp.maximum`'s is 1/2."""
    if not is_relu(equation):
        raise NoForm("")
    return Form(polynomial.function("relu", operands[0].polynomial), operands[0].dims)


def is_relu(equation: JaxprEqn) -> bool:
    """Whether a custom_jvp function has the result and the derivative of `jax.nn.relu`."""
    x = equation.invars[0]
    if equation.primitive.name != "custom_jvp_call" or not isinstance(x, Var):
        return False
    if len(equation.invars) != 1 or not is_float(x.aval.dtype):
        return False
    inner = equation.params["call_jaxpr"]
    inner = inner.jaxpr if isinstance(inner, ClosedJaxpr) else inner
    jaxpr = inner.replace(invars=[x], outvars=equation.outvars, eqns=[equation])
    call = jaxpr_as_fun(ClosedJaxpr(jaxpr, ()))
    return _with_derivative(lambda x: call(x)[0], x.aval) == _relu(x.aval)


def _with_derivative(function: Callable[..., Any], type_: Any) -> str:
    """The equations of a function and of its derivative."""
    both = jax.make_jaxpr(lambda x, dx: jax.jvp(function, (x,), (dx,)))
    return str(both(type_, type_))


@functools.lru_cache(maxsize=256)
def _relu(type_: Any) -> str:
    return _with_derivative(jax.nn.relu, type_)


RULES: dict[str, Rule] = {
    "add": _elementwise(lambda a, b: a + b),
    "sub": _elementwise(lambda a, b: a + b.scaled(-1)),
    "mul": _elementwise(lambda a, b: a * b),
    "div": _div,
    "max": _elementwise(_max),
    "neg": _elementwise(lambda a: a.scaled(-1)),
    "square": _elementwise(lambda a: a * a),
    "sqrt": _elementwise(lambda a: polynomial.power(a, 0.5)),
    "rsqrt": _elementwise(lambda a: polynomial.power(a, -0.5)),
    "abs": _elementwise(_abs),
    "tanh": _elementwise(_tanh),
    "erf": _elementwise(lambda a: _odd("erf", a)),
    "erfc": _elementwise(_erfc),
    "logistic": _elementwise(_logistic),
    "exp": _elementwise(_exp),
    "log": _elementwise(_log),
    "pow": _pow,
    "integer_pow": _integer_pow,
    "convert_element_type": _cast,
    "reduce_precision": _same,
    "copy": _same,
    "copy_p": _same,
    "name": _same,  # checkpoint_name
    "pvary": _same,
    "pcast": _same,
    "gt": _compare(lambda a, b: a > b),
    "lt": _compare(lambda a, b: a < b),
    "ge": _compare(lambda a, b: a >= b),
    "le": _compare(lambda a, b: a <= b),
    "eq": _compare(lambda a, b: a == b),
    "ne": _compare(lambda a, b: a != b),
    "select_n": _select,
    "is_finite": _function_of("is_finite"),
    "stop_gradient": _function_of("stop_gradient"),
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "squeeze": _expand_dims,
    "expand_dims": _expand_dims,
    "transpose": _transpose,
    "reduce_sum": _reduce_sum,
    "reduce_max": _reduce_max,
    "gather": _gather,
    "dot_general": _product,
    "custom_jvp_call": _custom_jvp,
}
