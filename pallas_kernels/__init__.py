"""Kernels: one folder each, with a typed entry (api.py) and one file a backend."""
