"""Exit codes of the programs."""

from eqx_decoders.errors import CheckpointError, ConfigError, ConversionError, DataError


EXIT_CONFIG = 2
EXIT_DATA = 3
EXIT_CHECKPOINT = 4
EXIT_SIGPIPE = 141  # 128 + 13, of a process that writes to a closed pipe
EXIT_SIGTERM = 143  # 128 + 15, the exit code of a process that was ended by SIGTERM


def exit_code(error: BaseException) -> int:
    """Return the exit code for an error: 2 configuration, 3 data, 4 checkpoint, otherwise 1."""
    checkpoint = (CheckpointError, ConversionError)
    codes = {ConfigError: EXIT_CONFIG, DataError: EXIT_DATA, checkpoint: EXIT_CHECKPOINT}
    return next((code for kind, code in codes.items() if isinstance(error, kind)), 1)
