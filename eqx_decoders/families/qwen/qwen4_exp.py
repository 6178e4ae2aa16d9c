"""The text decoder of Qwen 4 Exp (Qwen Team 2026): mixers and experts of Qwen3.5 with gated residual streams.

An indexer selects the key blocks that attention reads, by the mean key of each block. Some layers add embeddings of
n-grams, which they look up by 63-bit hashes (Engram). Published checkpoints contain a vision encoder, which is not
loaded: with images, the mean keys would be rotated by M-RoPE positions, and caches do not store these positions.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from eqx_decoders.blocks.block import BlockConfig, ExtraLayerConfig
from eqx_decoders.core.config_reader import Fields, abbreviate
from eqx_decoders.errors import ConversionError
from eqx_decoders.families import moe
from eqx_decoders.families._mtp import depth_settings, unread_depths
from eqx_decoders.families.common import ENDS, LAYER, NO_BIAS, DecoderSizes, decoder_sizes
from eqx_decoders.families.family import Family
from eqx_decoders.families.qwen.gated_streams import GatedStreams
from eqx_decoders.families.qwen.hybrid import IGNORED_STATE_KEYS, QWEN3_5_WEIGHTS, hybrid_settings, with_depth_rows
from eqx_decoders.families.qwen.text import EXPERTS, FUSED_EXPERTS, expert_settings, qwen_experts
from eqx_decoders.families.rope_config import rope_settings
from eqx_decoders.families.setting_rows import Group, Integer, Only, Rule, Values, Word, read_all, value_at, write_all
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


_SECTIONS = (11, 11, 10)  # M-RoPE sections for time, height and width
_ROPE = Rope(theta=1e7, fraction=0.25, sections=_SECTIONS)


def qwen4_exp(
    shape: DecoderSizes, *, delta: GatedDeltaNetConfig, mlp: ExpertsConfig, indexer: PooledIndexerConfig,
    residual: GatedStreams, full: tuple[bool, ...], rope: Rope = _ROPE, ngrams: dict[str, Any] | None = None,
    depths: int = 0,
) -> DecoderConfig:  # fmt: skip
    """Return the configuration of a decoder with Qwen 4 blocks.

    **Arguments:**

    - `shape`: sizes of the decoder and of attention.
    - `delta`: gated delta net of the layers without attention.
    - `mlp`: experts of all layers.
    - `indexer`: selection of the key blocks that attention reads.
    - `residual`: gated residual streams.
    - `full`: whether each layer has attention.
    - `rope`: rotary embedding of attention.
    - `ngrams`: fields of `EngramConfig`; its `layers` are the indices of layers with an Engram. None: no Engram.
    - `depths`: number of MTP layers, 0 or 1. An MTP layer has attention and no Engram.
    """
    norm = RMSNormConfig(eps=shape.eps, offset=1.0)
    residual = dataclasses.replace(residual, norm=norm)
    selection = dataclasses.replace(indexer, norm=norm)
    attention = shape.attention(rope=rope, qk_norm=QKNorm(norm=norm), output_gate=True, selection=selection)

    def block(index: int, has_attention: bool) -> BlockConfig:
        pre_layers: tuple[ExtraLayerConfig, ...] = ()
        if ngrams is not None and index in ngrams["layers"]:
            engram = EngramConfig(
                embed_dim=shape.embed_dim,
                vocab_size=shape.vocab_size,
                streams=residual.streams,
                layer=index,
                hash_bits=63,
                bias=False,
                eps=shape.eps,
                norm_offset=1.0,
                **ngrams,
            )
            pre_layers = (ExtraLayerConfig(layer=engram),)
        mixer = attention if has_attention else delta
        return BlockConfig(mixer=mixer, mlp=mlp, residual=residual, pre_layers=pre_layers)

    config = shape.decoder(block(index, has_attention) for index, has_attention in enumerate(full))
    mtp = None
    if depths:
        mtp = MTPConfig(
            num_depths=depths,
            block=BlockConfig(mixer=attention, mlp=mlp, residual=residual),
            norm=norm,
            all_streams=True,
            joint_norm=True,
            model_norm=True,
        )
    return dataclasses.replace(config, final_norm=None, mtp=mtp)


def _read_indexer(fields: Fields, values: Values) -> PooledIndexerConfig:
    block_size = fields.integer("indexer_compress_ratio")
    budget = fields.integer("indexer_budget")
    if budget % block_size:
        raise fields.error(f"indexer_budget={budget} must be a multiple of indexer_compress_ratio={block_size}.")
    return PooledIndexerConfig(
        size=block_size,
        top_k=budget // block_size,
        num_heads=fields.integer("indexer_n_heads"),
        head_dim=fields.integer("indexer_head_dim"),
    )


def _write_indexer(config: DecoderConfig) -> dict[str, Any]:
    indexer = value_at(config, "attention.selection")
    if not isinstance(indexer, PooledIndexerConfig):
        raise ConversionError(
            f"AttentionConfig.selection={indexer!r} must be a PooledIndexerConfig, which config.json describes."
        )
    return {
        "indexer_compress_ratio": indexer.size,
        "indexer_budget": indexer.size * indexer.top_k,
        "indexer_n_heads": indexer.num_heads,
        "indexer_head_dim": indexer.head_dim,
    }


_NGRAMS = (
    Integer("heads_per_ngram", "num_heads", 8),
    Integer("ple_conv_kernel_size", "taps", 4),
    Integer("seed", "seed", 1234, least=0),
    Integer("make_ngram_vocab_size_divisible_by", "row_multiple", 128),
    Integer("split_ngram_parts", "table_parts", 512),
)


def _read_ngrams(fields: Fields, values: Values) -> dict[str, Any] | None:
    shape = values["shape"]
    options = read_all(_NGRAMS, fields)
    layer_numbers = sorted(set(fields.integers("ple_layer_ids")))  # counted from 1
    max_ngram = fields.integer("ngram_size", 3)
    features = fields.integer("ple_embed_dim", shape.embed_dim)
    vocab_base = fields.integer("ngram_vocab_size_base", 20_000_000)
    end_tokens = fields.take("eos_token_id", None)
    if not layer_numbers:
        return None
    if layer_numbers[0] < 1 or layer_numbers[-1] > shape.num_layers:
        raise fields.error(f"ple_layer_ids={layer_numbers} must be layer numbers from 1 to {shape.num_layers}.")
    ids = end_tokens if isinstance(end_tokens, list) else [end_tokens]
    if not ids or not all(type(token) is int and 0 <= token < shape.vocab_size for token in ids):
        raise fields.error(
            f"eos_token_id={abbreviate(end_tokens)} must be a token id from 0 to {shape.vocab_size - 1}, or a list of "
            "token ids: n-grams of the layers in ple_layer_ids do not extend across the first one. Set eos_token_id."
        )
    if max_ngram < 2:
        raise fields.error(f"ngram_size={max_ngram} must be at least 2, the number of tokens of the shortest n-gram.")
    orders = max_ngram - 1
    num_hashes = orders * options["num_heads"]
    if features % num_hashes:
        raise fields.error(
            f"ple_embed_dim={features} must be a multiple of (ngram_size - 1) x heads_per_ngram={num_hashes}."
        )
    return dict(
        layers=tuple(number - 1 for number in layer_numbers),
        pad_token=ids[0],
        end_token=ids[0],
        head_dim=features // num_hashes,
        vocab_bases=(vocab_base,) * orders,
        **options,
    )


def _write_ngrams(config: DecoderConfig) -> dict[str, Any]:
    extra_layers = (extra.layer for block in config.blocks for extra in block.pre_layers)
    engram = next((layer for layer in extra_layers if isinstance(layer, EngramConfig)), None)
    if engram is None:
        return {"ple_layer_ids": []}
    return {
        "ple_layer_ids": [layer + 1 for layer in engram.layers],
        "ple_embed_dim": engram.features,
        "ngram_size": engram.max_ngram,
        "ngram_vocab_size_base": engram.vocab_bases[0],
        "eos_token_id": engram.end_token,
        **write_all(_NGRAMS, engram),
    }


_MTP_SETTINGS = (
    Only("layer_types", ["full_attention"]),
    Only("mtp_use_hidden_state_from_layer"),
    Only("rope_theta", lambda values: values["rope"].theta, lambda values: int(values["rope"].theta)),
)


def _check_mtp(fields: Fields, values: Values) -> None:
    """Raise ConversionError if the MTP layer differs from the decoder layers with attention."""
    table = fields.table("mtp")
    if table is not None and values["depths"]:
        read_all(_MTP_SETTINGS, table, values)


def _unnest_text_config(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings of the decoder, which are nested in `text_config` if the model has an encoder."""
    inner = content.get("text_config")
    if not isinstance(inner, Mapping):
        return content
    outer_keys = ("architectures", "tie_word_embeddings", "quantization_config")
    return {**inner, **{key: content[key] for key in outer_keys if key in content}}


