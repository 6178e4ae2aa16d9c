"""DeepSeek-V4 (DeepSeek-AI 2026): compressed attention and several residual streams.

In the first layers, token ids select the experts.
"""

import dataclasses
import math
from typing import Any

from eqx_decoders.blocks.residual.hyper_connections import HyperConnections
from eqx_decoders.core.config_reader import Fields, abbreviate
from eqx_decoders.errors import ConversionError
from eqx_decoders.families import moe
from eqx_decoders.families._mtp import DEPTHS
from eqx_decoders.families.common import DecoderSizes, decoder_sizes, ends
from eqx_decoders.families.deepseek.compressed_attention import CompressedAttentionConfig, CompressedIndexerConfig
from eqx_decoders.families.deepseek.compression import CompressionConfig
from eqx_decoders.families.family import Family
from eqx_decoders.families.rope_config import read_named_ropes, write_named_ropes
from eqx_decoders.families.setting_rows import (
    AUTO_MAP,
    Group,
    Integer,
    Number,
    Only,
    Rule,
    Unused,
    Values,
    Word,
    values_by_layer,
    write_all,
)
from eqx_decoders.families.weight_rows import Weight, mtp_rows
from eqx_decoders.layers.mlp import MLPConfig
from eqx_decoders.layers.moe.experts import ExpertsConfig
from eqx_decoders.layers.moe.router import RouterConfig
from eqx_decoders.layers.norm import RMSNormConfig
from eqx_decoders.layers.rope import Rope
from eqx_decoders.model.decoder_config import DecoderConfig
from eqx_decoders.model.mtp_config import MTPConfig


SLIDING = "sliding_attention"
SPARSE = "compressed_sparse_attention"
HEAVY = "heavily_compressed_attention"
_DEFAULT_SIZES = {SPARSE: 4, HEAVY: 128}
_TYPES_BY_RATIO = {0: SLIDING, 4: SPARSE, 128: HEAVY}


def _mixer(
    shape: DecoderSizes, rope_dim: int, q_rank: int, out_groups: int, out_rank: int, window: int
) -> CompressedAttentionConfig:
    """Return sliding-window attention, to which `deepseek_v4` adds compressed keys."""
    return CompressedAttentionConfig(
        num_heads=shape.num_heads, head_dim=shape.head_dim, rope_dim=rope_dim, q_rank=q_rank, out_groups=out_groups,
        out_rank=out_rank, window=window, norm=shape.norm,
    )  # fmt: skip


def _residual(shape: DecoderSizes, streams: int, iterations: int, eps: float) -> HyperConnections:
    norm = RMSNormConfig(eps=shape.eps, scale=False)
    return HyperConnections(streams=streams, iterations=iterations, eps=eps, norm=norm, weighted_sum=True)


def _router(score: Any, scaling_factor: float) -> RouterConfig:
    return RouterConfig(score=score, order="score_first", renormalize=True, scaling_factor=scaling_factor)


