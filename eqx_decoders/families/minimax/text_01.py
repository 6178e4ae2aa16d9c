"""MiniMax-Text-01 (MiniMax 2025): seven lightning attention layers for each softmax attention layer.

All layers have Mixtral's experts. Residual connections are weighted sums of a layer's normalized input and its output.
"""

import dataclasses
from collections.abc import Callable

from eqx_decoders.blocks.block import BlockConfig
from eqx_decoders.blocks.residual.residual import Weighted
from eqx_decoders.core.config_reader import Fields
from eqx_decoders.errors import ConversionError
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
from eqx_decoders.families.family import Family
from eqx_decoders.families.minimax.lightning import LightningAttentionConfig
from eqx_decoders.families.rope_config import rope_settings
from eqx_decoders.families.setting_rows import Group, Number, Only, Rule, Values
from eqx_decoders.families.weight_rows import Weight, sharing
from eqx_decoders.layers.attention.attention import AttentionConfig
from eqx_decoders.layers.rope import Rope
from eqx_decoders.model.decoder_config import DecoderConfig


ResidualWeights = tuple[float, float]  # weight of the normalized input, and weight of the output


def minimax(
    shape: DecoderSizes,
    *,
    full: tuple[bool, ...],
    num_experts: int,
    num_experts_per_token: int,
    rope: Rope,
    softmax: ResidualWeights,
    lightning: ResidualWeights,
    mlp: ResidualWeights,
) -> DecoderConfig:
    """Return a decoder of MiniMax-Text-01 blocks.

    **Arguments:**

    - `shape`: sizes of the decoder.
    - `full`: for each layer, whether it has softmax attention. Other layers have lightning attention.
    - `num_experts`, `num_experts_per_token`: numbers of experts in each layer.
    - `rope`: rotary embedding of softmax attention.
    - `softmax`, `lightning`, `mlp`: weights of the residual connections of softmax attention, lightning attention and
        experts.
    """
    experts = shape.experts(num_experts=num_experts, num_experts_per_token=num_experts_per_token)
    softmax_attention = shape.attention(rope=rope)
    lightning_attention = LightningAttentionConfig(
        num_heads=shape.num_heads, head_dim=shape.head_dim, rate_layers=shape.num_layers
    )

    def block(has_softmax: bool) -> BlockConfig:
        mixer = softmax_attention if has_softmax else lightning_attention
        weights = softmax if has_softmax else lightning
        residual = Weighted(keeps_normed=True, stream_scales=(weights[0], mlp[0]), layer_scales=(weights[1], mlp[1]))
        return shape.block(mixer, experts, residual=residual)

    return shape.decoder(map(block, full))


def _residual_weights(name: str, key: str, mixers: tuple[type, ...], branch: int) -> Group:
    """Return the setting of the weights of a residual connection.

    `mixers`: classes of the mixers of the blocks that have these weights. `branch`: 0 for the connection of the mixer,
    1 for the connection of the experts.
    """

    def first_weight(field: str) -> Callable[[DecoderConfig], float]:
        def weight(config: DecoderConfig) -> float:
            block = next((block for block in config.blocks if isinstance(block.mixer, mixers)), None)
            if block is None:
                return 1.0
            if not isinstance(block.residual, Weighted):
                raise ConversionError(
                    f"BlockConfig.residual={block.residual!r} must be a Weighted residual connection, whose weights "
                    "config.json describes."
                )
            factors = getattr(block.residual, field)
            return factors[branch] if factors else 1.0

        return weight

    settings = (
        Number(f"{key}_alpha_factor", first_weight("stream_scales"), 1.0, name="keep"),
        Number(f"{key}_beta_factor", first_weight("layer_scales"), 1.0, name="add"),
    )
    return Group(name, lambda keep, add: (float(keep), float(add)), settings)


def _set_default_layer_types(fields: Fields, values: Values) -> None:
    """Set `layer_types` if it is missing: layers 0, 2, 4, … have softmax attention, as in transformers."""
    if fields.content.get("layer_types") is None:
        fields.content["layer_types"] = [HYBRID_TYPES[(i + 1) % 2] for i in range(values["shape"].num_layers)]


_MOE = LAYER + "block_sparse_moe."
_ATTENTION = LAYER + "self_attn."
_HEADS = "(heads head_dim)"
_KERNEL = f"{_HEADS} embed -> embed heads head_dim"
_LIGHTNING_WEIGHTS = (
    *sharing(
        _ATTENTION + "qkv_proj.weight",
        *((f"mixer.{name}", _KERNEL) for name in ("query", "key", "value")),
        within="heads",
    ),
    Weight(_ATTENTION + "output_gate.weight", "mixer.gate", _KERNEL),
    Weight(_ATTENTION + "slope_rate", "mixer.rates", "heads 1 1 -> heads"),
    Weight(_ATTENTION + "norm.weight", "mixer.norm.scale", "norm -> norm"),
    Weight(_ATTENTION + "out_proj.weight", "mixer.out", f"embed {_HEADS} -> heads head_dim embed"),
)
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
        Rule("", _set_default_layer_types),
        hybrid_layers(AttentionConfig),
        rope_settings(theta=1e6),
        _residual_weights("softmax", "full_attn", (AttentionConfig,), 0),
        _residual_weights("lightning", "linear_attn", (LightningAttentionConfig,), 0),
        _residual_weights("mlp", "mlp", (AttentionConfig, LightningAttentionConfig), 1),
    ),
    build=minimax,
    weights=(
        *llama_weights(mlp=moe.separate_experts(_MOE, gate="w1", up="w3", down="w2")),
        *(dataclasses.replace(row, needs="mixer.rates") for row in _LIGHTNING_WEIGHTS),
    ),
    fused=moe.fused_experts(LAYER + "mlp."),
    ignored_keys=moe.IGNORED_ROUTER_KEYS
    | {
        "block_size": "it affects only how transformers runs the model",
        "rotary_dim shared_moe_mode": "transformers does not read it",
    },
    # powers of the decay rates: transformers reads these buffers if a checkpoint has them, and computes them otherwise
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