_PLE = LAYER + "ple."


def _hash_tensors(config: DecoderConfig) -> dict[str, np.ndarray]:
    """Return the hash multipliers, and the sizes and first rows of the hash tables, by tensor name."""
    tensors: dict[str, np.ndarray] = {}
    for index, block in enumerate(config.blocks):
        for engram in (extra.layer for extra in block.pre_layers):
            if isinstance(engram, EngramConfig):
                prefix = _PLE.format(layer=index) + "ple_embedding."
                sizes = np.asarray(engram.table_sizes)
                tensors[prefix + "layer_multipliers"] = np.asarray(engram.multipliers)
                tensors[prefix + "ngram_heads_vocab_sizes"] = sizes
                tensors[prefix + "ngram_heads_offsets"] = np.cumsum(sizes) - sizes
    return tensors


def _gated_mean(prefix: str, path: str) -> tuple[Weight, ...]:
    return (
        Weight(prefix + "hc_norm.weight", path + "scale", "(streams norm) -> streams norm"),
        Weight(
            f"{prefix}input_mix_weight_down.weight", path + "down", "gate_rank stream_embed -> stream_embed gate_rank"
        ),
        Weight(prefix + "input_mix_weight_up.weight", path + "up", "stream_embed gate_rank -> gate_rank stream_embed"),
    )


