"""Names of the flags of settings."""

import dataclasses

from eqx_decoders.data.config import DataConfig


# Settings of the data have a short flag; `--data.seq-len` and the like are accepted, too.
SHORT_FLAGS = {f"data.{field.name}": "--" + field.name.replace("_", "-") for field in dataclasses.fields(DataConfig)}
SHORT_FLAGS |= {"data.path": "--data", "data.held_out_path": "--held-out"}


def flag(name: str) -> str:
    """Return the flag of a setting by its dotted name: `"optimizer.eps"` is `--optimizer.eps`."""
    return SHORT_FLAGS.get(name, long_flag(name))


def long_flag(name: str) -> str:
    """Return the flag that has all parts of the dotted name: `"data.seq_len"` is `--data.seq-len`."""
    return "--" + name.replace("_", "-")
