"""Convert between Hugging Face directories and run directories: the program `eqx-decoders convert`."""

import sys

from eqx_decoders.cli.convert import main


if __name__ == "__main__":
    sys.exit(main())
