"""Names of the flags of settings."""

import dataclasses

from eqx_decoders.data.config import DataConfig


# Flags of settings of the data, without `data.`. `--data.seq-len` is also accepted.
SHORT_FLAGS = {f"data.{field.name}": "--" + field.name.replace("_", "-") for field in dataclasses.fields(DataConfig)}
SHORT_FLAGS |= {"data.path": "--data", "data.held_out_path": "--held-out"}


def flag(name: str) -> str:
    """Return the flag of a setting with this dotted name: `--optimizer.eps` for `"optimizer.eps"`."""
    return SHORT_FLAGS.get(name, long_flag(name))


def long_flag(name: str) -> str:
    """Return the flag with all parts of a dotted name: `--data.seq-len` for `"data.seq_len"`."""
    return "--" + name.replace("_", "-")
