"""Table of a model's weights: path, shape, axes, sharding, dtype and size per device."""

from jax.sharding import NamedSharding
from jaxtyping import PyTree

from eqx_decoders.sharding.axes import axes, named_leaves, names_of
from eqx_decoders.sharding.layout import device_bytes


def describe(model: PyTree) -> str:
    """Return a text table with one row per weight of `model` (arrays or `ShapeDtypeStruct`s) and their totals."""
    axis_names = axes(model)
    rows = [("path", "shape", "axes", "sharding", "dtype", "MB/device")]
    total_weights = 0
    total_bytes = 0
    for name, leaf in named_leaves(model).items():
        spec = leaf.sharding.spec if isinstance(leaf.sharding, NamedSharding) else ()
        mesh_axes = [names_of(part) for part in spec]
        sharding = ", ".join("x".join(names) or "-" for names in mesh_axes)
        size = device_bytes(leaf)
        total_weights += leaf.size
        total_bytes += size
        shape = " x ".join(map(str, leaf.shape))
        rows.append((name, shape, " ".join(axis_names[name]), sharding or "-", str(leaf.dtype), f"{size / 1e6:,.2f}"))
    rows.append((f"{len(axis_names)} arrays", f"{total_weights:,} weights", "", "", "", f"{total_bytes / 1e6:,.2f}"))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(
            cell.rjust(width) if column == 5 else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    separator = "-" * len(lines[0])
    execution = getattr(model, "execution", None)
    backend = [] if execution is None else ["", f"on {execution.layout.backend.describe()}"]
    return "\n".join([lines[0], separator, *lines[1:-1], separator, lines[-1], *backend])
