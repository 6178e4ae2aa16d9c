"""DBRX (Databricks 2024): clipped queries, keys and values, LayerNorm without biases, four of sixteen experts."""

from typing import Any

from eqx_decoders.core.config_reader import Fields
from eqx_decoders.families.common import DecoderSizes, ends
from eqx_decoders.families.config_keys import ACTIVATIONS, activation_name
from eqx_decoders.families.family import Family
from eqx_decoders.families.rope_config import read_rope, write_rope
from eqx_decoders.families.setting_rows import (
    AUTO_MAP,
    Check,
    Group,
    Integer,
    Layers,
    Number,
    Only,
    Rule,
    Table,
    Values,
    Word,
    value_at,
)
from eqx_decoders.families.weight_rows import Weight, norm_weights
from eqx_decoders.layers.moe.router import RouterConfig
from eqx_decoders.layers.norm import LayerNormConfig
from eqx_decoders.layers.rope import Rope
from eqx_decoders.model.decoder_config import DecoderConfig


def dbrx(
    shape: DecoderSizes, *, num_experts: int, num_experts_per_token: int, renormalize: bool = True,
    rope: Rope = Rope(), clip: float | None = None,
) -> DecoderConfig:  # fmt: skip
    """Return a decoder of DBRX blocks.

    **Arguments:**

    - `shape`: sizes of the decoder; `shape.mlp_dim` is the width of an expert.
    - `num_experts`, `num_experts_per_token`: number of experts, and number of experts per token.
    - `renormalize`: whether the router's weights of a token are divided by their sum.
    - `rope`: rotary embedding.
    - `clip`: queries, keys and values are clipped to `[-clip, clip]`; None: they are not clipped.
    """
    norm = LayerNormConfig(eps=shape.eps, bias=False)
    router = RouterConfig(order="score_first", renormalize=renormalize)
    experts = shape.experts(num_experts=num_experts, num_experts_per_token=num_experts_per_token, router=router)
    mixer = shape.attention(rope=rope, qkv_clip=clip, fused_qkv=True)
    return shape.decoder(shape.block(mixer, experts, norm), norm)


def _read_rope(fields: Fields, values: Values) -> Rope:
    """Return the rotary embedding. Published files have its base in `attn_config`."""
    theta = values["_theta"]
    rope = read_rope(fields, theta=theta)
    if rope.theta != theta:
        raise fields.error(
            f"attn_config.rope_theta={theta} must be equal to rope_theta={rope.theta} outside of attn_config: some "
            "releases of transformers use one of them, and other releases the other one."
        )
    return rope


def _read_normalization(fields: Fields, values: Values) -> bool:
    power = fields.take("moe_normalize_expert_weights", 1.0, None)
    if power not in (None, 1):
        raise fields.error(
            f"moe_normalize_expert_weights={power!r} must be 1 or null: other norms are not implemented."
        )
    return power is not None


def _write_normalization(config: DecoderConfig) -> dict[str, Any]:
    return {"moe_normalize_expert_weights": 1.0 if value_at(config, "experts.router.renormalize") else None}


def _read_activation(fields: Fields, values: Values) -> str:
    table = fields.table("ffn_act_fn") or Fields({})
    name = table.word("name", ACTIVATIONS, "silu")
    table.finish({})
    return name


def _write_activation(config: DecoderConfig) -> dict[str, Any]:
    return {"ffn_act_fn": {"name": activation_name(value_at(config, "experts.activation"))}}


