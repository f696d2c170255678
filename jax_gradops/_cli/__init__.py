"""The commands of ``python -m jax_gradops``.

Each command is a module of this package with a function ``add_arguments(parser)``, which adds its
options, and a function ``run(args)``, which returns the exit status.
"""

# Exit statuses as shells have them: 128 + SIGINT, 128 + SIGPIPE.
INTERRUPTED, NO_READER = 130, 141
