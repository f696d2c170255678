"""The parts of ``python -m jax_gradops demo --task digits``.

`data` loads the images, `resnet` is the model, `program` trains it. `plots` and `run` show the
results.
"""
