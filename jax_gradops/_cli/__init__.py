"""The commands of ``python -m jax_gradops``.

Each command is a module with two functions. ``add_arguments(parser)`` adds the command's options.
``run(args)`` runs the command and returns the exit status.
"""

# Exit statuses as in shells: 128 + SIGINT, 128 + SIGPIPE.
INTERRUPTED, NO_READER = 130, 141
