"""Let a model write: the program `eqx-decoders generate`."""

import sys

from eqx_decoders.cli import import_program


if __name__ == "__main__":
    sys.exit(import_program("generate")())
