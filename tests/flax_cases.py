"""Flax modules, constructor arguments and inputs. Our modules must do what Flax's do."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx

import jax_gradops.linen
import jax_gradops.nnx

#: Flax's module and our module, by API name.
APIS = {"linen": (linen, jax_gradops.linen), "nnx": (nnx, jax_gradops.nnx)}


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of one module.

    Attributes:
      options: arguments of the constructor.
      call: arguments of the call.
      kernel: whether this library's kernel must compute the result. Else Flax's own code must.
      only: the only API that supports the case, if there is one.
    """

    module: str
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    shape: tuple[int, ...] = (4, 6, 8)
    dtype: str = "float32"
    call: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    kernel: bool = True
    only: str | None = None

    def __str__(self) -> str:
        def text(value: Any) -> str:
            return getattr(value, "__name__", None) or str(value).replace(" ", "")

        named = [f"{name}={text(value)}" for name, value in {**self.options, **self.call}.items()]
        shape = "x".join(map(str, self.shape))
        return "-".join([self.module, *named, shape, self.dtype])

    def features(self) -> int:
        """The number of features for NNX constructors."""
        axis = self.options.get("axis", self.options.get("feature_axes", -1))
        axes = axis if isinstance(axis, tuple) else (axis,)
        return int(np.prod([self.shape[a] for a in axes]))

    def x(self) -> jax.Array:
        rng = np.random.default_rng(3)
        x = 0.5 + 2 * rng.standard_normal(self.shape)
        if self.dtype.startswith("complex"):
            x = x + 1j * rng.standard_normal(self.shape)
        return jnp.asarray(x, self.dtype)


def _mask(*shape: int) -> np.ndarray:
    return np.random.default_rng(5).random(shape) > 0.3


def _some(key: jax.Array, shape: Any, dtype: Any) -> jax.Array:
    return jax.random.normal(key, shape, dtype) + 1


_DTYPES = (None, "bfloat16", "float16", "float32")
_TRAINING = {"use_running_average": False}
_GROUPS = {"num_groups": 2}
CASES = [
    *(
        Case(module, {"dtype": dtype, "scale_init": _some, **more}, dtype=x)
        for module, more in (
            ("LayerNorm", {"bias_init": _some}),
            ("RMSNorm", {}),
            ("BatchNorm", _TRAINING),
            ("GroupNorm", {**_GROUPS, "bias_init": _some}),
            ("InstanceNorm", {"bias_init": _some}),
        )
        for x in ("bfloat16", "float16", "float32", "float64")
        for dtype in _DTYPES
        if x != "float64" or dtype in (None, "float32")
    ),
    *(
        Case(module, {**more, **options})
        for module, more in (
            ("LayerNorm", {}),
            ("BatchNorm", _TRAINING),
            ("GroupNorm", _GROUPS),
            ("InstanceNorm", {}),
        )
        for options in (
            {"use_bias": False},
            {"use_scale": False, "bias_init": _some},
            {"use_bias": False, "use_scale": False},
            {"epsilon": 0.5, "use_fast_variance": False},
            {"param_dtype": jnp.bfloat16},
            {"param_dtype": jnp.float64},
            {"axis_name": None, "axis_index_groups": None},
        )
    ),
    Case("RMSNorm", {"use_scale": False}),
    Case("RMSNorm", {"epsilon": 0.5, "use_fast_variance": False, "param_dtype": jnp.float16}),
    # Axes
    Case("LayerNorm", {"reduction_axes": (-2, -1), "feature_axes": (-2, -1), "scale_init": _some}),
    Case("RMSNorm", {"reduction_axes": (2, 1), "feature_axes": (1, 2), "scale_init": _some}),
    Case("LayerNorm", {"reduction_axes": (0, 1, 2), "feature_axes": (0, 1, 2)}),
    Case("LayerNorm", {"reduction_axes": 1}, kernel=False),
    Case("LayerNorm", {"reduction_axes": (1, 2)}, kernel=False),
    Case("LayerNorm", {"reduction_axes": 1, "feature_axes": 1}, kernel=False),
    Case("LayerNorm", shape=(8,)),
    Case("LayerNorm", shape=(0, 8), kernel=False),
    *(
        Case("BatchNorm", {**_TRAINING, "axis": axis, "scale_init": _some}, shape)
        for axis, shape in ((1, (4, 6, 8)), (-1, (4, 8)), (1, (4, 3, 5, 6)), (-1, (2, 3, 2, 5, 6)))
    ),
    Case("BatchNorm", {**_TRAINING, "axis": 0}),
    Case("BatchNorm", {**_TRAINING, "axis": (1, 2)}, kernel=False, only="linen"),
    Case("BatchNorm", _TRAINING, (2, 2, 2, 2, 2, 3), kernel=False),
    # Groups
    Case("GroupNorm", shape=(3, 5, 64)),
    Case("GroupNorm", {"num_groups": None, "group_size": 4}),
    Case("GroupNorm", {"num_groups": 1}),
    Case("GroupNorm", {"num_groups": 8}, (3, 2, 5, 8)),
    Case("GroupNorm", {**_GROUPS, "scale_init": _some}, (4, 8)),
    Case("GroupNorm", {**_GROUPS, "scale_init": _some}, (2, 2, 3, 2, 2, 2, 4)),
    *(
        Case("GroupNorm", {**_GROUPS, "reduction_axes": axes})
        for axes in ((1, 2), (-1, 1), [2, -2])
    ),
    Case("GroupNorm", {**_GROUPS, "reduction_axes": -1}, (4, 8), only="linen"),
    Case("GroupNorm", {**_GROUPS, "reduction_axes": (-1,)}, kernel=False, only="linen"),
    Case("GroupNorm", {**_GROUPS, "reduction_axes": (0, 1, 2)}, kernel=False, only="linen"),
    Case("GroupNorm", _GROUPS, (0, 3, 8), kernel=False),
    Case("InstanceNorm", {"feature_axes": 1, "scale_init": _some}, (4, 3, 5, 6)),
    Case("InstanceNorm", {"feature_axes": (-1,), "scale_init": _some}, (2, 3, 2, 2, 2, 4)),
    Case("InstanceNorm", {"feature_axes": (1, 2)}, (4, 3, 5, 6), kernel=False),
    Case("InstanceNorm", {"bias_init": _some}, (4, 8)),
    # Running averages
    Case("BatchNorm", {**_TRAINING, "momentum": 0.5}),
    Case("BatchNorm", {"use_running_average": True}, kernel=False),
    Case("BatchNorm", {"use_running_average": None}, call=_TRAINING),
    Case(
        "BatchNorm", {"use_running_average": None}, call={"use_running_average": True}, kernel=False
    ),
    Case(
        "BatchNorm",
        {"use_running_average": False},
        call={"use_running_average": True},
        kernel=False,
        only="nnx",
    ),
    # Flax's own path
    *(
        Case(module, more, call={"mask": _mask(4, 6, 8)}, kernel=False)
        for module, more in (
            ("LayerNorm", {}),
            ("RMSNorm", {}),
            ("BatchNorm", _TRAINING),
            ("GroupNorm", _GROUPS),
            ("InstanceNorm", {}),
        )
    ),
    *(
        Case(module, more, dtype=dtype, kernel=False)
        for module, more in (("LayerNorm", {}), ("GroupNorm", _GROUPS), ("InstanceNorm", {}))
        for dtype in ("complex64", "int32")
    ),
    Case("BatchNorm", _TRAINING, dtype="complex64", kernel=False, only="linen"),
    Case("BatchNorm", _TRAINING, dtype="int32", kernel=False),
    Case("LayerNorm", {"param_dtype": jnp.complex64}, kernel=False),
    *(
        Case(
            module,
            {**more, "force_float32_reductions": False},
            dtype="bfloat16",
            kernel=False,
            only="linen",
        )
        for module, more in (("LayerNorm", {}), ("GroupNorm", _GROUPS), ("InstanceNorm", {}))
    ),
]


