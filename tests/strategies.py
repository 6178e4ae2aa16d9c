"""Random decoders for the laws: lists of blocks over all options, small enough to compile in a second."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from eqx_decoders.block import BlockConfig
from eqx_decoders.create import abstract
from eqx_decoders.decoder import Decoder, DecoderConfig
from eqx_decoders.layers.attention import AttentionConfig, QKNorm
from eqx_decoders.layers.embedding import LearnedPositions, SinusoidalPositions
from eqx_decoders.layers.experts import ExpertsConfig
from eqx_decoders.layers.latent import LatentAttentionConfig
from eqx_decoders.layers.learned_init import LearnedInitConfig
from eqx_decoders.layers.mask import Bidirectional, Causal, Chunked, SlidingWindow
from eqx_decoders.layers.mlp import ACTIVATIONS, LinearConfig, MLPConfig
from eqx_decoders.layers.norm import LayerNormConfig, RMSNormConfig
from eqx_decoders.layers.rope import LinearRope, Llama3Rope, Rope, YarnRope
from eqx_decoders.layers.router import RouterConfig


VOCAB, EMBED, HEAD_DIM = 32, 16, 8

norms = st.sampled_from(
    [
        RMSNormConfig(),
        RMSNormConfig(offset=1.0, eps=1e-5),
        RMSNormConfig(scale=False),
        LayerNormConfig(),
        LayerNormConfig(bias=False, offset=1.0),
    ]
)
some_norm = st.none() | norms
ropes = st.sampled_from(
    [
        None,
        Rope(),
        Rope(pairing="interleaved"),
        Rope(fraction=0.5),
        LinearRope(factor=4.0),
        Llama3Rope(theta=100.0, original_length=8),
        YarnRope(theta=100.0, factor=4.0, original_length=8),
        YarnRope(
            theta=100.0, factor=4.0, original_length=8, truncate=False, attention_factor=1.1, pairing="interleaved"
        ),
    ]
)
causal_masks = st.sampled_from([Causal(), SlidingWindow(3), SlidingWindow(5), Chunked(4)])
masks = causal_masks | st.just(Bidirectional())
qk_norms = st.none() | st.builds(
    QKNorm, norm=norms, over=st.sampled_from(["head", "heads"]), when=st.sampled_from(["before_rope", "after_rope"])
)


SIGMOID = dict(score="sigmoid", order="score_first", renormalize=True, scaling_factor=2.5)
ROUTERS = [
    RouterConfig(),
    RouterConfig(bias=True),
    RouterConfig(order="score_first"),
    RouterConfig(order="score_first", renormalize=True, per_expert_scale=True),
    RouterConfig(order="score_first", num_groups=2, groups_per_token=1, scaling_factor=4.0),
    RouterConfig(selection_bias=True, num_groups=2, groups_per_token=1, group_score="top2_sum", **SIGMOID),
    RouterConfig(score="sigmoid", input_scaling=True),
    RouterConfig(score="sqrt_softplus", order="score_first", renormalize=True, selection_bias=True),
]


@st.composite
def attentions(draw, mask):
    """Any attention: heads divisible by two, so that meshes with two tensor parts fit."""
    fused = draw(st.booleans())
    return AttentionConfig(
        num_heads=4,
        num_kv_heads=draw(st.sampled_from([2, 4])),
        head_dim=HEAD_DIM,
        mask=draw(mask),
        rope=draw(ropes),
        query_scale=draw(st.sampled_from([None, 0.2])),
        soft_cap=draw(st.sampled_from([None, 2.0])),
        sinks=draw(st.booleans()),
        qk_norm=draw(qk_norms),
        qkv_bias=draw(st.booleans()),
        out_bias=draw(st.booleans()),
        fused_qkv=fused,
        shared_kv=draw(st.booleans()) and not fused,
        output_gate=draw(st.booleans()),
    )


@st.composite
def latents(draw, mask):
    """Any latent attention: ranks that eight devices can split."""
    return LatentAttentionConfig(
        num_heads=4,
        q_rank=draw(st.sampled_from([None, 8])),
        kv_rank=8,
        nope_dim=6,
        rope_dim=8,
        value_dim=5,
        mask=draw(mask),
        rope=draw(ropes.filter(lambda rope: rope is not None)),
        query_scale=draw(st.sampled_from([None, 0.2])),
        norm=draw(norms),
        bias=draw(st.booleans()),
    )


@st.composite
def mixers(draw, mask):
    """Any attention, now and then with kernels learned from a teacher's, or latent attention."""
    if draw(st.sampled_from(["attention"] * 5 + ["latent"])) == "latent":
        return draw(latents(mask))
    attention = draw(attentions(mask))
    if attention.fused_qkv or attention.shared_kv or not draw(st.booleans()):
        return attention
    teacher = dict(teacher_heads=6, teacher_kv_heads=2, teacher_head_dim=4)
    return LearnedInitConfig(attention=attention, general=draw(st.booleans()), **teacher)


