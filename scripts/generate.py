"""Let a model write: the program `eqx-decoders generate`."""

import sys

from eqx_decoders.cli.generate import main


if __name__ == "__main__":
    sys.exit(main())
