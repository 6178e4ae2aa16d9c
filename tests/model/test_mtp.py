"""Multi-token prediction: what the depths see, what they are trained on, and greedy decoding with their guesses."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_decoders as ed
from eqx_decoders.blocks.block import BlockConfig
from eqx_decoders.blocks.residual.hyper_connections import HyperConnections
from eqx_decoders.data.batch import Batch
from eqx_decoders.families.qwen.gated_streams import GatedStreams
from eqx_decoders.inference import generation
from eqx_decoders.layers.attention.attention import AttentionConfig
from eqx_decoders.layers.attention.block_indexer import PooledIndexerConfig
from eqx_decoders.layers.attention.mla import LatentAttentionConfig
from eqx_decoders.layers.embedding.embedding import LearnedPositions
from eqx_decoders.layers.mask import SlidingWindow
from eqx_decoders.layers.mlp import MLPConfig
from eqx_decoders.layers.moe.experts import ExpertsConfig
from eqx_decoders.layers.moe.router import RouterConfig
from eqx_decoders.layers.norm import RMSNormConfig
from eqx_decoders.model.init import with_mtp
from eqx_decoders.model.mtp import same_document
from eqx_decoders.training.evaluation import evaluate
from eqx_decoders.training.optimizer.optimizer import OptimizerConfig
from eqx_decoders.training.step.loss import mtp_targets, next_token_loss, next_tokens
from eqx_decoders.training.step.step import Trainer
from eqx_decoders.training.step.step_config import StepConfig
from tests.compare import assert_allclose, assert_array_equal
from tests.errors import refused
from tests.models import filled, packed


NORM = RMSNormConfig()
ATTENTION = AttentionConfig(num_heads=2, num_kv_heads=2, head_dim=8)
BLOCK = BlockConfig(mixer=ATTENTION, mlp=MLPConfig(mlp_dim=16), pre_mixer_norm=NORM, pre_mlp_norm=NORM)
MIXERLESS = dataclasses.replace(BLOCK, mixer=None, pre_mixer_norm=None)
ROUTER = RouterConfig(
    score="sigmoid", order="score_first", renormalize=True, selection_bias=True, bias_update_rate=0.1, balance_loss=0.5
)
PLACES = LearnedPositions(max_positions=16)
OWN = ("normed_stream", "normed_depths", "joint_norm", "model_norm", "loss_weight")
# depths of such a model read all of its streams
STREAMS = dataclasses.replace(BLOCK, residual=HyperConnections(streams=2, iterations=2, weighted_sum=True))
BLOCKS_OF_KEYS = PooledIndexerConfig(size=2, top_k=2, num_heads=2, head_dim=8)
GATED = dataclasses.replace(
    BLOCK,
    mixer=dataclasses.replace(ATTENTION, selection=BLOCKS_OF_KEYS),
    residual=GatedStreams(streams=2, rank=3),
    pre_mixer_norm=None,
    pre_mlp_norm=None,
)
EXPERTS = ExpertsConfig(num_experts=4, num_experts_per_token=2, mlp_dim=8, router=ROUTER)


def small(depths: int, *, block=BLOCK, **changes):
    """A decoder with so many depths; `changes` are of the decoder's configuration, or of its `MTPConfig`."""
    own = {name: changes.pop(name) for name in OWN if name in changes}
    parts: Any = dict(vocab_size=32, embed_dim=16, blocks=(block,), final_norm=NORM) | changes
    config = with_mtp(ed.DecoderConfig(**parts), depths)
    return dataclasses.replace(config, mtp=dataclasses.replace(config.mtp, **own))


def batch_of(**parts) -> Batch:
    tokens, segments = packed(4, 13)
    return Batch(**{"tokens": tokens, "segment_ids": segments, **parts})


def documents(segments):
    """Row, begin and end of each document."""
    for row, ids in enumerate(np.asarray(segments)):
        for number in sorted(set(ids.tolist()) - {0}):
            where = np.flatnonzero(ids == number)
            yield row, int(where[0]), int(where[-1]) + 1


# --- what a depth sees ------------------------------------------------------------------------------------------------