# --- What a case gives ---------------------------------------------------------------------------

Run = Callable[[Any, Case], tuple[dict[str, Any], Callable[..., Any], tuple[Any, ...]]]


def _loss(y: jax.Array) -> jax.Array:
    y = jnp.abs(y) if jnp.iscomplexobj(y) else y
    return jnp.sum(jnp.sin(y.astype(jnp.promote_types(y.dtype, jnp.float32))))


def _linen(modules: Any, case: Case) -> Any:
    """The initial variables, a function of these and x, and the arguments of this function."""
    module = getattr(modules, case.module)(**case.options)
    x = case.x()
    variables = module.init(jax.random.key(1), x, **case.call)

    def run(variables: Any, x: Any) -> Any:
        y, after = module.apply(variables, x, mutable=["batch_stats"], **case.call)
        return _loss(y), (y, after)

    return variables, run, (variables, x)


def _nnx(modules: Any, case: Case) -> Any:
    """As `_linen`, for NNX."""
    cls = getattr(modules, case.module)
    graph, variables = nnx.split(cls(case.features(), **case.options, rngs=nnx.Rngs(1)))

    def run(variables: Any, x: Any) -> Any:
        module = nnx.merge(graph, variables)
        y = module(x, **case.call)
        return _loss(y), (y, nnx.state(module, nnx.BatchStat))

    return variables, run, (variables, case.x())


def results(api: str, modules: Any, case: Case) -> tuple[dict[str, Any], str]:
    """Initial variables, output, variables after the call, gradients; and the lowered program."""
    variables, run, arguments = {"linen": _linen, "nnx": _nnx}[api](modules, case)
    wanted = tuple(i for i, a in enumerate(arguments) if i == 0 or a.dtype.kind in "fcV")
    gradient = jax.jit(jax.value_and_grad(run, wanted, has_aux=True, allow_int=False))
    (_, (y, after)), gradients = gradient(*arguments)
    values = {"initial": variables, "y": y, "after": after, "gradients": gradients}
    return values, jax.jit(run).lower(*arguments).as_text()
