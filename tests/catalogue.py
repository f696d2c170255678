"""Bugs of other projects in code like ours. Each bug is tested here.

A test has marks with the names of its bugs. `pytest -m N1` runs the tests against bug N1. `pytest
--markers` lists all bugs. `test_catalogue.py` finds bugs without a test.
"""

from __future__ import annotations

#: For a bug that is known without a report that we have read.
UNREPORTED = "no report read"

#: The bug, and its reports on GitHub (owner/repository#number) or UNREPORTED.
ROWS: dict[str, tuple[str, str]] = {
    # --- Numerics
    "N1": ("variance as E[x²] − E[x]²: 48425 for randn + 2000", "pytorch/pytorch#51102"),
    "N2": ("variance 0 for 0.01 · randn + 100", "pytorch/pytorch#40308"),
    "N3": ("[40000 … 40003] gives NaN", "microsoft/onnxruntime#28463"),
    "N4": ("a constant row of 1234.0 gives NaN", "microsoft/onnxruntime#21935"),
    "N5": ("NaN on the GPU only, for mean 1449 and deviation 0.5", "ml-explore/mlx#2238"),
    "N6": ("one pass in the SIMD path, two in the scalar one", "tracel-ai/burn#5607"),
    "N7": ("negative variance, NaN", "google/flax#1491, patrick-kidger/equinox#314"),
    "N8": ("batch norm of bfloat16, mean 5, deviation 0.1: NaN", "tenstorrent/tt-metal#45968"),
    "N9": ("|x| of 1e30: zeros on the CPU, NaN on the GPU", "pytorch/pytorch#178123"),
    "N10": ("squares overflow without a word at 1e19", "tenstorrent/tt-metal#55159"),
    "N11": ("sums in float16: zeros, or NaN", "microsoft/onnxruntime#29034"),
    "N12": ("float16 drifts away from float32", "pytorch/pytorch#66707"),
    "N13": ("two ways to the variance differ, 1/x makes it large", "pytorch/pytorch#186582"),
    "N14": (
        "sqrt(var) + eps in place of sqrt(var + eps)",
        "pytorch/pytorch#81090, pyg-team/pytorch_geometric#2917",
    ),
    "N15": ("inf or NaN for inputs of 1e-10", "pytorch/pytorch#141642"),
    "N16": ("scale and bias applied in bfloat16", "NVIDIA/TransformerEngine#744"),
    # --- Gradients
    "G1": ("masked lanes take part: no power of two", "linkedin/Liger-Kernel#518"),
    "G2": ("the test compared a gradient with itself", "linkedin/Liger-Kernel#359"),
    "G3": ("parameters indexed by the wrong axis", "deepspeedai/DeepSpeed#692"),
    "G4": ("backward took x for a matrix: wrong, out of bounds", "flagos-ai/FlagGems#5392"),
    "G5": ("number of features of the gradient as it came", "linkedin/Liger-Kernel#1375"),
    "G6": (
        "scratch of a wrong size; absent parameters; only with more than 65,536 rows",
        "pytorch/pytorch#192016, pytorch/pytorch#193016",
    ),
    "G7": ("the mean of dy · scale taken off twice", "tenstorrent/tt-metal#53204"),
    "G8": ("scale − 1 is stored: + 1 forgotten backward", "NVIDIA/TransformerEngine#67"),
    "G9": ("a wrong formula for the gradient", "openxla/xla#8225"),
    "G10": ("warps of another size: partial sums dropped", "pytorch/pytorch#183861"),
    "G11": ("a fused op had no gradient, and did not say so", "huggingface/candle#3613"),
    "G12": (
        "gradients overwritten, not added up; 1600 features",
        "karpathy/llm.c#408, karpathy/llm.c#445",
    ),
    # --- Memory and limits
    "M1": ("row · features wraps at 2^32 elements: zeros", "pytorch/pytorch#181555"),
    "M2": ("illegal access just above 2^31 elements", "flashinfer-ai/flashinfer#3391"),
    "M3": (
        "32-bit offsets, in four more projects",
        "vllm-project/vllm#42862, microsoft/onnxruntime#31650, PaddlePaddle/Paddle#79528",
    ),
    "M4": ("a leaf's size cut to 32 bits", "NVIDIA/TransformerEngine#2918"),
    "M5": ("more than 65,535 blocks", "NVIDIA/apex#411, pytorch/pytorch#16998"),
    "M6": ("vectors at addresses that are not theirs", "flashinfer-ai/flashinfer#634"),
    "M7": (
        "out of bounds backward; workspace cut at odd places",
        "NVIDIA/TransformerEngine#34, NVIDIA/TransformerEngine#379",
    ),
    "M8": (
        "no rows or no features: the next op fails, or a division by 0",
        "pytorch/pytorch#28614, pytorch/pytorch#80893, tensorflow/tensorflow#46366",
    ),
    "M9": ("an empty statistic is read", "pytorch/pytorch#189831"),
    "M10": (
        "scale shorter than the channels: read out of bounds",
        "tensorflow/tensorflow#52339, tensorflow/tensorflow#59001",
    ),
    "M11": ("a scale to be broadcast: row 0 was taken", "microsoft/onnxruntime#28971"),
    # --- Races and devices
    "R1": ("no barrier between rounds of a loop", "NVIDIA/apex#1184"),
    "R2": ("a race: the loss differs from run to run", "PaddlePaddle/Paddle#56100"),
    "R3": (
        "shared memory written before all had read it",
        "ml-explore/mlx#2340, flashinfer-ai/flashinfer#3607",
    ),
    "R4": ("kernels ran on device 0", "NVIDIA/apex#1022, NVIDIA/apex#770, NVIDIA/apex#1736"),
    "R5": (
        "operands gathered, or spread in ways that do not fit",
        "jax-ml/jax#32098, NVIDIA/TransformerEngine#1743",
    ),
    "R6": ("tasks wait for threads that wait for them", "PyAutoLabs/PyAutoFit#1530"),
    # --- Clipping
    "C1": ("0/0 where norm and limit are 0", "google-deepmind/optax#1752"),
    "C2": (
        "squares overflow in half precision or float",
        "facebookresearch/fairscale#263, PaddlePaddle/Paddle#13664",
    ),
    "C3": ("a norm in float16: infinite, gradients 0", "jax-ml/jax#39899"),
    "C4": (
        "the norm depends on how leaves are cut",
        "AI-Hypercomputer/maxtext#5143, pytorch/torchtitan#4135",
    ),
    "C5": (
        "infinite norms: zeros, or NaN by inf · 0",
        "pytorch/pytorch#46849, tensorflow/tensorflow#21363, deepspeedai/DeepSpeed#7171",
    ),
    "C6": (
        "the gradient through a clip of 0 is NaN",
        "tensorflow/tensorflow#22048, keras-team/keras#14075",
    ),
    "C7": ("leaves of mixed dtypes: illegal access", "NVIDIA/Megatron-LM#7338"),
    "C8": ("many large gradients overflow", "ray-project/ray#45055"),
    "C9": (
        "a loop's state changes its mesh axes in shard_map",
        "NVIDIA/warp#1851, jax-ml/jax#27903",
    ),
    "C10": (
        "parameters that are keys, counters or complex numbers",
        "patrick-kidger/equinox#15, patrick-kidger/equinox#364, patrick-kidger/equinox#887",
    ),
    "C11": ("gradients of dtype float0", "ott-jax/ott#129"),
    "C12": (
        "a checkpoint gives a scalar back as a Python number",
        "ray-project/ray#61937, google/flax#1550",
    ),
    # --- Batch norm
    "B1": ("a batch of one: NaN by Bessel's correction", "pytorch/pytorch#1381"),
    "B2": ("a batch of one: NaN of the fused op", "tensorflow/tensorflow#34062"),
    "B3": ("float16, channels last: NaN backward", "pytorch/pytorch#147303"),
    "B4": ("statistics saved in float16", "chainer/chainer#6323"),
    "B5": ("which variance, biased or unbiased", "apache/mxnet#21111"),
    # --- Softmax cross-entropy
    "E1": ("label smoothing also counts ignored rows: in the sum, or in the mean", UNREPORTED),
    "E2": ("mean over all rows, not over those that count; 0/0 where all are ignored", UNREPORTED),
    "E3": ("inf - inf: NaN for rows, or parts of rows, of -inf", UNREPORTED),
    "E4": ("an odd number of classes: lanes beyond the row take part", UNREPORTED),
    "E5": ("rows * classes in 32 bits: other rows' logits, or a crash", UNREPORTED),
    "E6": ("tied embedding: a gradient is lost, or overwrites logits in use", UNREPORTED),
    "E7": ("gradients computed forward, for the cotangent 1", UNREPORTED),
    "E8": ("the loss of 16-bit logits in 16 bits", UNREPORTED),
    "E9": ("the ignored label is an index: a read outside the array", UNREPORTED),
    # --- Installation and runtime
    "P1": (
        "built for another version of XLA's FFI",
        "NVIDIA/cuEquivariance#303, moreau-project/moreau#32",
    ),
    "P2": ("a handler's trait is lost: no CUDA graph", "openxla/xla#14889"),
    "P3": ("a GPU handler reads device memory on the host", "jax-ml/jax#31593"),
    "P4": (
        "the old API of custom calls is gone",
        "DifferentiableUniverseInitiative/jaxDecomp#66",
    ),
    "P5": (
        "the compilation cache gives a program of other attributes, or never finds one",
        "jax-ml/jax#22702, jax-ml/jax#21159",
    ),
    "P6": ("the GSPMD partitioner aborts the process", "jax-ml/jax#39128"),
    # --- Transformations
    "T1": (
        "a pullback cannot be transposed",
        "jax-ml/jax#26121, jax-ml/jax#5309, google/jaxopt#141",
    ),
    "T2": ("a mapped axis's name is unbound, or a type has it too often", "jax-ml/jax#27903"),
}

#: Bugs that pytest cannot find, and the tools that find them.
ELSEWHERE: dict[str, str] = {
    "M3": "GCC's -Wconversion, nvcc's warnings; offsets are int64_t in ffi/; sizes of M1 and M2",
    "M7": "compute-sanitizer's memcheck: tests/gpu/run.sh, steps sanitize and check",
    "R1": "compute-sanitizer's racecheck: tests/gpu/run.sh, steps sanitize and check",
    "R3": "compute-sanitizer's racecheck: tests/gpu/run.sh, steps sanitize and check",
}