def deepseek_v4(
    shape: DecoderSizes, *, mixer: CompressedAttentionConfig, layer_types: tuple[str, ...],
    compression_sizes: dict[str, int], ropes: dict[str, Rope], indexer: CompressedIndexerConfig,
    residual: HyperConnections, hashed_layers: tuple[bool, ...], router: RouterConfig, limit: float, depths: int = 0,
    **expert_counts: Any,
) -> DecoderConfig:  # fmt: skip
    """Return a decoder of DeepSeek-V4 blocks.

    **Arguments:**

    - `shape`: sizes of the decoder.
    - `mixer`: sliding-window attention. Layers with compressed keys add these to it.
    - `layer_types`: attention type of each layer: `SLIDING`, `SPARSE` or `HEAVY`.
    - `compression_sizes`: number of tokens per compressed key, for `SPARSE` and for `HEAVY`.
    - `ropes`: rotary embeddings of `SLIDING` layers (`"main"`) and of layers with compressed keys (`"compress"`).
    - `indexer`: selects the compressed keys of `SPARSE` layers.
    - `residual`: residual connections of all layers.
    - `hashed_layers`: for each layer, whether a table of token ids selects the experts instead of the router's scores.
    - `router`: router of all layers, without a selection bias or a table.
    - `limit`: clipping bound of routed and shared experts, see `MLPConfig`.
    - `depths`: number of multi-token prediction (MTP) layers. These layers have `SLIDING` attention and read all
        residual streams.
    - `expert_counts`: `num_experts` and `num_experts_per_token`.
    """
    sparse_compression = CompressionConfig(size=compression_sizes[SPARSE], overlaps=True, norm=shape.norm)
    heavy_compression = CompressionConfig(size=compression_sizes[HEAVY], overlaps=False, norm=shape.norm)
    compress_rope = ropes["compress"]
    mixers = {
        SLIDING: dataclasses.replace(mixer, rope=ropes["main"]),
        SPARSE: dataclasses.replace(mixer, compression=sparse_compression, indexer=indexer, rope=compress_rope),
        HEAVY: dataclasses.replace(mixer, compression=heavy_compression, rope=compress_rope),
    }
    shared = MLPConfig(mlp_dim=shape.mlp_dim, activation=shape.activation, limit=limit)

    def experts(layer_router: RouterConfig) -> ExpertsConfig:
        return shape.experts(router=layer_router, shared=shared, limit=limit, **expert_counts)

    scored_experts = experts(dataclasses.replace(router, selection_bias=True))
    hashed_experts = experts(dataclasses.replace(router, hashed_tokens=shape.vocab_size))
    blocks = (
        shape.block(mixers[layer_type], hashed_experts if is_hashed else scored_experts, residual=residual)
        for layer_type, is_hashed in zip(layer_types, hashed_layers, strict=True)
    )
    config = shape.decoder(blocks)
    if depths == 0:
        return config
    block = shape.block(mixers[SLIDING], scored_experts, residual=residual)
    mtp = MTPConfig(num_depths=depths, block=block, norm=shape.norm, all_streams=True)
    return dataclasses.replace(config, mtp=mtp)


def _read_compress_ratios(fields: Fields, num_layers: int) -> list[str] | None:
    """Return the attention type of each layer from `compress_ratios`; None if this key is missing."""
    ratios = fields.integers("compress_ratios")
    if fields.content.get("compress_ratios") is None:
        return None
    if len(ratios) < num_layers:
        raise fields.error(
            f"compress_ratios has {len(ratios)} entries, but there are {num_layers} layers: add an entry per layer."
        )
    mtp_ratios = list(ratios[num_layers:])
    if any(mtp_ratios):
        raise fields.error(
            f"compress_ratios[{num_layers}:]={mtp_ratios} must be 0, because these multi-token prediction layers have "
            "no compressed keys. Set them to 0."
        )
    unknown_ratio = next((ratio for ratio in ratios if ratio not in _TYPES_BY_RATIO), None)
    if unknown_ratio is not None:
        raise fields.error(
            f"compress_ratios: {unknown_ratio} must be 0, 4 or 128. Use layer_types and compress_rates for other sizes."
        )
    return [_TYPES_BY_RATIO[ratio] for ratio in ratios[:num_layers]]


def _read_layer_types(fields: Fields, values: Values) -> tuple[str, ...]:
    num_layers = values["shape"].num_layers
    layer_types = fields.words("layer_types", (SLIDING, SPARSE, HEAVY), num_layers)
    ratio_types = _read_compress_ratios(fields, num_layers)
    if layer_types is None:
        default = [SPARSE if index > 1 and index % 2 else HEAVY for index in range(num_layers)]
        return tuple(ratio_types or default)
    if ratio_types is not None and ratio_types != layer_types:
        ratios = fields.content["compress_ratios"]
        raise fields.error(
            f"compress_ratios={abbreviate(ratios)} describes other layers than layer_types: make them equal, or remove "
            "compress_ratios."
        )
    return tuple(layer_types)


def _mixers(config: DecoderConfig) -> list[CompressedAttentionConfig]:
    """Return the attention of every block, including the block of multi-token prediction (MTP) layers.

    Raises ConversionError if the mixer of a block is not compressed attention.
    """
    blocks = config.blocks if config.mtp is None else (*config.blocks, config.mtp.block)
    mixers = [block.mixer for block in blocks]
    for mixer in mixers:
        if not isinstance(mixer, CompressedAttentionConfig):
            raise ConversionError(
                f"BlockConfig.mixer={mixer!r} must be a CompressedAttentionConfig: this model type has no other mixers."
            )
    return mixers  # pyright: ignore[reportReturnType] - checked above


def _layer_type(mixer: CompressedAttentionConfig) -> str:
    if mixer.compression is None:
        return SLIDING
    return HEAVY if mixer.indexer is None else SPARSE


