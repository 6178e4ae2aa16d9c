"""Plan a training step for TPUs that are not here: the program `eqx-decoders plan`."""

import os
import sys


os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")

from eqx_decoders.cli import import_program


if __name__ == "__main__":
    sys.exit(import_program("plan")())