@st.composite
def experts(draw, dropout=0.0):
    """Any experts: four of them, so that eight devices can split them, and a capacity that nothing exceeds."""
    router = draw(st.sampled_from(ROUTERS))
    shared = MLPConfig(mlp_dim=8, dropout=dropout) if draw(st.booleans()) else None
    return ExpertsConfig(
        num_experts=4,
        num_experts_per_token=draw(st.sampled_from([1, 2])),
        mlp_dim=8,
        router=router,
        activation=draw(st.sampled_from(["silu", "quick_gelu"])),
        up_offset=draw(st.sampled_from([0.0, 1.0])),
        limit=draw(st.sampled_from([None, 0.5])),
        bias=draw(st.booleans()),
        shared=shared,
        shared_gate=shared is not None and draw(st.booleans()),
        capacity_factor=draw(st.sampled_from([None, None, 4.0])),
    )


@st.composite
def mlps(draw, dropout=0.0):
    kind = draw(st.sampled_from(["experts"] * 3 + ["mlp"] * 4 + ["linear"]))
    if kind == "linear":
        return LinearConfig()
    if kind == "experts":
        return draw(experts(dropout))
    gated = draw(st.booleans())
    return MLPConfig(
        mlp_dim=24,
        activation=draw(st.sampled_from(sorted(ACTIVATIONS))),
        gated=gated,
        bias=draw(st.booleans()),
        fused=gated and draw(st.booleans()),
        dropout=dropout,
    )


@st.composite
def blocks(draw, mask=masks, dropout=0.0):
    part = draw(st.sampled_from(["both", "both", "both", "mixer", "mlp"]))
    mixer = draw(mixers(mask)) if part != "mlp" else None
    mlp = draw(mlps(dropout)) if part != "mixer" else None
    # not "plain": without a residual stream a few layers blow rounding up
    wiring = draw(st.sampled_from(["sequential", "parallel"]))

    def around(layer, normed=False):
        """A norm before the layer, after it, or both: a few gated layers without any overflow."""
        post = draw(some_norm) if layer else None
        return (draw(some_norm if post or normed else norms) if layer else None), post

    pre_mixer, post_mixer = around(mixer)
    pre_mlp, post_mlp = around(mlp, normed=wiring == "parallel" and pre_mixer is not None)
    return BlockConfig(
        mixer=mixer,
        mlp=mlp,
        pre_mixer_norm=pre_mixer,
        post_mixer_norm=post_mixer,
        pre_mlp_norm=pre_mlp,
        post_mlp_norm=post_mlp,
        wiring=wiring,
        dropout=dropout,
    )


