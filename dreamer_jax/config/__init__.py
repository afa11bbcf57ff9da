"""Configuration: one schema of frozen dataclasses, strict YAML files, overrides from the command line."""

from dreamer_jax.config.errors import ConfigError, UserError
from dreamer_jax.config.loading import LoadedConfig, load_config
from dreamer_jax.config.schema import Config
from dreamer_jax.config.writing import difference, to_yaml

__all__ = ["Config", "ConfigError", "LoadedConfig", "UserError", "difference", "load_config", "to_yaml"]
