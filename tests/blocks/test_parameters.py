"""Boxes of parameters: their roles decide what is cast and decayed."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

from dreamer_jax.blocks.parameters import Parameter, roles_of
from dreamer_jax.errors import UserError


def test_roles_that_nobody_knows_are_refused():
    """A typing error would be cast and decayed as nobody meant it; so would an array without a box."""
    good = Parameter(jnp.zeros((2, 3)), ("vocab", "hidden"), "embedding")
    assert roles_of({"a": {"b": good}}) == {"a": {"b": "embedding"}}
    with pytest.raises(UserError, match=r"parameter \['a'\]\['b'\]: role 'embed'; roles are matrix, embedding, norm"):
        roles_of({"a": {"b": good.replace(role="embed")}})
    with pytest.raises(UserError, match=r"parameter \['c'\]: a .* that isn't boxed \(`Parameter`\)"):
        roles_of({"a": good, "c": jnp.zeros(3)})
