"""Llama 4, text (Meta 2025): chunked attention with RoPE, every fourth layer whole and without it; experts."""

from typing import Any

from eqx_decoders.block import BlockConfig
from eqx_decoders.decoder import DecoderConfig
from eqx_decoders.errors import ConversionError
from eqx_decoders.families.family import Family, Weight
from eqx_decoders.families.fields import Fields, activation_name
from eqx_decoders.families.moe import HARMLESS, dense_of, experts_of, is_sparse, need_experts, shared_mlp, write_experts
from eqx_decoders.families.ropes import read_rope, write_ropes
from eqx_decoders.families.shape import ATTENTION, ENDS, PRE_NORMS, Shape, attentions, read_shape, write_sizes
from eqx_decoders.layers.attention import QKNorm, QueryTemperature
from eqx_decoders.layers.experts import ExpertsConfig
from eqx_decoders.layers.mask import Causal, Chunked
from eqx_decoders.layers.mlp import MLPConfig
from eqx_decoders.layers.norm import RMSNormConfig
from eqx_decoders.layers.rope import Llama3Rope, Rope
from eqx_decoders.layers.router import RouterConfig


def llama4(
    shape: Shape,
    *,
    num_experts: int,
    num_experts_per_token: int,
    dense_dim: int,
    sparse_layers: frozenset[int],
    rotated_layers: frozenset[int],
    chunked_layers: frozenset[int],
    chunk: int | None,
    rope: Rope,
    qk_norm: bool = True,
    temperature: QueryTemperature | None = QueryTemperature(),
    attention_bias: bool = False,
) -> DecoderConfig:
    """A decoder of Llama 4 blocks; layers are counted from 0, `shape`'s MLP is that of an expert and the shared one.

    Queries and keys are normalised where they are rotated, and have a `temperature` where they are not.
    """
    norm = RMSNormConfig(eps=shape.eps)
    experts = ExpertsConfig(
        num_experts=num_experts,
        num_experts_per_token=num_experts_per_token,
        mlp_dim=shape.mlp_dim,
        activation=shape.activation,
        router=RouterConfig(score="sigmoid", input_scaling=True),
        shared=shape.mlp(),
    )
    dense = MLPConfig(mlp_dim=dense_dim, activation=shape.activation)
    normed = QKNorm(norm=RMSNormConfig(eps=shape.eps, scale=False), when="after_rope") if qk_norm else None

    def block(index):
        rotated = index in rotated_layers
        mixer = shape.attention(
            mask=Chunked(chunk) if index in chunked_layers and chunk is not None else Causal(),
            rope=rope if rotated else None,
            qk_norm=normed if rotated else None,
            temperature=None if rotated else temperature,
            qkv_bias=attention_bias,
            out_bias=attention_bias,
        )
        mlp = experts if index in sparse_layers else dense
        return BlockConfig(mixer=mixer, mlp=mlp, pre_mixer_norm=norm, pre_mlp_norm=norm)

    return shape.layered([block(index) for index in range(shape.num_layers)], norm)


def _read(fields: Fields) -> DecoderConfig:
    shape = read_shape(fields, num_kv_heads=8, head_dim=128, eps=1e-5)
    layers = range(shape.num_layers)
    interval, step = fields.integer("no_rope_layer_interval", 4), fields.integer("interleave_moe_layer_step", 1)
    rotates = fields.numbers("no_rope_layers") or [int((index + 1) % interval != 0) for index in layers]
    if len(rotates) != shape.num_layers:
        raise fields.error(f"no_rope_layers has {len(rotates)} entries, but there are {shape.num_layers} layers.")
    given = fields.content.get("moe_layers") is not None
    sparse = fields.numbers("moe_layers") if given else list(range(step - 1, shape.num_layers, step))
    types = fields.words("layer_types", ("full_attention", "chunked_attention"), shape.num_layers)
    chunked = [kind == "chunked_attention" for kind in types] if types else [bool(flag) for flag in rotates]
    chunk = fields.integer("attention_chunk_size", 8192, null=None)
    tuning = fields.content.get("attn_temperature_tuning")
    if isinstance(tuning, int) and not isinstance(tuning, bool):  # published as 4, and taken for true
        fields.content["attn_temperature_tuning"] = tuning != 0
    tuned = fields.flag("attn_temperature_tuning", True)
    fields.off("for_llm_compressor", False)
    scale, floor = fields.number("attn_scale", 0.1), fields.integer("floor_scale", 8192)
    config = llama4(
        shape,
        num_experts=fields.integer("num_local_experts", 16),
        num_experts_per_token=fields.integer("num_experts_per_tok", 1),
        dense_dim=fields.integer("intermediate_size_mlp", 16_384),
        sparse_layers=frozenset(sparse),
        rotated_layers=frozenset(index for index in layers if rotates[index]),
        chunked_layers=frozenset(index for index in layers if chunked[index]),
        chunk=chunk,
        rope=read_rope(fields, theta=500_000.0, pairing="interleaved"),
        qk_norm=fields.flag("use_qk_norm", True),
        temperature=QueryTemperature(scale=scale, length=floor) if tuned else None,
        attention_bias=fields.flag("attention_bias", False),
    )
    return need_experts(fields, config)