_NESTED = {"architectures": "a nested object has no model class", "hidden_size": "d_model determines it"}
_ATTENTION = Table(
    "attn_config",
    (
        Number("clip_qkv", "attention.qkv_clip", None, name="clip"),
        Integer("kv_n_heads", "attention.num_kv_heads", 1, name="_kv_n_heads"),
        Number("rope_theta", "attention.rope.theta", name="_theta"),
    ),
    what="attention",
    ignored=_NESTED,
)
_EXPERTS = Table(
    "ffn_config",
    (
        Integer("ffn_hidden_size", "experts.mlp_dim", 3584, name="_mlp_dim"),
        Integer("moe_num_experts", "experts.num_experts", 4, name="num_experts"),
        Integer("moe_top_k", "experts.num_experts_per_token", 1),
        Rule("renormalize", _read_normalization, _write_normalization),
        Only("uniform_expert_assignment", False),
        Rule("_activation", _read_activation, _write_activation),
    ),
    what="the experts",
    ignored=_NESTED | {"moe_loss_weight moe_jitter_eps": "training of routers only"},
)
_SIZES = (
    Integer("d_model", "embed_dim", 2048),
    Integer("n_heads", "attention.num_heads", 16, name="num_heads"),
    Check(lambda values: values["embed_dim"] % values["num_heads"] == 0, "d_model={embed_dim} must be a multiple of "
          "n_heads={num_heads}."),
    Layers("n_layers", "blocks", 24, name="num_layers"),
    Integer("vocab_size", "vocab_size", 32_000),
    Number("initializer_range", "init_std", 0.02),
    # values from nested objects, and values that follow from others
    Integer("", None, lambda values: values["_kv_n_heads"], name="num_kv_heads"),
    Integer("", None, lambda values: values["embed_dim"] // values["num_heads"], name="head_dim"),
    Integer("", None, lambda values: values["_mlp_dim"], name="mlp_dim"),
    Word("", None, lambda values: values["_activation"], known={}, name="activation"),
    Number("", None, 1e-5, name="eps"),
)  # fmt: skip

_BLOCK = "transformer.blocks.{layer}."
_ATTENTION_PREFIX = _BLOCK + "norm_attn_norm."
_EXPERT_MLP = _BLOCK + "ffn.experts.mlp."
FAMILY = Family(
    model_type="dbrx",
    architecture="DbrxForCausalLM",
    settings=(
        AUTO_MAP,
        _ATTENTION,
        _EXPERTS,
        Group("shape", DecoderSizes, _SIZES),
        Integer(
            "num_key_value_heads",
            "attention.num_kv_heads",
            lambda values: values["_kv_n_heads"],
            name="_num_key_value_heads",
        ),
        Check(
            lambda values: values["_num_key_value_heads"] == values["_kv_n_heads"],
            "num_key_value_heads={_num_key_value_heads} must be equal to attn_config.kv_n_heads={_kv_n_heads}.",
        ),
        Only("tie_word_embeddings", False, written=True),
        Rule("rope", _read_rope, write_rope),
    ),
    build=dbrx,
    weights=(
        *ends("transformer.wte", "transformer.norm_f"),
        *norm_weights(_ATTENTION_PREFIX, pre_mixer_norm="norm_1", pre_mlp_norm="norm_2"),
        Weight(
            _ATTENTION_PREFIX + "attn.Wqkv.weight",
            "mixer.qkv",
            "(qkv_heads head_dim) embed -> embed qkv_heads head_dim",
        ),
        Weight(
            _ATTENTION_PREFIX + "attn.out_proj.weight", "mixer.out", "embed (heads head_dim) -> heads head_dim embed"
        ),
        Weight(_BLOCK + "ffn.router.layer.weight", "mlp.router.kernel", "experts embed -> embed experts"),
        Weight(_EXPERT_MLP + "w1", "mlp.gate", "(experts mlp) embed -> experts embed mlp"),
        Weight(_EXPERT_MLP + "v1", "mlp.up", "(experts mlp) embed -> experts embed mlp"),
        Weight(_EXPERT_MLP + "w2", "mlp.down", "(experts mlp) embed -> experts mlp embed"),
    ),
    ignored_keys={
        "output_router_logits router_aux_loss_coef": "training of routers only",
        "emb_pdrop": "dropout is used in training only",
        "max_seq_len": "rotary embeddings have no maximum length",
    },
)


MODELS = {
    "dbrx-132b-a36b": dict(
        model_type="dbrx", vocab_size=100_352, d_model=6144, n_layers=40, n_heads=48,
        attn_config=dict(clip_qkv=8.0, kv_n_heads=8, rope_theta=500_000.0),
        ffn_config=dict(ffn_hidden_size=10_752, moe_num_experts=16, moe_top_k=4),
    ),
}  # fmt: skip
