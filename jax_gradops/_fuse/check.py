"""Compares an op with the equations that it replaces, on random numbers.

The equations are run on few rows. For this, each array is given the axes of the root, in the root's
order, with size 1 where the array does not vary. Reshapes, transpositions and broadcasts then do
nothing, and the number of rows does not matter. An addition before the root is run on its arrays as
they are, with few rows.
"""

# JAX declares the types of variables without shapes.
# pyright: reportAttributeAccessIssue=false
from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Literal, Var
from jax.sharding import AbstractMesh

from jax_gradops import _registry
from jax_gradops._fuse import forms, search
from jax_gradops._fuse.patterns.candidate import Candidate, Left
from jax_gradops._fuse.polynomial import Atom, Function, Leaf, Mean, Pick, Polynomial
from jax_gradops._fuse.program import Site, is_float
from jax_gradops._fuse.search import Values
from jax_gradops._implementation import default_implementation, use_implementation

_NOTHING_HERE = {"broadcast_in_dim", "reshape", "squeeze", "expand_dims", "transpose"}
_NOTHING_HERE |= {"pvary", "pcast", "name"}
# The number of elements, in the comparison, of axes without a sum.
_ROWS = 2
# All comparisons so far, by their keys. A result says what differs. It is "" if nothing does.
_comparisons: dict[Any, Future[str]] = {}
# The threads for comparisons, and the comparisons that the search has not waited for.
_in_threads: ContextVar[tuple[ThreadPoolExecutor, list[Future[str]]]] = ContextVar("_in_threads")
# The comparison runs once, so that compilation is most of its time.
_QUICKLY_COMPILED: dict[str, Any] = {
    "xla_backend_optimization_level": 0,
    "xla_cpu_parallel_codegen_split_count": 1,
}
if jax.__version_info__ < (0, 11):  # later versions have no such option
    _QUICKLY_COMPILED["xla_cpu_use_fusion_emitters"] = False


@contextlib.contextmanager
def in_threads() -> Iterator[list[Future[str]]]:
    """Comparisons that start inside run in threads, and count as passed until they have finished.

    After it, all have finished. `passed` tells which of them passed.
    """
    with ThreadPoolExecutor(2) as threads:
        unfinished: list[Future[str]] = []
        token = _in_threads.set((threads, unfinished))
        try:
            yield unfinished
        finally:
            _in_threads.reset(token)


def passed(comparison: Future[str]) -> bool:
    """Whether a comparison that has finished found no difference, and no error."""
    return comparison.exception() is None and comparison.result() == ""


def forget_errors() -> None:
    """Comparisons that ended with an error run again in the next trace."""
    for key, comparison in list(_comparisons.items()):
        if comparison.done() and comparison.exception() is not None:
            _comparisons.pop(key, None)


@contextlib.contextmanager
def _own_settings(x64: bool, implementation: Any) -> Iterator[None]:
    """Sets JAX's settings to their defaults in this thread. The caller decides about 64 bits."""
    cpu = jax.devices("cpu")[0] if _has_cpu() else None
    # With "ffi", the references for platforms without kernels are not traced.
    kernels = "ffi" if cpu and not _registry.why_unavailable("cpu") else None
    with contextlib.ExitStack() as settings:
        for setting in (
            jax.enable_x64(x64),
            jax.disable_jit(False),
            jax.default_device(cpu),
            jax.transfer_guard("allow"),
            jax.debug_nans(False),
            jax.debug_infs(False),
            jax.numpy_rank_promotion("allow"),
            jax.numpy_dtype_promotion("standard"),
            jax.sharding.use_abstract_mesh(AbstractMesh((), ())),
            use_implementation(implementation or kernels),
        ):
            settings.enter_context(setting)
        yield


