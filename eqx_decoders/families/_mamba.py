"""Weights of Mamba-2 in the checkpoints of several families."""

from eqx_decoders.families.weight_rows import Weight, sharing


def mamba_weights(prefix: str) -> tuple[Weight, ...]:
    """Return rows of Mamba-2: its input projections share one tensor, and its convolutions another."""
    streams = {"value": "(heads value_dim)", "key": "(key_heads key_dim)", "query": "(key_heads key_dim)"}
    into = [("gate", "(heads value_dim)"), *streams.items()]
    return (
        *sharing(
            prefix + "in_proj.weight",
            *((f"mixer.{name}", f"{rows} embed -> embed {rows.strip('()')}") for name, rows in into),
            ("mixer.dt", "heads embed -> embed heads"),
        ),
        *sharing(
            prefix + "conv1d.weight",
            *((f"mixer.{name}_taps", f"{rows} 1 taps -> {rows.strip('()')} taps") for name, rows in streams.items()),
        ),
        *sharing(
            prefix + "conv1d.bias",
            *((f"mixer.{name}_taps_bias", f"{rows} -> {rows.strip('()')}") for name, rows in streams.items()),
        ),
        Weight(prefix + "A_log", "mixer.a_log", "heads -> heads"),
        Weight(prefix + "D", "mixer.skip", "heads -> heads"),
        Weight(prefix + "dt_bias", "mixer.dt_bias", "heads -> heads"),
        Weight(prefix + "norm.weight", "mixer.norm_scale", "(heads value_dim) -> heads value_dim"),
        Weight(prefix + "out_proj.weight", "mixer.out", "embed (heads value_dim) -> heads value_dim embed"),
    )
