"""Llama 4, text (Meta 2025): chunked attention with RoPE, every fourth layer whole and without it; experts."""

from typing import Any

from eqx_decoders.decoder import DecoderConfig
from eqx_decoders.families.family import Family
from eqx_decoders.families.fields import Fields
from eqx_decoders.families.moe import (
    IGNORED_ROUTER_KEYS,
    dense_of,
    experts_of,
    fused_experts,
    is_sparse,
    need_experts,
    write_experts,
)
from eqx_decoders.families.ropes import read_rope, write_rope
from eqx_decoders.families.shape import (
    ATTENTION,
    ENDS,
    PRE_NORMS,
    Shape,
    attentions,
    gated_mlp,
    read_shape,
    write_sizes,
)
from eqx_decoders.layers.attention import QKNorm, QueryTemperature
from eqx_decoders.layers.mask import Causal, Chunked, Mask
from eqx_decoders.layers.mlp import MLPConfig
from eqx_decoders.layers.norm import RMSNormConfig
from eqx_decoders.layers.rope import Llama3Rope, Rope
from eqx_decoders.layers.router import RouterConfig


LAYER_TYPES = ("full_attention", "chunked_attention")


def llama4(
    shape: Shape,
    *,
    num_experts: int,
    num_experts_per_token: int = 1,
    dense_dim: int = 16_384,
    sparse_layers: frozenset[int],
    rotated_layers: frozenset[int],
    masks: tuple[Mask, ...],
    rope: Rope,
    qk_norm: bool = True,
    temperature: QueryTemperature | None = QueryTemperature(),
    attention_bias: bool = False,
) -> DecoderConfig:
    """A decoder of Llama 4 blocks; layers are counted from 0, `shape`'s MLP is that of an expert and the shared one.

    Queries and keys are normalised where they are rotated, and have a `temperature` where they are not.
    """
    experts = shape.experts(
        num_experts=num_experts,
        num_experts_per_token=num_experts_per_token,
        router=RouterConfig(score="sigmoid", input_scaling=True),
        shared=shape.mlp(),
    )
    dense = MLPConfig(mlp_dim=dense_dim, activation=shape.activation)
    normed = QKNorm(norm=RMSNormConfig(eps=shape.eps, scale=False), when="after_rope") if qk_norm else None

    def block(index: int, mask: Mask):
        options = (
            dict(rope=rope, qk_norm=normed) if index in rotated_layers else dict(rope=None, temperature=temperature)
        )
        mixer = shape.attention(mask=mask, bias=attention_bias, **options)
        return shape.block(mixer, experts if index in sparse_layers else dense)

    return shape.decoder(block(index, mask) for index, mask in enumerate(masks))


def _read(fields: Fields) -> DecoderConfig:
    shape = read_shape(fields, num_kv_heads=8, head_dim=128, eps=1e-5)
    count = shape.num_layers
    interval, step = fields.integer("no_rope_layer_interval", 4), fields.integer("interleave_moe_layer_step", 1)
    rotated = fields.numbers("no_rope_layers") or [int((index + 1) % interval != 0) for index in range(count)]
    if len(rotated) != count:
        raise fields.error(f"no_rope_layers has {len(rotated)} entries, but there are {count} layers.")
    listed = fields.content.get("moe_layers") is not None
    sparse = fields.numbers("moe_layers") if listed else range(step - 1, count, step)
    types = fields.words("layer_types", LAYER_TYPES, count) or [LAYER_TYPES[flag != 0] for flag in rotated]
    chunk = fields.integer("attention_chunk_size", 8192, null=None)
    chunked = Causal() if chunk is None else Chunked(chunk)
    tuning = fields.content.get("attn_temperature_tuning")
    if isinstance(tuning, int) and not isinstance(tuning, bool):  # published as 4, and taken for true
        fields.content["attn_temperature_tuning"] = tuning != 0
    temperature = QueryTemperature(scale=fields.number("attn_scale", 0.1), length=fields.integer("floor_scale", 8192))
    fields.allow_only("for_llm_compressor", False)
    config = llama4(
        shape,
        num_experts=fields.integer("num_local_experts", 16),
        num_experts_per_token=fields.integer("num_experts_per_tok", 1),
        dense_dim=fields.integer("intermediate_size_mlp", 16_384),
        sparse_layers=frozenset(sparse),
        rotated_layers=frozenset(index for index in range(count) if rotated[index]),
        masks=tuple(chunked if kind == "chunked_attention" else Causal() for kind in types),
        rope=read_rope(fields, theta=500_000.0, pairing="interleaved"),
        qk_norm=fields.flag("use_qk_norm", True),
        temperature=temperature if fields.flag("attn_temperature_tuning", True) else None,
        attention_bias=fields.flag("attention_bias", False),
    )
    return need_experts(fields, config)


