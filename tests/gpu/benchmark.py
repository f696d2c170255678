"""Times every op against XLA and against a plain copy on one GPU: the table of README.md.

    python -P tests/gpu/benchmark.py [--rows 32768] [--features 4096] [--json FILE]

Each figure is the median over rounds, and the rounds of all competitors are interleaved. A round
times a series of asynchronous calls over rotating inputs, several times the L2 cache, so that host
dispatch hides behind the device's work. `fraction of copy` is the op's minimum traffic (each input
read once, each output written once) over its time, against the rate of `jnp.copy` in the same run.
XLA runs the textbook formulas (two passes for the variance, no more), `jax.nn.gelu`, and Optax.
`error` is the distance from float64 NumPy, as a fraction of the reference's norm, on 256 rows; on
all rows, our results must agree with XLA's before anything is timed.
"""

import argparse
import json
import re
import statistics
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jax_gradops
from jax_gradops._ops import bias_gelu, norm_kernels

sys.path.insert(0, str(Path(__file__).parents[1]))
import oracles  # noqa: E402

IMPLEMENTATIONS = ("ffi", "xla")
# Rows that are compared with float64.
ORACLE_ROWS = 256
EPSILON = np.float64(1e-6)
BWD = {"scale_offset": np.float64(0)}
FWD = BWD | {"epsilon": EPSILON}


# --- What JAX users write ------------------------------------------------------------------------


def stock_layer_norm(x, scale, bias):
    wide = x.astype(jnp.float32)
    centered = wide - jnp.mean(wide, -1, keepdims=True)
    rstd = jax.lax.rsqrt(jnp.mean(jnp.square(centered), -1, keepdims=True) + EPSILON)
    return (centered * rstd * scale + bias).astype(x.dtype)


def stock_rms_norm(x, scale):
    wide = x.astype(jnp.float32)
    rstd = jax.lax.rsqrt(jnp.mean(jnp.square(wide), -1, keepdims=True) + EPSILON)
    return (wide * rstd * scale).astype(x.dtype)


def stock_norm_vjp(dy, x, scale, mean, rstd):
    """From saved statistics; without a mean, of RMS norm."""
    wide, x_hat = dy.astype(jnp.float32), x.astype(jnp.float32)
    if mean is not None:
        x_hat = x_hat - mean[:, None]
    x_hat = x_hat * rstd[:, None]
    wdy = wide * scale
    dx = wdy - x_hat * jnp.mean(wdy * x_hat, -1, keepdims=True)
    if mean is not None:
        dx = dx - jnp.mean(wdy, -1, keepdims=True)
    dx = (dx * rstd[:, None]).astype(x.dtype)
    dscale = jnp.sum(wide * x_hat, 0)
    return (dx, dscale) if mean is None else (dx, dscale, jnp.sum(wide, 0))


def stock_bias_gelu(x, bias, approximate):
    return jax.nn.gelu(x.astype(jnp.float32) + bias, approximate).astype(x.dtype)


def stock_bias_gelu_vjp(dy, x, bias, approximate):
    z = x.astype(jnp.float32) + bias
    (dz,) = jax.vjp(lambda z: jax.nn.gelu(z, approximate), z)[1](dy.astype(jnp.float32))
    return dz.astype(x.dtype), jnp.sum(dz, 0)


# --- Cases ---------------------------------------------------------------------------------------