def _write_layer_types(config: DecoderConfig) -> dict[str, Any]:
    return {"layer_types": [_layer_type(mixer) for mixer in _mixers(config)[: len(config.blocks)]]}


def _read_compression_sizes(fields: Fields, values: Values) -> dict[str, int]:
    table = fields.table("compress_rates") or Fields({}, fields.where)
    sizes: dict[str, int] = {}
    # some configuration files have these keys instead of compress_rates
    for layer_type, key in ((SPARSE, "compress_rate_csa"), (HEAVY, "compress_rate_hca")):
        nested = table.integer(layer_type, None)
        flat = fields.integer(key, None)
        if nested is not None and flat is not None and nested != flat:
            raise fields.error(
                f"{key}={flat} must be equal to compress_rates.{layer_type}={nested}: change or remove one of them."
            )
        sizes[layer_type] = nested or flat or _DEFAULT_SIZES[layer_type]
    table.finish()
    return sizes


def _write_compression_sizes(config: DecoderConfig) -> dict[str, Any]:
    sizes = {_layer_type(mixer): mixer.compression.size for mixer in _mixers(config) if mixer.compression is not None}
    return {"compress_rates": _DEFAULT_SIZES | sizes}


_INDEXER = Group("indexer", CompressedIndexerConfig, (
    Integer("index_n_heads", "num_heads", 64),
    Integer("index_head_dim", "head_dim", 128),
    Integer("index_topk", "top_k", 512),
))  # fmt: skip


def _write_indexer(config: DecoderConfig) -> dict[str, Any]:
    indexer = next((mixer.indexer for mixer in _mixers(config) if mixer.indexer is not None), None)
    return {} if indexer is None else write_all(_INDEXER.settings, indexer)


def _read_hashed_layers(fields: Fields, values: Values) -> tuple[bool, ...]:
    num_layers = values["shape"].num_layers
    num_hashed = fields.integer("num_hash_layers", 3, least=0)
    mlp_types = fields.words("mlp_layer_types", ("hash_moe", "moe"), num_layers)
    first_layers = tuple(index < num_hashed for index in range(num_layers))
    if mlp_types is None:
        return first_layers
    hashed_layers = tuple(mlp_type == "hash_moe" for mlp_type in mlp_types)
    if hashed_layers != first_layers and fields.content.get("num_hash_layers") is not None:
        raise fields.error(
            f"num_hash_layers={num_hashed} describes other layers than mlp_layer_types: make them equal, or remove "
            "num_hash_layers."
        )
    return hashed_layers


def _write_hashed_layers(config: DecoderConfig) -> dict[str, Any]:
    hashed_tokens = values_by_layer(config, "mlp.router.hashed_tokens")
    return {"mlp_layer_types": ["moe" if tokens is None else "hash_moe" for tokens in hashed_tokens]}


def _read_rope_dim(fields: Fields, values: Values) -> int:
    head_dim = values["shape"].head_dim
    fraction = fields.number("partial_rotary_factor", None)
    rope_dim = fields.integer("qk_rope_head_dim", None)
    if fraction is None:
        return rope_dim or head_dim // 8
    # the product may be slightly below an integer: 44 * (30 / 44) < 30
    rope_dim_of_fraction = math.floor(head_dim * fraction + 1e-6)
    if rope_dim is not None and rope_dim != rope_dim_of_fraction:
        raise fields.error(
            f"qk_rope_head_dim={rope_dim} must be equal to head_dim x partial_rotary_factor, {head_dim} x {fraction}: "
            "change or remove one of them."
        )
    return rope_dim_of_fraction


def _write_rope_dim(config: DecoderConfig) -> dict[str, Any]:
    mixer = _mixers(config)[0]
    return {"qk_rope_head_dim": mixer.rope_dim, "partial_rotary_factor": mixer.rope_dim / mixer.head_dim}


def _read_ropes(fields: Fields, values: Values) -> dict[str, Rope]:
    thetas = {"main": ("rope_theta", 1e4), "compress": ("compress_rope_theta", 1.6e5)}
    fraction = values["_rope_dim"] / values["shape"].head_dim
    ropes = read_named_ropes(fields, thetas, fraction=fraction)
    # the layer applies the rotary embedding to its rope_dim features only, so all of these are rotated
    return {name: dataclasses.replace(rope, pairing="interleaved", fraction=1.0) for name, rope in ropes.items()}