def _connection(name: str, index: int) -> tuple[Weight, ...]:
    prefix = LAYER + f"{name}_hyper_connection."
    path = f"residual.connections.{index}."
    return (
        *_gated_mean(prefix, path + "mean."),
        Weight(prefix + "block_inject_weight.weight", path + "write", "streams stream_embed -> stream_embed streams"),
    )


def _mtp_input(name: str, path: str) -> tuple[Weight, ...]:
    return (
        Weight(f"mtp.pre_fc_norm_{name}.weight", f"mtp.depth.{path}_norm.scale", "norm -> norm"),
        Weight(f"mtp.fc_{name}.weight", f"mtp.depth.{path}_kernel", "embed joined -> joined embed"),
    )


_ENGRAM = "pre_layers.0.layer."
_INDEXER = LAYER + "self_attn.indexer."
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
    Weight(_INDEXER + "q_layernorm.weight", "mixer.indexer.query_norm.scale", "norm -> norm"),
    Weight(_INDEXER + "k_layernorm.weight", "mixer.indexer.key_norm.scale", "norm -> norm"),
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
        Rule("", _check_mtp),
    ),
    build=qwen4_exp,
    weights=(
        *ENDS,
        *with_depth_rows(_LAYERS),
        *_gated_mean("model.hyper_connection_mixer.", "streams."),
        *_gated_mean("mtp.hyper_connection_mixer.", "mtp.depth.streams."),
        *_mtp_input("embedding", "embed"),
        *_mtp_input("hidden", "stream"),
        Weight(_PLE + "ple_embedding.ngram_embedding.shard_{table_part}.weight", _ENGRAM + "table",
               "rows row_dim -> rows row_dim"),
        Weight(_PLE + "key_proj.weight", _ENGRAM + "key",
               "(streams embed) ngram_features -> ngram_features streams embed"),
        Weight(_PLE + "value_proj.weight", _ENGRAM + "value", "embed ngram_features -> ngram_features embed"),
        Weight(_PLE + "conv1d.weight", _ENGRAM + "convolution", "channels 1 taps -> channels taps"),
        Weight(_PLE + "norm_query.weight", _ENGRAM + "query_scale", "(streams norm) -> streams norm"),
        Weight(_PLE + "norm_key.weight", _ENGRAM + "key_scale", "(streams norm) -> streams norm"),
        Weight(_PLE + "norm_conv.weight", _ENGRAM + "value_scale", "(streams norm) -> streams norm"),
    ),
    fused=with_depth_rows(FUSED_EXPERTS),
    fixed_tensors=_hash_tensors,
    integer_tensors=r".*\.ple_embedding\.(layer_multipliers|ngram_heads_.*)",
    ignored_tensors=unread_depths(r"mtp\..*", r".*rotary_emb\.inv_freq|model\.visual\..*"),
    aliases=("qwen4_exp",),
    other_architectures=("Qwen4ExpForConditionalGeneration",),
    own_settings=_unnest_text_config,
    renamed={r"^model\.language_model\.": "model."},
    ignored_keys=moe.IGNORED_ROUTER_KEYS | IGNORED_STATE_KEYS | {
        "number_of_conv_states": "it follows from ple_layer_ids",
        "mtp": "the MTP layer must equal the layers with attention",
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
