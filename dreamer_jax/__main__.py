"""`python -m dreamer_jax` is `dreamer`."""

import sys

from dreamer_jax.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