def _write_ropes(config: DecoderConfig) -> dict[str, Any]:
    mixers = _mixers(config)
    ropes = {"main": Rope(), "compress": Rope(theta=1.6e5)}
    ropes |= {"main" if mixer.compression is None else "compress": mixer.rope for mixer in mixers}
    fraction = mixers[0].rope_dim / mixers[0].head_dim
    written = write_named_ropes({name: dataclasses.replace(rope, fraction=fraction) for name, rope in ropes.items()})
    return written | {"rope_theta": ropes["main"].theta, "compress_rope_theta": ropes["compress"].theta}


_LAYER = "layers.{layer}."
_ATTENTION = _LAYER + "attn."
_MLP = _LAYER + "ffn."


def _compressor(prefix: str, path: str) -> tuple[Weight, ...]:
    kernel_pattern = "(series head_dim) embed -> embed series head_dim"
    return (
        Weight(prefix + "wkv.weight", path + "key", kernel_pattern),
        Weight(prefix + "wgate.weight", path + "gate", kernel_pattern),
        Weight(prefix + "ape", path + "bias", "taps (series head_dim) -> taps series head_dim"),
        Weight(prefix + "norm.weight", path + "norm.scale", "norm -> norm"),
    )


def _connection(name: str, index: int) -> tuple[Weight, ...]:
    path = f"residual.connections.{index}."
    return (
        Weight(_LAYER + f"hc_{name}_fn", path + "kernel", "coefficients stream_embed -> stream_embed coefficients"),
        Weight(_LAYER + f"hc_{name}_base", path + "bias", "coefficients -> coefficients"),
        Weight(_LAYER + f"hc_{name}_scale", path + "scale", "coefficient_kinds -> coefficient_kinds"),
    )


def _stream_sum(prefix: str, path: str) -> tuple[Weight, ...]:
    return (
        Weight(prefix + "hc_head_fn", path + "streams.kernel", "streams stream_embed -> stream_embed streams"),
        Weight(prefix + "hc_head_base", path + "streams.bias", "streams -> streams"),
        Weight(prefix + "hc_head_scale", path + "streams.scale", "one -> one"),
    )


def _with_mtp(*rows: Weight) -> tuple[Weight, ...]:
    """Return the weight rows of the decoder, `rows`, and of its multi-token prediction (MTP) layers."""
    prefix = "mtp.{depth}."
    path = "mtp.depth."
    return (
        *rows,
        *mtp_rows(rows, _LAYER, prefix),
        *_stream_sum(prefix, path),
        Weight(prefix + "enorm.weight", path + "embed_norm.scale", "norm -> norm"),
        Weight(prefix + "hnorm.weight", path + "stream_norm.scale", "norm -> norm"),
        Weight(prefix + "e_proj.weight", path + "embed_kernel", "embed joined -> joined embed"),
        Weight(prefix + "h_proj.weight", path + "stream_kernel", "embed joined -> joined embed"),
        Weight(prefix + "norm.weight", path + "final_norm.scale", "norm -> norm"),
    )


