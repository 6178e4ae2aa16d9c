"""Exit codes of programs."""

from eqx_decoders.errors import CheckpointError, ConfigError, ConversionError, DataError
from eqx_decoders.io.exit_codes import exit_code


def test_exit_codes():
    kinds = (ConfigError, DataError, CheckpointError, ConversionError, ValueError)
    assert [exit_code(kind("x")) for kind in kinds] == [2, 3, 4, 4, 1]