@eqx.filter_jit
def run_ahead(model, tokens, segments):
    ahead = model.predict_mtp(model(tokens, segment_ids=segments).hidden, tokens, None, segments)
    return ahead, [model.logits(x, depth=depth) for depth, x in enumerate(ahead.hidden, 1)]


@eqx.filter_jit
def formula(model, tokens, count):
    """The streams and logits of all depths for one document of `count` tokens, alone in a row, by the formula."""
    index, config = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None], model.config.mtp
    stream = model(tokens, segment_ids=(index < count).astype(jnp.int32)).hidden
    stream, found = model.final_norm(stream) if config.normed_stream else stream, []
    for depth, own in enumerate(model.mtp.unstacked(), 1):
        embedded = model.embed(jnp.roll(tokens, -depth, axis=1), ed.ForwardContext(positions=index + depth))
        embedded, here = own.embed_norm(embedded), jnp.where(index < count - depth, index, -1)
        streams = jnp.split(stream, stream.shape[-1] // 16, axis=-1)  # one, or all of them
        x = [embedded @ own.embed_kernel + own.stream_norm(each) @ own.stream_kernel for each in streams]
        out = own.block(jnp.stack(x, axis=2) if config.all_streams else x[0], ed.ForwardContext(positions=here))[0]
        summed = own.streams.reduce(out, ed.ForwardContext(positions=here)) if config.all_streams else out
        found.append((out.reshape(stream.shape), own.final_norm(summed) @ model.head.kernel))
        stream = own.final_norm(out) if config.normed_depths else found[-1][0]
    return found


NORMED: Any = dict(normed_stream=True, normed_depths=True)
LIKE_QWEN: Any = dict(block=GATED, final_norm=None, joint_norm=True, model_norm=True)


@pytest.mark.slow(fast=("normed",))
@pytest.mark.parametrize(
    "changes",
    [{}, NORMED, dict(block=STREAMS)],
    ids=["as they are", "normed", "all streams"],
)
def test_depths_are_the_formula_and_know_their_own_document_only(changes):
    """In a packed row as in the document alone: norms, projection and block of h_{k-1}[t] and token t + k."""
    model, batch = filled(small(2, positions=PLACES, **changes)), batch_of()
    ahead = run_ahead(model, batch.tokens, batch.segment_ids)
    tokens, reals = np.asarray(batch.tokens), np.zeros((2, *batch.tokens.shape), bool)
    for row, begin, end in documents(batch.segment_ids):
        alone = np.zeros((1, tokens.shape[1]), np.int32)
        alone[0, : end - begin] = tokens[row, begin:end]
        for depth, wanted in enumerate(formula(model, alone, jnp.int32(end - begin)), 1):
            count = max(end - begin - depth, 0)
            reals[depth - 1, row, begin : begin + count] = True
            if count == 0:
                continue
            for got, want in zip((ahead[0].hidden[depth - 1], ahead[1][depth - 1]), wanted, strict=True):
                assert_allclose(got[row, begin : begin + count], want[0, :count], rtol=2e-5, atol=2e-5)
    assert_array_equal(np.stack(ahead[0].real), reals)


@pytest.mark.slow(fast=("True-1",))
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("masked", [False, True])
def test_targets_never_cross_a_document(depth, masked):
    """Against a loop; also where the ids of documents repeat further on, and where only positions mark padding."""
    mask = np.random.default_rng(0).random((4, 13)) < 0.7 if masked else None
    segments = None if masked else batch_of().segment_ids
    positions = np.where(np.arange(13) < np.array([[13], [9], [2], [1]]), np.arange(13), -1)
    positions = jnp.asarray(positions, jnp.int32) if masked else None
    batch = batch_of(loss_mask=mask, segment_ids=segments, positions=positions)
    targets, weights = mtp_targets(batch, depth)
    for row in range(4):
        for here in range(13):
            there = here + depth + 1
            want = there < 13
            if want and masked:
                want = bool(mask[row, there]) and int(positions[row, there]) >= 0
            if want and not masked:
                want = len(set(np.asarray(segments)[row, here : there + 1].tolist())) == 1 and segments[row, here] != 0
            assert float(weights[row, here]) == float(want)
            assert int(targets[row, here]) == (int(batch.tokens[row, there]) if want else 0)


# --- the loss ---------------------------------------------------------------------------------------------------------


def plain_loss(model, batch, weight):
    """Main loss plus `weight` times the mean over all depths' targets, with all logits at once."""

    def nll(logits, targets, weights):
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits, axis=-1), targets[..., None], axis=-1)[..., 0]
        return -jnp.sum(weights * chosen), jnp.sum(weights)

    out = model(batch.tokens, batch.positions, batch.segment_ids)
    main, count = nll(out.logits, *next_tokens(batch))
    ahead = model.predict_mtp(out.hidden, batch.tokens, batch.positions, batch.segment_ids)
    parts = [nll(model.logits(x, depth=depth), *mtp_targets(batch, depth)) for depth, x in enumerate(ahead.hidden, 1)]
    return main / count + weight * sum(part[0] for part in parts) / sum(part[1] for part in parts)


