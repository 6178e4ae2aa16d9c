"""Convert between Hugging Face directories and run directories: the program `eqx-decoders convert`."""

import sys

from eqx_decoders.cli import import_program


if __name__ == "__main__":
    sys.exit(import_program("convert")())
