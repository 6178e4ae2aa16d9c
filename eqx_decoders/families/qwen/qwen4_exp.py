"""Qwen 4 Exp, text (Qwen Team 2026): Qwen3.5's mixers and experts between gated residual streams.

Attention reads blocks of keys that an indexer chooses by their means, and some layers find vectors of n-grams by
hashes of 63 bits. Of files with an encoder, as the published ones, the decoder alone is read: beside pictures the keys
of blocks would turn by positions of three dimensions, which no cache has.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from eqx_decoders.blocks.block import BlockConfig, ExtraLayerConfig
from eqx_decoders.core.config_reader import Fields
from eqx_decoders.families import moe
from eqx_decoders.families._mtp import depth_settings, unread_depths
from eqx_decoders.families.common import ENDS, NO_BIAS, DecoderSizes, decoder_sizes
from eqx_decoders.families.hf_table import Family
from eqx_decoders.families.qwen.gated_streams import GatedStreams
from eqx_decoders.families.qwen.hybrid import (
    IGNORED_STATE_KEYS,
    LAYER,
    QWEN3_5_WEIGHTS,
    hybrid_settings,
    with_depth_rows,
)
from eqx_decoders.families.qwen.text import EXPERTS, FUSED_EXPERTS, expert_settings, qwen_experts
from eqx_decoders.families.rope_config import rope_settings
from eqx_decoders.families.settings_table import Group, Integer, Only, Rule, Values, Word, read_all, value_at, write_all
from eqx_decoders.families.weight_rows import Weight, sharing
from eqx_decoders.layers.attention.attention import QKNorm
from eqx_decoders.layers.attention.block_indexer import PooledIndexerConfig
from eqx_decoders.layers.embedding.engram import EngramConfig
from eqx_decoders.layers.moe.experts import ExpertsConfig
from eqx_decoders.layers.norm import RMSNormConfig
from eqx_decoders.layers.recurrent.gated_delta_net import GatedDeltaNetConfig
from eqx_decoders.layers.rope import Rope
from eqx_decoders.model.decoder_config import DecoderConfig
from eqx_decoders.model.mtp_config import MTPConfig


_SECTIONS = (11, 11, 10)
_ROPE = Rope(theta=1e7, fraction=0.25, sections=_SECTIONS)


def qwen4_exp(
    shape: DecoderSizes, *, delta: GatedDeltaNetConfig, mlp: ExpertsConfig, indexer: PooledIndexerConfig,
    residual: GatedStreams, full: tuple[bool, ...], rope: Rope = _ROPE, ngrams: dict[str, Any] | None = None,
    depths: int = 0,
) -> DecoderConfig:  # fmt: skip
    """Return a decoder of Qwen 4's blocks, with attention where `full` is True.

    `ngrams` are fields of an Engram; the numbers of its `layers` are counted from 0. `depths` of multi-token prediction
    have attention, and no Engram.
    """
    norm = RMSNormConfig(eps=shape.eps, offset=1.0)
    residual = dataclasses.replace(residual, norm=norm)
    selection = dataclasses.replace(indexer, norm=norm)
    attention = shape.attention(rope=rope, qk_norm=QKNorm(norm=norm), output_gate=True, selection=selection)

    def block(index: int, has_attention: bool) -> BlockConfig:
        extra: tuple[ExtraLayerConfig, ...] = ()
        if ngrams is not None and index in ngrams["layers"]:
            sizes = dict(embed_dim=shape.embed_dim, vocab_size=shape.vocab_size, streams=residual.streams)
            fixed: dict[str, Any] = dict(hash_bits=63, bias=False, eps=shape.eps, norm_offset=1.0, layer=index)
            extra = (ExtraLayerConfig(layer=EngramConfig(**sizes, **fixed, **ngrams)),)
        mixer = attention if has_attention else delta
        return BlockConfig(mixer=mixer, mlp=mlp, residual=residual, pre_layers=extra)

    config = shape.decoder(block(index, has_attention) for index, has_attention in enumerate(full))
    mtp = None
    if depths:
        ahead = BlockConfig(mixer=attention, mlp=mlp, residual=residual)
        streams = dict(all_streams=True, joint_norm=True, model_norm=True)
        mtp = MTPConfig(num_depths=depths, block=ahead, norm=norm, **streams)
    return dataclasses.replace(config, final_norm=None, mtp=mtp)


def _read_indexer(fields: Fields, values: Values) -> PooledIndexerConfig:
    size, budget = fields.integer("indexer_compress_ratio"), fields.integer("indexer_budget")
    if budget % size:
        raise fields.error(f"indexer_budget={budget} must be a multiple of indexer_compress_ratio={size}.")
    heads, head_dim = fields.integer("indexer_n_heads"), fields.integer("indexer_head_dim")
    return PooledIndexerConfig(size=size, top_k=budget // size, num_heads=heads, head_dim=head_dim)


def _write_indexer(config: DecoderConfig) -> dict[str, Any]:
    indexer = value_at(config, "attention").selection
    return {
        "indexer_compress_ratio": indexer.size, "indexer_budget": indexer.size * indexer.top_k,
        "indexer_n_heads": indexer.num_heads, "indexer_head_dim": indexer.head_dim,
    }  # fmt: skip


_NGRAMS = (
    Integer("heads_per_ngram", "num_heads", 8),
    Integer("ple_conv_kernel_size", "taps", 4),
    Integer("seed", "seed", 1234, least=0),
    Integer("make_ngram_vocab_size_divisible_by", "row_multiple", 128),
    Integer("split_ngram_parts", "table_parts", 512),
)


def _read_ngrams(fields: Fields, values: Values) -> dict[str, Any] | None:
    shape, options, numbers = values["shape"], read_all(_NGRAMS, fields), set(fields.numbers("ple_layer_ids"))
    orders, features = fields.integer("ngram_size", 3) - 1, fields.integer("ple_embed_dim", shape.embed_dim)
    base, end = fields.integer("ngram_vocab_size_base", 20_000_000), fields.take("eos_token_id", None)
    if not numbers:
        return None
    if not numbers <= set(range(1, shape.num_layers + 1)):
        raise fields.error(f"ple_layer_ids={sorted(numbers)} must be numbers of layers from 1 to {shape.num_layers}.")
    end = end[0] if isinstance(end, list) and end else end
    if not isinstance(end, int):
        raise fields.error("eos_token_id is missing: n-grams of layers in ple_layer_ids do not reach across it.")
    if orders < 1 or features % (orders * options["num_heads"]):
        rule = f"must be a multiple of (ngram_size - 1) x heads_per_ngram={orders * options['num_heads']}"
        raise fields.error(f"ple_embed_dim={features} {rule}.")
    sizes = dict(head_dim=features // (orders * options["num_heads"]), vocab_bases=(base,) * orders)
    return dict(
        layers=tuple(sorted(number - 1 for number in numbers)), pad_token=end, end_token=end, **sizes, **options
    )


def _write_ngrams(config: DecoderConfig) -> dict[str, Any]:
    layers = (extra.layer for block in config.blocks for extra in block.pre_layers)
    layer = next((layer for layer in layers if isinstance(layer, EngramConfig)), None)
    if layer is None:
        return {"ple_layer_ids": []}
    written = {"ple_layer_ids": [number + 1 for number in layer.layers], "ple_embed_dim": layer.features}
    written |= {"ngram_size": layer.max_ngram, "ngram_vocab_size_base": layer.vocab_bases[0]}
    return written | {"eos_token_id": layer.end_token} | write_all(_NGRAMS, layer)


_DEPTH = (
    Only("layer_types", ["full_attention"]),
    Only("mtp_use_hidden_state_from_layer"),
    Only("rope_theta", lambda values: values["rope"].theta, lambda values: int(values["rope"].theta)),
)


def _check_depth(fields: Fields, values: Values) -> None:
    """Refuse a layer of multi-token prediction unlike the model's layers with attention."""
    table = fields.table("mtp")
    if table is not None and values["depths"]:
        read_all(_DEPTH, table, values)


