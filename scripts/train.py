"""Train a decoder on text: the program `eqx-decoders train`."""

import sys

from eqx_decoders.cli import import_program


if __name__ == "__main__":
    sys.exit(import_program("train")())
