"""Budgets: parameters, FLOPs and memory of any model, and matching one model to another (section 3.8).

`analytic` and `memory` are plain arithmetic on a DreamerConfig (no jax); `matching` searches with them; `program`
counts the same quantities in the lowered program, as an independent check.
"""