@eqx.filter_jit
def loss_and_gradient(model, batch, fused=True):
    return eqx.filter_value_and_grad(lambda m: next_token_loss(m, batch, fused=fused)[0])(model)


@eqx.filter_jit
def loss_of(model, batch):
    return next_token_loss(model, batch)


@pytest.mark.slow(fast=("no mixer",))
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(dict(block=MIXERLESS, tied=True), id="no mixer"),
        pytest.param(dict(), id="own head"),
        pytest.param(dict(block=STREAMS), id="all streams"),
        pytest.param(dict(tied=True, head_bias=True, logit_soft_cap=3.0, normed_stream=True), id="tied"),
    ],
)
def test_loss_and_gradient_match_the_plain_formula(changes):
    model, batch = filled(small(2, loss_weight=0.3, **changes)), batch_of()
    want, wanted = eqx.filter_jit(eqx.filter_value_and_grad(plain_loss))(model, batch, 0.3)
    for fused in (True,) if changes else (True, False):
        got, gradient = loss_and_gradient(model, batch, fused)
        assert float(got) == pytest.approx(float(want), rel=1e-5)
        for one, other in zip(jax.tree.leaves(gradient), jax.tree.leaves(wanted), strict=True):
            assert_allclose(one, other, rtol=1e-4, atol=1e-5)
            assert float(jnp.abs(other).max()) > 0


@pytest.mark.slow
def test_weight_zero_and_rows_without_targets():
    model, batch = filled(small(1, loss_weight=0.0)), batch_of()
    bare = model.without_mtp()
    loss, metrics = loss_of(model, batch)
    assert metrics.mtp is None and float(loss) == float(loss_of(bare, batch)[0])
    lonely = batch_of(segment_ids=jnp.arange(1, 14, dtype=jnp.int32)[None] + jnp.zeros((4, 1), jnp.int32))
    loss, metrics = loss_of(filled(small(2)), lonely)
    assert float(loss) == 0.0 and np.asarray(metrics.mtp.tokens).tolist() == [0.0, 0.0]
    short = Batch(tokens=batch.tokens[:, :1])
    assert float(loss_of(filled(small(3)), short)[0]) == 0.0


def test_logits_do_not_depend_on_the_depths():
    model, tokens = filled(small(2)), batch_of().tokens
    run = eqx.filter_jit(lambda model, tokens: model(tokens).logits)
    assert_array_equal(run(model, tokens), run(model.without_mtp(), tokens))
    assert model.without_mtp().config.mtp is None
    with refused(ed.ConfigError, "predict_mtp"):
        model.without_mtp().predict_mtp(jnp.zeros((4, 13, 16)), tokens)
    with refused(ed.ConfigError, "mtp_input"):
        model.without_mtp().mtp_input(jnp.zeros((4, 13, 16)))


@pytest.fixture(scope="module")
def expert_model():
    """A model whose last layer and depths have experts."""
    return filled(small(2, block=dataclasses.replace(MIXERLESS, mlp=EXPERTS), loss_weight=0.5))


