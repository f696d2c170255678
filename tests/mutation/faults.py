"""The faults that `run.py` puts into the library, and for each the tests that have to find it."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]


class Fault(NamedTuple):
    """Replaces what occurs once in a file; `tests` are arguments of pytest."""

    name: str
    path: str
    old: str
    new: str
    tests: str

    def applied(self, text: str) -> str:
        """The file's text with the fault."""
        if (count := text.count(self.old)) != 1 or self.old == self.new:
            raise ValueError(f"{self.path}: {self.name}: {count} times in the file: {self.old!r}")
        return text.replace(self.old, self.new)


def _k(files: str, expression: str) -> str:
    return f'{_paths(files)} -k "({expression}) and not cuda"'


def _gpu(files: str, expression: str) -> str:
    return f'{_paths(files)} -k "({expression}) and cuda"'


def _paths(files: str) -> str:
    return " ".join(f"tests/test_{file}.py" for file in files.split())


_NORM = _k("layer_norm", "(TestLayerNorm or TestRmsNorm) and test_sizes and ffi")
_NORM_GROUPS = _k(
    "layer_norm", "TestLayerNorm and (test_vmap_of_many_rows or test_vmap) and not xla"
)
_FROM_OUTPUT = _k("norm_variants", "FromOutput and test_sizes and ffi")
_ADD = _k("norm_variants", "TestAddLayerNorm and test_sizes and ffi")
_GELU = _k("bias_gelu", "(TestBiasGelu and test_sizes and ffi) or test_many_groups")
_GELU_VALUES = _k("bias_gelu", "test_float32 or test_every_small or test_float64 or test_special")
_BATCH = _k("batch_norm", "(test_sizes or test_layouts) and ffi")
_BATCH_VALUES = _k("batch_norm_numerics", "(test_large or test_hard or test_outlier) and ffi")
_BATCH_LARGE = _k("batch_norm_numerics", "test_large_results")
_CLIP = _k("global_norm", "test_sizes or test_large or test_range or test_mixed")
_GROUPS = _k(
    "global_norm_in_place global_norm_transformations", "test_in_place_groups or test_per_example"
)
_STREAMS = _k("cpu_streams", "test_norms or test_batch_norm")
_CALLS = "tests/test_native_calls.py -k cpu"
_SOURCES = "tests/test_package.py -k offsets"

