"""Norms, activations, losses, clips and embeddings that a reader would see, and that were left.

The search has no reason for code that is unlike the ops' formulas. So each equation that may show
such code is tested here: what is it computed from, and what is computed from it? The tests follow
elementwise equations only, and a few of them. A matrix product ends a piece of code.
"""

# JAX declares the types of variables without shapes.
# pyright: reportAttributeAccessIssue=false
from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from jax_gradops._fuse import search
from jax_gradops._fuse.patterns import lookups, losses
from jax_gradops._fuse.program import Program
from jax_gradops._fuse.report import NEVER_SHOWN, is_own

_SHAPES = {"broadcast_in_dim", "reshape", "squeeze", "expand_dims", "transpose", "copy", "copy_p"}
_SHAPES |= {"convert_element_type", "reduce_precision", "stop_gradient", "pvary", "pcast", "name"}
_ELEMENTWISE = _SHAPES | {"add", "sub", "mul", "div", "neg", "abs", "max", "min", "clamp", "exp"}
_ELEMENTWISE |= {"log", "log1p", "expm1", "select_n", "integer_pow", "square", "pow", "logistic"}
_ELEMENTWISE |= {"tanh", "custom_jvp_call", "add_any"}
# A norm may have the statistics of a part of an array, or of a function of the array.
_RELATED = _ELEMENTWISE | {"slice", "split", "concatenate", "sin", "cos", "sqrt", "rsqrt", "erf"}
_ORDERS = {"lt", "gt", "le", "ge"}
_INDEXING = {"gather", "dynamic_slice"}
# How many equations of a piece of code are followed.
_NEAR = 12
_FAR = 60
# A smaller bound of a norm is there to avoid a division by 0.
_SMALL = 1e-2


class Skipped(NamedTuple):
    """A line of the report: the kind of code, the number of its equation, and the reason."""

    kind: str
    anchor: int
    why: str


# The ranks of the search's reasons, and of better ones in the table.
_LEAST, UNSURE, _BETTER, SURE, _BEST = range(5)


class Reason(NamedTuple):
    """What the search says. If it is unsure, the code may be none of this kind."""

    kind: str
    why: str
    rank: int


class _Row(NamedTuple):
    """A line of the table: if the test of an equation with such a primitive is true, `why` holds.

    The search may have a reason, too. The one with the higher rank is shown.
    """

    primitives: tuple[str, ...]
    kind: str
    test: Callable[[_Piece], bool]
    why: str
    rank: int = _LEAST


