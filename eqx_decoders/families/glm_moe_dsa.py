"""GLM-5 (Z.ai 2026): DeepSeek-V3.2's attention, whose layers may share the keys that an indexer chooses."""

import dataclasses
from typing import Any

from eqx_decoders.core.config_reader import Fields
from eqx_decoders.families import moe
from eqx_decoders.families._deepseek import (
    INDEXER,
    MLP,
    V3_COPIES,
    V3_ROPE,
    V3_WEIGHTS,
    deepseek_v3,
    expert_settings,
    indexer_settings,
    latent_mixer,
    latent_sizes,
    v3_router_settings,
    with_indexer,
)  # fmt: skip
from eqx_decoders.families._mtp import DEPTHS
from eqx_decoders.families.hf_table import Family
from eqx_decoders.families.settings_table import AUTO_MAP, Only, Rule, Values
from eqx_decoders.layers.attention.indexer import IndexerConfig
from eqx_decoders.model.decoder_config import DecoderConfig


_INDEXED, _KINDS = "indexed_attention", ("shared", "full")


def glm_moe_dsa(*, indexer: IndexerConfig, chooses: tuple[bool, ...], **options: Any) -> DecoderConfig:
    """Return a decoder of which some layers choose keys, and each other one takes the choice of the last of those."""
    config = with_indexer(deepseek_v3(**options), indexer)
    blocks = []
    for block, own, next_own in zip(config.blocks, chooses, (*chooses[1:], True), strict=True):
        names = dict(shared_from=None if own else "choice", shares_as="choice" if own and not next_own else None)
        mixer: Any = block.mixer
        mixer = dataclasses.replace(mixer, indexer=dataclasses.replace(indexer, **names))
        blocks.append(dataclasses.replace(block, mixer=mixer))
    return dataclasses.replace(config, blocks=tuple(blocks))


def _read_chooses(fields: Fields, values: Values) -> tuple[bool, ...]:
    layers, every = values["shape"].num_layers, fields.integer("index_topk_freq", 1)
    begin, pattern = fields.integer("index_skip_topk_offset", 2, least=0), fields.take("index_topk_pattern", None)
    if isinstance(pattern, str):
        fields.content["index_topk_pattern"] = pattern = [
            {"F": "full", "S": "shared"}.get(each, each) for each in pattern
        ]
    cycle = [_KINDS[max(index - begin + 1, 0) % every == 0] for index in range(layers)]
    listed = fields.words("indexer_types", _KINDS, layers) or fields.words("index_topk_pattern", _KINDS, layers)
    return tuple(kind == "full" for kind in listed or cycle)


def _write_chooses(config: DecoderConfig) -> dict[str, Any]:
    mixers: list[Any] = [block.mixer for block in config.blocks]
    kinds = {"layer_types": [_INDEXED] * len(mixers), "indexer_types": [_KINDS[mixer.chooses] for mixer in mixers]}
    return kinds | {"first_k_dense_replace": moe.sparse_layers(config)[0]}


FAMILY = Family(
    model_type="glm_moe_dsa",
    architecture="GlmMoeDsaForCausalLM",
    settings=(
        indexer_settings(num_heads=32, pairing="interleaved"),
        Only("indexer_rope_interleave", True),
        Only("rope_interleave", True),
        AUTO_MAP,
        *v3_router_settings(scale=2.5),
        *latent_sizes(nope_dim=192, eps=1e-5),
        V3_ROPE,
        latent_mixer(2048, value_dim=256),
        *expert_settings(num_experts=256, chosen=8, shared=1, expert_dim=2048),
        moe.dense_layers(3, listed=True),
        DEPTHS,
        Only("layer_types", lambda values: [_INDEXED] * values["shape"].num_layers),
        Rule("chooses", _read_chooses, _write_chooses),
    ),
    build=glm_moe_dsa,
    weights=(*V3_WEIGHTS, *INDEXER),
    fused=moe.fused_experts(MLP),
    ignored_keys=moe.IGNORED_ROUTER_KEYS | {"mlp_bias": "transformers' MLP of this model never has one"},
    copies=V3_COPIES,
)


MODELS = {
    "glm5-744b-a40b": dict(
        model_type="glm_moe_dsa", vocab_size=154_880, hidden_size=6144, num_hidden_layers=78, num_attention_heads=64,
        intermediate_size=12_288, rope_theta=1_000_000.0,
    ),
}  # fmt: skip