def norm_cases(rows, features, dtype):
    """By name: function of implementation and inputs, inputs, traffic, and the inputs' oracle."""
    keys = iter(jax.random.split(jax.random.key(0), 16))
    activations = lambda: jax.random.normal(next(keys), (rows, features), jnp.float32).astype(dtype)  # noqa: E731
    size = rows * features * jnp.dtype(dtype).itemsize
    scale = jax.random.normal(next(keys), (features,)) * 0.1 + 1
    bias = jax.random.normal(next(keys), (features,))
    xs = [(activations(), activations()) for _ in range(3)]
    mean_rstd = [
        norm_kernels.LAYER_NORM_FWD(x, None, None, None, **FWD, implementation="xla")[2:]
        for x, _ in xs
    ]
    rms = [norm_kernels.RMS_NORM_FWD(x, None, None, **FWD, implementation="xla")[2] for x, _ in xs]
    fwd = [(x, scale, bias) for x, _ in xs]
    centered = {"epsilon": EPSILON, "centered": True}
    plain = {"epsilon": EPSILON, "centered": False}
    return {
        "layer_norm fwd": (
            lambda i, x, s, b: jax_gradops.layer_norm(x, s, b, implementation=i) if i == "ffi"
            else stock_layer_norm(x, s, b), fwd, 2 * size,
            lambda x, s, b: [oracles.norm(x, s, b, **centered)]),
        "layer_norm bwd": (
            lambda i, dy, x, *a: norm_kernels.LAYER_NORM_BWD(
                dy, x, None, *a, **BWD, implementation=i
            ) if i == "ffi" else stock_norm_vjp(dy, x, *a),
            [(dy, x, scale, *stats) for (x, dy), stats in zip(xs, mean_rstd, strict=True)],
            3 * size, lambda dy, x, s, *stats: oracles.norm_vjp(dy, x, s, **centered)),
        "rms_norm fwd": (
            lambda i, x, s: jax_gradops.rms_norm(x, s, implementation=i) if i == "ffi"
            else stock_rms_norm(x, s),
            [(x, scale) for x, _ in xs], 2 * size,
            lambda x, s: [oracles.norm(x, s, **plain)]),
        "rms_norm bwd": (
            lambda i, dy, x, s, r: norm_kernels.RMS_NORM_BWD(
                dy, x, None, s, r, **BWD, implementation=i
            ) if i == "ffi" else stock_norm_vjp(dy, x, s, None, r),
            [(dy, x, scale, r) for (x, dy), r in zip(xs, rms, strict=True)], 3 * size,
            lambda dy, x, s, rstd: oracles.norm_vjp(dy, x, s, **plain)[:2]),
        **{
            f"bias_gelu {name} {direction}": case
            for name, approximate in (("tanh", True), ("exact", False))
            for direction, case in {
                "fwd": (
                    lambda i, x, b, approximate=approximate: bias_gelu.FWD(
                        x, b, approximate=approximate, implementation=i) if i == "ffi"
                    else stock_bias_gelu(x, b, approximate),
                    [(x, bias) for x, _ in xs], 2 * size,
                    lambda x, b, approximate=approximate: [
                        oracles.bias_gelu(x, b, approximate=approximate)]),
                "bwd": (
                    lambda i, dy, x, b, approximate=approximate: bias_gelu.BWD(
                        dy, x, b, approximate=approximate, implementation=i) if i == "ffi"
                    else stock_bias_gelu_vjp(dy, x, b, approximate),
                    [(dy, x, bias) for x, dy in xs], 3 * size,
                    lambda dy, x, b, approximate=approximate: oracles.bias_gelu_vjp(
                        dy, x, b, approximate=approximate)),
            }.items()
        },
        # Here XLA's side is what JAX users have: Optax.
        "global_norm": (
            lambda i, x: jax_gradops.clip_tree_by_global_norm(x, 1.0)[1] if i == "ffi"
            else optax.global_norm(x), [(x,) for x, _ in xs], size,
            lambda x: [oracles.global_norm(x)]),
        "clip (clipping)": (
            lambda i, x: jax_gradops.clip_tree_by_global_norm(x, 1.0)[0] if i == "ffi"
            else optax.clip_by_global_norm(1.0).update(x, optax.EmptyState())[0],
            [(x,) for x, _ in xs], 3 * size, lambda x: oracles.clip(1.0, x)),
        "copy": (lambda i, x: jnp.copy(x), [(x,) for x, _ in xs], 2 * size, None),
    }  # fmt: skip


def round_seconds(function, inputs, calls):
    """Seconds per call of one round."""
    start = time.perf_counter()
    for k in range(calls):
        result = function(*inputs[k % len(inputs)])
    jax.block_until_ready(result)
    return (time.perf_counter() - start) / calls


def relative_error(outputs, references):
    """The largest error of an output, as a fraction of its reference's norm."""
    errors = []
    for out, ref in zip(jax.tree.leaves(outputs), jax.tree.leaves(references), strict=True):
        out, ref = np.asarray(out, np.float64), np.asarray(ref, np.float64)
        errors.append(np.linalg.norm(out - ref) / max(np.linalg.norm(ref), 1e-300))
    return max(errors)