@st.composite
def decoders(draw, mask=masks, dropout=0.0):
    """A decoder of two to six blocks of one to three kinds, with repetitions."""
    kinds = draw(st.lists(blocks(mask, dropout), min_size=1, max_size=2))
    picks = draw(st.lists(st.sampled_from(range(len(kinds))), min_size=2, max_size=6))
    return DecoderConfig(
        vocab_size=VOCAB,
        embed_dim=EMBED,
        blocks=tuple(kinds[pick] for pick in picks),
        final_norm=draw(some_norm),
        tied=draw(st.booleans()),
        embedding_scale=draw(st.sampled_from([1.0, 4.0])),
        positions=draw(st.sampled_from([None, LearnedPositions(max_positions=64), SinusoidalPositions()])),
        logit_soft_cap=draw(st.sampled_from([None, 3.0])),
        dropout=dropout,
    )


def rich_decoder(layers: int = 4, **changes) -> DecoderConfig:
    """A fixed decoder with a pattern, for laws that are about everything but the layers."""
    norm = RMSNormConfig()
    local = BlockConfig(
        mixer=AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=HEAD_DIM, mask=SlidingWindow(5), soft_cap=5.0),
        mlp=MLPConfig(mlp_dim=24),
        pre_mixer_norm=norm,
        pre_mlp_norm=norm,
        post_mlp_norm=norm,
    )
    full = BlockConfig(
        mixer=AttentionConfig(
            num_heads=4, num_kv_heads=2, head_dim=HEAD_DIM, fused_qkv=True, sinks=True, qkv_bias=True, qk_norm=QKNorm()
        ),
        mlp=MLPConfig(mlp_dim=24, fused=True, bias=True, activation="gelu_tanh"),
        pre_mixer_norm=norm,
        pre_mlp_norm=norm,
    )
    config = DecoderConfig(vocab_size=VOCAB, embed_dim=EMBED, blocks=((local, full) * layers)[:layers], final_norm=norm)
    return dataclasses.replace(config, **changes)


def filled(config: DecoderConfig, seed: int = 0, **execution) -> Decoder:
    """A decoder with every weight drawn by NumPy: nothing to compile, and no zero bias, sink or unit scale that could
    hide a mistake."""
    generator = np.random.default_rng(seed)

    def draw(leaf):
        # five dimensions has only a map of heads and features together, which contracts the first two
        fan = leaf.shape[1] * leaf.shape[2] if leaf.ndim == 5 else leaf.shape[-2] if leaf.ndim > 2 else 4
        return jnp.asarray(generator.normal(0.2 if leaf.ndim < 2 else 0.0, fan**-0.5, leaf.shape), leaf.dtype)

    shapes, static = eqx.partition(abstract(config), lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))
    return eqx.combine(jax.tree.map(draw, shapes), static).replace(**execution)


def some_tokens(rows: int, length: int, seed: int = 3) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).integers(0, VOCAB, (rows, length)), jnp.int32)


def packed(rows: int = 4, length: int = 13) -> tuple[jax.Array, jax.Array]:
    """Tokens and segment ids: several documents per row, of one token too, and padding at the end."""
    cuts = [(5, 1, 4), (13,), (1, 1, 9), (3, 10), (6, 6, 1), (2, 2, 2, 2), (12,), (1,)]
    tokens = some_tokens(rows, length)
    segments = np.zeros((rows, length), np.int32)
    for row in range(rows):
        ids = np.repeat(np.arange(len(cuts[row % 8])) + 1, cuts[row % 8])[:length]
        segments[row, : len(ids)] = ids
    return tokens, jnp.asarray(segments)


def loss(model, tokens, segments, key):
    """A loss that weighs every logit differently, and the logits."""
    out = model(tokens, segment_ids=segments, key=key)
    weights = jnp.sin(jnp.arange(out.logits.size, dtype=jnp.float32)).reshape(out.logits.shape)
    return jnp.mean(weights * out.logits), out.logits


@eqx.filter_jit
def run(model, tokens, segments, key=None):
    (_, logits), gradient = eqx.filter_value_and_grad(loss, has_aux=True)(model, tokens, segments, key)
    return logits, gradient


@eqx.filter_jit
def extend(model, tokens, cache, positions=None):
    out = model(tokens, positions=positions, cache=cache)
    return out.logits, out.cache
