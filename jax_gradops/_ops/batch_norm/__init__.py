"""Batch norm."""
