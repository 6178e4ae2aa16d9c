"""DeepSeek-V4 (DeepSeek-AI 2026): compressed attention, several residual streams, experts of token ids at first."""

import dataclasses
from typing import Any

from eqx_decoders.blocks.residual.hyper_connections import HyperConnections
from eqx_decoders.core.config_reader import Fields
from eqx_decoders.families import moe
from eqx_decoders.families._mtp import DEPTHS
from eqx_decoders.families.common import DecoderSizes, decoder_sizes, ends
from eqx_decoders.families.deepseek.compressed_attention import CompressedAttentionConfig, CompressedIndexerConfig
from eqx_decoders.families.deepseek.compression import CompressionConfig
from eqx_decoders.families.hf_table import Family
from eqx_decoders.families.rope_config import read_named_ropes, write_named_ropes
from eqx_decoders.families.settings_table import (
    AUTO_MAP,
    Group,
    Integer,
    Number,
    Only,
    Rule,
    Unused,
    Values,
    Word,
    write_all,
)
from eqx_decoders.families.weight_rows import Weight, mtp_rows
from eqx_decoders.layers.mlp import MLPConfig
from eqx_decoders.layers.moe.router import RouterConfig
from eqx_decoders.layers.norm import RMSNormConfig
from eqx_decoders.layers.rope import Rope
from eqx_decoders.model.decoder_config import DecoderConfig
from eqx_decoders.model.mtp_config import MTPConfig


SLIDING, CHOSEN, HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
_HASHED = ("hash_moe", "moe")


def _mixer(
    shape: DecoderSizes, rope_dim: int, q_rank: int, out_groups: int, out_rank: int, window: int
) -> CompressedAttentionConfig:
    """Return attention without compressed keys."""
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
    shape: DecoderSizes, *, mixer: CompressedAttentionConfig, kinds: tuple[str, ...], sizes: dict[str, int],
    ropes: dict[str, Rope], indexer: CompressedIndexerConfig, residual: HyperConnections, hashed: tuple[bool, ...],
    router: RouterConfig, depths: int = 0, **experts: Any,
) -> DecoderConfig:  # fmt: skip
    """Return a decoder whose layers compress as `kinds` say, windows of `sizes` tokens each.

    In `hashed` layers token ids find the experts; `experts` are their numbers and `limit`. The `depths` of multi-token
    prediction have windows alone, and read all residual streams.
    """
    chosen, heavy = (
        CompressionConfig(size=sizes[kind], overlaps=kind == CHOSEN, norm=shape.norm) for kind in (CHOSEN, HEAVY)
    )
    mixers = {
        SLIDING: dataclasses.replace(mixer, rope=ropes["main"]),
        CHOSEN: dataclasses.replace(mixer, compression=chosen, indexer=indexer, rope=ropes["compress"]),
        HEAVY: dataclasses.replace(mixer, compression=heavy, rope=ropes["compress"]),
    }
    shared = MLPConfig(mlp_dim=shape.mlp_dim, activation=shape.activation, limit=experts["limit"])
    best, by_token = (
        shape.experts(router=dataclasses.replace(router, **how), shared=shared, **experts)
        for how in (dict(selection_bias=True), dict(hashed_tokens=shape.vocab_size))
    )
    blocks = (
        shape.block(mixers[kind], by_token if first else best, residual=residual)
        for kind, first in zip(kinds, hashed, strict=True)
    )
    config = shape.decoder(blocks)
    if depths == 0:
        return config
    block = shape.block(mixers[SLIDING], best, residual=residual)
    mtp = MTPConfig(num_depths=depths, block=block, norm=shape.norm, all_streams=True)
    return dataclasses.replace(config, mtp=mtp)


def _read_kinds(fields: Fields, values: Values) -> tuple[str, ...]:
    layers, ratios = values["shape"].num_layers, fields.numbers("compress_ratios", ())
    if any(ratios[layers:]):
        raise fields.error("compress_ratios of layers of multi-token prediction must be 0: they see windows alone.")
    kinds = fields.words("layer_types", (SLIDING, CHOSEN, HEAVY), layers)
    if kinds is None and ratios:
        kinds = [{0: SLIDING, 4: CHOSEN}.get(ratio, HEAVY) for ratio in ratios[:layers]]
    return tuple(kinds or [CHOSEN if index > 1 and index % 2 else HEAVY for index in range(layers)])


def _kind(mixer: Any) -> str:
    return SLIDING if mixer.compression is None else HEAVY if mixer.indexer is None else CHOSEN


def _write_kinds(config: DecoderConfig) -> dict[str, Any]:
    return {"layer_types": [_kind(block.mixer) for block in config.blocks]}


def _read_sizes(fields: Fields, values: Values) -> dict[str, int]:
    table, defaults = fields.table("compress_rates"), {CHOSEN: 4, HEAVY: 128}
    sizes = {CHOSEN: fields.integer("compress_rate_csa", None), HEAVY: fields.integer("compress_rate_hca", None)}
    for kind, size in defaults.items():
        sizes[kind] = sizes[kind] or (size if table is None else table.integer(kind, size))
    if table is not None:
        table.finish()
    return sizes


