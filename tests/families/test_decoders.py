"""Decoders with layers that only one family has: invariants, and comparisons with NumPy."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_decoders as ed
from eqx_decoders.model.mtp_config import MTPConfig
from tests.compare import assert_array_equal, assert_close
from tests.errors import refused
from tests.families.small import DEEPSEEK_CUSTOM, GEMMA3N, GEMMA4, GEMMA4_EXPERTS, LONGCAT
from tests.laws import check_documents, check_execution, check_pieces, check_rejection, forward
from tests.models import EMBED, filled, some_tokens


# --- invariants ---

MODELS = {
    "deepseek-custom": DEEPSEEK_CUSTOM,
    "longcat-flash": LONGCAT,
    "gemma3n": GEMMA3N,
    "gemma4": GEMMA4,
    "gemma4-experts": GEMMA4_EXPERTS,
}


@pytest.fixture(scope="module", params=MODELS)
def model(request):
    return filled(MODELS[request.param])


@pytest.mark.slow
@pytest.mark.parametrize("pieces", [(1,) * 9, (6, 1, 3)], ids=["tokens", "6-1-3"])
def test_pieces_with_a_cache_equal_one_call(model, pieces):
    check_pieces(model, pieces)


@pytest.mark.slow
def test_packed_documents_equal_separate_documents(model):
    check_documents(model)


@pytest.mark.slow
def test_rejected_tokens_do_not_change_the_cache(model):
    check_rejection(model)


@pytest.mark.slow
def test_execution_options_do_not_change_the_result(model):
    check_execution(model, fsdp=2, tensor=2, data=2)


# --- DeepSeek with hyper-connections and Engram ---


def test_parameter_count_of_deepseek_custom_matches_the_formula():
    vocab, embed, heads, streams = 129_280, 1024, 16, 4
    attention = embed * 384 + 384 + 384 * heads * 48 + embed * 144 + 128 + 128 * heads * 160 + heads * 128 * embed
    attention += 384 * 16 * 64 + embed * 64 + 2 * 64 + embed * 16  # its indexer
    experts = embed * 16 + 16 + 16 * 3 * embed * 512 + 3 * embed * 512
    connection = streams * embed * (1 + 2 * streams + streams**2) + 3 + 2 * streams + streams**2
    layers = 6 * (attention + 2 * embed + 2 * connection) + 3 * embed * 2048 + 5 * experts
    vectors = 2 * 8 * 512
    engram = vectors * embed * (streams + 1) + embed * (streams + 1) + streams * embed * (3 + 4) + embed
    config = ed.get_config("deepseek-custom")
    rows = sum(sum(config.blocks[layer].pre_layers[0].layer.table_sizes) for layer in (1, 4))
    assert rows > 2 * 16 * 226_240
    assert ed.count_parameters(config) == 2 * vocab * embed + embed + layers + 2 * engram + 512 * rows


def test_json_of_deepseek_custom_gives_the_same_configuration():
    text = DEEPSEEK_CUSTOM.to_json()
    assert ed.DecoderConfig.from_json(text) == DEEPSEEK_CUSTOM
    assert len(text) < 20_000


@pytest.mark.slow
def test_dropout_of_several_streams_depends_on_the_key():
    blocks = tuple(dataclasses.replace(block, dropout=0.5) for block in DEEPSEEK_CUSTOM.blocks[:2])
    model = filled(dataclasses.replace(DEEPSEEK_CUSTOM, blocks=blocks))
    one, two = (model(some_tokens(2, 5), key=jax.random.key(seed)).hidden for seed in (0, 1))
    assert not (one == two).all()


# --- Gemma 3n and Gemma 4 ---


@pytest.mark.slow
def test_gemma3n_tokens_beyond_the_per_layer_table_use_its_first_row():
    model = filled(GEMMA3N)
    ctx, x = ed.ForwardContext(positions=jnp.zeros((1, 3), jnp.int32)), jnp.zeros((1, 3, 16))
    found = np.asarray(model.per_layer_embedding(jnp.asarray([[0, 31, 32]]), x, ctx))
    assert np.array_equal(found[:, :, 2], found[:, :, 0]) and not np.allclose(found[:, :, 1], found[:, :, 0])
    config = dataclasses.replace(model.per_layer_embedding.config, unknown_token=None)
    last = dataclasses.replace(model.per_layer_embedding, config=config)
    assert np.array_equal(last(jnp.asarray([[31, 32]]), x[:, :2], ctx)[:, :, 1], found[:, :, 1])


def test_layers_of_gemma4_with_shared_keys_have_no_cache():
    cache = ed.init_cache(GEMMA4, 1, 8)
    assert [list(layer) for segment in cache.layer_caches for layer in segment] == [["mixer"], ["mixer"], [], []]


def test_gemma4_refuses_incomplete_combinations():
    with refused(ed.ConfigError, "blocks[1].mixer.kv_shared_from='full_attention'"):
        dataclasses.replace(GEMMA4, blocks=GEMMA4.blocks[:1] + GEMMA4.blocks[3:])
    with refused(ed.ConfigError, "per_layer_embedding", "[]", "[4]"):
        dataclasses.replace(GEMMA4, per_layer_embedding=None)
    model = filled(GEMMA4)
    with refused(ed.ConfigError, "embeddings"):
        model(embeds=np.zeros((1, 3, 16), np.float32))


# --- LongCat-Flash: the output of experts is added one block later, once ---

FIRST, SECOND, *_ = LONGCAT.blocks


def with_blocks(*blocks):
    return dataclasses.replace(LONGCAT, blocks=blocks)


@pytest.mark.slow
def test_shortcut_is_added_after_the_next_block():
    """The expected stream is computed layer by layer with experts that have no shortcut."""
    model, tokens = filled(dataclasses.replace(with_blocks(FIRST, SECOND), final_norm=None)), some_tokens(2, 5)

    @eqx.filter_jit
    def by_hand(model):
        ctx = ed.ForwardContext(jnp.broadcast_to(jnp.arange(5), (2, 5)), execution=model.execution)
        first, second = (block for segment in model.scanned_layers for block in segment.unstacked())
        x = model.embedding(tokens, ctx)
        h = x + first.mixer(first.pre_mixer_norm(x), ctx)[0]
        normed = first.pre_mlp_norm(h)
        both = dataclasses.replace(first.mlp, config=dataclasses.replace(first.mlp.config, shortcut=None))
        aside = both(normed, ctx)[0] - first.mlp.shared(normed, ctx)
        h = h + first.mlp.shared(normed, ctx)
        h = h + second.mixer(second.pre_mixer_norm(h), ctx)[0]
        return h + second.mlp(second.pre_mlp_norm(h), ctx) + aside

    assert_close(model(tokens).hidden, by_hand(model), units=256)


def test_expert_outputs_must_be_used_once():
    assert with_blocks(FIRST, SECOND, FIRST, SECOND) == LONGCAT
    with refused(ed.ConfigError, "blocks[0].mlp.shortcut='experts'"):
        with_blocks(FIRST)
    with refused(ed.ConfigError, "blocks[1].mlp.shortcut='experts'"):
        with_blocks(FIRST, FIRST, SECOND)
    with refused(ed.ConfigError, "blocks[2].shortcut_from"):
        with_blocks(FIRST, SECOND, SECOND)
    with refused(ed.ConfigError, "MTPConfig.block", "shortcut"):
        MTPConfig(num_depths=1, block=FIRST, norm=LONGCAT.final_norm)
    with refused(ed.ConfigError, "ExpertsConfig.shortcut=experts"):
        dataclasses.replace(FIRST.mlp, shared=None)


@pytest.mark.slow
def test_any_order_of_blocks_runs_as_a_scan():
    """Also if a scanned segment starts with a block that adds a shortcut, or if other blocks are in between."""
    plain = dataclasses.replace(SECOND, shortcut_from=None)
    for blocks in (
        (FIRST, plain, SECOND),
        (FIRST, SECOND, plain, FIRST, SECOND),
        (plain, FIRST, *(SECOND, FIRST) * 2, SECOND),
    ):
        model, tokens = filled(with_blocks(*blocks)), some_tokens(2, 5)
        assert_close(forward(model, tokens), forward(model.replace(scan=False), tokens))


@pytest.mark.slow
def test_padding_is_not_routed_to_experts():
    """Padding is not routed to zero experts either: the result is the output of the shared MLP."""
    layer = filled(LONGCAT).scanned_layers[0].unstacked()[0].mlp
    x, ctx = jnp.ones((1, 3, EMBED)), ed.ForwardContext(jnp.asarray([[0, -1, 1]]))
    result = eqx.filter_jit(layer.branch)(x, ctx, None, None)
    assert_array_equal(result.shared[0, 1], 0.0)
    assert np.abs(result.shared[0, 0]).max() > 0.01


def initialized(config):
    """Return a new decoder. Weights of equal keys are equal, whichever layers are stacked."""
    return ed.init(config, key=jax.random.key(0))


@pytest.mark.slow
@pytest.mark.parametrize("names, make", [("ab", filled), ("abc", initialized)], ids=["ab", "abc"])
def test_block_may_read_and_write_one_shortcut_name(names, make):
    """The block adds the earlier shortcut, and not the shortcut that it makes under the same name."""

    def logits(*names):
        sent = [None if name is None else dataclasses.replace(FIRST.mlp, shortcut=name) for name in names]
        blocks = [
            dataclasses.replace(FIRST, mlp=mlp or SECOND.mlp, shortcut_from=before)
            for mlp, before in zip(sent, (None, *names), strict=False)
        ]
        return forward(make(with_blocks(*blocks)), some_tokens(1, 4))

    assert_close(logits(*"a" * len(names), None), logits(*names, None))