@pytest.fixture(scope="module")
def expert_step(expert_model):
    """The state and the metrics after a step."""
    return step_of(expert_model, 1)


def step_of(model, microbatches):
    optimizer = OptimizerConfig(learning_rate=1e-2, warmup_steps=0, weight_decay=0.1)
    config = StepConfig(gradient_accumulation_steps=microbatches)
    trainer = Trainer.create(optimizer, model, steps=3, config=config)
    return trainer.step(trainer.init(jax.tree.map(jnp.copy, model), key=jax.random.key(0)), batch_of())


def test_experts_of_the_depths_are_counted_and_balanced(expert_model, expert_step):
    """Their rows of the statistics come last, and without tokens whose later one is of another document."""
    (state, metrics), batch = expert_step, batch_of()
    real = run_ahead(expert_model, batch.tokens, batch.segment_ids)[0].real
    want = [int(jnp.sum(batch.segment_ids != 0)), *(int(jnp.sum(each)) for each in real)]
    assert np.asarray(metrics.stats.routing.tokens).tolist() == want
    old, new = (m.mtp.depth.block.mlp.router.selection_bias for m in (expert_model, state.model))
    counts = np.asarray(metrics.stats.routing.counts)[1:]
    assert_allclose(new - old, 0.1 * np.sign(counts.mean(axis=1, keepdims=True) - counts), atol=1e-6)


@pytest.mark.slow
def test_microbatches_add_up_with_depths_and_experts(expert_model, expert_step):
    (whole, one), (parts, two) = expert_step, step_of(expert_model, 2)
    assert float(one.loss) == pytest.approx(float(two.loss), rel=1e-5)
    for a, b in zip(jax.tree.leaves(whole.model), jax.tree.leaves(parts.model), strict=True):
        assert_allclose(a, b, rtol=1e-4, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh, block",
    [
        (dict(fsdp=2, tensor=2, data=2), BLOCK),
        (dict(fsdp=4, context=2), BLOCK),
        (dict(fsdp=2, tensor=2, context=2), STREAMS),
    ],
    ids=["fsdp and tensor", "context", "all streams"],
)
def test_loss_and_gradient_on_a_mesh_match_one_device(mesh, block):
    model, batch = filled(small(2, block=block)), batch_of(tokens=jnp.tile(packed(4, 12)[0], (2, 1)), segment_ids=None)
    want, wanted = loss_and_gradient(model, batch)
    got, gradient = loss_and_gradient(model.place(ed.Layout.create(**mesh)), batch)
    assert float(got) == pytest.approx(float(want), rel=1e-5)
    for one, other in zip(jax.tree.leaves(gradient), jax.tree.leaves(wanted), strict=True):
        assert_allclose(jax.device_get(one), other, rtol=1e-4, atol=1e-5)


def test_evaluation_tells_how_many_guesses_the_head_confirms():
    model, batch = filled(small(2)), batch_of()
    result = evaluate(model, [jax.tree.map(np.asarray, batch)] * 2, 4)
    _, guesses = run_ahead(model, batch.tokens, batch.segment_ids)
    out = eqx.filter_jit(model)(batch.tokens, segment_ids=batch.segment_ids)
    said = np.asarray(jnp.argmax(out.logits, axis=-1))
    for depth, x in enumerate(guesses, 1):
        guess = np.asarray(jnp.argmax(x, axis=-1))
        weights = np.asarray(mtp_targets(batch, depth)[1])
        right = [guess[r, t] == said[r, t + depth] for r, t in np.argwhere(weights > 0)]
        assert result.acceptance[depth - 1] == pytest.approx(np.mean(right))


# --- decoding with guesses --------------------------------------------------------------------------------------------


