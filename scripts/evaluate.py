"""Measure models on tasks and texts: the program `eqx-decoders evaluate`."""

import sys

from eqx_decoders.cli import import_program


if __name__ == "__main__":
    sys.exit(import_program("evaluate")())
