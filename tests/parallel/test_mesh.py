"""The mesh of a configuration, and the table of chips."""

import jax
import pytest

from dreamer_jax.config.errors import ConfigError
from dreamer_jax.config.schema import MeshConfig
from dreamer_jax.parallel import chip_of, make_mesh


def test_mesh_takes_the_first_devices():
    mesh = make_mesh(MeshConfig(data=4))
    assert dict(mesh.shape) == {"data": 4}
    assert list(mesh.devices.flat) == jax.devices()[:4]


def test_more_devices_than_there_are():
    with pytest.raises(ConfigError, match=r"mesh.data: 9 devices asked for, but jax sees 8 \(cpu\); use --mesh.data 8"):
        make_mesh(MeshConfig(data=9))


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("TPU v4", "v4"),
        ("TPU v5 lite", "v5e"),
        ("TPU v5", "v5p"),
        ("TPU v5p", "v5p"),
        ("TPU v6 lite", "v6e"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H200", "H200"),
    ],
)
def test_chips_by_the_name_jax_gives_them(kind, name):
    chip = chip_of(kind)
    assert chip is not None and chip.name == name


def test_unknown_chips():
    assert chip_of("cpu") is None
    assert chip_of("TPU v99") is None