LATENT = LatentAttentionConfig(
    num_heads=2, q_rank=None, kv_rank=8, nope_dim=4, rope_dim=4, value_dim=4, rope=ed.layers.Rope()
)
WINDOW = dataclasses.replace(BLOCK, mixer=dataclasses.replace(ATTENTION, mask=SlidingWindow(3)))
SPARSE = dataclasses.replace(BLOCK, mixer=LATENT, mlp=EXPERTS)
# Configurations, and seeds with which some guesses are right and some wrong.
SPECULATIVE = {
    "one depth": (small(1, vocab_size=5), 5),
    "two depths, tied": (small(2, vocab_size=4, tied=True), 3),
    "three depths, normed": (small(3, vocab_size=3, **NORMED), 1),
    "all streams": (small(2, vocab_size=3, block=STREAMS), 1),
    "gated streams, one norm of all": (small(2, vocab_size=3, **LIKE_QWEN), 2),
    "window": (small(2, vocab_size=3, block=WINDOW), 12),
    "latent attention and experts": (small(2, vocab_size=3, block=SPARSE), 1),
    "learned positions": (small(2, vocab_size=3, positions=LearnedPositions(max_positions=64)), 2),
    "no mixer": (small(2, vocab_size=4, block=MIXERLESS), 3),
}  # fmt: skip
RARE = [
    pytest.param(name, marks=pytest.mark.slow)
    for name in ("three depths, normed", "all streams", "gated streams, one norm of all")
]
NEW, LENGTHS = 14, [6, 1, 2, 4, 3]


def prompts(vocab: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(1).integers(0, vocab, (len(LENGTHS), max(LENGTHS))), jnp.int32)


def speculated(model, prompt, lengths, new, depths, stops=(), pad=0):
    """The tokens of `generate`, and the steps of each row; more room than is asked for stays padding."""
    options: Any = dict(prompt_lengths=lengths, stop_ids=stops, num_draft_tokens=depths, pad_id=pad)
    request = generation._Request.create("generate", model, prompt, max_new_tokens=new, **options)
    tokens, steps = final_state(model, request)
    assert tokens.shape[1] > new and (np.asarray(tokens)[:, new:] == pad).all()
    return tokens[:, :new], steps


@eqx.filter_jit
def final_state(model, request):
    """The loop of `generate`, with the number of steps of each row."""

    def step(carry):
        state, steps = carry
        return generation._decode(model, request.rules, state), steps + (~state.done).astype(jnp.int32)

    start = generation._prefill(model, request)
    state, steps = jax.lax.while_loop(lambda carry: ~jnp.all(carry[0].done), step, (start, jnp.zeros_like(start.count)))
    return jax.tree.map(model.execution.layout.replicate, (state.tokens, steps))


@pytest.mark.slow(fast=("no mixer",))
@pytest.mark.parametrize("name", SPECULATIVE)
def test_guessing_ahead_gives_the_tokens_of_plain_greedy_decoding(name):
    """For prompts of all lengths, some shorter than the depths, with a stop in the midst of what is accepted."""
    config, seed = SPECULATIVE[name]
    model, prompt, lengths = filled(config, seed), prompts(config.vocab_size), jnp.asarray(LENGTHS)
    plain = np.array(ed.generate(model, prompt, max_new_tokens=NEW, prompt_lengths=lengths))
    stop = max(range(config.vocab_size), key=lambda token: max((row == token).argmax() for row in plain))
    for row in plain:
        row[np.flatnonzero(np.cumsum(row == stop))[1:]] = 9
    assert (plain == 9).any()
    tokens, steps = speculated(model, prompt, lengths, NEW, config.mtp.num_depths, (stop,), 9)
    assert_array_equal(tokens, plain)
    needed = (plain != 9).sum(axis=1) - 1  # of plain decoding, after the first token
    assert 0 < np.sum(steps) < needed.sum()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["window", *RARE])