def equal(
    values: Values, candidate: Candidate, equations: Sequence[int], added: Site | None = None
) -> Any:
    """Raises `Left` if results or gradients of the op and of the equations differ.

    They are compared twice: in the dtypes of the equations, and with all of them in float32, where
    a difference of a bfloat16 rounding is seen, unless the code's own numbers are rounded to
    bfloat16. Equal comparisons are made once. `added`: the op in its form with an addition first.
    Then the equations of the addition are compared, too. Returns what equal comparisons share.
    """
    region = _Region(values, candidate, equations, added)
    key = region.signature()
    _compare_once(key, region.name, region.op, region.cases)
    return key


def compare(
    op: str,
    reference: Callable[..., Any],
    call: Callable[..., Any],
    types: Sequence[tuple[tuple[int, ...], Any]],
    key: Any,
) -> None:
    """Raises `Left` if two functions of arrays of these shapes and dtypes differ.

    `reference` gets a bool first: whether all floats are float32. Both cases are compared.
    """

    def cases() -> list[_Case]:
        rng = np.random.default_rng(0)
        numbers = [rng.uniform(0.5, 1.5, shape) for shape, _ in types]
        found = []
        for wide in (False, True):
            arrays = [
                x.astype(np.float32 if wide and is_float(dtype) else dtype)
                for x, (_, dtype) in zip(numbers, types, strict=True)
            ]
            unit = max(float(jnp.finfo(x.dtype).eps) for x in arrays)
            found.append(_Case(functools.partial(reference, wide), arrays, 64 * unit))
        return found

    _compare_once(key, op, call, cases)


def run_broadcast(equations: Iterable[JaxprEqn], env: dict[Any, jax.Array], wide: bool) -> None:
    """Runs elementwise equations on small arrays, and adds the results to `env`.

    Changes of shape do nothing. So they may only repeat an array, or add axes of size 1 in front.
    Sums must be over all axes. `wide`: all floats are float32, and nothing is rounded.
    """
    for equation in equations:
        operands = [_read(v, env, (), wide) for v in equation.invars]
        name = equation.primitive.name
        if name in _NOTHING_HERE or (wide and name == "reduce_precision"):
            result = operands[0]
        elif name == "convert_element_type":
            result = _cast(operands[0], equation, wide)
        elif name == "reduce_sum":
            result = jnp.sum(operands[0], dtype=operands[0].dtype)
        else:
            result = bind(equation, operands)
        env[equation.outvars[0]] = result


class _Case(NamedTuple):
    """A comparison with `reference`, whose results may differ by `limit` of the largest number."""

    reference: Callable[..., Any]
    arrays: Sequence[np.ndarray]
    limit: float


def _compare_once(
    key: Any, op: str, call: Callable[..., Any], cases: Callable[[], Sequence[_Case]]
) -> None:
    """Raises `Left` if results or gradients of a case differ. It does not wait for them."""
    threads, unfinished = _in_threads.get()
    if key not in _comparisons:
        settings = jax.config.jax_enable_x64, default_implementation()  # pyright: ignore
        _comparisons[key] = threads.submit(_difference, settings, op, call, cases)
    comparison = _comparisons[key]
    if not comparison.done():
        unfinished.append(comparison)
    elif comparison.result():
        raise Left(comparison.result())


def _program(call: Callable[..., Any], cases: Sequence[_Case]) -> jax.stages.Lowered:
    """The program of all cases."""

    def both(groups: Sequence[Sequence[jax.Array]]) -> Any:
        return [
            [_with_gradients(function, arrays) for function in (case.reference, call)]
            for case, arrays in zip(cases, groups, strict=True)
        ]

    return jax.jit(both).lower([case.arrays for case in cases])


def _difference(
    settings: tuple[bool, Any],
    op: str,
    call: Callable[..., Any],
    make_cases: Callable[[], Sequence[_Case]],
) -> str:
    """What differs, or ""."""
    with _own_settings(*settings):
        cases = make_cases()
        compiled = _program(call, cases).compile(_QUICKLY_COMPILED)
        found = jax.device_get(compiled([case.arrays for case in cases]))
    for case, (expected, got) in zip(cases, found, strict=True):
        for what, a, b in zip(("results", "gradients"), expected, got, strict=True):
            for x, y in zip(a, b, strict=True):
                x, y = (np.asarray(each, np.float64) for each in (x, y))
                largest = float(np.max(np.abs(x), initial=1e-3))
                error = float(np.max(np.abs(x - y), initial=0.0))
                if not error <= case.limit * largest:
                    return (
                        f"{what} of {op} differ on random numbers, by {error:.1e} of {largest:.1e}"
                    )
    return ""