def _of_decoder(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings of the decoder, which stand in `text_config` where there is an encoder."""
    inner = content.get("text_config")
    outer = ("architectures", "tie_word_embeddings", "quantization_config")
    return (
        {**inner, **{key: content[key] for key in outer if key in content}} if isinstance(inner, Mapping) else content
    )


_PLE = LAYER + "ple."


def _numbers_of_hashes(config: DecoderConfig) -> dict[str, np.ndarray]:
    """Return the multipliers of hashes, and sizes and first rows of their tables."""
    tensors: dict[str, np.ndarray] = {}
    for number, block in enumerate(config.blocks):
        for layer in (extra.layer for extra in block.pre_layers):
            if isinstance(layer, EngramConfig):
                sizes, prefix = np.asarray(layer.table_sizes), _PLE.format(layer=number) + "ple_embedding."
                tensors[prefix + "layer_multipliers"] = np.asarray(layer.multipliers)
                tensors[prefix + "ngram_heads_vocab_sizes"] = sizes
                tensors[prefix + "ngram_heads_offsets"] = np.cumsum(sizes) - sizes
    return tensors


def _mean(prefix: str, path: str) -> tuple[Weight, ...]:
    return (
        Weight(prefix + "hc_norm.weight", path + "scale", "(streams norm) -> streams norm"),
        Weight(
            f"{prefix}input_mix_weight_down.weight", path + "down", "gate_rank stream_embed -> stream_embed gate_rank"
        ),
        Weight(prefix + "input_mix_weight_up.weight", path + "up", "stream_embed gate_rank -> gate_rank stream_embed"),
    )


def _connection(name: str, number: int) -> tuple[Weight, ...]:
    prefix, path = LAYER + f"{name}_hyper_connection.", f"residual.connections.{number}."
    pattern = "streams stream_embed -> stream_embed streams"
    return (*_mean(prefix, path + "mean."), Weight(prefix + "block_inject_weight.weight", path + "write", pattern))


def _into_depth(name: str, path: str) -> tuple[Weight, ...]:
    return (
        Weight(f"mtp.pre_fc_norm_{name}.weight", f"mtp.depth.{path}_norm.scale", "norm -> norm"),
        Weight(f"mtp.fc_{name}.weight", f"mtp.depth.{path}_kernel", "embed joined -> joined embed"),
    )


_ENGRAM, _INDEXER = "pre_layers.0.layer.", LAYER + "self_attn.indexer."
_LAYERS = (
    *QWEN3_5_WEIGHTS,
    *EXPERTS,
    *_connection("attn", 0),
    *_connection("mlp", 1),
    *sharing(
        _INDEXER + "index_qk_proj.weight",
        ("mixer.indexer.query", "(kv_heads head_dim) embed -> embed kv_heads head_dim"),
        ("mixer.indexer.key", "head_dim embed -> embed head_dim"),
    ),
    *(
        Weight(_INDEXER + f"{name[0]}_layernorm.weight", f"mixer.indexer.{name}_norm.scale", "norm -> norm")
        for name in ("query", "key")
    ),
)
FAMILY = Family(
    model_type="qwen4_exp_text",
    architecture="Qwen4ExpForCausalLM",
    settings=(
        moe.mlp_like_experts(512),
        Only("indexer_kv_heads", 1, written=True),
        Only("norm_topk_prob", True, written=True),
        decoder_sizes(
            num_kv_heads=2, head_dim=256, keys=NO_BIAS,
            paths={"intermediate_size": None, "rms_norm_eps": "residual.norm.eps"},
        ),
        Group("mlp", qwen_experts, expert_settings(num=512, chosen=10), uses=("shape",)),
        *hybrid_settings(
            Word("output_gate_type", "delta.gate_activation", "silu",
                 known={"silu": "silu", "swish": "silu", "sigmoid": "sigmoid"}),
            word="indexed_attention",
        ),
        rope_settings(fraction=0.25, sections=_SECTIONS),
        Rule("indexer", _read_indexer, _write_indexer),
        Group("residual", GatedStreams, (
            Integer("hc_count", "streams", 4),
            Integer("hc_lowrank", "rank", 320),
        ), path="residual"),
        Rule("ngrams", _read_ngrams, _write_ngrams),
        *depth_settings("mtp_num_hidden_layers", always=False),
        Only("mtp_use_dedicated_embeddings", False),
        Rule("", _check_depth),
    ),
    build=qwen4_exp,
    weights=(
        *ENDS,
        *with_depth_rows(_LAYERS),
        *_mean("model.hyper_connection_mixer.", "streams."),
        *_mean("mtp.hyper_connection_mixer.", "mtp.depth.streams."),
        *_into_depth("embedding", "embed"),
        *_into_depth("hidden", "stream"),
        Weight(_PLE + "ple_embedding.ngram_embedding.shard_{table_part}.weight", _ENGRAM + "table",
               "rows row_dim -> rows row_dim"),
        Weight(_PLE + "key_proj.weight", _ENGRAM + "key",
               "(streams embed) ngram_features -> ngram_features streams embed"),
        Weight(_PLE + "value_proj.weight", _ENGRAM + "value", "embed ngram_features -> ngram_features embed"),
        Weight(_PLE + "conv1d.weight", _ENGRAM + "convolution", "channels 1 taps -> channels taps"),
        *(Weight(_PLE + f"norm_{name}.weight", f"{_ENGRAM}{path}_scale", "(streams norm) -> streams norm")
          for name, path in (("query", "query"), ("key", "key"), ("conv", "value"))),
    ),
    fused=with_depth_rows(FUSED_EXPERTS),
    fixed_tensors=_numbers_of_hashes,
    integer_tensors=r".*\.ple_embedding\.(layer_multipliers|ngram_heads_.*)",
    ignored_tensors=unread_depths(r"mtp\..*", r".*rotary_emb\.inv_freq|model\.visual\..*"),
    aliases=("qwen4_exp",),
    other_architectures=("Qwen4ExpForConditionalGeneration",),
    own_settings=_of_decoder,
    renamed={r"^model\.language_model\.": "model."},
    ignored_keys=moe.IGNORED_ROUTER_KEYS | IGNORED_STATE_KEYS | {
        "number_of_conv_states": "it follows from ple_layer_ids",
        "mtp": "its layer is like those with attention, or it is refused",
    },
)  # fmt: skip


MODELS = {
    "qwen4-exp": dict(
        model_type="qwen4_exp_text", vocab_size=248_320, hidden_size=2560, num_hidden_layers=48, num_attention_heads=24,
        eos_token_id=248_044, indexer_budget=2048, indexer_compress_ratio=4, indexer_head_dim=128, indexer_n_heads=4,
        linear_num_value_heads=48, moe_intermediate_size=640, output_gate_type="sigmoid", ple_layer_ids=[2],
        rope_theta=10_000_000.0, shared_expert_intermediate_size=640, split_ngram_parts=128,
    ),
}  # fmt: skip
