"""Clipping by the global norm."""
