"""Configuration: frozen dataclasses (sections, and one a family of models), strict YAML, command line overrides."""

from dreamer_jax.config.loading import LoadedConfig, load_config
from dreamer_jax.config.sections import Config
from dreamer_jax.config.writing import difference, to_yaml

__all__ = ["Config", "LoadedConfig", "difference", "load_config", "to_yaml"]