class _Piece:
    """The code around an equation that may show what the code is."""

    def __init__(self, program: Program, equation: JaxprEqn, whole: bool) -> None:
        self.program, self.equation, self.whole = program, equation, whole
        self.operand, self.result = equation.invars[0], equation.outvars[0]
        self.size = math.prod(self.result.aval.shape)

    # --- What is near ------------------------------------------------------------------------

    def before(self, v: Any, names: set[str] = _ELEMENTWISE, most: int = _NEAR) -> list[JaxprEqn]:
        """The equations that compute v, back to and with the first of other primitives."""
        found: list[JaxprEqn] = []
        waiting, seen = [v], set()
        while waiting and len(found) < most:
            u = waiting.pop(0)
            equation = self.program.equation_of(u)
            if equation is None or id(equation) in seen:
                continue
            seen.add(id(equation))
            found.append(equation)
            if equation.primitive.name in names:
                waiting += [w for w in equation.invars if isinstance(w, Var)]
        return found

    def after(self, v: Any, names: set[str] = _ELEMENTWISE, most: int = _FAR) -> list[JaxprEqn]:
        """The equations that use v, to and with the first of other primitives."""
        found: dict[int, JaxprEqn] = {}
        waiting = [v]
        while waiting and len(found) < most:
            for i in self.program.users.get(waiting.pop(0), ()):
                if i not in found:
                    found[i] = self.program.items[i].equation
                    waiting += found[i].outvars if found[i].primitive.name in names else []
        return list(found.values())

    def origins(self, v: Any, names: set[str] = _ELEMENTWISE) -> set[Var]:
        """The value, and the arrays from which elementwise equations compute it."""
        equations = [e for e in self.before(v, names) if e.primitive.name in names]
        return {u for u in (v, *(u for e in equations for u in e.invars)) if isinstance(u, Var)}

    def plain(self, v: Any) -> Any:
        """The array before changes of its shape and dtype."""
        equation = self.program.equation_of(v)
        while equation is not None and equation.primitive.name in _SHAPES:
            v = equation.invars[0]
            equation = self.program.equation_of(v)
        return v

    def spread(self, v: Any, depth: int = 6) -> int:
        """The number of elements of an array, without those that are repeated."""
        equation = self.program.equation_of(v)
        size = math.prod(v.aval.shape)
        if isinstance(v, Literal) or size == 1:
            return 1
        if equation is None or equation.primitive.name not in _ELEMENTWISE or not depth:
            return size
        return min(size, max(self.spread(u, depth - 1) for u in equation.invars))

    def number(self, v: Any) -> float | None:
        """The value of a number, perhaps repeated."""
        v = self.plain(v)
        if not isinstance(v, Literal) or np.size(v.val) != 1 or np.iscomplexobj(v.val):
            return None
        return float(np.asarray(v.val).item())

    def others(self, equation: JaxprEqn, own: set[Var]) -> list[Var]:
        """The arrays of an equation that are not among these, without numbers."""
        arrays = [(v, self.plain(v)) for v in equation.invars if isinstance(v, Var)]
        return [v for v, u in arrays if isinstance(u, Var) and v not in own and u not in own]

    # --- Losses ------------------------------------------------------------------------------

    def is_log_of_sum_of_exp(self) -> bool:
        sums = [e for e in self.before(self.operand, _SHAPES | {"add", "max", "abs"})
                if e.primitive.name == "reduce_sum"]  # fmt: skip
        return any(_has(self.before(each.invars[0]), "exp") for each in sums)

    @functools.cached_property
    def uses(self) -> Counter[str]:
        """How often log-probabilities meet "labels", "diagonal", "entropy", "array", "custom"."""
        names = _ELEMENTWISE - {"exp"}  # after it, they are probabilities, as in attention
        after = self.after(self.result, names)
        own = {self.result, *(v for e in after if e.primitive.name in names for v in e.outvars)}
        exps = {v for e in after if e.primitive.name == "exp" for v in e.outvars}
        before = self.origins(self.operand)
        for each in self.before(self.operand, _ELEMENTWISE | {"reduce_sum"}, 2 * _NEAR):
            before |= {v for v in each.invars if isinstance(v, Var)}
        found = Counter[str]()
        for equation in after:
            name = equation.primitive.name
            if name in _INDEXING and equation.invars[0] in own:
                found[self._of_index(equation)] += 1
            if name in ("jit", "pjit") and "diag" in equation.params.get("name", ""):
                found["diagonal"] += 1
            if name == "slice" and _takes_one_of_last(equation):
                found["class"] += 1
            if name in ("add", "sub"):  # of log(sum(exp(x))) and x[label]
                found.update(self._picked(v, before) for v in self.others(equation, own))
            products = name in ("mul", "select_n", "custom_jvp_call", "dot_general")
            if not products or not self._is_summed(equation):
                continue
            arrays = {v for v in equation.invars if isinstance(v, Var)}
            if arrays & exps and arrays & own and name != "select_n":
                found["entropy"] += 1
            for v in self.others(equation, own | exps):
                if math.prod(self.plain(v).aval.shape) < math.prod(v.aval.shape):
                    continue  # weights of rows, or of classes
                use = self._other_factor(v, before)
                custom = use == "labels" and name == "custom_jvp_call"
                found["custom" if custom else use] += 1
        return found

    def _picked(self, v: Var, logits: set[Var]) -> str:
        """What v is of each row: the logit of a label, or the logit of one class for all rows."""
        for each in self.before(v, _SHAPES | _INDEXING | {"neg", "select_n"}):
            if each.primitive.name in _INDEXING and self.origins(each.invars[0]) & logits:
                return self._of_index(each)
            if each.primitive.name == "slice" and self.origins(each.invars[0]) & logits:
                return "class" if _takes_one_of_last(each) else ""
        return ""

    def _other_factor(self, v: Var, logits: set[Var]) -> str:
        """What log-probabilities are multiplied by."""
        origins = self.before(v, _ELEMENTWISE | {"eq"})
        same = self.before(v, _SHAPES | {"eq"})
        for each in origins:
            if each.primitive.name == "eq":
                sides = [self.before(u) for u in each.invars]
                counts = [_has(side, "iota") for side in sides]
                if any(counts):
                    is_eye = all(counts) and any(each is e for e in same)
                    return "diagonal" if is_eye else "labels"
        if _has(origins, "exp") and self.origins(v) & logits:
            return "entropy"
        return "" if v.aval.dtype == bool else "array"

    def _is_summed(self, equation: JaxprEqn) -> bool:
        if equation.primitive.name == "dot_general" or not self.whole:
            return True
        names = _SHAPES | {"neg", "mul", "select_n", "add", "sub"}
        return _has(self.after(equation.outvars[0], names), "reduce_sum", "dot_general")

    def _of_index(self, equation: JaxprEqn) -> str:
        """What an index takes of each row: its label, an element of the diagonal, or one class."""
        if equation.primitive.name == "dynamic_slice":
            return "slice" if equation.outvars[0].aval.shape[-1] == 1 else ""
        if self._has_input(equation.invars[1]):
            return "labels"
        names = _ELEMENTWISE | _ORDERS | {"concatenate", "iota"}
        return "diagonal" if _has(self.before(equation.invars[1], names, _FAR), "iota") else "class"

    def _has_input(self, v: Any) -> bool:
        """Whether an index is computed from an array, not only counted."""
        names = _ELEMENTWISE | _ORDERS | {"concatenate", "iota"}
        near = self.before(v, names, _FAR)
        starts = [v, *(u for e in near for u in e.invars)]
        is_input = any(isinstance(u, Var) and u not in self.program.producer for u in starts)
        return is_input or any(e.primitive.name not in names for e in near)

    def makes_logits(self) -> bool:
        """Whether it is a logarithm of probabilities that is normalised once more."""
        is_log = self.equation.primitive.name == "log" and not self.is_log_of_sum_of_exp()
        return is_log and _has(self.after(self.result), "exp")

    def is_squared(self) -> bool:
        squares = {"square", "integer_pow"}
        after = self.after(self.result, _SHAPES | {"add"})
        return any(e.primitive.name in squares for e in after)

    def is_log_of_softmax(self) -> bool:
        names = _ELEMENTWISE | _INDEXING | {"reduce_sum"}
        for each in self.before(self.operand, names, 2 * _NEAR):
            if each.primitive.name == "div":
                if _has(self.before(each.invars[1], _SHAPES), "reduce_sum"):
                    return _has(self.before(each.invars[0]), "exp")
        return False

    def is_log_of_sigmoid(self) -> bool:
        return _has(self.before(self.operand), "logistic")

    def is_softplus(self) -> bool:
        """log(1 + exp(x)), by `logaddexp` or by hand."""
        if self.equation.primitive.name == "log1p":
            return _has(self.before(self.operand, _SHAPES), "exp")
        zero = any(self.number(v) == 0 for v in self.equation.invars)
        return zero and _has([self.equation], "log1p")

    def is_sigmoid_loss(self) -> bool:
        """log(sigmoid(x)) is -softplus(-x). The loss of labels t is softplus(x) - t x."""
        if not self.is_softplus():
            return False
        negated = self.before(self.operand, _SHAPES)[-1:] + self.after(self.result, _SHAPES)
        is_log = [e.primitive.name for e in negated].count("neg") > 1
        if self.equation.primitive.name != "log1p" and is_log:
            return True
        logits = self.origins(self.operand, _SHAPES | {"neg", "abs", "exp"})
        names = _SHAPES | {"add", "sub", "neg"}
        for each in self.after(self.result, names, _NEAR):
            for product in (p for v in each.invars for p in self.before(v, names)):
                factors = [self.plain(v) for v in product.invars]
                arrays = {v for v in factors if isinstance(v, Var)}
                if product.primitive.name == "mul" and len(arrays) == 2 and arrays & logits:
                    return True
        return False

    # --- Norms and clips ---------------------------------------------------------------------

    def squared(self) -> set[Var]:
        """The arrays of whose squares a square root is a sum, and what these are computed from."""
        names = _ELEMENTWISE | {"psum", "psum_invariant", "all_reduce"}
        found: set[Var] = set()
        for each in self.before(self.operand, names, _FAR):
            terms = [each] if each.primitive.name == "dot_general" else []
            if each.primitive.name == "reduce_sum":
                terms = self.before(each.invars[0])
            for e in terms:
                operands = [v for v in e.invars if isinstance(v, Var)]
                power = e.primitive.name == "integer_pow" and e.params["y"] == 2
                if power or e.primitive.name == "square" or len(operands) > len(set(operands)):
                    found |= self.origins(operands[0], _RELATED)
        return found

    @functools.cached_property
    def divides(self) -> str:
        """Whether arrays are divided by the root of their own squares' sum: "norm" or "clip"."""
        if search.kind(self.equation) != "norm" or self._is_moving_average():
            return ""
        squared, given = self.squared(), self.has_given_variance
        if not squared and not given:
            return ""
        alone = self.size > 1 and self.is_of_one
        exponents = [self.number(v) or 0.0 for v in self.equation.invars[1:]]  # of "pow"
        inverse = self.equation.primitive.name == "rsqrt" or any(e < 0 for e in exponents)
        waiting: list[tuple[Var, bool, bool, bool]] = [(self.result, inverse, False, False)]
        seen: set[Var] = set()
        while waiting and len(seen) < _FAR:
            v, inverse, bounded, is_ratio = waiting.pop(0)
            if v in seen:
                continue
            seen.add(v)
            for i in self.program.users.get(v, ()):
                e = self.program.items[i].equation
                name = e.primitive.name
                if name not in _ELEMENTWISE or name in ("exp", "log", "log1p"):
                    continue
                others = self.others(e, seen)
                larger = [u for u in others if self.spread(u) > self.size - alone]
                below = name == "div" and e.invars[1] is v
                after = inverse != (below or (name == "integer_pow" and e.params["y"] < 0))
                if name in ("mul", "div") and larger:
                    if after and (given or self.origins(larger[0], _RELATED) & squared):
                        if (bounded and not is_ratio) or self._is_bounded(e.outvars[0]):
                            return "clip"
                        if not is_ratio:
                            return "norm"
                    continue
                # The ratio of the norms of weights and of their update is no norm of either.
                ratio = name in ("mul", "div") and any(map(self._has_root, others))
                bounds = bounded or self._choice(e)[1] >= _SMALL
                waiting.append((e.outvars[0], after, bounds, is_ratio or ratio))
        return ""

    @functools.cached_property
    def has_given_variance(self) -> bool:
        """Whether this is the root of an array from outside, plus an epsilon."""
        equation = self.program.equation_of(self.plain(self.operand))
        if equation is None or equation.primitive.name != "add" or self.size == 1:
            return False
        numbers = [n for v in equation.invars if (n := self.number(v)) is not None]
        inputs = [v for v in equation.invars if self.program.equation_of(self.plain(v)) is None]
        return len(numbers) == 1 and numbers[0] < _SMALL and len(inputs) == 2

    def _has_root(self, v: Var) -> bool:
        return _has(self.before(v), "sqrt", "rsqrt")

    def _is_moving_average(self) -> bool:
        """Whether another array times a number is added to the squares, as in optimizers."""
        for e in self.before(self.operand):
            if e.primitive.name == "add":
                factors = [self.program.equation_of(self.plain(v)) for v in e.invars]
                if all(f is not None and f.primitive.name == "mul" for f in factors):
                    return True
        return False

    def _choice(self, e: JaxprEqn) -> tuple[list[Var], float]:
        """What `max`, `min` or `where` compares, and with which number. Infinity for an array."""
        limits = [e] if e.primitive.name in ("max", "min", "clamp") else []
        if e.primitive.name == "select_n":
            near = self.before(e.invars[0], _SHAPES | {"and", "or", "not"})
            limits = [c for c in near if c.primitive.name in {*_ORDERS, "eq"}]
        compared = [v for c in limits for v in c.invars]
        numbers = [n for v in compared if (n := self.number(v)) is not None]
        arrays = [u for v in compared if isinstance(u := self.plain(v), Var)]
        return arrays, math.inf if len(arrays) > len(limits) else max(numbers, default=-1.0)

    def _is_bounded(self, v: Var) -> bool:
        """Whether this is a case of a choice between scaled and unscaled values."""
        after = [e for e in self.after(v, _SHAPES, _NEAR) if e.primitive.name == "select_n"]
        return any(self._choice(e)[1] >= _SMALL for e in after)

    def has_least(self) -> bool:
        """Whether `max` or `where` replaces a small norm, or a small sum of squares."""
        for e in (*self.before(self.operand), *self.after(self.result)):
            arrays, limit = self._choice(e)
            rows = [u for u in arrays if math.prod(u.aval.shape) <= self.size]
            is_small = 0 <= limit < _SMALL and (limit or e.primitive.name == "select_n")
            if is_small and any(_has(self.before(u), "reduce_sum", *_ROOTS) for u in rows):
                return True
        return False

    @functools.cached_property
    def sums(self) -> list[JaxprEqn]:
        near = self.before(self.operand, most=_FAR)
        return [e for e in near if e.primitive.name == "reduce_sum"]

    @property
    def is_of_one(self) -> bool:
        """Whether there are sums before this, and each is of one element."""
        sizes = [[math.prod(v.aval.shape) for v in (*e.invars, *e.outvars)] for e in self.sums]
        return bool(sizes) and all(terms == size for terms, size in sizes)

    def has_mask(self) -> bool:
        """Whether some elements are left out of the statistics, by `where` or by a product."""
        names = _SHAPES | {"mul", "square", "integer_pow", "select_n"}
        terms = [e for each in self.sums for e in self.before(each.invars[0], names)]
        arrays = [self.plain(v).aval for e in terms for v in e.invars]
        return any(a.dtype == bool and math.prod(a.shape) > self.size for a in arrays)

    # --- Embeddings --------------------------------------------------------------------------

    @property
    def lookup_axis(self) -> int | None:
        return lookups.axis_of_lookup(self.program, self.equation)

    def is_one_hot_product(self) -> bool:
        """Whether rows of a table are taken by a product with one-hot rows."""
        (contracted, batch), operands = (
            self.equation.params["dimension_numbers"],
            self.equation.invars,
        )
        if any(batch) or any(len(axes) != 1 for axes in contracted):
            return False
        for i in (0, 1):
            hot, table = operands[i], operands[1 - i]
            counted = contracted[i][0] == hot.aval.ndim - 1 and contracted[1 - i][0] == 0
            if counted and lookups.is_parameter(self.program, table):
                tests = [e for e in self.before(hot, _SHAPES | {"eq"}) if e.primitive.name == "eq"]
                sides = [self._has_input(v) for e in tests for v in e.invars]
                if sorted(sides) == [False, True]:
                    return True
        return False

    # --- Activations -------------------------------------------------------------------------

    def factors(self) -> list[Var]:
        """The arrays that a function's result is multiplied by."""
        own = {self.result}
        found: list[Var] = []
        for equation in self.after(self.result, _SHAPES | {"mul", "add", "sub"}, 6):
            if equation.primitive.name == "mul":
                found += [v for v in self.others(equation, own)
                          if math.prod(v.aval.shape) == self.size]  # fmt: skip
            own.update(equation.outvars)
        return found

    def is_times_own_argument(self) -> bool:
        argument = self.origins(self.operand)
        return any(self.origins(v) & argument for v in self.factors())

    def is_quick_gelu(self) -> bool:
        scaled = self.program.equation_of(self.plain(self.operand))
        numbers = [self.number(v) for v in scaled.invars] if scaled else []
        return self.is_times_own_argument() and any(abs((n or 0) - 1.702) < 0.01 for n in numbers)

    def is_gate(self) -> bool:
        argument = self.origins(self.operand)
        return any(not self.origins(v) & argument for v in self.factors())

    def is_almost_gelu(self) -> bool:
        before = self.before(self.operand)
        cube = any(e.primitive.name == "integer_pow" and e.params["y"] == 3 for e in before)
        return (cube or self.equation.primitive.name != "tanh") and self.is_times_own_argument()

    def is_mish(self) -> bool:
        return self.is_softplus() and _has(self.after(self.result, _SHAPES), "tanh")

    def is_quotient_by_exp(self) -> bool:
        """Whether this is x / (1 + exp(-x)), or 1 / (1 + exp(-x))."""
        sums = self.before(self.equation.invars[1], _SHAPES)
        if not sums or sums[-1].primitive.name != "add":
            return False
        terms = sums[-1].invars
        exps = [_has(self.before(v, _SHAPES), "exp") for v in terms]
        return any(exps) and any(self.number(v) == 1 for v in terms)


