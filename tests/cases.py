"""Small decoders over all options, and the law that holds for each: the fast form equals the plainest one.

A case gives every factor of `FACTORS` a value. The plainest form runs its layers one by one on one device in float32,
with all scores and all logits at once, every expert on every token, and no cache. The fast form has the kernel, remat
policy, scan, dtype, mesh, microbatches, fused loss and cache that the case names. Loss, gradients and logits
must agree.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from allpairspy import AllPairs

import eqx_decoders as ed
from eqx_decoders.blocks.residual.hyper_connections import HyperConnections
from eqx_decoders.blocks.residual.residual import PostNorm, Sequential, Weighted
from eqx_decoders.families.deepseek.compressed_attention import CompressedAttentionConfig, CompressedIndexerConfig
from eqx_decoders.families.deepseek.compression import CompressionConfig
from eqx_decoders.families.diffllama import DifferentialAttentionConfig
from eqx_decoders.families.doge import DynamicMaskConfig
from eqx_decoders.families.gemma.altup import AltUp, Laurel
from eqx_decoders.families.gemma.rg_lru import RGLRUConfig
from eqx_decoders.families.jetmoe import HeadMixtureConfig
from eqx_decoders.families.minimax.lightning import LightningAttentionConfig
from eqx_decoders.families.qwen.gated_streams import GatedStreams
from eqx_decoders.families.rwkv import ChannelMixConfig, TimeMixConfig
from eqx_decoders.families.xlstm import MLSTMConfig
from eqx_decoders.layers.attention.alibi import Alibi
from eqx_decoders.layers.attention.attention import AttentionConfig, QKNorm, QueryTemperature
from eqx_decoders.layers.attention.block_indexer import BlockIndexerConfig, PooledIndexerConfig
from eqx_decoders.layers.attention.indexer import IndexerConfig
from eqx_decoders.layers.attention.learned_init import LearnedInitConfig
from eqx_decoders.layers.attention.mla import LatentAttentionConfig
from eqx_decoders.layers.attention.moba import BlockSelection
from eqx_decoders.layers.embedding.embedding import LearnedPositions, SinusoidalPositions
from eqx_decoders.layers.embedding.engram import EngramConfig
from eqx_decoders.layers.embedding.head_transform import HeadTransformConfig
from eqx_decoders.layers.embedding.per_layer_embedding import PerLayerEmbeddingConfig, PerLayerInputConfig
from eqx_decoders.layers.mask import Bidirectional, Causal, Chunked, SlidingWindow
from eqx_decoders.layers.mlp import LinearConfig, MLPConfig
from eqx_decoders.layers.moe.experts import ExpertsConfig
from eqx_decoders.layers.moe.router import RouterConfig
from eqx_decoders.layers.norm import LayerNormConfig, LayerScaleConfig, RMSNormConfig
from eqx_decoders.layers.parallel_mixers import NamedMixer, ParallelMixersConfig
from eqx_decoders.layers.recurrent.gated_conv import GatedConvolutionConfig
from eqx_decoders.layers.recurrent.gated_delta_net import GatedDeltaNetConfig
from eqx_decoders.layers.recurrent.kimi_delta import KimiDeltaAttentionConfig
from eqx_decoders.layers.recurrent.mamba1 import Mamba1Config
from eqx_decoders.layers.recurrent.mamba2 import Mamba2Config
from eqx_decoders.layers.rope import LinearRope, Llama3Rope, NTKRope, Rope, YarnRope
from eqx_decoders.model.mtp_config import MTPConfig
from eqx_decoders.sharding.axes import named_leaves
from eqx_decoders.training.optimizer.optimizer import OptimizerConfig
from eqx_decoders.training.step.loss import token_loss_sum
from eqx_decoders.training.step.step import Trainer
from eqx_decoders.training.step.step_config import StepConfig
from tests.compare import assert_close, root_mean_square, unit
from tests.models import EMBED, VOCAB, filled


Case = Mapping[str, Any]

ROWS = 8
MASKS = {
    "causal": Causal(),
    "window": SlidingWindow(5),
    "chunked": Chunked(8),
    "bidirectional": Bidirectional(),
    "causal, spans": Causal(),  # whose tokens see each other whole
    "window, spans": SlidingWindow(5),
}
SPANS = ("causal, spans", "window, spans")
ROPES = {
    "none": None,
    "plain": Rope(),
    "interleaved": Rope(pairing="interleaved"),
    "partial": Rope(fraction=0.5),
    "linear": LinearRope(factor=4.0),
    "llama3": Llama3Rope(theta=100.0, original_length=8),
    "turned back, NTK": NTKRope(alpha=2.0, reverse=True),
    "yarn": YarnRope(theta=100.0, factor=4.0, original_length=8),
}
QK_NORMS = {
    "none": None,
    "head before rope": QKNorm(),
    "head after rope": QKNorm(norm=RMSNormConfig(scale=False), when="after_rope"),
    "all heads": QKNorm(norm=LayerNormConfig(), over="heads"),
    "each head": QKNorm(norm=LayerNormConfig(bias=False), over="each_head"),
}
HEADS = {"multi-head": (4, 4, 12), "grouped": (4, 2, 8), "multi-query": (4, 1, 16)}  # heads, kv heads, head_dim
MIXERS = {
    "split": dict(qkv_bias=True, out_bias=True),
    "fused": dict(fused_qkv=True, qkv_bias=True, sinks=True),
    "shared": dict(shared_kv=True, output_gate=True, query_scale=0.2),
    "tempered": dict(temperature=QueryTemperature(scale=0.5, length=4), soft_cap=2.0, value_dim=5, value_scale=0.5),
    "clipped": dict(qkv_clip=0.5, inner_norm=RMSNormConfig()),
    "selecting": dict(selection=BlockSelection(size=3, top_k=2)),
    "block indexer": dict(selection=BlockIndexerConfig(size=3, top_k=3, local_blocks=2, num_heads=2, head_dim=16)),
    "means of blocks": dict(selection=PooledIndexerConfig(size=2, top_k=2, num_heads=6, head_dim=16)),
}
NORMS = {  # before and after a layer
    "RMSNorm": (RMSNormConfig(), None),
    "offset sandwich": (RMSNormConfig(offset=1.0), RMSNormConfig(offset=1.0, eps=1e-5)),
    "no scale": (RMSNormConfig(scale=False), None),
    "LayerNorm": (LayerNormConfig(), None),
    "after only": (None, LayerNormConfig(bias=False, offset=1.0)),
    "mean alone": (LayerNormConfig(scale=False, bias=False), None),
    "scaled": (RMSNormConfig(), LayerScaleConfig(start=0.5)),
}
ROUTERS = {
    "dropless": RouterConfig(bias=True, balance_loss=0.1, z_loss=0.01),
    "all to all": RouterConfig(order="score_first", renormalize=True, per_expert_scale=True, balance_form="megatron"),
    "capacity": RouterConfig(
        score="sigmoid", order="score_first", renormalize=True, selection_bias=True, num_groups=2, balance_loss=0.1
    ),
    "dense": RouterConfig(score="sigmoid", input_scaling=True, z_loss=0.01),
}
CHANNELS = {
    "gated": MLPConfig(mlp_dim=24),
    "fused": MLPConfig(mlp_dim=24, fused=True, activation="gelu_tanh", bias=True),
    "ungated": MLPConfig(mlp_dim=24, gated=False, activation="relu2", bias=True),
    "normalized": MLPConfig(mlp_dim=24, gate_sparsity=0.4, activation="xielu", inner_norm=RMSNormConfig()),
    "linear": LinearConfig(),
    "channel mix": ChannelMixConfig(embed_dim=EMBED, mlp_dim=24),
    "none": None,
    "dropless": ExpertsConfig(
        num_experts=4, num_experts_per_token=2, mlp_dim=8, router=ROUTERS["dropless"], bias=True, out_bias=True
    ),
    "all to all": ExpertsConfig(
        num_experts=4,
        num_experts_per_token=2,
        mlp_dim=8,
        router=ROUTERS["all to all"],
        shared=MLPConfig(mlp_dim=8),
        num_zero_experts=4,
    ),
    "capacity": ExpertsConfig(
        num_experts=4, num_experts_per_token=2, mlp_dim=8, router=ROUTERS["capacity"], capacity_factor=0.75
    ),
    "dense": ExpertsConfig(
        num_experts=4,
        num_experts_per_token=2,
        mlp_dim=8,
        router=ROUTERS["dense"],
        activation="quick_gelu",
        up_offset=1.0,
        limit=0.5,
        shared=MLPConfig(mlp_dim=8),
        shared_gate=True,
    ),
}
RESIDUALS = {
    **{name: name for name in ("sequential", "parallel", "none", "chained")},
    "scaled": Sequential(residual_scale=0.5, output_scale=True),
    "weighted": Weighted(keeps_normed=True, gains=True),
    "post-norm": PostNorm(),
    "hyper-connections": HyperConnections(streams=3, iterations=3),
    "gated streams": GatedStreams(streams=2, rank=4),
    "alternating updates": AltUp(streams=3, inner=Laurel(rank=4)),
}
MESHES = {
    "one device": None,
    "data": dict(data=8),
    "fsdp": dict(fsdp=8),
    "fsdp x tensor": dict(data=2, fsdp=2, tensor=2),
    "transpose": dict(data=2, fsdp_transpose=2, tensor=2),
    "sequence": dict(data=2, fsdp=2, tensor_sequence=2),
    "context": dict(context=2, fsdp=2, tensor=2),
    "long context": dict(data=2, context=4),
    "expert": dict(expert=4, tensor=2),
    "stage": dict(stage=2, fsdp=4),
}
# Further ways to run on meshes: sizes, and fields of `Execution`.
FORMS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "exchanged heads": (dict(data=4, context=2), dict(context_form="all_to_all")),
    "ring": (dict(context=2, fsdp=2, tensor=2), dict(context_form="ring")),
    "long ring": (dict(data=2, context=4), dict(context_form="ring")),
    "ring of groups": (dict(data=2, context=4), dict(context_form="ring_all_to_all")),
    "pipeline": (dict(stage=2, fsdp=4), dict(pipeline=ed.Pipeline(microbatches=2))),
    "pipeline and tensor": (dict(stage=2, fsdp=2, tensor=2), dict(pipeline=ed.Pipeline(microbatches=2, gather="once"))),
    "split batch": (dict(fsdp=2, context=2, tensor=2), dict(batch_split=2)),
    "split batch and experts": (dict(expert=2, context=2, tensor=2), dict(batch_split=2)),
    "small pieces": (dict(expert=4, tensor=2), dict(exchange_bytes=256, head_bytes=4096)),
}
NARROW = {  # tables and heads of other features than the stream's, beside these norms
    "LayerNorm": dict(
        embedding_rank=8, head_transform=HeadTransformConfig(features=8, bias=True, norm=LayerNormConfig())
    ),
}
ENGRAM = EngramConfig(
    embed_dim=EMBED, vocab_size=VOCAB, layers=(0,), layer=0, num_heads=2, head_dim=8, vocab_bases=(20, 30), taps=2
)
PER_LAYER = PerLayerEmbeddingConfig(features=8, vocab_size=VOCAB)
FURTHER = {"mlp": MLPConfig(mlp_dim=8), "per layer": PerLayerInputConfig(features=8)}
_BIASED_MAMBA = Mamba2Config(
    num_heads=4, value_dim=5, num_groups=2, key_dim=6, norm="before_gate", in_bias=True, out_bias=True,
    in_scales=(2.0, 0.5, 2.0, 0.5, 3.0),
)  # fmt: skip
COMPRESSED = dict(num_heads=4, head_dim=12, rope_dim=6, q_rank=8, out_groups=2, out_rank=8, window=5)
RECURRENT = {
    "delta net": GatedDeltaNetConfig(
        num_key_heads=2, num_heads=4, key_dim=6, value_dim=5, taps=3, negative_eigenvalues=True
    ),
    "mamba2": Mamba2Config(num_heads=4, value_dim=5, num_groups=2, key_dim=6, dt_min=0.3),
    "mamba": Mamba1Config(channels=24, key_dim=5, step_rank=8, bias=True, norm=RMSNormConfig()),
    "lightning": LightningAttentionConfig(num_heads=4, head_dim=6, rate_layers=3),
    "gated convolution": GatedConvolutionConfig(channels=24, bias=True),
    "mLSTM": MLSTMConfig(num_heads=4, key_dim=6, value_dim=5, gate_cap=3.0),
    "time mix": TimeMixConfig(embed_dim=EMBED, channels=24),
    "gated unit": RGLRUConfig(num_heads=4, value_dim=8, taps=3),
    # no recurrences, but their masks and rotary embeddings are their own as well
    "chosen": CompressedAttentionConfig(
        **COMPRESSED,
        compression=CompressionConfig(size=2, overlaps=True),
        indexer=CompressedIndexerConfig(num_heads=12, head_dim=8, top_k=3),
    ),
    "kimi delta": KimiDeltaAttentionConfig(num_heads=4, head_dim=6, gate_rank=8, taps=3),
    "mamba2 and attention": ParallelMixersConfig(
        mixers=(
            NamedMixer(name="mamba", mixer=_BIASED_MAMBA, input_scale=2.0, output_scale=0.5),
            NamedMixer(name="attention", mixer=AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=8)),
        )
    ),
}
WRAPPED = ("head mixture", "differential", "dynamic mask")  # attention within a layer of its own
SELECTING = ("selecting", "block indexer", "means of blocks", "indexed", "dynamic mask")
SPLITS_HEADS = (
    *("fsdp x tensor", "transpose", "sequence", "context", "expert"),
    *(name for name, (sizes, _) in FORMS.items() if "tensor" in sizes),
)
OWN_DROPOUT = tuple(name for name, (_, run) in FORMS.items() if {"pipeline", "batch_split"} & set(run))
FACTORS: dict[str, tuple[Any, ...]] = {
    "mesh": tuple(MESHES),
    "channel": tuple(CHANNELS),
    "mixer": (*MIXERS, "latent", "indexed", "learned", *WRAPPED, *RECURRENT),
    "rope": tuple(ROPES),
    "length": (1, 13, 32, 64, 97, 130),
    "norm": tuple(NORMS),
    "remat": ("none", "full", "save_qkv_proj", "minimal_with_context", "minimal_offloaded"),
    "mask": tuple(MASKS),
    "qk_norm": tuple(QK_NORMS),
    "residual": tuple(RESIDUALS),
    "further": ("none", "engram", *FURTHER),
    "kv_shared_from": (False, True),
    "cache": ("none", "token by token", "pieces", "rejected"),
    "heads": tuple(HEADS),
    "kernel": ("dot", "chunked", "auto"),
    "packing": ("whole", "packed", "left padding"),
    "mtp": (0, 1, 2),
    "scan": (True, False),
    "dtype": ("float32", "bfloat16"),
    "accumulation": (1, 2),
    "tied": (False, True),
    "loss": ("fused", "plain"),
    "dropout": (0.0, 0.25),
}

CACHED = FACTORS["cache"][1:]

# Pairs that no decoder has, and why.
EXCLUDED: list[tuple[str, tuple[Any, ...], str, tuple[Any, ...]]] = [
    ("mixer", ("tempered",), "residual", ("chained",)),  # whose output has features of its own
    ("heads", ("multi-query",), "mesh", SPLITS_HEADS),  # one head can't be split
    ("mask", ("bidirectional",), "cache", CACHED),  # its past would change with every token
    # rounded scores choose others
    ("mixer", (*SELECTING, "chosen", "head mixture"), "dtype", ("bfloat16",)),
    ("further", ("engram",), "dtype", ("bfloat16",)),  # the slope of its root of a score has no bound
    ("mixer", SELECTING, "mask", tuple(MASKS)[1:]),  # they select from the whole past
    # equal tokens have equal biases, of which rounding chooses, unless their positions are in the stream
    ("mixer", ("dynamic mask",), "rope", tuple(ROPES)[1:]),
    ("mixer", ("dynamic mask",), "residual", ("none",)),
    ("mixer", ("dynamic mask",), "norm", ("after only",)),  # and large ones hide the rest of scores
    ("mixer", ("dynamic mask",), "further", ("engram",)),  # whose slopes have no bound
    ("mixer", ("latent",), "mask", SPANS),  # it has none
    ("mask", SPANS, "cache", ("token by token", "rejected")),  # a span comes in one call
    ("mixer", ("latent", "indexed"), "heads", ("grouped", "multi-query")),  # all its heads share one latent
    ("mixer", ("latent", "indexed"), "qk_norm", tuple(QK_NORMS)[1:]),  # its norms are those of the latents
    # whose output has the features of the stream
    ("residual", ("chained",), "mixer", (*WRAPPED, *RECURRENT)),
    ("mixer", ("latent", "indexed"), "rope", ("none",)),  # it always has rotary features
    # no head is always there, or heads are halves of others
    ("mixer", ("head mixture", "differential"), "qk_norm", ("all heads", "each head")),
    ("residual", ("chained",), "channel", ("none",)),  # one layer feeds the other
    ("residual", ("chained",), "further", ("engram", "mlp", "per layer")),  # and no other
    (
        "kv_shared_from",
        (True,),
        "mixer",
        ("latent", "learned", *WRAPPED, "block indexer", "means of blocks", *RECURRENT),
    ),  # they lend nothing
    ("channel", ("capacity",), "cache", CACHED),  # a piece has fewer places than the whole
    ("dropout", (0.25,), "accumulation", (2,)),  # other microbatches draw other masks
    ("dropout", (0.25,), "mesh", OWN_DROPOUT),  # parts of a batch draw masks of their own
]


def legal(case: Case) -> bool:
    """Whether no two of the values, of perhaps some factors only, exclude each other."""
    return not any(case.get(a) in these and case.get(b) in those for a, these, b, those in EXCLUDED)


def pairs(case: Case) -> set[tuple[str, Any, str, Any]]:
    """All pairs of values of different factors."""
    items = list(case.items())
    return {(a, x, b, y) for index, (a, x) in enumerate(items) for b, y in items[:index]}


def legal_pairs() -> set[tuple[str, Any, str, Any]]:
    """All pairs of values that may meet in one decoder."""
    single = [(name, value) for name, values in FACTORS.items() for value in values]
    each = ({a: x, b: y} for a, x in single for b, y in single if a != b)
    return {
        pair for case in each if legal(case) for pair in pairs({name: case[name] for name in FACTORS if name in case})
    }


@functools.cache
def covering_array() -> list[dict[str, Any]]:
    """Cases that hold every legal pair at least once; always the same ones."""
    names, generator = list(FACTORS), np.random.default_rng(0)
    rows = AllPairs(list(FACTORS.values()), filter_func=lambda row: legal(dict(zip(names, row, strict=False))))
    cases = [dict(zip(names, row, strict=True)) for row in rows]
    missing = legal_pairs().difference(*map(pairs, cases))
    while missing:  # where its greedy choices ended in exclusions
        a, x, b, y = min(missing, key=repr)
        drawn = (draw(generator) | {a: x, b: y} for _ in itertools.count())
        some = itertools.islice(filter(legal, drawn), 10)
        cases.append(max(some, key=lambda case: len(pairs(case) & missing)))
        missing -= pairs(cases[-1])
    return cases


def array_of_forms(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of these cases those in which each of `FORMS` meets every value that it may meet there."""
    chosen = []
    for form in FORMS:
        able = [case | {"mesh": form} for case in cases if legal(case | {"mesh": form})]
        chosen += representative(able)
    return chosen


