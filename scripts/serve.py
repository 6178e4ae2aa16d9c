"""Serve a model over HTTP: the program `eqx-decoders serve`."""

import sys

from eqx_decoders.cli import import_program


if __name__ == "__main__":
    sys.exit(import_program("serve")())