def _has(equations: Iterable[JaxprEqn], *names: str) -> bool:
    """Whether one of the equations has one of the primitives, perhaps in a custom_jvp function."""
    return any(
        e.primitive.name in names
        or (e.primitive.name == "custom_jvp_call" and _has(_jaxpr(e).eqns, *names))
        for e in equations
    )


def _jaxpr(equation: JaxprEqn) -> Jaxpr:
    inner = equation.params["call_jaxpr"]
    return inner.jaxpr if isinstance(inner, ClosedJaxpr) else inner


_NO_KERNEL = "the library has no kernel for {}. XLA computes it in one pass with the code around it"
_CUSTOM_CALLS = ("custom_jvp_call", "custom_vjp_call")
_LOSSES = ("log", "log1p", "custom_jvp_call")
_ROOTS = ("sqrt", "rsqrt", "pow")
_SIGMOID_LOSS = "it is a sigmoid cross-entropy. The library has the softmax cross-entropy"
_CUSTOM = "it is inside a function with custom_vjp or custom_jvp, which stays as it is"


def _activation(test: Callable[[_Piece], bool], name: str, *primitives: str) -> _Row:
    return _Row(primitives, "activation", test, _NO_KERNEL.format(name))


def _loss(use: str, why: str, rank: int = _LEAST) -> _Row:
    test = lambda p: p.is_log_of_sum_of_exp() and use in p.uses  # noqa: E731
    return _Row(("log",), "loss", test, why, rank)