def oracle_errors(case, dtype, name):
    """The distances of ours and of XLA's results from float64."""
    function, (inputs, *_), _, oracle = case
    expected = [r.value for r in oracle(*(np.asarray(a, np.float64) for a in inputs))]
    errors = {
        i: relative_error(jax.jit(lambda *a, i=i: function(i, *a))(*inputs), expected)
        for i in IMPLEMENTATIONS
    }
    limit = 4e-3 if dtype in ("bfloat16", "float16") else 1e-5
    assert errors["ffi"] < limit, f"{name} {dtype}: differs from float64 by {errors['ffi']}"
    return errors


def main():
    """Prints the table, and writes it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=32768)
    parser.add_argument("--features", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--calls", type=int, default=12)
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--ops", default="", help="only ops whose name matches this")
    parser.add_argument("--json")
    args = parser.parse_args()

    rows = []
    for dtype in args.dtypes:
        functions, errors = {}, {}
        for name, case in norm_cases(ORACLE_ROWS, args.features, dtype).items():
            if name != "copy" and re.search(args.ops, name):
                errors[name] = oracle_errors(case, dtype, name)
        for name, (function, inputs, traffic, _) in norm_cases(
            args.rows, args.features, dtype
        ).items():
            if name != "copy" and not re.search(args.ops, name):
                continue
            for implementation in IMPLEMENTATIONS if name != "copy" else ("xla",):
                jitted = jax.jit(lambda *a, f=function, i=implementation: f(i, *a))
                functions[name, implementation] = (jitted, inputs, traffic)
            if name != "copy":
                ours, xla = (functions[name, i][0](*inputs[0]) for i in IMPLEMENTATIONS)
                error = relative_error(ours, xla)
                limit = 2e-2 if dtype in ("bfloat16", "float16") else 1e-4
                assert error < limit, f"{name} {dtype}: differs from XLA by {error}"
        samples = {key: [] for key in functions}
        for jitted, inputs, _ in functions.values():
            round_seconds(jitted, inputs, args.calls)  # warm up
        for _ in range(args.rounds):
            for key, (jitted, inputs, _) in functions.items():
                samples[key].append(round_seconds(jitted, inputs, args.calls))
        copy = functions["copy", "xla"][2] / statistics.median(samples["copy", "xla"])
        print(f"{dtype} [{args.rows}, {args.features}], copy {copy / 1e12:.2f} TB/s, "
              f"jax {jax.__version__}, {jax.devices()[0].device_kind}")  # fmt: skip
        print(f"{'op':24} {'ours µs':>20} {'XLA µs':>20} {'speed-up':>8} {'of copy':>8} {'XLA':>6} "
              f"{'error':>8} {'XLA':>8}")  # fmt: skip
        for name in dict.fromkeys(name for name, _ in functions if name != "copy"):
            row = {"op": name, "dtype": dtype, "rows": args.rows, "features": args.features}
            for implementation in IMPLEMENTATIONS:
                times = sorted(samples[name, implementation])
                traffic = functions[name, implementation][2]
                low, mid, high = (times[int(q * (len(times) - 1))] for q in (0.2, 0.5, 0.8))
                row[implementation] = {"us": mid * 1e6, "p20": low * 1e6, "p80": high * 1e6,
                                       "fraction_of_copy": traffic / mid / copy,
                                       "error": errors[name][implementation]}  # fmt: skip
            ours, xla = row["ffi"], row["xla"]
            spread = [f"{r['us']:7.1f} ({r['p20']:.0f}–{r['p80']:.0f})" for r in (ours, xla)]
            print(f"{name:24} {spread[0]:>20} {spread[1]:>20} {xla['us'] / ours['us']:7.2f}× "
                  f"{ours['fraction_of_copy']:8.2f} {xla['fraction_of_copy']:6.2f} "
                  f"{ours['error']:8.1e} {xla['error']:8.1e}")  # fmt: skip
            rows.append(row)
        print(flush=True)
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"jax": jax.__version__, "device": jax.devices()[0].device_kind,
                       "results": rows}, file, indent=1)  # fmt: skip


if __name__ == "__main__":
    main()
