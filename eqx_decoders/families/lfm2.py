"""LFM2 (Liquid AI 2025): gated short convolutions, and attention with normalized queries and keys."""

from eqx_decoders.core.config_reader import Fields
from eqx_decoders.families._lfm2 import SETTINGS, WEIGHTS, lfm2
from eqx_decoders.families.hf_table import Family
from eqx_decoders.families.settings_table import Renamed, Rule, Values


def _fit_mlp(fields: Fields, values: Values) -> None:
    """Replace `intermediate_size` by the features that the MLPs really have."""
    size, multiple = fields.integer("intermediate_size", 12_288), fields.integer("block_multiple_of", 256)
    factor = fields.number("block_ffn_dim_multiplier", 1.0, null=None)
    if fields.flag("block_auto_adjust_ff_dim", True):
        size = int(2 * size / 3) if factor is None else int(factor * int(2 * size / 3))
        size = -(-size // multiple) * multiple
    fields.content["intermediate_size"] = size


FAMILY = Family(
    model_type="lfm2",
    architecture="Lfm2ForCausalLM",
    settings=(
        Renamed({"block_ff_dim": "intermediate_size"}),
        Rule("", _fit_mlp, lambda config: {"block_auto_adjust_ff_dim": False}),
        *SETTINGS,
    ),
    build=lfm2,
    weights=WEIGHTS,
    ignored_keys={
        "block_dim block_mlp_init_scale block_norm_eps block_out_init_scale block_use_swiglu block_use_xavier_init "
        "conv_dim conv_dim_out conv_use_xavier_init num_heads use_pos_enc": "transformers does not read it",
    },
)  # fmt: skip


_SETTINGS = dict(
    model_type="lfm2",
    vocab_size=65_536,
    num_hidden_layers=16,
    block_auto_adjust_ff_dim=False,
    layer_types=["full_attention" if layer in (2, 5, 8, 10, 12, 14) else "conv" for layer in range(16)],
)

MODELS = {
    "lfm2-350m": _SETTINGS | dict(hidden_size=1024, num_attention_heads=16, intermediate_size=4608),
    "lfm2-700m": _SETTINGS | dict(hidden_size=1536, num_attention_heads=24, intermediate_size=6912),
    "lfm2-1.2b": _SETTINGS | dict(hidden_size=2048, num_attention_heads=32, intermediate_size=8192),
}  # fmt: skip