_ENTROPY = (
    "it is an entropy or a divergence of the softmax's own probabilities, not a loss of labels"
)
# The first row whose test is true names the code.
_ROWS = (
    _Row(("log",), "loss", _Piece.is_log_of_sigmoid, _SIGMOID_LOSS),
    _Row(_LOSSES, "loss", _Piece.is_sigmoid_loss, _SIGMOID_LOSS),
    _Row(("log",), "loss", lambda p: "labels" in p.uses and p.has_mask(), "a mask leaves some "
         "classes out", _BEST),
    _Row(("log",), "loss", lambda p: "labels" in p.uses and p.is_of_one, "there is one class. The "
         "loss is 0", _BEST),
    _loss("labels", losses.OTHER_FORMULA),
    _loss("slice", "one element of one row is sliced. The op takes one row and its label, too",
          _BEST),
    _loss("class", "it takes one class of all rows. The op takes labels, here jnp.full(n, class)",
          _BEST),
    _loss("custom", "the labels are multiplied in a function with custom_jvp, which stays as it "
          "is"),
    _loss("diagonal", "it takes the diagonal of the log-probabilities. The op takes labels, here "
          "jnp.arange(n)", _BEST),
    _loss("entropy", _ENTROPY, _BEST),
    _loss("array", losses.PROBABILITIES),
    _Row(("log",), "loss", lambda p: p.is_log_of_sum_of_exp() and p.is_squared(), "it is a z-loss "
         "alone. The op has it beside a loss of labels: z_loss="),
    _Row(("log",), "loss", _Piece.is_log_of_softmax, "it is the logarithm of probabilities. The "
         "op takes logits: log_softmax(x) is found"),
    _Row(_ROOTS, "norm", lambda p: p.divides == "norm" and p.has_mask(), "a mask leaves some "
         "elements out", _BETTER),
    _Row(_ROOTS, "norm", lambda p: p.divides == "norm" and p.has_least(), "a maximum or a choice "
         "replaces a small norm. The op adds epsilon to the mean square", _BEST),
    _Row(_ROOTS, "norm", lambda p: p.divides == "norm" and p.is_of_one, "each of its statistics is "
         "of one element", _BEST),
    _Row(_ROOTS, "norm", lambda p: p.divides == "norm" and p.has_given_variance, "its mean and "
         "variance are given, as in inference. jax_gradops.batch_norm_inference takes them"),
    _Row(_ROOTS, "norm", lambda p: p.divides == "norm", "its statistics are not a variance or a "
         "mean square of one array, in a formula of the ops"),
    _Row(_ROOTS, "clip", lambda p: p.divides == "clip" and len(p.sums) < 2, "an array is "
         "clipped by its own norm. The op takes the global norm of all arrays", _BEST),
    _Row(_ROOTS, "clip", lambda p: p.divides == "clip", "the result is not that of Optax's "
         "clip_by_global_norm: where(norm < max_norm, x, x / norm * max_norm)"),
    _Row(("gather",), "embedding", lambda p: (p.lookup_axis or 0) > 0, "it looks up slices along "
         "another axis than the first, as jax.vmap over tables does"),
    _Row(("gather",), "embedding", lambda p: p.lookup_axis == 0, "another op replaces an operand"),
    _Row(("dot_general",), "embedding", _Piece.is_one_hot_product, "it is a product with one-hot "
         "rows. The op looks up rows: table[indices]"),
    _activation(_Piece.is_mish, "Mish", *_LOSSES),
    _activation(_Piece.is_softplus, "softplus", *_LOSSES),
    _Row(("tanh", "erf", "erfc"), "gelu", _Piece.is_almost_gelu, "the result is not x * (1 + "
         "erf(x / sqrt(2))) / 2, or its approximation by tanh, of one array"),
    _Row(("logistic",), "gelu", _Piece.is_quick_gelu, "it is the approximation x * sigmoid(1.702 "
         "x). The op has the exact GELU, and the approximation by tanh"),
    _activation(lambda p: p.is_times_own_argument() and p.is_gate(), "a gated SiLU", "logistic"),
    _activation(_Piece.is_times_own_argument, "SiLU", "logistic"),
    _activation(_Piece.is_gate, "a sigmoid gate", "logistic"),
    _activation(lambda p: True, "the sigmoid", "logistic"),
    _activation(lambda p: True, "tanh", "tanh"),
    _activation(_Piece.is_quotient_by_exp, "SiLU or the sigmoid", "div"),
)  # fmt: skip
_NAMED = {*_CUSTOM_CALLS, *(name for row in _ROWS for name in row.primitives)}


