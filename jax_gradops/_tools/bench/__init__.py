"""The parts of ``python -m jax_gradops bench``.

`options` reads the command line. `formulas`, `batch_norm_formulas` and `cases` say what is run,
`peers`, `jax_functions` and `torch_peers` who runs it, `timing` how it is timed, `gate` whether it
is right, `measuring` takes one case through all of these. `results` makes JSON of what came of it,
`record` is the file with that, and all that follows is made from it: `report` (the table, with
`live`), `sheet` (CSV), `plots`. For the suite "clip": `trees`, `clips`, `clip_loops`, `torch_clip`,
`clip_gate` and `clip_measuring`, in the same order. For the suite "train": `train` (cases), the
models (`train_resnet`), `train_measuring` and `train_report`.
"""