def _write(config: DecoderConfig) -> dict[str, Any]:
    experts, dense, mixers = experts_of(config), dense_of(config), attentions(config)
    ropes = [mixer.rope for mixer in mixers if mixer.rope is not None]
    if not ropes:
        raise ConversionError("AttentionConfig.rope=None: some layer must have a rotary embedding.")
    chunks = [mixer.mask.size for mixer in mixers if isinstance(mixer.mask, Chunked)]
    warm = next((mixer.temperature for mixer in mixers if mixer.rope is None), None)
    whole = all(mixer.rope is not None for mixer in mixers)
    tuning = {} if warm is None else {"attn_scale": warm.scale, "floor_scale": warm.length}
    return (
        write_sizes(config)
        | write_experts(experts, "num_local_experts")
        | {
            "intermediate_size": experts.mlp_dim,
            "intermediate_size_mlp": 16_384 if dense is None else dense.mlp_dim,
            "hidden_act": activation_name(experts.activation),
            "moe_layers": [index for index, block in enumerate(config.blocks) if is_sparse(block)],
            "no_rope_layers": [int(mixer.rope is not None) for mixer in mixers],
            "layer_types": [
                "chunked_attention" if isinstance(mixer.mask, Chunked) else "full_attention" for mixer in mixers
            ],
            "attention_chunk_size": max(chunks, default=None),
            "use_qk_norm": any(mixer.qk_norm is not None for mixer in mixers),
            "attn_temperature_tuning": warm is not None or whole,
            "attention_bias": mixers[0].qkv_bias,
        }
        | tuning
        | write_ropes(ropes[0])
    )


_LAYER = "model.layers.{layer}.feed_forward."
_BOTH = "experts embed (part mlp) -> part experts embed mlp"
FAMILY = Family(
    model_type="llama4_text",
    architecture="Llama4ForCausalLM",
    read=_read,
    write=_write,
    weights=(
        *ENDS,
        *ATTENTION,
        *PRE_NORMS,
        Weight(_LAYER + "router.weight", "mlp.router.kernel", "experts embed -> embed experts"),
        Weight(_LAYER + "experts.gate_up_proj", "mlp.gate", _BOTH, part=(0, 2)),
        Weight(_LAYER + "experts.gate_up_proj", "mlp.up", _BOTH, part=(1, 2)),
        Weight(_LAYER + "experts.down_proj", "mlp.down", "experts mlp embed -> experts mlp embed"),
        *shared_mlp(_LAYER + "shared_expert."),
        Weight(_LAYER + "gate_proj.weight", "mlp.gate", "mlp embed -> embed mlp"),
        Weight(_LAYER + "up_proj.weight", "mlp.up", "mlp embed -> embed mlp"),
        Weight(_LAYER + "down_proj.weight", "mlp.down", "embed mlp -> mlp embed"),
    ),
    harmless=HARMLESS | dict.fromkeys(("interleave_moe_layer_step", "no_rope_layer_interval"), "the lists say it"),
)


def _llama4(num_experts: int, step: int, qk_norm: bool, rope: Rope) -> DecoderConfig:
    shape = Shape(
        vocab_size=202_048,
        embed_dim=5120,
        num_layers=48,
        num_heads=40,
        num_kv_heads=8,
        head_dim=128,
        mlp_dim=8192,
        eps=1e-5,
    )
    rotated = frozenset(index for index in range(48) if (index + 1) % 4)
    return llama4(
        shape,
        num_experts=num_experts,
        num_experts_per_token=1,
        dense_dim=16_384,
        sparse_layers=frozenset(range(step - 1, 48, step)),
        rotated_layers=rotated,
        chunked_layers=rotated,
        chunk=8192,
        rope=rope,
        qk_norm=qk_norm,
    )


MODELS = {
    "llama4-17b-16e": lambda: _llama4(
        16,
        1,
        True,
        Llama3Rope(theta=500_000.0, factor=16.0, high_frequency_factor=1.0, pairing="interleaved"),
    ),
    "llama4-17b-128e": lambda: _llama4(128, 2, False, Rope(theta=500_000.0, pairing="interleaved")),
}
