"""Sequence attention: a token over the earlier ones of its document."""
