"""LFM2 (Liquid AI 2025): gated short convolutions, and attention with normalized queries and keys."""

import functools
from typing import Any

from eqx_decoders.core.config_reader import Fields
from eqx_decoders.families._lfm2 import SETTINGS, WEIGHTS, lfm2
from eqx_decoders.families.common import DecoderSizes
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


def _layers(*attention: int, count: int = 16) -> tuple[bool, ...]:
    return tuple(index in attention for index in range(count))


_shape = functools.partial(DecoderSizes, vocab_size=65_536, head_dim=64, num_kv_heads=8, eps=1e-5, tied=True)
_350M = _shape(embed_dim=1024, num_layers=16, num_heads=16, mlp_dim=4608)
_700M = _shape(embed_dim=1536, num_layers=16, num_heads=24, mlp_dim=6912)
_1_2B = _shape(embed_dim=2048, num_layers=16, num_heads=32, mlp_dim=8192)
_FULL: dict[str, Any] = dict(full=_layers(2, 5, 8, 10, 12, 14))

MODELS = {
    "lfm2-350m": lambda: lfm2(_350M, **_FULL),
    "lfm2-700m": lambda: lfm2(_700M, **_FULL),
    "lfm2-1.2b": lambda: lfm2(_1_2B, **_FULL),
}