def representative(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A few of the cases, in which every value of every factor still occurs."""
    missing, chosen = {item for case in cases for item in case.items()}, []
    while missing:
        chosen.append(max(cases, key=lambda case: len(missing & case.items())))
        missing -= chosen[-1].items()
    return chosen


def draw(generator: np.random.Generator) -> dict[str, Any]:
    """A value for each factor, legal or not."""
    return {name: values[generator.integers(len(values))] for name, values in FACTORS.items()}


def random_cases(seed: int) -> Iterator[dict[str, Any]]:
    """An endless stream of cases; the same seed gives the same ones."""
    generator = np.random.default_rng(seed)
    while True:
        if legal(case := draw(generator)):
            yield case


def decoder_config(case: Case) -> ed.DecoderConfig:
    """Two equal layers of the case's kind, or one and two that borrow its keys and values, or choices of keys."""
    pre, post = NORMS[case["norm"]]
    channel, mixer = _channel(case), _mixer(case)
    after = case["norm"] == "after only"
    parallel_norm = None if case["residual"] == "parallel" and not after else pre  # else the MLP shares the mixer's
    block = ed.BlockConfig(
        mixer=mixer,
        mlp=channel,
        pre_mixer_norm=pre,
        post_mixer_norm=post,
        pre_mlp_norm=parallel_norm if channel else None,
        post_mlp_norm=post if channel else None,
        residual=RESIDUALS[case["residual"]],
        dropout=case["dropout"],
    )
    depths, alone = case["mtp"], block
    block = dataclasses.replace(block, **_further(case))
    blocks = (block, block)
    if case["kv_shared_from"]:
        blocks = _sharing(block)
    return ed.DecoderConfig(
        vocab_size=VOCAB,
        embed_dim=EMBED,
        blocks=blocks,
        final_norm=RMSNormConfig(),
        tied=case["tied"],
        **NARROW.get(case["norm"], {}),
        head_bias=case["norm"] in ("LayerNorm", "mean alone"),
        embedding_scale=2.0 if case["tied"] else 1.0,
        embedding_norm=LayerNormConfig() if case["norm"] == "mean alone" else None,
        positions={"none": LearnedPositions(max_positions=100), "plain": SinusoidalPositions()}.get(case["rope"]),
        logit_soft_cap=3.0 if case["loss"] == "fused" else None,
        dropout=case["dropout"],
        per_layer_embedding=PerLayerEmbeddingConfig(features=8, vocab_size=VOCAB)
        if case["further"] == "per layer"
        else None,
        mtp=_ahead(depths, alone) if depths else None,
    )


def _ahead(depths: int, block: ed.BlockConfig) -> MTPConfig:
    """Two depths read all residual streams, or the only one normalized."""
    streams = block.residual.weighted_sum or (depths > 1 and isinstance(block.residual, HyperConnections))
    return MTPConfig(
        num_depths=depths,
        block=block,
        norm=RMSNormConfig(),
        normed_depths=depths > 1 and not streams,
        all_streams=streams,
    )


def _sharing(block: ed.BlockConfig) -> tuple[ed.BlockConfig, ...]:
    """A layer, and two that use its keys and values, or in cycles of two layers the choices of their indexers."""
    if isinstance(block.mixer, LatentAttentionConfig):
        indexers = (dataclasses.replace(block.mixer.indexer, **{name: "it"}) for name in ("shares_as", "shared_from"))
        mixers = (dataclasses.replace(block.mixer, indexer=indexer) for indexer in indexers)
        return tuple(dataclasses.replace(block, mixer=mixer) for mixer in mixers) * 2
    narrow = dataclasses.replace(block.mixer, fused_qkv=False, shared_kv=False, value_scale=1.0, kv_shared_from="first")
    return dataclasses.replace(block, shares_kv_as="first"), *(dataclasses.replace(block, mixer=narrow),) * 2


def _further(case: Case) -> dict[str, Any]:
    """Branches beside mixer and MLP."""
    streams = getattr(RESIDUALS[case["residual"]], "streams", 1)
    layers = dict(pre_layers=dataclasses.replace(ENGRAM, streams=streams), post_layers=FURTHER.get(case["further"]))
    place = {"none": None, "engram": "pre_layers"}.get(case["further"], "post_layers")
    return {} if place is None else {place: (ed.ExtraLayerConfig(layer=layers[place], pre_norm=RMSNormConfig()),)}


def _mixer(case: Case):
    if case["mixer"] in RECURRENT:
        return RECURRENT[case["mixer"]]
    mask, rope = MASKS[case["mask"]], ROPES[case["rope"]]
    if case["mixer"] in ("latent", "indexed"):
        indexer = IndexerConfig(num_heads=12, head_dim=10, top_k=4) if case["mixer"] == "indexed" else None
        ranks = dict(q_rank=8 if case["tied"] or indexer else None, kv_rank=8, nope_dim=6, rope_dim=8, value_dim=5)
        return LatentAttentionConfig(num_heads=4, mask=mask, rope=rope, bias=True, indexer=indexer, **ranks)
    heads, kv_heads, head_dim = HEADS[case["heads"]]
    learned, wrapped = case["mixer"] == "learned", case["mixer"] in WRAPPED
    if case["mixer"] == "differential":  # as many pairs
        heads, kv_heads = 2 * heads, 2 * kv_heads
    attention = AttentionConfig(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        mask=mask,
        rope=rope,
        qk_norm=QK_NORMS[case["qk_norm"]],
        spans=case["mask"] in SPANS,
        alibi=Alibi(max_exponent=3.0) if rope is None and not wrapped else None,
        out_dim=24 if case["residual"] == "chained" and not learned else None,
        **MIXERS.get(case["mixer"], {}),
    )
    if learned:
        teacher = dict(teacher_heads=6, teacher_kv_heads=2, teacher_head_dim=4)
        return LearnedInitConfig(attention=attention, general=case["tied"], **teacher)
    wrap = {
        "head mixture": lambda: HeadMixtureConfig(attention=attention, num_experts=4),
        "differential": lambda: DifferentialAttentionConfig(attention=attention),
        # its biases are exponentials of values: of 2e5 the log-sum-exp, in float32, has two decimals
        "dynamic mask": lambda: DynamicMaskConfig(attention=dataclasses.replace(attention, qkv_clip=2.0), top_k=5),
    }
    return wrap.get(case["mixer"], lambda: attention)()


def _channel(case: Case):
    channel = CHANNELS[case["channel"]]
    if isinstance(channel, MLPConfig):
        return dataclasses.replace(channel, dropout=case["dropout"])
    if isinstance(channel, ExpertsConfig) and case["dropout"] > 0:  # a key is at hand
        shared = channel.shared and dataclasses.replace(channel.shared, dropout=case["dropout"])
        return dataclasses.replace(channel, shared=shared)
    return channel


def batch_of(case: Case, seed: int = 3) -> ed.Batch:
    """Eight rows: whole ones; several documents a row, of one token too, with padding behind; or padding in front.

    Where the mask has spans, two thirds of the tokens are in one; none reaches into another of the pieces for a cache.
    """
    length, generator = case["length"], np.random.default_rng(seed)
    tokens = generator.integers(0, VOCAB, (ROWS, length)).astype(np.int32)
    spans = None
    if case["mask"] in SPANS:
        spans = (generator.random((ROWS, length)) < 0.2).cumsum(axis=1).astype(np.int32) % 3
        spans[:, length // 2] = 0
    if case["packing"] == "whole":
        return ed.Batch(tokens=tokens, spans=spans)
    if case["packing"] == "left padding":
        begins = generator.integers(0, length, (ROWS, 1))
        positions = np.maximum(np.arange(length)[None] - begins, -1).astype(np.int32)
        return ed.Batch(tokens=tokens, positions=positions, spans=spans)
    segments = np.cumsum(generator.random((ROWS, length)) < 0.2, axis=1).astype(np.int32) + 1
    padding = generator.integers(0, max(1, length // 3), (ROWS, 1))
    segments = np.where(np.arange(length)[None] >= length - padding, 0, segments).astype(np.int32)
    mask = (generator.random((ROWS, length)) < 0.8).astype(np.float32)
    return ed.Batch(tokens=tokens, segment_ids=segments, loss_mask=mask, spans=spans)


def fast_form(case: Case, model: ed.Decoder) -> ed.Decoder:
    """The same weights, run as the case says."""
    channel = case["channel"]
    experts = channel if channel in ("dropless", "capacity", "dense") else "dropless"
    model = model.replace(
        scan=case["scan"],
        remat=case["remat"],
        attention=case["kernel"],
        experts=experts,
        expert_exchange="all_to_all" if channel == "all to all" else "gather",
        lookup="one_hot" if case["tied"] and case["loss"] == "fused" else "gather",
        precision=ed.Precision(compute=case["dtype"]),
    )
    mesh, run = FORMS.get(case["mesh"]) or (MESHES[case["mesh"]], {})
    return model if mesh is None else model.replace(**run).place(ed.Layout.create(**mesh))


Z_LOSS = 1e-2


def key_of(case: Case):
    return jax.random.key(7) if case["dropout"] > 0 else None


@eqx.filter_jit
def plain_results(model: ed.Decoder, batch: ed.Batch, key, whole_rows: bool):
    """Loss sums, gradients by path, and logits, of the batch or of its rows as whole documents."""

    def loss(model):
        return token_loss_sum(model, batch, z_loss=Z_LOSS, fused=False, key=key)

    (total, metrics), gradient = eqx.filter_value_and_grad(loss, has_aux=True)(model)
    where = () if whole_rows else (batch.positions, batch.segment_ids)
    sums = (total, metrics.nll, metrics.tokens, metrics.mtp and metrics.mtp.nll)
    return sums, named_leaves(gradient), model(batch.tokens, *where, inputs=batch.inputs).logits


@eqx.filter_jit
def step_results(trainer: Trainer, model: ed.Decoder, batch: ed.Batch, key):
    """Loss sums and gradients, as a training step computes them."""
    gradient, metrics = trainer._gradient(model, batch, key)
    return (metrics.loss, metrics.nll, metrics.tokens, metrics.mtp and metrics.mtp.nll), gradient


@eqx.filter_jit
def logits_of(model: ed.Decoder, batch: ed.Batch, cache: str):
    """Logits of the whole batch, or of its rows as whole documents that are fed through a cache."""
    if cache == "none":
        return model(batch.tokens, batch.positions, batch.segment_ids, inputs=batch.inputs).logits
    tokens, execution = jnp.asarray(batch.tokens), model.execution
    rows, length = tokens.shape
    dtype = execution.precision.compute
    memory = ed.init_cache(model.config, rows, length, dtype=dtype, layout=execution.layout)

    def feed(memory, some, spans=None):
        out = model(some, cache=memory, inputs=ed.Inputs(spans=spans))
        return out.cache, out.logits

    if cache == "token by token":
        _, logits = jax.lax.scan(feed, memory, tokens.T[:, :, None])
        return jnp.swapaxes(logits[:, :, 0], 0, 1)
    if cache == "rejected":
        _, logits = jax.lax.scan(lambda memory, some: _guessing(model, memory, some), memory, tokens.T[:, :, None])
        return jnp.swapaxes(logits[:, :, 0], 0, 1)
    pieces, begin = [], 0
    for size in (length // 2, 1, length):  # the first half, a token, the rest
        some = tokens[:, begin : begin + size]
        if some.shape[1] > 0:
            memory, logits = feed(memory, some, None if batch.spans is None else batch.spans[:, begin : begin + size])
            pieces.append(logits)
        begin += size
    return jnp.concatenate(pieces, axis=1)


def _guessing(model: ed.Decoder, memory: ed.Cache, token: jax.Array):
    """One token with two wrong guesses behind it, which are rejected."""
    wrong = [(token + shift) % VOCAB for shift in (3, 5)]
    hidden, proposal, _ = model.forward_uncommitted(jnp.concatenate([token, *wrong], axis=1), cache=memory)
    kept = jnp.where(jnp.arange(3)[None] == 0, proposal.positions, -1)
    return memory.commit(proposal.entries, kept), model.logits(hidden[:, :1])


@eqx.filter_jit
def _jittered(model: ed.Decoder, size: float, key: jax.Array) -> ed.Decoder:
    """The model with every weight moved by so much of itself, up or down."""
    leaves, structure = jax.tree.flatten(model)
    keys = jax.random.split(key, len(leaves))
    moved = [
        leaf * (1 + size * jax.random.rademacher(key, leaf.shape, leaf.dtype))
        if jnp.issubdtype(leaf.dtype, jnp.floating)
        else leaf
        for leaf, key in zip(leaves, keys, strict=True)
    ]
    return jax.tree.unflatten(structure, moved)


def check(case: Case, seed: int = 0, **execution: Any) -> None:
    """The fast form of a case equals the plain one in float32, up to the rounding of the case's own dtype.

    `execution` are further ways in which the fast form runs.

    Some decoders (a recurrence under a few norms) blow rounding errors up a thousandfold: what the plain form itself
    makes of weights that are rounded in other ways is granted, too. In some roundings a weight loses a hundredth of
    what it loses in others: two tell enough of most cases, and eight of those that need more.
    """
    model, batch, key = filled(decoder_config(case), seed), batch_of(case, seed + 3), key_of(case)
    plain = model.replace(scan=False, attention="dot", experts="capacity" if case["channel"] == "capacity" else "dense")
    fast = fast_form(case, model).replace(**execution)
    config = StepConfig(
        gradient_accumulation_steps=case["accumulation"], z_loss=Z_LOSS, fused_loss=case["loss"] == "fused"
    )
    trainer = Trainer.create(OptimizerConfig(), fast, steps=1, config=config)
    results = (*step_results(trainer, fast, batch, key), logits_of(fast, batch, case["cache"]))
    trained = results[1]
    assert {leaf.dtype for leaf in jax.tree.leaves(trained)} == {jnp.dtype("float32")}

    def plainly(model: ed.Decoder) -> tuple:
        sums, gradient, logits = plain_results(model, batch, key, case["cache"] != "none")
        return sums, {name: gradient[name] for name in trained}, logits

    def compare(exact: tuple, rounded: list[tuple], **rules: Any) -> None:
        for got, want, *lossy in zip(results, exact, *rounded, strict=True):
            if got is trained and case["dtype"] == "bfloat16" and case["mixer"] in (*RECURRENT, "differential"):
                assert all(jnp.isfinite(leaf).all() for leaf in got.values())  # the plain form's are as wrong as large
            else:
                assert_close(got, want, rounded=lossy, **rules)

    def roundings(model: ed.Decoder, size: float, seeds: Iterable[int]) -> list[tuple]:
        return [plainly(_jittered(model, size, jax.random.key(seed))) for seed in seeds]

    exact = plainly(plain)
    if case["dtype"] == "bfloat16":
        # Rounding may choose another expert for a token or two, and models without norms before their layers blow it
        # up: the root mean square counts, and what the plain form itself loses in bfloat16.
        coarse = plain.replace(precision=ed.Precision(compute="bfloat16"))
        rounded = [plainly(coarse), *roundings(coarse, 2**-9, (1, 2))]
        return compare(exact, rounded, units=12, dtype="bfloat16", measure=root_mean_square)
    few = roundings(plain, unit("float32"), range(2))
    try:
        compare(exact, few, units=512)
    except AssertionError:
        compare(exact, few + roundings(plain, unit("float32"), range(2, 8)), units=512)