FAMILY = Family(
    model_type="deepseek_v4",
    architecture="DeepseekV4ForCausalLM",
    settings=(
        AUTO_MAP,
        decoder_sizes(
            num_kv_heads=1, head_dim=512,
            keys={"intermediate_size": "moe_intermediate_size", "attention_bias": None},
            paths={
                "num_attention_heads": "compressed.num_heads", "num_key_value_heads": lambda config: 1,
                "head_dim": "compressed.head_dim", "intermediate_size": "experts.mlp_dim",
                "hidden_act": "experts.activation",
            },
        ),
        Only("num_key_value_heads", 1),
        Only("n_shared_experts", 1, written=True),
        Only("norm_topk_prob", True, written=True),
        Only("topk_method", "noaux_tc"),
        Only("attention_bias", False, written=True),
        Rule("_rope_dim", _read_rope_dim, _write_rope_dim),
        Rule("ropes", _read_ropes, _write_ropes),
        Rule("layer_types", _read_layer_types, _write_layer_types),
        Rule("compression_sizes", _read_compression_sizes, _write_compression_sizes),
        Rule("hashed_layers", _read_hashed_layers, _write_hashed_layers),
        Group("mixer", _mixer, (
            Integer("q_lora_rank", "compressed.q_rank", 1024),
            Integer("o_groups", "compressed.out_groups", 8),
            Integer("o_lora_rank", "compressed.out_rank", 1024),
            Integer("sliding_window", "compressed.window", 128),
        ), uses=("shape", "_rope_dim")),
        Rule("", _INDEXER.read, _write_indexer),
        Group("residual", _residual, (
            Integer("hc_mult", "residual.streams", 4),
            Integer("hc_sinkhorn_iters", "residual.iterations", 20),
            Number("hc_eps", "residual.eps", 1e-6),
        ), uses=("shape",)),
        *moe.expert_counts("n_routed_experts", num=256, chosen=6),
        Group("router", _router, (
            Number("routed_scaling_factor", "experts.router.scaling_factor", 1.5),
            Word("scoring_func", "experts.router.score", "sqrtsoftplus",
                 known={"sqrtsoftplus": "sqrt_softplus", "sigmoid": "sigmoid", "softmax": "softmax"}),
        )),
        Number("swiglu_limit", "experts.limit", 10.0),
        DEPTHS,
        Unused("expert_dtype", "it is the storage format of the published weights"),
    ),
    build=deepseek_v4,
    weights=_with_mtp(
        *ends("embed", "norm", "head"),
        *_stream_sum("", ""),
        *_connection("attn", 0),
        *_connection("ffn", 1),
        Weight(_LAYER + "attn_norm.weight", "pre_mixer_norm.scale", "norm -> norm"),
        Weight(_LAYER + "ffn_norm.weight", "pre_mlp_norm.scale", "norm -> norm"),
        Weight(_ATTENTION + "wq_a.weight", "mixer.query_down", "q_rank embed -> embed q_rank"),
        Weight(_ATTENTION + "q_norm.weight", "mixer.query_norm.scale", "norm -> norm"),
        Weight(_ATTENTION + "wq_b.weight", "mixer.query_up", "(heads head_dim) q_rank -> q_rank heads head_dim"),
        Weight(_ATTENTION + "wkv.weight", "mixer.key", "head_dim embed -> embed head_dim"),
        Weight(_ATTENTION + "kv_norm.weight", "mixer.key_norm.scale", "norm -> norm"),
        Weight(_ATTENTION + "wo_a.weight", "mixer.out_down",
               "(out_groups out_rank) (group_heads head_dim) -> out_groups group_heads head_dim out_rank"),
        Weight(_ATTENTION + "wo_b.weight", "mixer.out_up", "embed (out_groups out_rank) -> out_groups out_rank embed"),
        Weight(_ATTENTION + "attn_sink", "mixer.sink", "heads -> heads"),
        *_compressor(_ATTENTION + "compressor.", "mixer.compressor."),
        *_compressor(_ATTENTION + "indexer.compressor.", "mixer.indexer.compressor."),
        Weight(_ATTENTION + "indexer.wq_b.weight", "mixer.indexer.query",
               "(heads head_dim) q_rank -> q_rank heads head_dim"),
        Weight(_ATTENTION + "indexer.weights_proj.weight", "mixer.indexer.head_weight", "heads embed -> embed heads"),
        *moe.separate_experts(_MLP, gate="w1", up="w3", down="w2", bias="gate.bias"),
        Weight(_MLP + "gate.tid2eid", "mlp.router.table", "vocab slots -> vocab slots"),
        Weight(_MLP + "shared_experts.w1.weight", "mlp.shared.gate", "mlp embed -> embed mlp"),
        Weight(_MLP + "shared_experts.w3.weight", "mlp.shared.up", "mlp embed -> embed mlp"),
        Weight(_MLP + "shared_experts.w2.weight", "mlp.shared.down", "embed mlp -> mlp embed"),
    ),
    prefix="",
    integer_tensors=r".*\.tid2eid",
    ignored_keys=moe.IGNORED_ROUTER_KEYS | {"mlp_bias": "the MLPs of this model have no bias in transformers"},
)  # fmt: skip


MODELS = {
    "deepseek4-flash-284b-a13b": dict(
        model_type="deepseek_v4", vocab_size=129_280, hidden_size=4096, num_hidden_layers=43, num_attention_heads=64,
        layer_types=["sliding_attention", "sliding_attention", "compressed_sparse_attention"]
        + ["heavily_compressed_attention", "compressed_sparse_attention"] * 20,
        moe_intermediate_size=2048,
        rope_parameters=dict(
            compress=dict(attention_factor=1.0, factor=16.0, original_max_position_embeddings=65_536, rope_type="yarn"),
            main=dict(),
        ),
    ),
}  # fmt: skip
