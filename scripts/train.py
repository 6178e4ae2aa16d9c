"""Train a decoder on text: the program `eqx-decoders train`."""

import sys

from eqx_decoders.cli.train import main


if __name__ == "__main__":
    sys.exit(main())