def test_guesses_with_caches_match_the_whole_text(name):
    """Steps are counted as by a loop without any cache, which reads everything anew."""
    config, seed = SPECULATIVE[name]
    model, prompt, depths = filled(config, seed), np.asarray(prompts(config.vocab_size)), config.mtp.num_depths
    tokens, counted = speculated(model, jnp.asarray(prompt), jnp.asarray(LENGTHS), NEW, depths)
    width = max(LENGTHS) + NEW + 2 * depths

    @eqx.filter_jit
    def read(model, tokens, count):
        """What the head and each depth say at every token of a text."""
        segments = (jnp.arange(width) < count).astype(jnp.int32)[None]
        out = model(tokens, segment_ids=segments)
        ahead = model.predict_mtp(out.hidden, tokens, None, segments)
        said = [out.logits, *(model.logits(x, depth=depth) for depth, x in enumerate(ahead.hidden, 1))]
        return [jnp.argmax(each, axis=-1)[0] for each in said]

    def said(text):
        padded = jnp.asarray([text + [0] * (width - len(text))], jnp.int32)
        return [np.asarray(each) for each in read(model, padded, jnp.int32(len(text)))]

    for row, length in enumerate(LENGTHS):
        text = prompt[row, :length].tolist()
        text.append(int(said(text)[0][-1 + len(text)]))
        steps = 0
        while len(text) < length + NEW:
            guessed = list(text)
            for depth in range(1, depths + 1):
                guessed.append(int(said(guessed)[depth][len(text) - 2]))
            heads, right = said(guessed)[0], 0
            while right < depths and guessed[len(text) + right] == int(heads[len(text) - 1 + right]):
                right += 1
            text = [*guessed[: len(text) + right], int(heads[len(text) - 1 + right])]
            steps += 1
        assert int(counted[row]) == steps
        assert np.asarray(tokens[row]).tolist() == text[length : length + NEW]


@pytest.mark.slow
def test_draws_with_guesses_are_those_without():
    """The same key gives the same tokens, whatever is guessed; a steep draw makes some of the guesses right."""
    config, seed = SPECULATIVE["window"]
    model, prompt = filled(config, seed), prompts(config.vocab_size)
    options: Any = dict(max_new_tokens=NEW, sampler=ed.Sample(temperature=0.5, top_p=0.95), key=jax.random.key(2))
    plain = np.asarray(ed.generate(model, prompt, **options))
    assert_array_equal(ed.generate(model, prompt, **options, num_draft_tokens=2), plain)
    assert (plain != np.asarray(ed.generate(model, prompt, max_new_tokens=NEW))).any()
    streamed = np.stack(list(ed.stream(model, prompt, **options, num_draft_tokens=2)), axis=1)
    assert_array_equal(streamed, plain)


@pytest.mark.slow
def test_guesses_on_a_mesh_match_one_device():
    """And every device has what the host reads of them."""
    model = filled(small(2))
    placed = model.place(ed.Layout.create(data=2, fsdp=2, tensor=2))
    prompt, options = np.asarray(prompts(32))[:2, :5], dict(max_new_tokens=6, num_draft_tokens=2)
    want = np.asarray(ed.generate(model, prompt, **options))
    assert_array_equal(np.stack(list(ed.stream(placed, prompt, **options)), axis=1), want)
    lengths = jnp.asarray([5, 5])
    found = speculated(placed, prompt, lengths, 6, 2)
    assert_array_equal(found[0], want)
    assert all(leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(found))


@pytest.mark.slow
def test_guesses_are_refused_where_they_can_not_be_made():
    model, prompt = filled(small(1)), jnp.zeros((1, 2), jnp.int32)
    for options, name in (
        (dict(num_draft_tokens=2), "num_draft_tokens=2"),
        (dict(num_draft_tokens=-1), "num_draft_tokens=-1"),
        (dict(num_draft_tokens=1, sampler=ed.Sample()), "key="),
    ):
        with refused(ed.ConfigError, name):
            ed.generate(model, prompt, max_new_tokens=2, **options)
    with refused(ed.ConfigError, "num_draft_tokens=1"):
        ed.generate(model.without_mtp(), prompt, max_new_tokens=2, num_draft_tokens=1)
    want, _ = speculated(model, prompt, jnp.asarray([2]), 3, 1)
    assert_array_equal(ed.generate(model, prompt, max_new_tokens=3, num_draft_tokens=1), want)
    streamed = np.stack(list(ed.stream(model, prompt, max_new_tokens=3, num_draft_tokens=1)), axis=1)
    assert_array_equal(streamed, want)
    assert ed.generate(model, prompt, max_new_tokens=1, num_draft_tokens=1).shape == (1, 1)


