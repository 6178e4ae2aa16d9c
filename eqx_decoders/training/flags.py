"""Names of the flags of settings."""


def flag(name: str) -> str:
    """Return the flag of a setting by its dotted name: `"optimizer.eps"` is `--optimizer.eps`."""
    named = {"data.path": "data", "data.held_out_path": "held-out"}
    return "--" + named.get(name, name.removeprefix("dataset.").replace("_", "-"))
