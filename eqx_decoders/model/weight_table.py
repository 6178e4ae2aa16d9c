"""The table of a model's weights: path, shape, axes, sharding and bytes on a device."""

from jax.sharding import NamedSharding
from jaxtyping import PyTree

from eqx_decoders.sharding.axes import axes, named_leaves
from eqx_decoders.sharding.layout import device_bytes


def describe(model: PyTree) -> str:
    """Return a table with one row per weight of `model` (arrays or `ShapeDtypeStruct`s), their sum, and the backend."""
    words = axes(model)
    rows = [("path", "shape", "axes", "sharding", "dtype", "MB/device")]
    count = size = 0
    for name, leaf in named_leaves(model).items():
        spec = leaf.sharding.spec if isinstance(leaf.sharding, NamedSharding) else ()
        split = ", ".join("x".join(part if isinstance(part, tuple) else (part,)) if part else "-" for part in spec)
        device_size = device_bytes(leaf)
        count, size = count + leaf.size, size + device_size
        shape = " x ".join(map(str, leaf.shape))
        rows.append((name, shape, " ".join(words[name]), split or "-", str(leaf.dtype), f"{device_size / 1e6:,.2f}"))
    rows.append((f"{len(words)} arrays", f"{count:,} weights", "", "", "", f"{size / 1e6:,.2f}"))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(
            cell.rjust(w) if column == 5 else cell.ljust(w)
            for column, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    rule = "-" * len(lines[0])
    execution = getattr(model, "execution", None)
    backend = [] if execution is None else ["", f"on {execution.layout.backend.describe()}"]
    return "\n".join([lines[0], rule, *lines[1:-1], rule, lines[-1], *backend])