def _write(config: DecoderConfig) -> dict[str, Any]:
    experts, dense, mixers = experts_of(config), dense_of(config), attentions(config)
    chunks = [mixer.mask.size for mixer in mixers if isinstance(mixer.mask, Chunked)]
    temperatures = [mixer.temperature for mixer in mixers if mixer.rope is None]
    temperature = next(iter(temperatures), None)
    settings = {
        "intermediate_size": experts.mlp_dim,
        "intermediate_size_mlp": 16_384 if dense is None else dense.mlp_dim,
        "moe_layers": [index for index, block in enumerate(config.blocks) if is_sparse(block)],
        "no_rope_layers": [int(mixer.rope is not None) for mixer in mixers],
        "layer_types": [LAYER_TYPES[isinstance(mixer.mask, Chunked)] for mixer in mixers],
        "attention_chunk_size": max(chunks, default=None),
        "use_qk_norm": any(mixer.qk_norm is not None for mixer in mixers),
        "attn_temperature_tuning": temperature is not None or not temperatures,
        "attention_bias": mixers[0].qkv_bias,
    }
    if temperature is not None:
        settings |= {"attn_scale": temperature.scale, "floor_scale": temperature.length}
    return write_sizes(config) | write_experts(config, "num_local_experts") | settings | write_rope(config)


_MLP = "model.layers.{layer}.feed_forward."
FAMILY = Family(
    model_type="llama4_text",
    architecture="Llama4ForCausalLM",
    read=_read,
    write=_write,
    weights=(
        *ENDS,
        *ATTENTION,
        *PRE_NORMS,
        *fused_experts(_MLP, "router", gate_up="experts embed (part mlp)", down="experts mlp embed"),
        *gated_mlp(_MLP + "shared_expert.", "mlp.shared."),
        *gated_mlp(_MLP),
    ),
    ignored_keys=IGNORED_ROUTER_KEYS
    | dict.fromkeys(("interleave_moe_layer_step", "no_rope_layer_interval"), "the lists say it"),
)

_SHAPE = Shape(
    vocab_size=202_048, embed_dim=5120, num_layers=48, num_heads=40, num_kv_heads=8, head_dim=128, mlp_dim=8192,
    eps=1e-5,
)  # fmt: skip
_ROTATED = frozenset(index for index in range(48) if (index + 1) % 4)
_MASKS = tuple(Chunked(8192) if index in _ROTATED else Causal() for index in range(48))
_SCOUT_ROPE = Llama3Rope(theta=500_000.0, factor=16.0, high_frequency_factor=1.0, pairing="interleaved")
_MAVERICK_ROPE = Rope(theta=500_000.0, pairing="interleaved")

MODELS = {
    "llama4-17b-16e": lambda: llama4(
        _SHAPE, num_experts=16, sparse_layers=frozenset(range(48)), rotated_layers=_ROTATED, masks=_MASKS,
        rope=_SCOUT_ROPE,
    ),
    "llama4-17b-128e": lambda: llama4(
        _SHAPE, num_experts=128, sparse_layers=frozenset(range(1, 48, 2)), rotated_layers=_ROTATED, masks=_MASKS,
        rope=_MAVERICK_ROPE, qk_norm=False,
    ),
}  # fmt: skip