def lines(
    program: Program, taken: set[int], reasons: Mapping[int, Reason], whole: bool = True
) -> Iterator[Skipped]:
    """What a report says about code that was not replaced, one line for each piece of code.

    Args:
      program: the jaxpr.
      taken: the equations that were replaced.
      reasons: what the search says, by the equation that shows the code.
      whole: whether the sum of a loss is in the jaxpr.
    """
    found: list[tuple[int, int, Skipped]] = []
    for i, item in enumerate(program.items):
        equation, name = item.equation, item.equation.primitive.name
        used = any(v in program.users or v in program.results for v in equation.outvars)
        if i in taken or not used or name not in _NAMED:
            continue
        if name in _CUSTOM_CALLS and (inner := _with_derivative(equation)) is not None:
            kinds = {line.kind: None for line in lines(Program(inner), set(), {}, whole=False)}
            found += [(-1, i, Skipped(kind, i, _CUSTOM)) for kind in kinds]
            continue
        piece = _Piece(program, equation, whole)
        if piece.makes_logits():
            continue
        number, row = _row_of(piece)
        reason = reasons.get(i)
        if reason and reason.rank == UNSURE and (row is None or row.kind != reason.kind):
            reason = None
        best = max((each for each in (row, reason) if each), key=lambda e: e.rank, default=None)
        if best is not None:
            found.append((number, i, Skipped(best.kind, i, best.why)))
    kept: list[_Kept] = []
    for _, i, line in sorted(found, key=lambda each: each[:2]):
        if line.kind in ("loss", "activation", "gelu"):
            new = _Kept(line.kind, _Piece(program, program.items[i].equation, whole))
            if any(new.is_of(each) for each in kept):
                continue
            kept.append(new)
            if new.is_softmax and "entropy" in new.uses and line.why != _ENTROPY:
                yield line._replace(why=_ENTROPY)  # of the same log-probabilities
            if line.why == _ENTROPY:
                yield from [line] * (new.uses["entropy"] - 1)
        yield line