def _with_gradients(function: Callable[..., Any], arrays: Sequence[jax.Array]) -> Any:
    """The results, and the gradients of a random sum of them."""
    floats = [i for i, a in enumerate(arrays) if is_float(a.dtype)]

    def of_floats(*given: jax.Array) -> Any:
        full = list(arrays)
        for i, array in zip(floats, given, strict=True):
            full[i] = array
        return jax.tree.leaves(function(*full))

    results, pull = jax.vjp(of_floats, *(arrays[i] for i in floats))
    rng = np.random.default_rng(1)
    dy = [jnp.asarray(rng.standard_normal(y.shape).astype(y.dtype)) for y in results]
    return results, pull(dy)


def bind(equation: JaxprEqn, operands: Sequence[jax.Array]) -> jax.Array:
    """The result of an elementwise equation for operands that are broadcast."""
    if len({x.shape for x in operands}) > 1:
        operands = jnp.broadcast_arrays(*operands)
    return equation.primitive.bind(*operands, **equation.params)


def _has_cpu() -> bool:
    try:
        return bool(jax.devices("cpu"))
    except RuntimeError:
        return False


class _Region:
    """The equations that an op may replace. An addition before the root may belong to them.

    Attributes:
      operands: the op's operands. With an addition, its terms come first, instead of the root.
      terms: the number of operands in the root's place.
      distinct: the operands, each once: the derivative of x + x is that of one array.
      has_sum: whether the op returns the root, too.
    """

    def __init__(
        self, values: Values, candidate: Candidate, equations: Sequence[int], added: Site | None
    ) -> None:
        self.values, self.candidate = values, candidate
        of: Any = added or candidate
        self.name, self.call, self.operands = of.op, of.call, of.operands
        self.terms = len(self.operands) - len(candidate.operands) + 1
        self.distinct = tuple(dict.fromkeys(self.operands))
        self.has_sum = added is not None and values.root in added.outputs
        program, root = values.program, values.root
        addition = search.slice_between(program, [root], set(self.operands)) if added else ()
        self.addition = [program.items[i].equation for i in sorted(addition)]
        self.equations = [program.items[i].equation for i in equations]
        form = values.forms[candidate.output]
        self.order = [p.label for axis in form.dims for p in axis if isinstance(p.label, int)]
        self.leaves, self.classes = _labels(form.polynomial)
        reduced = {a for e in self.equations for a in self._reduced(e)}
        # Of an axis that is divided, only the first part is shorter: see `label_sizes`.
        first = {axis[0].label for axis in values.forms[values.root].dims if axis}
        self.sizes = [
            min(n, _ROWS) if i in first and i not in reduced else n
            for i, n in enumerate(values.sizes)
        ]
        self.output_sizes = [n if i in form.labels else 1 for i, n in enumerate(self.sizes)]
        self.count = math.prod(values.sizes[a] for a in reduced)
        outputs = [v for e in (*self.addition, *self.equations) for v in e.outvars]
        self.dtypes = {
            v.aval.dtype.name for v in (*self.operands, *outputs) if is_float(v.aval.dtype)
        }

    def _axes(self, leaf: Var) -> list[int]:
        return [label for axis in self.leaves[leaf] for label in axis]

    def _reduced(self, equation: JaxprEqn) -> frozenset[int]:
        if equation.primitive.name not in ("reduce_sum", "reduce_max"):
            return frozenset()
        form = self.values.form_of(equation.invars[0])
        return forms.reduce(form, equation.params["axes"])[0]

    def signature(self) -> Any:
        """Equal for regions whose comparisons are equal."""
        numbers: dict[Any, int] = {}

        def name(v: Any) -> Any:
            if isinstance(v, Literal):
                return str(v.val), str(v.aval)
            return numbers.setdefault(v, len(numbers)), v.aval.dtype.name

        arrays = (self.values.root, *self.operands)
        operands = [(name(v), v.aval.shape[-2:] and self._dims(v)) for v in arrays]
        lines = [
            (e.primitive.name, *map(name, e.invars), *map(name, e.outvars), str(e.params.get("y")),
             str(sorted(self._reduced(e))))
            for e in (*self.addition, *self.equations)
        ]  # fmt: skip
        keywords = getattr(self.candidate.call, "keywords", {})
        sizes = tuple(self.sizes)
        return (self.name, str(keywords), sizes, str(operands), str(lines))

    def _dims(self, v: Var) -> Any:
        if v is self.values.root:
            return self.values.forms[v].dims
        return self.leaves.get(v)

    def cases(self) -> list[_Case]:
        """Returns a comparison in the dtypes of the equations, and one in float32."""
        found = []
        for wide in (False, True):
            if wide and self.dtypes <= {"float32", "float64"}:
                continue
            dtypes = {"float32"} if wide else self.dtypes
            unit = max(float(jnp.finfo(name).eps) for name in dtypes)
            limit = unit * max(64, 4 * math.sqrt(self.count))
            limit = max(limit, 2 * self.candidate.rounding)
            rng = np.random.default_rng(0)
            arrays = [self._random(rng, v, wide) for v in self.distinct]
            reference = functools.partial(self.run, wide)
            found.append(_Case(reference, arrays, limit))
        return found

    def op(self, *arrays: jax.Array) -> list[jax.Array]:
        """Computes the op's result, with the axes that `run` returns, and perhaps the sum."""
        result, *others = jax.tree.leaves(self.call(*self._given(arrays)))
        result = result.reshape([self.sizes[i] for i in self.order]).transpose(
            np.argsort(self.order)
        )
        return [result.reshape(self.output_sizes), *(others[:1] if self.has_sum else [])]

    def _given(self, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        """The array of each operand."""
        by_operand = dict(zip(self.distinct, arrays, strict=True))
        return [by_operand[v] for v in self.operands]

    def _random(self, rng: np.random.Generator, v: Var, wide: bool) -> np.ndarray:
        """An operand with few rows."""
        shape = self.shape(v)
        if not is_float(v.aval.dtype):
            most = min(self.sizes[self.classes] - 1, jnp.iinfo(v.aval.dtype).max)
            return rng.integers(0, most, shape, endpoint=True).astype(v.aval.dtype)
        numbers = rng.uniform(0.5, 1.5, shape)
        if v.aval.shape == self.values.root.aval.shape:
            numbers = rng.standard_normal(shape) * 1.5 + 0.25
        return numbers.astype(np.float32 if wide else v.aval.dtype)

    def shape(self, v: Var) -> tuple[int, ...]:
        """The shape of an operand, with few rows."""
        root = self.values.root
        if v in self.leaves:
            labels: Any = self.leaves[v]
        else:  # the root, an array of its shape, or a vector
            labels = [[p.label for p in axis] for axis in self.values.forms[root].dims]
            if v.aval.shape != root.aval.shape:
                labels = [*([[]] * (len(v.aval.shape) - 1)), labels[-1]]
        sizes = self.sizes
        return tuple(math.prod(sizes[n] for n in axis if isinstance(n, int)) for axis in labels)

    def run(self, wide: bool, *arrays: jax.Array) -> list[jax.Array]:
        """The equations' result, and perhaps the sum."""
        given: dict[Any, jax.Array] = dict(zip(self.distinct, arrays, strict=True))
        run_broadcast(self.addition, given, wide)
        total = given[self.values.root]
        own = self.values.root_atom.axes
        sizes = [n if i in own else 1 for i, n in enumerate(self.sizes)]
        env: dict[Any, jax.Array] = {self.values.root: total.reshape(sizes)}
        for v in self.candidate.operands[1:]:
            array = given[v]
            labels = self._axes(v)
            array = array.reshape([self.sizes[a] for a in labels])
            array = array.transpose(np.argsort(labels))
            kept = set(labels)
            env[v] = array.reshape([n if i in kept else 1 for i, n in enumerate(self.sizes)])
        for equation in self.equations:
            env[equation.outvars[0]] = self._evaluate(equation, env, wide)
        result = jnp.broadcast_to(env[self.candidate.output], self.output_sizes)
        return [result, total] if self.has_sum else [result]

    def _evaluate(self, equation: JaxprEqn, env: Mapping[Any, jax.Array], wide: bool) -> jax.Array:
        ones = (1,) * len(self.sizes)
        operands = [_read(v, env, ones, wide) for v in equation.invars]
        name, params = equation.primitive.name, dict(equation.params)
        if name in _NOTHING_HERE or (wide and name == "reduce_precision"):
            return operands[0]
        if name in ("reduce_sum", "reduce_max"):
            form = self.values.form_of(equation.invars[0])
            over, copies, _ = forms.reduce(form, params["axes"])
            sizes = [n if i in over else m for i, (n, m) in
                     enumerate(zip(self.sizes, operands[0].shape, strict=True))]  # fmt: skip
            x = jnp.broadcast_to(operands[0], sizes)
            if name == "reduce_max":
                return jnp.max(x, axis=tuple(over), keepdims=True)
            total = jnp.sum(x, axis=tuple(over), keepdims=True, dtype=x.dtype)
            return total * jnp.asarray(copies, x.dtype)
        if name == "convert_element_type":
            return _cast(operands[0], equation, wide)
        if name == "iota":
            if self.classes < 0:  # it makes an array that the formula does not need
                raise Left("")
            shape = [n if i == self.classes else 1 for i, n in enumerate(self.sizes)]
            return jnp.arange(self.sizes[self.classes], dtype=params["dtype"]).reshape(shape)
        if name == "dot_general":
            dtype = np.float32 if wide else equation.outvars[0].aval.dtype
            return operands[0].astype(dtype) * operands[1].astype(dtype)
        if name == "gather":
            return self._gather(params, *operands)
        if name == "custom_jvp_call":
            return jax.nn.relu(*operands)
        return bind(equation, operands)

    def _gather(self, params: Mapping[str, Any], x: jax.Array, index: jax.Array) -> jax.Array:
        """The element of each row, or the only one."""
        if x.shape[self.classes] == 1:
            return x
        mode = "fill" if params["mode"].name == "FILL_OR_DROP" else "clip"
        return jnp.take_along_axis(x, index, self.classes, mode=mode)


def _read(v: Any, env: Mapping[Any, jax.Array], shape: tuple[int, ...], wide: bool) -> jax.Array:
    """The value of an equation's operand. Literals get the shape."""
    if isinstance(v, Var):
        if v not in env:
            raise Left("")
        return env[v]
    dtype = v.aval.dtype
    return jnp.asarray(np.full(shape, v.val, np.float32 if wide and is_float(dtype) else dtype))


def _cast(x: jax.Array, equation: JaxprEqn, wide: bool) -> jax.Array:
    dtype = equation.params["new_dtype"]
    return x.astype(np.float32 if wide and is_float(dtype) else dtype)


def _labels(p: Polynomial) -> tuple[dict[Var, tuple[tuple[int, ...], ...]], int]:
    """For each leaf, the root's axes that its axes lie along; and the axis of classes, or -1."""
    found: dict[Var, Any] = {}
    classes: set[int] = set()

    def visit(atoms: Iterable[Atom]) -> None:
        for atom in atoms:
            if isinstance(atom, (Mean, Pick)):
                visit(a for a, _ in atom.of)
            if isinstance(atom, Pick):
                classes.add(atom.over)
                visit([atom.index])
            elif isinstance(atom, Function):
                visit(a for inner, _ in atom.of for a, _ in inner)
            elif isinstance(atom, Leaf) and found.setdefault(atom.var, atom.labels) != atom.labels:
                raise Left("an array is used along different axes")

    visit(a for monomial in p.terms for a, _ in monomial)
    return found, max(classes, default=-1)
