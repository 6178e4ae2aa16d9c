"""Serve a model over HTTP: the program `eqx-decoders serve`."""

import sys

from eqx_decoders.cli.serve import main


if __name__ == "__main__":
    sys.exit(main())