@pytest.mark.parametrize("field, value", [("num_depths", 0), ("loss_weight", -0.1)])
def test_bad_configurations_are_refused(field, value):
    with refused(ed.ConfigError, f"MTPConfig.{field}={value}"):
        dataclasses.replace(small(1).mtp, **{field: value})


@pytest.mark.slow
def test_depths_are_added_to_a_model_and_leave_it_as_it_is():
    """Born where the rest lives; a model of shapes gets shapes."""
    layout = ed.Layout.create(fsdp=8)
    model = filled(small(1)).without_mtp().place(layout)
    more = ed.add_mtp(model, 2, key=jax.random.key(0))
    assert more.config == small(2) and more.without_mtp().config == model.config
    shapes = ed.add_mtp(ed.abstract(model.config, layout=layout), 2, key=jax.random.key(0)).mtp
    got, want = jax.tree.leaves(more.mtp), jax.tree.leaves(shapes)
    assert [(x.shape, x.dtype, x.sharding) for x in got] == [(x.shape, x.dtype, x.sharding) for x in want]
    assert not np.allclose(more.mtp.depth.stream_kernel[0], more.mtp.depth.stream_kernel[1])
    with refused(ed.ConfigError, "add_mtp"):
        ed.add_mtp(more, 1, key=jax.random.key(0))


@pytest.mark.slow(fast=("2-0,0,1,0,0,0",))
@pytest.mark.parametrize(("count", "want"), [(1, [0, 0, 1, 1, 0, 0]), (2, [0, 0, 1, 0, 0, 0])])
def test_padding_within_a_document_is_not_crossed(count, want):
    positions, segments = jnp.asarray([[0, -1, 1, 2, 3, 0]]), jnp.asarray([[1, 0, 1, 1, 1, 2]])
    assert same_document(positions, segments, count)[0].astype(int).tolist() == want
    alone = same_document(positions[:, :5], None, count)[0].astype(int).tolist()
    assert alone == want[:5]


def test_depths_do_not_find_experts_by_token_ids():
    """The block is refused, and those that are added are like an earlier one."""
    experts = dataclasses.replace(EXPERTS, router=RouterConfig(hashed_tokens=8))
    hashed = dataclasses.replace(BLOCK, mlp=experts)
    with refused(ed.ConfigError, "DecoderConfig.mtp.block", "token ids"):
        small(1, block=hashed)
    config = dataclasses.replace(small(1), mtp=None, blocks=(BLOCK, hashed))
    assert with_mtp(config, 1).mtp.block == BLOCK


def test_experts_of_depths_have_no_shortcut():
    experts = dataclasses.replace(EXPERTS, shared=MLPConfig(mlp_dim=8), shortcut="experts")
    blocks = (
        dataclasses.replace(BLOCK, mlp=experts),
        dataclasses.replace(MIXERLESS, shortcut_from="experts"),
    )
    config = dataclasses.replace(small(1), mtp=None, blocks=blocks)
    assert with_mtp(config, 1).mtp.block == dataclasses.replace(BLOCK, mlp=dataclasses.replace(experts, shortcut=None))


def test_a_score_head_removes_saved_weights_of_the_depths():
    model = dataclasses.replace(ed.abstract(small(1)), saved_modules=("embedding.table", "mtp.depth.embed_kernel"))
    assert ed.add_score_head(model, key=jax.random.key(0)).saved_modules == ("embedding.table",)


def test_depths_read_all_streams_only_of_residuals_that_allow_it():
    config = ed.get_config("tiny")
    mtp = ed.MTPConfig(num_depths=1, block=config.blocks[0], norm=RMSNormConfig(), all_streams=True)
    with refused(ed.ConfigError, "DecoderConfig.mtp.all_streams=True"):
        dataclasses.replace(config, mtp=mtp)
    block = dataclasses.replace(config.blocks[0], residual=HyperConnections())
    assert HyperConnections.mtp_streams
    dataclasses.replace(config, blocks=(block,), mtp=dataclasses.replace(mtp, block=block))