def _write_sizes(config: DecoderConfig) -> dict[str, Any]:
    mixers: list[Any] = [block.mixer for block in config.blocks]
    found = {_kind(mixer): mixer.compression.size for mixer in mixers if mixer.compression is not None}
    return {"compress_rates": {CHOSEN: 4, HEAVY: 128} | found}


_INDEXER = Group("indexer", CompressedIndexerConfig, (
    Integer("index_n_heads", "num_heads", 64),
    Integer("index_head_dim", "head_dim", 128),
    Integer("index_topk", "top_k", 512),
))  # fmt: skip


def _write_indexer(config: DecoderConfig) -> dict[str, Any]:
    mixers: list[Any] = [block.mixer for block in config.blocks]
    indexer = next((mixer.indexer for mixer in mixers if mixer.indexer is not None), None)
    return {} if indexer is None else write_all(_INDEXER.settings, indexer)


def _read_hashed(fields: Fields, values: Values) -> tuple[bool, ...]:
    layers, count = values["shape"].num_layers, fields.integer("num_hash_layers", 3, least=0)
    kinds = fields.words("mlp_layer_types", _HASHED, layers)
    return tuple(i < count if kinds is None else kinds[i] == _HASHED[0] for i in range(layers))


def _write_hashed(config: DecoderConfig) -> dict[str, Any]:
    mlps: list[Any] = [block.mlp for block in config.blocks]
    return {"mlp_layer_types": [_HASHED[mlp.router.hashed_tokens is None] for mlp in mlps]}


def _read_rope_dim(fields: Fields, values: Values) -> int:
    head_dim = values["shape"].head_dim
    fraction, given = fields.number("partial_rotary_factor", None), fields.integer("qk_rope_head_dim", None)
    fraction = fraction or (given or head_dim * 64 / 512) / head_dim
    return int(head_dim * fraction)


def _write_rope_dim(config: DecoderConfig) -> dict[str, Any]:
    mixer: Any = config.blocks[0].mixer
    return {"qk_rope_head_dim": mixer.rope_dim, "partial_rotary_factor": mixer.rope_dim / mixer.head_dim}


def _read_ropes(fields: Fields, values: Values) -> dict[str, Rope]:
    thetas = {"main": ("rope_theta", 1e4), "compress": ("compress_rope_theta", 1.6e5)}
    fraction = values["_rope_dim"] / values["shape"].head_dim
    ropes = read_named_ropes(fields, thetas, fraction=fraction)
    return {name: dataclasses.replace(rope, pairing="interleaved", fraction=1.0) for name, rope in ropes.items()}


def _write_ropes(config: DecoderConfig) -> dict[str, Any]:
    blocks = config.blocks if config.mtp is None else (*config.blocks, config.mtp.block)
    mixers: list[Any] = [block.mixer for block in blocks]
    found = {"main" if mixer.compression is None else "compress": mixer.rope for mixer in mixers}
    ropes, fraction = {"main": Rope(), "compress": Rope(theta=1.6e5)} | found, mixers[0].rope_dim / mixers[0].head_dim
    written = write_named_ropes({name: dataclasses.replace(rope, fraction=fraction) for name, rope in ropes.items()})
    return written | {"rope_theta": ropes["main"].theta, "compress_rope_theta": ropes["compress"].theta}


_LAYER = "layers.{layer}."
_ATTENTION, _MLP = _LAYER + "attn.", _LAYER + "ffn."


def _compressor(prefix: str, path: str) -> tuple[Weight, ...]:
    wide = "(series head_dim) embed -> embed series head_dim"
    return (
        Weight(prefix + "wkv.weight", path + "key", wide),
        Weight(prefix + "wgate.weight", path + "gate", wide),
        Weight(prefix + "ape", path + "bias", "taps (series head_dim) -> taps series head_dim"),
        Weight(prefix + "norm.weight", path + "norm.scale", "norm -> norm"),
    )


def _connection(name: str, number: int) -> tuple[Weight, ...]:
    path = f"residual.connections.{number}."
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


def _with_depths(*rows: Weight) -> tuple[Weight, ...]:
    """Return the rows with those of layers of multi-token prediction."""
    depth, path = "mtp.{depth}.", "mtp.depth."
    return (
        *rows,
        *mtp_rows(rows, _LAYER, depth),
        *_stream_sum(depth, path),
        Weight(depth + "enorm.weight", path + "embed_norm.scale", "norm -> norm"),
        Weight(depth + "hnorm.weight", path + "stream_norm.scale", "norm -> norm"),
        Weight(depth + "e_proj.weight", path + "embed_kernel", "embed joined -> joined embed"),
        Weight(depth + "h_proj.weight", path + "stream_kernel", "embed joined -> joined embed"),
        Weight(depth + "norm.weight", path + "final_norm.scale", "norm -> norm"),
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
        Rule("kinds", _read_kinds, _write_kinds),
        Rule("sizes", _read_sizes, _write_sizes),
        Rule("hashed", _read_hashed, _write_hashed),
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
        Unused("expert_dtype", "it says how tensors were stored"),
    ),
    build=deepseek_v4,
    weights=_with_depths(
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
    ignored_keys=moe.IGNORED_ROUTER_KEYS | {"mlp_bias": "transformers' MLP of this model never has one"},
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
