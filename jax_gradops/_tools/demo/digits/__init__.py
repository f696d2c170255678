"""The parts of ``python -m jax_gradops demo --task digits``.

`data` has the images, `resnet` the model, `program` trains it, `plots` and `run` show what came of
it.
"""