CPU = [
    # --- The CPU's kernels ---
    Fault(
        "y without what the rounded mean is off by",
        "ffi/cpu/layer_norm_fwd.cc",
        "((at(x) - mean) - delta) * rstd",
        "(at(x) - mean) * rstd",
        _k("norm_numerics", "test_large_mean and ffi"),
    ),
    Fault(
        "bias left out",
        "ffi/cpu/layer_norm_fwd.cc",
        "- mean) - delta) * rstd * at(scale) + at(bias)",
        "- mean) - delta) * rstd * at(scale)",
        _NORM,
    ),
    Fault(
        "a streamed row loses its tail",
        "ffi/cpu/lanes.h",
        "ForStores<kCount, T>(n - head,",
        "ForStores<kCount, T>(n - head - 1,",
        _STREAMS,
    ),
    Fault(
        "a streamed 16-bit block loses its last elements",
        "ffi/cpu/lanes.h",
        "ForStores<kCount, T>(count,",
        "ForStores<kCount, T>(count - 1,",
        _STREAMS,
    ),
    Fault(
        "registers are streamed one over the other",
        "ffi/cpu/lanes.h",
        "(to + i, rounded + i);",
        "(to, rounded + i);",
        _STREAMS,
    ),
    Fault(
        "a streamed block loses what lies before its first cache line",
        "ffi/cpu/stream.h",
        "std::memcpy(out, in, static_cast<std::size_t>(head));",
        "",
        _STREAMS,
    ),
    Fault(
        "a chunk of rows ends one early",
        "ffi/cpu/layer_norm_fwd.cc",
        "std::min(rows, (chunk + 1) * chunk_rows)",
        "std::min(rows, (chunk + 1) * chunk_rows - 1)",
        _NORM,
    ),
    Fault(
        "both column sums at the same place",
        "ffi/cpu/layer_norm_bwd.cc",
        "* sums + sum) * features",
        "* sums) * features",
        _NORM,
    ),
    Fault(
        "groups share a place for their sums",
        "ffi/cpu/layer_norm_bwd.cc",
        "results[sum] + group * features\n",
        "results[sum]\n",
        _NORM_GROUPS,
    ),
    Fault(
        "sums of many rows without the last block of them",
        "ffi/cpu/layer_norm_bwd.cc",
        "const std::int64_t block_end = std::min(end, row + kRowsPerSum);",
        "const std::int64_t block_end = std::min(end - 1, row + kRowsPerSum);\n"
        "    if (block_end <= row) break;",
        _NORM,
    ),
    Fault(
        "the rest of the mean's error ignored backward",
        "ffi/cpu/layer_norm_bwd.cc",
        "x_hat = (shifted(at) - delta) * factor;",
        "x_hat = shifted(at) * factor;",
        _k("norm_numerics", "test_large_mean and ffi"),
    ),
    Fault(
        "from the output: a scale of zero divides",
        "ffi/cpu/layer_norm_bwd.cc",
        "args.shape, args.scale_offset, kInfinity}",
        "args.shape, args.scale_offset}",
        _k("norm_variants", "test_zero_scale"),
    ),
    Fault(
        "from the output: the bias stays in x_hat",
        "ffi/cpu/layer_norm_bwd.cc",
        "(at(x) - at(bias)) / at(divisor)",
        "at(x) / at(divisor)",
        _FROM_OUTPUT,
    ),
    Fault(
        "the cotangent of the sum is dropped",
        "ffi/cpu/layer_norm_bwd.cc",
        "const auto added = at(dsum);",
        "const decltype(at(dsum)) added(0);",
        _ADD,
    ),
    Fault(
        "the residual's bias left out",
        "ffi/cpu/layer_norm_fwd.cc",
        "at(x_block) + (at(residual_block) + at(bias))",
        "at(x_block) + at(residual_block)",
        _ADD,
    ),
    Fault(
        "the residual's bias gets another sum's gradient",
        "ffi/cpu/layer_norm_bwd.cc",
        "own[s] = slice_sums(group, slice, numbers[s]);",
        "own[s] = slice_sums(group, slice, std::min<std::int64_t>(1, numbers[s]));",
        _ADD,
    ),
    Fault(
        "a 32-bit offset",
        "ffi/cpu/layer_norm_fwd.cc",
        "static_cast<T*>(args.y) + row * features",
        "static_cast<T*>(args.y) + static_cast<std::int32_t>(row * features)",
        _SOURCES,
    ),
    Fault(
        "the lanes lose the tail",
        "ffi/cpu/lanes.h",
        "for (int lane = 0; i + lane < n; ++lane) values[lane] +=",
        "for (int lane = 0; i + lane + 1 < n; ++lane) values[lane] +=",
        _NORM,
    ),
    Fault(
        "long sums in one run of float32",
        "ffi/cpu/lanes.h",
        "constexpr std::int64_t kAtATime = 16 * kLanes<A>;",
        "constexpr std::int64_t kAtATime = std::int64_t{1} << 40;",
        "tests/test_norm_accuracy.py tests/test_layer_norm.py tests/test_norm_numerics.py"
        ' -k "not cuda and not xla and (test_float32 or test_long or test_exact or hard or WIDE)"',
    ),
    Fault(
        "every group reads the first one's parameters",
        "ffi/cpu/wide.h",
        "return data_ + group * stride_ + start;",
        "return data_ + start;",
        _NORM_GROUPS,
    ),
    Fault(
        "partial rows added up in float32",
        "ffi/cpu/column_sum.h",
        "double totals[kColumns];",
        "A totals[kColumns];",
        _k("norm_numerics", "test_partial_sums"),
    ),
    Fault(
        "thousands of rows added up in float32",
        "ffi/cpu/column_sum.h",
        "kRowsPerSum = 128;",
        "kRowsPerSum = std::int64_t{1} << 40;",
        "tests/test_norm_numerics.py tests/test_bias_gelu.py"
        ' -k "(test_exact_sums or test_long_sums) and not cuda"',
    ),
    Fault(
        "the caller does not wait for its helpers",
        "ffi/cpu/parallel.h",
        "state->all_done.wait(lock, [&] { return state->done == chunks; });",
        "",
        "tests/test_core.py tests/test_layer_norm.py"
        ' -k "(test_python_threads or TestLayerNorm) and not cuda and not xla"',
    ),
    Fault(
        "work is cut by the number of threads",
        "ffi/cpu/layer_norm_bwd.cc",
        "std::min(args.partial_rows, kMaxSlices)",
        "std::min(args.partial_rows, 3 * pool.num_threads())",
        _k("core", "test_threads_do_not"),
    ),
    Fault(
        "GELU's bias is that of the next element",
        "ffi/cpu/bias_gelu.cc",
        "at(from) + at(bias + start); }",
        "at(from) + at(bias + start + (at.i + 32 < count)); }",
        _GELU,
    ),
    Fault(
        "joined rows' sums lose one of them",
        "ffi/cpu/bias_gelu.cc",
        "for (std::int64_t c = own; c < tile.columns; c += own)",
        "for (std::int64_t c = 2 * own; c < tile.columns; c += own)",
        _GELU,
    ),
    Fault(
        "the last rows of a chunk are left out",
        "ffi/cpu/bias_gelu.cc",
        ".rows = std::min(t.rows_per_chunk, t.rows - row)}",
        ".rows = std::min(t.rows_per_chunk, t.rows - row) - (t.rows > 9)}",
        _GELU,
    ),
    Fault(
        "partial rows of the wrong group",
        "ffi/cpu/bias_gelu.cc",
        "AddPartialRows(workspace + group * args.partial_rows * shape.features",
        "AddPartialRows(workspace + group * t.row_chunks * shape.features",
        _k("bias_gelu", "TestBiasGelu and test_vmap_of_many_rows"),
    ),
    Fault(
        "groups share a bias",
        "ffi/cpu/bias_gelu.cc",
        "static_cast<const A*>(bias.data) + tile.group * bias.group_stride",
        "static_cast<const A*>(bias.data)",
        _k("bias_gelu", "TestBiasGelu and test_vmap and not xla"),
    ),
    Fault(
        "the tanh form's derivative without the slope of the cube",
        "ffi/common/gelu.h",
        "MulAdd(t.square, F(3 * kSlope * kCubic<A>), F(kSlope))",
        "MulAdd(t.square, F(kSlope * kCubic<A>), F(kSlope))",
        _GELU_VALUES,
    ),
    Fault(
        "a polynomial without its last term",
        "ffi/common/gelu.h",
        "0.18660364f / 65536, -0.07712412f / 262144);",
        "0.18660364f / 65536);",
        _GELU_VALUES,
    ),
    Fault(
        "double's tail with a wrong digit",
        "ffi/common/gelu.h",
        "23086.70123772492",
        "23086.70124772492",
        _GELU_VALUES,
    ),
    Fault(
        "double's tail is cut off",
        "ffi/common/gelu.h",
        "ClampedAbs(x, 39.0)",
        "ClampedAbs(x, 30.0)",
        _GELU_VALUES,
    ),
    Fault(
        "infinity times zero in the tail",
        "ffi/common/gelu.h",
        "ClampedAbs(x, 14.8f);",
        "ClampedAbs(x, 1e30f);",
        _GELU_VALUES,
    ),
    Fault(
        "every turn of a formula in two loops has the first one's state",
        "ffi/cpu/bias_gelu.cc",
        "return {here(tail_x),",
        "return {AtLanes<kCount>{0}(tail_x),",
        _GELU_VALUES,
    ),
    Fault(
        "every turn of the exponential's loop has the first one's argument",
        "ffi/cpu/bias_gelu.cc",
        "Exp2<A>(here(tail_3),",
        "Exp2<A>(AtLanes<kCount>{0}(tail_3),",
        _GELU_VALUES,
    ),
    Fault(
        "rows that begin anywhere are streamed as whole lines",
        "ffi/cpu/bias_gelu.cc",
        "streamed && reinterpret_cast<std::uintptr_t>(to) % 64 == 0",
        "streamed",
        _k("cpu_streams", "test_gelu"),
    ),
    Fault(
        "a power of two is one too small",
        "ffi/common/exponential.h",
        "return FromBits(Bits(e) + bits);",
        "return FromBits(Bits(e) + bits - (BitsOf<A>{1} << (std::numeric_limits<A>::digits - 1)));",
        _GELU_VALUES,
    ),
    Fault(
        "small squares of 16-bit numbers are lost",
        "ffi/cpu/global_norm.cc",
        "all >= static_cast<double>(kMinFloatSum)",
        "all >= 0.0",
        _CLIP,
    ),
    Fault(
        "leaves are those of the first group",
        "ffi/cpu/global_norm.cc",
        "group * leaf.count + begin - (ends_[i] - leaf.count)",
        "begin - (ends_[i] - leaf.count)",
        _GROUPS,
    ),
    Fault(
        "the last element of a part is left out",
        "ffi/cpu/global_norm.cc",
        "for (std::int64_t i = whole; i < n; ++i)",
        "for (std::int64_t i = whole; i < n - 1; ++i)",
        _CLIP,
    ),
    Fault(
        "the squares of one of four blocks are left out",
        "ffi/cpu/global_norm.cc",
        "to += (at(0) + at(1)) + (at(2) + at(3));",
        "to += (at(0) + at(1)) + at(2);",
        _CLIP,
    ),
    Fault(
        "a block is read again in the place of the next one",
        "ffi/cpu/global_norm.cc",
        "i / 2 * half + i % 2 * kBlock",
        "i / 2 * half",
        _CLIP,
    ),
    Fault(
        "16-bit squares: the second half is left out where they are added up in double",
        "ffi/cpu/global_norm.cc",
        "for (const T* const half : {x.first, x.first + x.half})",
        "for (const T* const half : {x.first, x.first})",
        _k("global_norm", "test_float64_norm"),
    ),
    Fault(
        "parts are added up in float32",
        "ffi/cpu/global_norm.cc",
        "    double sum = 0;\n    for (std::int64_t part = 0;",
        "    float sum = 0;\n    for (std::int64_t part = 0;",
        _CLIP,
    ),
    Fault(
        "a product is rounded twice",
        "ffi/cpu/global_norm.cc",
        "static_cast<T>(RoundToOdd(scaled))",
        "static_cast<T>(static_cast<float>(scaled))",
        _k("global_norm", "test_rounded_once"),
    ),
    Fault(
        "what is not clipped is written",
        "ffi/cpu/global_norm.cc",
        "if (factors[group] != 1) {",
        "if (factors[group] != 2) {",
        _k("global_norm_in_place", "test_nothing_is_written"),
    ),
    Fault(
        "squares are added up in float32 for a float64 result",
        "ffi/ops/global_norm.h",
        "return result == ffi::F64 ? -1.0f : 0x1p100f;",
        "return 0x1p127f;",
        _k("global_norm", "test_float64_norm"),
    ),
    Fault(
        "the distance of the parts' means left out",
        "ffi/cpu/batch_norm_fwd.cc",
        "static_cast<double>(other_squares[i]) + delta * delta * weight;",
        "static_cast<double>(other_squares[i]);",
        _BATCH,
    ),
    Fault(
        "the variance of a sample",
        "ffi/cpu/batch_norm_fwd.cc",
        "static_cast<A>(squares / static_cast<double>(args.shape.terms()))",
        "static_cast<A>(squares / static_cast<double>(args.shape.terms() - 1))",
        _BATCH,
    ),
    Fault(
        "what the guess is off by left out of the variance",
        "ffi/cpu/batch_norm_fwd.cc",
        "static_cast<double>(sum_squares) - offset * static_cast<double>(sum);",
        "static_cast<double>(sum_squares);",
        _BATCH,
    ),
    Fault(
        "what the rounded mean is off by is lost",
        "ffi/cpu/batch_norm_fwd.cc",
        "set_numbers(group, channel, mean, rstd, delta);",
        "set_numbers(group, channel, mean, rstd, A{0});",
        _BATCH_VALUES,
    ),
    Fault(
        "a bad guess is kept",
        "ffi/cpu/batch_norm_fwd.cc",
        "if (far == 0) break;",
        "break;",
        _k("batch_norm_numerics", "test_guess"),
    ),
    Fault(
        "channels first, a bad guess is kept",
        "ffi/cpu/batch_norm_fwd.cc",
        "if (again || sums[0] * sums[0] <= 2.0 / 3 * count * sums[1]) break;",
        "break;",
        _k("batch_norm_numerics", "test_guess"),
    ),
    Fault(
        "rows that four do not divide are left out of sums",
        "ffi/cpu/batch_norm_pieces.h",
        "for (std::int64_t r = 4 * quarter; r < rows; ++r)",
        "for (std::int64_t r = 4 * quarter + 1; r < rows; ++r)",
        _BATCH,
    ),
    Fault(
        "four rows have the first one's residual",
        "ffi/cpu/batch_norm_fwd.cc",
        "at(residual + skipped));",
        "at(residual));",
        _STREAMS,
    ),
    Fault(
        "four rows that begin anywhere are streamed as whole lines",
        "ffi/cpu/batch_norm_pieces.h",
        "rows == kRows && lines",
        "rows == kRows",
        _STREAMS,
    ),
    Fault(
        "new memory comes in small pages",
        "ffi/cpu/stream.h",
        "IsResident(result, bytes) || AdviseHugePages(result, bytes)",
        "IsResident(result, bytes)",
        _k("cpu_streams", "test_new_memory"),
    ),
    Fault(
        "relu swallows NaN",
        "ffi/cpu/batch_norm_fwd.cc",
        "return Max(least, of_row(skipped)); }",
        "return Max(of_row(skipped), decltype(of_row(skipped))(least)); }",
        _k("batch_norm_numerics", "test_relu_keeps_nan or test_nonfinite"),
    ),
    Fault(
        "relu's gradient at zero is 1",
        "ffi/cpu/batch_norm_bwd.cc",
        "return IfGreater(centered(at, skipped) * factor_(at) + offset_(at), zero, dy, zero);",
        "return IfGreater(zero, centered(at, skipped) * factor_(at) + offset_(at), zero, dy);",
        _k("batch_norm_numerics", "test_relu_at_zero"),
    ),
    Fault(
        "relu's gradient at zero is 1, by y",
        "ffi/cpu/batch_norm_bwd.cc",
        "return IfGreater(at(y_ + skipped), zero, dy, zero);",
        "return IfGreater(zero, at(y_ + skipped), zero, dy);",
        _k("batch_norm_numerics", "test_relu_at_zero"),
    ),
    Fault(
        "dx without the projection on x_hat",
        "ffi/cpu/batch_norm_bwd.cc",
        "(terms.dz(at) - level(at) - terms.centered(at) * slope(at)) * factor(at)",
        "(terms.dz(at) - level(at)) * factor(at)",
        _BATCH,
    ),
    Fault(
        "blocks of channels share a place for their sums",
        "ffi/cpu/batch_norm_bwd.cc",
        "partial + s * channels + piece.channel,",
        "partial + s * channels,",
        _BATCH_LARGE,
    ),
    Fault(
        "the odd one is left out of pairwise sums",
        "ffi/cpu/batch_norm_pieces.h",
        "for (; n > 1; n -= n / 2) {",
        "for (; n > 1; n /= 2) {",
        _BATCH,
    ),
    Fault(
        "a shorter last row is taken for a whole one",
        "ffi/cpu/batch_norm_pieces.h",
        "ForBlocks(layout.width_of(row),",
        "ForBlocks(layout.width_of(row) / layout.channels * layout.channels - (row > 0 ? 1 : 0),",
        _BATCH,
    ),
    Fault(
        "what is after the last cache line is not stored",
        "ffi/cpu/stream.h",
        "  std::memcpy(out, in, static_cast<std::size_t>(bytes));\n",
        "",
        _STREAMS,
    ),
    # --- Formulas and dtypes ---
    Fault(
        "dx without the projection on x_hat, of norms",
        "ffi/common/math.h",
        "(wdy - mean_wdy - x_hat * mean_wdy_x_hat) * rstd",
        "(wdy - mean_wdy) * rstd",
        _NORM,
    ),
    Fault(
        "epsilon outside of the root",
        "ffi/common/math.h",
        "return A{1} / std::sqrt(square) + nan_if_infinite;",
        "return A{1} / (std::sqrt(variance) + epsilon) + nan_if_infinite;",
        _k("layer_norm", "test_epsilon and ffi"),
    ),
    Fault(
        "an overflow becomes zeros",
        "ffi/common/math.h",
        "std::sqrt(square) + nan_if_infinite;",
        "std::sqrt(square);",
        _k("layer_norm norm_numerics", "test_overflowing_variance or test_nonfinite"),
    ),
    Fault(
        "bfloat16 halves are rounded up",
        "ffi/common/dtype.h",
        "u + 0x7fffu + ((u >> 16) & 1u)",
        "u + 0x8000u",
        _k("global_norm", "test_ties"),
    ),
    Fault(
        "bfloat16 NaN may become infinity",
        "ffi/common/dtype.h",
        "(rounded | nan) >> 16",
        "rounded >> 16",
        _k("bias_gelu", "test_special_values or test_nonfinite or test_every_small_float"),
    ),
    Fault(
        "bfloat16 halves are rounded up, two registers at a time",
        "ffi/cpu/registers.h",
        "_mm_and_si128(upper, every(1))",
        "every(1)",
        _k("norm_numerics", "test_bfloat16_is_rounded"),
    ),
    Fault(
        "bfloat16 NaN may become zero",
        "ffi/cpu/registers.h",
        "_mm_max_epu16(_mm_adds_epi16(upper, carry), upper)",
        "_mm_adds_epi16(upper, carry)",
        _k("norm_numerics", "test_bfloat16_is_rounded"),
    ),
    Fault(
        "a kept row is that of another block",
        "ffi/cpu/layer_norm_fwd.cc",
        "static_cast<const A*>(kept + start)",
        "static_cast<const A*>(kept)",
        _k("norm_accuracy", "test_16_bits and bfloat16"),
    ),
    Fault(
        "float16 overflows late",
        "ffi/common/dtype.h",
        "mask(magnitude >= 0x47800000u)",
        "mask(magnitude >= 0x48000000u)",
        _k("norm_numerics", "test_float16_overflows"),
    ),
    # --- Handlers ---
    Fault(
        "a parameter may have any length",
        "ffi/common/shape.h",
        "dims.size() == groups + 1 && dims.back() == x_dims[feature_axis_];",
        "dims.size() == groups + 1;",
        _CALLS,
    ),
    Fault(
        "dy is not checked",
        "ffi/ops/layer_norm.h",
        'check.Rows("dy", in.dy).Rows("dx", out.dx)',
        'check.Rows("dx", out.dx)',
        _CALLS,
    ),
    Fault(
        "a batched parameter is taken for a shared one",
        "ffi/common/shape.h",
        "shared ? 0 : shape_.features, buffer.element_type()};",
        "0, buffer.element_type()};",
        _NORM_GROUPS,
    ),
    Fault(
        "attributes in the wrong order",
        "ffi/ops/layer_norm.h",
        '.template Attr<double>("epsilon")\n        .template Attr<double>("scale_offset")',
        '.template Attr<double>("scale_offset")\n        .template Attr<double>("epsilon")',
        _k("layer_norm", "(test_epsilon or test_scale_offset) and ffi"),
    ),
    Fault(
        "operands in the wrong order",
        "ffi/ops/bias_gelu.h",
        "(Context ctx, std::int64_t group_rank, bool approximate, In dy, In x,",
        "(Context ctx, std::int64_t group_rank, bool approximate, In x, In dy,",
        _GELU,
    ),
    Fault(
        "the workspace's size is not checked",
        "ffi/ops/global_norm.h",
        "if (!args.leaves.empty() && args.workspace_doubles < args.groups) {",
        "if (args.workspace_doubles < 0) {",
        _CALLS,
    ),
    Fault(
        "a handler under another name",
        "ffi/ops/handlers.h",
        'Named<"rms_norm_bwd",',
        'Named<"rms_norm_backward",',
        "tests/test_package.py -k handlers",
    ),
    # --- The Python core ---
    Fault(
        "a psum is skipped",
        "jax_gradops/_partitioning.py",
        "return lax.psum(parts, axes) if axes else parts",
        "return parts",
        _k("layer_norm", "TestLayerNorm and test_rows_spread and not unequally"),
    ),
    Fault(
        "copies of a partial sum are added up",
        "jax_gradops/_partitioning.py",
        "lax.psum([part / copies for part in parts], everywhere)",
        "lax.psum(parts, everywhere)",
        _k("layer_norm", "TestLayerNorm and (test_partial_manual or test_three_axes)"),
    ),
    Fault(
        "sums have what fills up unequal shards",
        "jax_gradops/_partitioning.py",
        "specs = [even(s, o.shape, over.axes) for s, o in zip(specs, operands, strict=True)]",
        "pass",
        _k("layer_norm", "TestLayerNorm and test_rows_spread_unequally"),
    ),
    Fault(
        "a parameter's gradient is rounded before its sum over shards",
        "jax_gradops/_array_types.py",
        "if dtype is not None and a.dtype.itemsize < dtype.itemsize:",
        "if False:",
        _k("norm_variants", "test_sums_over_shards_are_wide"),
    ),
    Fault(
        "an image's axes are not summed over",
        "jax_gradops/_layout.py",
        'for e in (*letters["n"], *letters["m"]) for a in',
        'for e in letters["n"] for a in',
        _k("batch_norm_devices", "test_images_spread"),
    ),
    Fault(
        "nnx.Linear: a bias's gradient is summed up in the cotangent's dtype",
        "jax_gradops/_modules.py",
        "jnp.sum(dy, tuple(range(dy.ndim - 1)), accum_dtype(dy.dtype))",
        "jnp.sum(dy, tuple(range(dy.ndim - 1)), dy.dtype)",
        _k("flax_linear", "rounded_on_its_way"),
    ),
    Fault(
        "nnx.Linear: sums over shards are rounded before they are added",
        "jax_gradops/_modules.py",
        "match_vma(y, exact, sums=(None, accum_dtype(y.dtype)))",
        "match_vma(y, exact)",
        _k("flax_linear", "test_shard_map"),
    ),
    Fault(
        "nnx.Linear: a bias that is sharded otherwise is taken as it is",
        "jax_gradops/_modules.py",
        "if plain or of_y[-1] != of_bias[-1]:",
        "if plain:",
        _k("flax_linear", "test_explicit_meshes"),
    ),
    Fault(
        "nnx.Linear: products and sum have a cotangent of their own each",
        "jax_gradops/_modules.py",
        "dy = lax.optimization_barrier(dy)",
        "pass",
        _k("flax_linear", "exists_once"),
    ),
    Fault(
        "nnx.Linear: the product with ones obeys the user's precision",
        "jax_gradops/_modules.py",
        "precision=lax.Precision.DEFAULT,",
        "precision=None,",
        _k("flax_linear", "products_with_ones_are_exact"),
    ),
    Fault(
        "float64 is looked for in the first array only",
        "jax_gradops/_array_types.py",
        "any(d == jnp.float64 for d in dtypes)",
        "any(d == jnp.float64 for d in dtypes[:1])",
        _k("global_norm", "test_mixed_dtypes"),
    ),
    Fault(
        "a mapped parameter is folded into the rows",
        "jax_gradops/_core.py",
        'and not any(b for _, b, dims in operands if "n" not in dims)',
        "",
        _k("layer_norm", "TestLayerNorm and test_vmap and not xla"),
    ),
    Fault(
        "gradients of groups are added up",
        "jax_gradops/_core.py",
        'and all("n" in r.dims for r in call.wanted)',
        "",
        _k("layer_norm", "TestLayerNorm and test_vmap and not xla"),
    ),
    Fault(
        "partial sums are rounded",
        "jax_gradops/_core.py",
        "return dataclasses.replace(self, dtypes=())",
        "return self",
        _k("norm_variants", "test_sums_over_shards_are_wide"),
    ),
    Fault(
        "partial sums of many groups",
        "jax_gradops/_core.py",
        "max(1, min(rows, 512 // groups, 2**23 // (features * groups)))",
        "max(1, min(rows, 512, 2**23 // (features * groups)))",
        "tests/test_package.py -k workspace",
    ),
    Fault(
        "no derivative through the derivative",
        "jax_gradops/_core.py",
        "return op(*primals), jax.jvp(call.reference, primals, tangents)[1]",
        "return op(*primals), jax.tree.map(jnp.zeros_like, op(*primals))",
        _k("layer_norm", "TestLayerNorm and test_hessian and not xla"),
    ),
    Fault(
        "wrong alias",
        "jax_gradops/_ops/bias_gelu.py",
        'in_place={"dx": "dy"},',
        'in_place={"dx": "x"},',
        _k("bias_gelu", "test_bias_gelu_in_place"),
    ),
    Fault(
        "a leaf's memory becomes another one's result",
        "jax_gradops/_core.py",
        "aliases = {i: i for i in range(call.arrays)}",
        "aliases = {i: call.arrays - 1 - i for i in range(call.arrays)}",
        _k("global_norm_in_place", "test_in_place"),
    ),
    Fault(
        "shards' variances without their means' distances",
        "jax_gradops/_ops/batch_norm_kernels.py",
        'partial["batch_variance"] + jnp.square(offset))',
        'partial["batch_variance"])',
        _k("batch_norm_devices", "test_axis_name or test_images_spread"),
    ),
    Fault(
        "means over one shard's rows",
        "jax_gradops/_ops/batch_norm_kernels.py",
        "n = shards * (max(1, rows) if isinstance(rows, int) else rows)",
        "n = max(1, rows) if isinstance(rows, int) else rows",
        _k("batch_norm_devices", "test_axis_name or test_images_spread"),
    ),
    Fault(
        "zero over zero",
        "jax_gradops/_ops/global_norm_kernels.py",
        "keep = (norm < max_norm) | (norm == 0)",
        "keep = norm < max_norm",
        _k("global_norm", "test_zero_norm"),
    ),
    Fault(
        "huge leaves' norm is halved",
        "jax_gradops/_ops/global_norm_kernels.py",
        "jnp.sqrt(huge) * 2.0**96,",
        "jnp.sqrt(huge) * 2.0**95,",
        _k("global_norm", "test_range"),
    ),
    Fault(
        "the residual's gradient is the sum's",
        "jax_gradops/_ops/norm_kernels.py",
        "return dx, None if dsum is None else dx, dresidual_bias, dscale, dbias",
        "return dx, dsum, dresidual_bias, dscale, dbias",
        _ADD,
    ),
    Fault(
        "a gradient summed over axes is rounded before",
        "jax_gradops/_ops/norm_arguments.py",
        "parameter.dtype.itemsize < self.accum_dtype.itemsize:",
        "False:",
        _k("norm_numerics", "test_gradient_summed"),
    ),
    Fault(
        "a bool is a number",
        "jax_gradops/_checks.py",
        "if isinstance(value, Tracer | bool | np.bool_) or not (",
        "if isinstance(value, Tracer) or not (",
        "tests/test_mistakes.py -k mistake",
    ),
    Fault(
        "handlers that are too new are registered",
        "jax_gradops/_registry.py",
        "compiled[0] == runtime[0] and compiled[1] <= runtime[1]",
        "compiled[0] == runtime[0]",
        _k("compatibility", "test_ffi_version_guard or test_unusable"),
    ),
]

