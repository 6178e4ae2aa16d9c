"""MiniMax-Text-01 (MiniMax 2025): seven lightning attentions to one softmax attention, Mixtral's experts.

Its residual connections keep what a norm returned, and weigh it and the output of the layer.
"""

import dataclasses
from collections.abc import Callable

from eqx_decoders.blocks.block import BlockConfig
from eqx_decoders.blocks.residual.residual import Weighted
from eqx_decoders.core.config_reader import Fields
from eqx_decoders.families import moe
from eqx_decoders.families.common import (
    HYBRID_TYPES,
    LAYER,
    NO_BIAS,
    DecoderSizes,
    decoder_sizes,
    hybrid_layers,
    llama_weights,
)
from eqx_decoders.families.hf_table import Family
from eqx_decoders.families.minimax.lightning import LightningAttentionConfig
from eqx_decoders.families.rope_config import rope_settings
from eqx_decoders.families.settings_table import Group, Number, Only, Rule, Values
from eqx_decoders.families.weight_rows import Weight, sharing
from eqx_decoders.layers.attention.attention import AttentionConfig
from eqx_decoders.layers.rope import Rope
from eqx_decoders.model.decoder_config import DecoderConfig


Weights = tuple[float, float]  # of the stream and of a layer's output


def minimax(
    shape: DecoderSizes,
    *,
    full: tuple[bool, ...],
    num_experts: int,
    num_experts_per_token: int,
    rope: Rope = Rope(theta=1e7),
    softmax: Weights = (1.0, 1.0),
    lightning: Weights = (1.0, 1.0),
    mlp: Weights = (1.0, 1.0),
) -> DecoderConfig:
    """Return a decoder with softmax attention in the layers where `full` is True; else it is lightning attention."""
    experts = shape.experts(num_experts=num_experts, num_experts_per_token=num_experts_per_token)
    linear = LightningAttentionConfig(num_heads=shape.num_heads, head_dim=shape.head_dim, rate_layers=shape.num_layers)

    def block(has_softmax: bool) -> BlockConfig:
        (keep, add), mixer = (softmax, shape.attention(rope=rope)) if has_softmax else (lightning, linear)
        residual = Weighted(keeps_normed=True, keep=(keep, mlp[0]), add=(add, mlp[1]))
        return shape.block(mixer, experts, residual=residual)

    return shape.decoder(map(block, full))


def _weights(name: str, key: str, kinds: tuple[type, ...], branch: int) -> Group:
    """Return the rows of the weights of residual connections: of a mixer of one of these kinds, or of the MLP."""

    def value(field: str) -> Callable[[DecoderConfig], float]:
        def of_first(config: DecoderConfig) -> float:
            block = next((block for block in config.blocks if isinstance(block.mixer, kinds)), None)
            return 1.0 if block is None else getattr(block.residual, field)[branch]

        return of_first

    rows = (
        Number(f"{key}_alpha_factor", value("keep"), 1.0, name="keep"),
        Number(f"{key}_beta_factor", value("add"), 1.0, name="add"),
    )
    return Group(name, lambda keep, add: (float(keep), float(add)), rows)


def _alternate(fields: Fields, values: Values) -> None:
    """Set the types of layers that files without them have: every other layer, from the first on, has softmax."""
    if fields.content.get("layer_types") is None:
        fields.content["layer_types"] = [HYBRID_TYPES[(i + 1) % 2] for i in range(values["shape"].num_layers)]


_MOE = LAYER + "block_sparse_moe."
_OWN = LAYER + "self_attn."
_HEADS = "(heads head_dim)"
_INTO = f"{_HEADS} embed -> embed heads head_dim"
_RECURRENCE = (
    *sharing(
        _OWN + "qkv_proj.weight", *((f"mixer.{name}", _INTO) for name in ("query", "key", "value")), within="heads"
    ),
    Weight(_OWN + "output_gate.weight", "mixer.gate", _INTO),
    Weight(_OWN + "slope_rate", "mixer.rates", "heads 1 1 -> heads"),
    Weight(_OWN + "norm.weight", "mixer.norm.scale", "norm -> norm"),
    Weight(_OWN + "out_proj.weight", "mixer.out", f"embed {_HEADS} -> heads head_dim embed"),
)
_SOFTMAX, _LIGHTNING = (AttentionConfig,), (LightningAttentionConfig,)
FAMILY = Family(
    model_type="minimax",
    architecture="MiniMaxForCausalLM",
    settings=(
        decoder_sizes(num_kv_heads=8, eps=1e-5, keys=NO_BIAS, paths=moe.EXPERT_PATHS),
        *moe.expert_counts("num_local_experts", num=8, chosen=2),
        Only("hidden_act", "silu", written=True),
        Only("sliding_window", written=True),
        Only("postnorm", True),
        Only("shared_intermediate_size", 0),
        Rule("", _alternate),
        hybrid_layers(AttentionConfig),
        rope_settings(theta=1e6),
        _weights("softmax", "full_attn", _SOFTMAX, 0),
        _weights("lightning", "linear_attn", _LIGHTNING, 0),
        _weights("mlp", "mlp", _SOFTMAX + _LIGHTNING, 1),
    ),
    build=minimax,
    weights=(
        *llama_weights(mlp=moe.separate_experts(_MOE, gate="w1", up="w3", down="w2")),
        *(dataclasses.replace(row, needs="mixer.rates") for row in _RECURRENCE),
    ),
    fused=moe.fused_experts(LAYER + "mlp."),
    ignored_keys=moe.IGNORED_ROUTER_KEYS
    | {"block_size": "how it is run", "rotary_dim shared_moe_mode": "transformers does not read it"},
    # tables of powers of the rates, which transformers reads where they are, and makes where they are not
    ignored_tensors=r".*(rotary_emb\.inv_freq|self_attn\.(query|key|diagonal)_decay)",
    kept_tensors=r".*self_attn\.(query|key|diagonal)_decay",
)


MODELS = {
    "minimax-text-01-456b-a46b": dict(
        model_type="minimax", vocab_size=200_064, hidden_size=6144, num_hidden_layers=80, num_attention_heads=64,
        head_dim=128, intermediate_size=9216, full_attn_alpha_factor=3.5565588200778455,
        layer_types=["full_attention" if layer % 8 == 7 else "linear_attention" for layer in range(80)],
        linear_attn_alpha_factor=3.5565588200778455, mlp_alpha_factor=3.5565588200778455, num_local_experts=32,
        rope_theta=10_000_000.0,
    ),
}  # fmt: skip
