"""The mesh of a configuration, and the table of chips."""

import dataclasses

import jax
import pytest
from jax.sharding import PartitionSpec

from dreamer_jax.chips import chip_of
from dreamer_jax.config.sections import MeshConfig
from dreamer_jax.errors import ConfigError
from dreamer_jax.parallel import batch_spec, make_mesh


def test_axes_and_their_order():
    mesh = make_mesh(MeshConfig(slices=2, data=(2, 1), expert=2))
    assert dict(mesh.shape) == {"slice": 2, "data0": 2, "data1": 1, "expert": 2}
    assert list(mesh.devices.flat) == jax.devices()
    assert batch_spec(mesh) == PartitionSpec(("slice", "data0", "data1", "expert"))


def test_one_device_is_the_first_of_many():
    assert list(make_mesh(MeshConfig()).devices.flat) == jax.devices()[:1]


@dataclasses.dataclass(frozen=True)
class Device:
    """As much of a TPU device as a mesh asks for."""

    id: int
    coords: tuple[int, int, int]
    slice_index: int = 0
    core_on_chip: int = 0
    platform: str = "tpu"


def test_several_processes_must_take_all_devices(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ConfigError, match=r"mesh.data: 1 devices asked for .* the product must be 8$"):
        make_mesh(MeshConfig())


def test_axes_follow_the_torus():
    """Devices are numbered with the first coordinate fastest; neighbours along an axis differ in one coordinate."""
    devices = [Device(x + 2 * y + 8 * z, (x, y, z)) for z in range(2) for y in range(4) for x in range(2)]
    mesh = make_mesh(MeshConfig(data=(2, 4), expert=2), devices)
    places = {(x, y, z): mesh.devices[0, x, y, z].coords for x in range(2) for y in range(4) for z in range(2)}
    assert all(place == coordinates for place, coordinates in places.items())


def test_slices_stay_together():
    devices = [Device(i, (i // 2, 0, 0), slice_index=i % 2) for i in range(8)]
    mesh = make_mesh(MeshConfig(slices=2, data=(4,)), devices)
    assert [device.slice_index for device in mesh.devices.flat] == [0, 0, 0, 0, 1, 1, 1, 1]
    with pytest.raises(ConfigError, match=r"mesh.slices: 1, but the devices form 2 slices"):
        make_mesh(MeshConfig(data=(8,)), devices)


@pytest.mark.parametrize(
    ("config", "asked"),
    [
        (MeshConfig(data=(9,)), r"9 devices asked for \(data 9\)"),
        (MeshConfig(data=(4,)), r"4 devices asked for \(data 4\)"),
        (MeshConfig(data=(4, 4)), r"16 devices asked for \(data 4 x 4\)"),
        (MeshConfig(slices=2, data=(2,), expert=4), r"16 devices asked for \(2 slices x data 2 x expert 4\)"),
    ],
)
def test_the_product_must_be_the_number_of_devices(config, asked):
    with pytest.raises(ConfigError, match=rf"mesh.data: {asked}, but there are 8 \(cpu\); the product must be 8, or 1"):
        make_mesh(config)


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
