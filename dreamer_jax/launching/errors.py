"""The launcher's own error: `dreamer_jax.config` needs PyYAML, which a laptop may lack."""


class LaunchError(Exception):
    """Something a person can mend; the message says what and how."""