CUDA = [
    # Each compiles one or two files again.
    Fault(
        "GELU: sums are read before they are written",
        "ffi/cuda/bias_gelu.cu",
        "__syncthreads();  // all sums are written",
        "",
        _gpu("bias_gelu", "(TestBiasGelu and test_sizes and ffi) or test_widths or exact_sums"),
    ),
    Fault(
        "GELU: the next sums overwrite what is still read",
        "ffi/cuda/bias_gelu.cu",
        "__syncthreads();  // all sums are read before the next ones are written",
        "",
        _gpu("bias_gelu", "test_more_groups"),
    ),
    Fault(
        "GELU: the elements after the last whole pack are left out",
        "ffi/cuda/bias_gelu.cu",
        "if (k * step != left) continue;",
        "if (k * step != left + 1) continue;",
        _gpu("bias_gelu", "TestBiasGelu and test_sizes and ffi"),
    ),
    Fault(
        "GELU: a 32-bit offset",
        "ffi/cuda/bias_gelu.cu",
        "static_cast<T*>(args.y) + group * rows * features + first * W;",
        "static_cast<T*>(args.y) + group * rows * features + static_cast<int>(first * W);",
        _gpu("large", "test_rows and bias_gelu"),
    ),
    Fault(
        "GELU: groups share partial rows",
        "ffi/cuda/bias_gelu.cu",
        "slice_sums.sums + group * slice_sums.group_pitch + slice",
        "slice_sums.sums + slice",
        _gpu("bias_gelu", "test_vmap_of_many_rows or test_many_groups or test_widths"),
    ),
    Fault(
        "GELU: a sum without a copy of the row",
        "ffi/cuda/bias_gelu.cu",
        "for (int copy = 1; copy < cut.copies; ++copy)",
        "for (int copy = 2; copy < cut.copies; ++copy)",
        _gpu("bias_gelu", "(TestBiasGelu and test_sizes and ffi) or test_exact_sums"),
    ),
    Fault(
        "GELU: a thread's span, rounded down",
        "ffi/cuda/bias_gelu_policy.h",
        "inverse_lanes = static_cast<int>(CeilDiv(1 << 20, lanes));",
        "inverse_lanes = (1 << 20) / lanes;",
        _gpu("bias_gelu", "test_many_rows"),
    ),
    Fault(
        "norm: the tail is left out",
        "ffi/cuda/global_norm.cu",
        "if (division.tail() < count) sum += Square(x[division.tail()]);",
        "",
        _gpu("global_norm", "test_sizes or test_large"),
    ),
    Fault(
        "norm: leaves are the first group's",
        "ffi/cuda/global_norm_leaves.cuh",
        "static_cast<const T*>(leaf.data) + group * count + first",
        "static_cast<const T*>(leaf.data) + first",
        _gpu(
            "global_norm global_norm_in_place global_norm_transformations",
            "test_in_place_groups or test_per_example or test_vmap",
        ),
    ),
    Fault(
        "norm: a 32-bit offset",
        "ffi/cuda/global_norm_leaves.cuh",
        "const std::int64_t first = (chunk - leaf_begin) * kChunk;",
        "const std::int64_t first = static_cast<int>((chunk - leaf_begin) * kChunk);",
        _gpu("large", "test_norm"),
    ),
    Fault(
        "norm: later tables overwrite the sums of earlier ones",
        "ffi/cuda/global_norm.cu",
        "accumulate ? partials[item] + sum : sum;",
        "sum;",
        _gpu("global_norm", "test_many_leaves"),
    ),
    Fault(
        "clip: what is not clipped is written, and more",
        "ffi/cuda/global_norm.cu",
        "if (factor == 1) continue;",
        "if (factor != 1) continue;",
        _gpu("global_norm_in_place", "test_in_place or test_operator"),
    ),
    Fault(
        "layer norm: y without what the rounded mean is off by",
        "ffi/cuda/layer_norm_fwd.cuh",
        "const A shift = -moments.delta * moments.rstd;",
        "const A shift = 0;",
        _gpu("norm_numerics", "test_large_mean and ffi"),
    ),
    Fault(
        "layer norm: rows that start anywhere are framed by the first one",
        "ffi/cuda/layer_norm_fwd_rows.cuh",
        "static_cast<std::uint64_t>(features) % W));",
        "static_cast<std::uint64_t>(features) % W) & (W / 2 - 1));",
        _gpu("layer_norm", "TestLayerNorm and test_sizes and ffi"),
    ),
    Fault(
        "layer norm backward: wrong term",
        "ffi/cuda/layer_norm_bwd.cuh",
        "mean_wdy_x_hat -= delta * totals[1];",
        "mean_wdy_x_hat -= delta;",
        _gpu("norm_numerics", "test_large_mean and ffi"),
    ),
    Fault(
        "layer norm backward: sums overwrite those of earlier rows",
        "ffi/cuda/layer_norm_bwd.cuh",
        "turn < turns.most; store = false) {",
        "turn < turns.most;) {",
        _gpu("norm_numerics", "test_exact_sums or test_long_sums"),
    ),
    Fault(
        "layer norm backward: packs are read before they arrive",
        "ffi/cuda/layer_norm_ring.cuh",
        "WaitForCopies<1>();\n    } else {\n      WaitForCopies<3>();",
        "WaitForCopies<2>();\n    } else {\n      WaitForCopies<4>();",
        _gpu("layer_norm", "TestLayerNorm and test_sizes and ffi"),
    ),
    Fault(
        "layer norm backward: all rows are called usual",
        "ffi/cuda/layer_norm_ring.cuh",
        "return usual_ >> from & 1;",
        "return !careful_;",
        _gpu("norm_numerics", "(test_large_mean or test_rows_of_several_kinds) and (ffi or cuda)"),
    ),
    Fault(
        "layer norm backward: epsilon is taken for a part of the deviation",
        "ffi/cuda/layer_norm_ring.cuh",
        "part = A{1} - epsilon * rstd * rstd",
        "part = A{1}",
        _gpu("norm_numerics", "test_deviation_far_below_epsilon and ffi"),
    ),
    Fault(
        "layer norm backward: a row is called usual as its warp's first one is",
        "ffi/cuda/layer_norm_ring.cuh",
        "return usual_ >> from & 1;",
        "return usual_ & 1;",
        _gpu("norm_numerics", "test_rows_of_several_kinds"),
    ),
    Fault(
        "batch norm: a part of a plane without elements has a mean",
        "ffi/cuda/batch_norm_fwd.cu",
        "count > 0 ? sum.x * (1.0 / count) : 0.0",
        "sum.x * (1.0 / count)",
        _gpu("batch_norm", "test_layouts"),
    ),
    Fault(
        "layer norm backward: of few rows all are called usual",
        "ffi/cuda/layer_norm_stream.cuh",
        "__ballot_sync(0xffffffffu, !usual)",
        "0 * __ballot_sync(0xffffffffu, !usual)",
        _gpu("norm_numerics", "test_large_mean and ffi"),
    ),
    Fault(
        "layer norm backward: of narrow rows all are called usual",
        "ffi/cuda/layer_norm_bwd_narrow.cuh",
        "(unusual >> of_chunk & 1) != 0 ?",
        "false ?",
        _gpu("norm_numerics", "(test_large_mean or test_rows_of_several_kinds) and (ffi or cuda)"),
    ),
    Fault(
        "layer norm backward: narrow rows' sums overwrite those of earlier ones",
        "ffi/cuda/layer_norm_bwd_narrow.cuh",
        "turn < turns.most; store = false) {",
        "turn < turns.most;) {",
        _gpu("norm_numerics", "test_exact_sums"),
    ),
    Fault(
        "layer norm: columns that two lanes of a narrow row have count twice",
        "ffi/cuda/layer_norm_fwd_narrow.cuh",
        "weights[k] = place.Owns(k) ? A{1} : A{0};",
        "weights[k] = A{1};",
        _gpu("layer_norm", "TestLayerNorm and test_sizes and ffi"),
    ),
    Fault(
        "layer norm: what a chunk of narrow rows has of its last pack is not stored",
        "ffi/cuda/layer_norm_narrow.cuh",
        "tail >= packs && at < end",
        "tail >= packs && at < tail",
        _gpu("layer_norm", "TestLayerNorm and test_sizes and ffi"),
    ),
    Fault(
        "layer norm backward: threads without packs of their own count",
        "ffi/cuda/layer_norm_bwd.cuh",
        "totals[2] += place.Counts(i) ? centered : A{0};",
        "totals[2] += centered;",
        _gpu("norm_numerics", "test_large_mean and ffi"),
    ),
    Fault(
        "layer norm backward: a cluster's first warp sends its own sums only",
        "ffi/cuda/layer_norm_totals.cuh",
        "if (cluster_ == 1 || warp_ == 0) sum = OverParts(",
        "if (cluster_ == 1) sum = OverParts(",
        _k("row_paths", "test_paths and bfloat16"),
    ),
    Fault(
        "layer norm backward: statistics of the turn before",
        "ffi/cuda/layer_norm_ring.cuh",
        "from = first_ + of;",
        "from = first_ + max(0, of - 1);",
        _k("row_paths", "test_paths and bfloat16"),
    ),
    Fault(
        "layer norm backward: of more than four warps' sums, only eight",
        "ffi/cuda/layer_norm_totals.cuh",
        "sum[0] += other[0];",
        "",
        _k("row_paths", "test_paths and bfloat16"),
    ),
    Fault(
        "layer norm backward: units' sums are read before they are written",
        "ffi/cuda/layer_norm_column_sums.cuh",
        "__syncthreads();  // all units' sums are written",
        "",
        _gpu(
            "layer_norm norm_numerics", "(TestLayerNorm and test_sizes and ffi) or test_exact_sums"
        ),
    ),
    Fault(
        "sums over blocks: rows of any length are read by 16 bytes",
        "ffi/cuda/column_sum.cuh",
        "features % kVec<A> == 0 && Aligned(workspace) && features",
        "Aligned(workspace) && features",
        _k("row_paths", "test_paths and bfloat16"),
    ),
    Fault(
        "layer norm backward: sums of dx go on from those of earlier turns",
        "ffi/cuda/layer_norm_bwd.cuh",
        "if (sums_dx) dx_sums.Clear();",
        "if (sums_dx && turn == 0) dx_sums.Clear();",
        _gpu("norm_sums", "test_exact_sums_of_dx"),
    ),
    Fault(
        "layer norm: parameters of rows that start anywhere begin with the frame",
        "ffi/cuda/layer_norm_parameters.cuh",
        "own_column = place.first_column - place.skip() + place.base;",
        "own_column = place.first_column + place.base;",
        _gpu("norm_variants", "TestAdd and test_sizes and ffi"),
    ),
    Fault(
        "layer norm: rows after the first ones are not ordered",
        "ffi/cuda/layer_norm_fwd_rows.cuh",
        "if (kReread) replace();",
        "",
        _k("row_paths", "test_paths and bfloat16"),
    ),
    Fault(
        "layer norm: columns that a row does not have count in its deviation",
        "ffi/cuda/layer_norm_moments.cuh",
        "FillHeld(place, h, warp_mean);",
        "",
        _gpu("layer_norm", "TestLayerNorm and test_sizes and ffi"),
    ),
    Fault(
        "layer norm: a cluster's blocks send what their first warp has alone",
        "ffi/cuda/layer_norm_sums.cuh",
        "return !kClusters || cluster_ == 1 || warp_ == 0;",
        "return !kClusters || cluster_ == 1;",
        _k("row_paths", "test_paths and bfloat16"),
    ),
    Fault(
        "batch norm: partial sums are read before they are written",
        "ffi/cuda/batch_norm_bwd.cu",
        "MeetBlocks(plan);  // partial sums are written",
        "",
        _gpu(
            "batch_norm batch_norm_numerics", "(test_sizes or test_layouts or thousand) and not xla"
        ),
    ),
    Fault(
        "batch norm: partial results are read before they are written",
        "ffi/cuda/batch_norm_fwd.cu",
        "MeetBlocks(plan);  // partial results are written",
        "",
        _gpu(
            "batch_norm batch_norm_numerics", "(test_sizes or test_layouts or thousand) and not xla"
        ),
    ),
    Fault(
        "batch norm: a pack's channels have one place for their numbers",
        "ffi/cuda/batch_norm_plan.h",
        "return in_pack * channel_pitch + (channel >> channel_shift);",
        "return channel >> channel_shift;",
        _gpu("batch_norm", "test_sizes and ffi"),
    ),
    Fault(
        "batch norm: a block takes the first of its tile's partial results for all of them",
        "ffi/cuda/batch_norm_sums.cuh",
        "const int parts = plan.BlocksOf(group, channel);",
        "const int parts = 1;",
        _gpu("batch_norm batch_norm_numerics", "(test_sizes or thousand) and not xla"),
    ),
    Fault(
        "batch norm: of the rows that a warp has in a step, one is added up",
        "ffi/cuda/batch_norm_sums.cuh",
        "for (int rows = plan.warp_rows; rows > 1; rows /= 2) {",
        "for (int rows = 1; rows > 1; rows /= 2) {",
        _gpu("batch_norm", "test_sizes and ffi"),
    ),
    Fault(
        "batch norm: a channel's columns are added up, their other rows are not",
        "ffi/cuda/batch_norm_sums.cuh",
        "if (is_channel || rows > 1) {",
        "if (is_channel) {",
        _gpu("batch_norm", "test_layouts and ffi"),
    ),
    Fault(
        "batch norm: more is on its way than there is room for",
        "ffi/cuda/batch_norm_policy.h",
        "return few && task.shared_bytes >= kMuchMemory ?",
        "return few ?",
        _k("channel_plans", "test_more_is_on_its_way"),
    ),
    Fault(
        "batch norm: dx without what the mean is off by",
        "ffi/cuda/batch_norm_grad.cuh",
        "level(mean_dz - delta * (mean_dz_x_hat * rstd))",
        "level(mean_dz)",
        _gpu("batch_norm_numerics", "test_large_means and ffi"),
    ),
]
