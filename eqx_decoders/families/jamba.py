"""Jamba (AI21 2024): seven Mamba layers per attention layer, no position embeddings, MLPs or experts."""

from typing import Any

from eqx_decoders.core.config_reader import Fields
from eqx_decoders.families import moe
from eqx_decoders.families.common import LAYER, DecoderSizes, decoder_sizes, ends
from eqx_decoders.families.family import Family
from eqx_decoders.families.mamba.mamba1 import mamba1_settings, mamba1_weights
from eqx_decoders.families.setting_rows import Integer, Only, Rule, Values, first_layer
from eqx_decoders.families.weight_rows import gated_mlp, norm_weights, self_attention
from eqx_decoders.layers.attention.attention import AttentionConfig
from eqx_decoders.layers.moe.router import RouterConfig
from eqx_decoders.layers.recurrent.mamba1 import Mamba1Config
from eqx_decoders.model.decoder_config import DecoderConfig


def jamba(
    shape: DecoderSizes,
    *,
    mamba: Mamba1Config,
    full: range,
    sparse: range,
    num_experts: int,
    num_experts_per_token: int,
) -> DecoderConfig:
    """Return a decoder with a Mamba mixer or attention in each layer, and an MLP or experts.

    **Arguments:**

    - `shape`: sizes of the decoder; experts have the width of the MLP.
    - `mamba`: the Mamba mixer.
    - `full`: the layers with attention, from 0.
    - `sparse`: the layers with experts, from 0.
    - `num_experts`, `num_experts_per_token`: number of experts, and number of experts per token.
    """
    attention = shape.attention(rope=None)
    experts = None
    if sparse:
        experts = shape.experts(
            num_experts=num_experts,
            num_experts_per_token=num_experts_per_token,
            router=RouterConfig(score="softmax", order="score_first", renormalize=False),
        )
    return shape.decoder(
        shape.block(attention if index in full else mamba, experts if index in sparse else None)
        for index in range(shape.num_layers)
    )


def _read_layers(fields: Fields, values: Values, kind: str, period: int, offset: int) -> range:
    period = fields.integer(f"{kind}_layer_period", period)
    offset = fields.integer(f"{kind}_layer_offset", offset, least=0)
    if offset >= period:
        raise fields.error(f"{kind}_layer_offset={offset} must be below {kind}_layer_period={period}.")
    return range(offset, values["shape"].num_layers, period)


def _read_full(fields: Fields, values: Values) -> range:
    full = _read_layers(fields, values, "attn", 8, 4)
    if not full:
        raise fields.error(
            f"attn_layer_offset={full.start} must be below num_hidden_layers={values['shape'].num_layers}: the model "
            "needs an attention layer."
        )
    return full


def _read_sparse(fields: Fields, values: Values) -> range:
    sparse = _read_layers(fields, values, "expert", 2, 1)
    return sparse if values["num_experts"] > 1 else range(0)


def _write_layers(kind: str, layers: list[int], num_layers: int) -> dict[str, int]:
    if not layers:
        return {f"{kind}_layer_period": num_layers + 1, f"{kind}_layer_offset": num_layers}
    period = layers[1] - layers[0] if len(layers) > 1 else num_layers
    return {f"{kind}_layer_period": period, f"{kind}_layer_offset": layers[0]}


def _write_full(config: DecoderConfig) -> dict[str, Any]:
    full = [index for index, block in enumerate(config.blocks) if isinstance(block.mixer, AttentionConfig)]
    return _write_layers("attn", full, len(config.blocks))


def _write_sparse(config: DecoderConfig) -> dict[str, Any]:
    return _write_layers("expert", moe.sparse_layer_indices(config), len(config.blocks))


def _num_experts(config: DecoderConfig) -> int:
    experts = first_layer(config, "experts")
    return 1 if experts is None else experts.num_experts


def _num_experts_per_token(config: DecoderConfig) -> int:
    experts = first_layer(config, "experts")
    return 1 if experts is None else experts.num_experts_per_token


_KEY_NAMES = {
    "expand": "mamba_expand", "intermediate_size": "", "state_size": "mamba_d_state",
    "time_step_rank": "mamba_dt_rank", "conv_kernel": "mamba_d_conv", "use_conv_bias": "mamba_conv_bias",
    "use_bias": "mamba_proj_bias",
}  # fmt: skip
FAMILY = Family(
    model_type="jamba",
    architecture="JambaForCausalLM",
    settings=(
        decoder_sizes(num_kv_heads=8, keys={"head_dim": None, "attention_bias": None, "hidden_act": None}),
        Only("hidden_act", "silu", written=True),
        Only("sliding_window"),
        Only("mamba_inner_layernorms", True),
        mamba1_settings(Rule("norm", lambda fields, values: values["shape"].norm), keys=_KEY_NAMES),
        Integer("num_experts", _num_experts, 16, name="num_experts"),
        Integer("num_experts_per_tok", _num_experts_per_token, 2, name="num_experts_per_token"),
        Rule("full", _read_full, _write_full),
        Rule("sparse", _read_sparse, _write_sparse),
    ),
    build=jamba,
    weights=(
        *ends(final_norm="model.final_layernorm"),
        *norm_weights(LAYER, pre_mixer_norm="input_layernorm", pre_mlp_norm="pre_ff_layernorm"),
        *self_attention(LAYER),
        *mamba1_weights(LAYER + "mamba."),
        *gated_mlp(LAYER + "feed_forward."),
        *moe.separate_experts(LAYER + "feed_forward.", router="router"),
    ),
    ignored_keys=moe.IGNORED_ROUTER_KEYS
    | {
        "calc_logits_for_entire_prompt num_logits_to_keep use_associative_scan use_mamba_kernels "
        "use_mambapy": "runtime option; it changes no output",
    },
)  # fmt: skip


_BASE = dict(model_type="jamba", vocab_size=65_536)

MODELS = {
    "jamba-52b-a12b": _BASE | dict(
        hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, intermediate_size=14_336,
    ),
    "jamba-398b-a94b": _BASE | dict(
        hidden_size=8192, num_hidden_layers=72, num_attention_heads=64, intermediate_size=24_576,
    ),
}  # fmt: skip