class _Kept:
    """A piece of code with a line: other equations of its formula have no line of their own."""

    def __init__(self, kind: str, piece: _Piece) -> None:
        self.is_loss = kind == "loss"
        of_softmax = piece.is_log_of_sum_of_exp() or piece.is_log_of_softmax()
        self.is_softmax = self.is_loss and of_softmax
        self.uses = piece.uses if self.is_softmax else Counter[str]()
        joins = {"stack", "concatenate"} | (set[str]() if self.is_softmax else {"reduce_sum"})
        names = _ELEMENTWISE | joins, _ELEMENTWISE - {"add", "sub"}
        self.after, self.near = (
            {id(e) for e in (piece.equation, *piece.after(piece.result, n))} for n in names
        )
        operands = [v for v in piece.equation.invars if isinstance(v, Var)]
        # The arrays from which elementwise equations start.
        self.arrays = {
            u
            for v in operands
            for u in piece.origins(v)
            if (e := piece.program.equation_of(u)) is None or e.primitive.name not in _ELEMENTWISE
        }

    def is_of(self, other: _Kept) -> bool:
        """Whether both lead to one equation, and are functions of equal arrays or two softmaxes."""
        meets = bool(self.after & other.after if other.is_loss else self.near & other.near)
        if self.is_loss and not other.is_loss:
            return False
        of_softmaxes = self.is_softmax and other.is_softmax
        return meets and (of_softmaxes or self.arrays == other.arrays)


def _takes_one_of_last(equation: JaxprEqn) -> bool:
    """Whether a slice has one element of the last axis, and all of the others."""
    (*rows, classes), (*kept, one) = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
    return rows == kept and one == 1 < classes


def _row_of(piece: _Piece) -> tuple[int, _Row | None]:
    """The first row whose test is true, and its number."""
    name = piece.equation.primitive.name
    for number, row in enumerate(_ROWS):
        # A function of one number is no layer's activation. A batch of one row has a loss.
        is_one = piece.size == 1 and row.kind in ("activation", "gelu")
        if name in row.primitives and not is_one and row.test(piece):
            return number, row
    return len(_ROWS), None


def _with_derivative(equation: JaxprEqn) -> Jaxpr | None:
    """The jaxpr of a function with a derivative of its own, if it is not JAX's."""
    jaxpr = _jaxpr(equation)
    file = getattr(getattr(jaxpr, "debug_info", None), "func_filename", None)
    return jaxpr if is_own(file, NEVER_SHOWN) else None
