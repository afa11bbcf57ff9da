"""`python -m dreamer_jax` is `dreamer`."""

import sys

from dreamer_jax.cli.main import entry

if __name__ == "__main__":
    sys.exit(entry())
