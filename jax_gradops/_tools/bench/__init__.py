"""The parts of ``python -m jax_gradops bench``.

- `options` reads the command line.
- `formulas` and `cases` define the work.
- `peers`, `jax_functions` and `torch_peers` are the competitors that do the work.
- `timing` times programs. `gate` checks their results. `measuring` takes one case through all
  steps.
- `results` converts results to JSON. `record` is the file of these results.
- `report` (the table, with `live`), `sheet` (CSV) and `plots` are made from the file.

The suite "clip" has its own modules: `trees`, `clips`, `clip_loops`, `torch_clip`, `clip_gate` and
`clip_measuring`. They do the work of the modules above in this order. The suite "train" has `train`
(cases), models such as `train_resnet`, `train_measuring` and `train_report`. Its language models
share `train_transformer` and `train_text`.
"""
