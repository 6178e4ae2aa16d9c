"""Names of the flags of settings."""

# Settings that have a short flag; `--data.path` and the like are accepted, too.
SHORT_FLAGS = {
    "data.path": "--data",
    "data.held_out_path": "--held-out",
    "data.batch_size": "--batch-size",
    "data.seq_len": "--seq-len",
    "data.seed": "--seed",
}


def flag(name: str) -> str:
    """Return the flag of a setting by its dotted name: `"optimizer.eps"` is `--optimizer.eps`."""
    return SHORT_FLAGS.get(name, long_flag(name))


def long_flag(name: str) -> str:
    """Return the flag that has all parts of the dotted name: `"data.seq_len"` is `--data.seq-len`."""
    return "--" + name.replace("_", "-")
