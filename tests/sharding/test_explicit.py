"""Meshes of Explicit axes: the same numbers by the same programs, and types that say how arrays are split."""

import collections
import dataclasses
import re
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import eqx_decoders as ed
from eqx_decoders.context import ForwardContext
from eqx_decoders.core.sampling import Greedy
from eqx_decoders.data.batch import Batch
from eqx_decoders.data.host_rows import place
from eqx_decoders.errors import ConfigError
from eqx_decoders.io.checkpoint.checkpoints import Checkpoints
from eqx_decoders.io.huggingface.gather import _from_all_devices
from eqx_decoders.layers.moe.experts import ExpertsConfig
from eqx_decoders.layers.norm import RMSNormConfig
from eqx_decoders.model.mtp_config import MTPConfig
from eqx_decoders.numerics.low_precision import LowPrecision
from eqx_decoders.planning.traced_memory import abstract_batch
from eqx_decoders.sharding import explicit as explicit_module
from eqx_decoders.sharding.axes import output_axes
from eqx_decoders.sharding.explicit import spec_of
from eqx_decoders.training.evaluation import evaluate
from eqx_decoders.training.llama_lti import llama_lti, materialize
from eqx_decoders.training.lora import LoRAConfig, add_lora, merge_lora
from eqx_decoders.training.settings.run import TrainConfig
from eqx_decoders.training.step.loss import token_loss_sum
from tests.compare import assert_close
from tests.errors import refused
from tests.models import ROUTERS, filled, rich_decoder, some_tokens
from tests.training.step.test_step import ANY, CONFIG, first_state, same_bits, trainer_of


CUBE: Any = dict(data=2, fsdp=2, tensor=2)
DEEP = rich_decoder(4)
SPARSE = dataclasses.replace(
    CONFIG,
    blocks=(
        dataclasses.replace(
            CONFIG.blocks[0], mlp=ExpertsConfig(num_experts=4, num_experts_per_token=2, mlp_dim=24, router=ROUTERS[5])
        ),
    ),
)
FURTHER = dataclasses.replace(CONFIG, mtp=MTPConfig(num_depths=1, block=CONFIG.blocks[0], norm=RMSNormConfig()))


def both(sizes: Any, config=CONFIG, **execution):
    """The same model on a mesh of Auto axes, and on one of Explicit axes."""
    base = filled(config, **execution)
    devices = jax.devices()[: int(np.prod(list(sizes.values())))]
    return tuple(base.place(ed.Layout.create(**sizes, devices=devices, explicit=on)) for on in (False, True))


def rows_of(model) -> Batch:
    """Eight packed rows of 16 tokens on the model's mesh."""
    tokens, segments = np.asarray(some_tokens(8, 16)), np.repeat([[1] * 9 + [2] * 7], 8, axis=0).astype(np.int32)
    return place(Batch(tokens=tokens, segment_ids=segments), model.execution.layout, 8)


def specs(tree) -> list[P]:
    return [spec_of(leaf) for leaf in jax.tree.leaves(tree)]


def sent(compiled) -> collections.Counter:
    """Of each kind of collective in a program how many there are."""
    kinds = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute|collective-broadcast"
    return collections.Counter(re.findall(rf" ({kinds})(?:-start)?\(", compiled.as_text()))


@pytest.fixture(scope="module")
def models():
    return both(CUBE)


STEPS = {
    "cube": (CUBE, CONFIG, {}, {}, {}),
    "fsdp": (dict(fsdp=8), DEEP, dict(remat="full"), {}, {}),
    "context": (dict(context=4, data=2), CONFIG, {}, {}, {}),
    "ring": (dict(context=4, fsdp=2), CONFIG, dict(context_form="ring", context_order="zigzag"), {}, {}),
    "tensor_sequence": (dict(fsdp=2, tensor_sequence=4), CONFIG, {}, {}, {}),
    "experts": (dict(expert=4, fsdp=2), SPARSE, dict(layer_stats=True), {}, {}),
    "pipeline": (dict(stage=2, fsdp=4), DEEP, dict(pipeline=ed.Pipeline(microbatches=2)), {}, {}),
    "state over data": (dict(data=4, fsdp=2), CONFIG, {}, {}, dict(shard_over_data=True, ema_decay=0.5)),
    "microbatches": (dict(fsdp=4), CONFIG, {}, dict(gradient_accumulation_steps=2), {}),
    "further tokens": (dict(fsdp=4, tensor=2), FURTHER, {}, {}, {}),
    "int8": (dict(fsdp=2, tensor=2), CONFIG, dict(low_precision=LowPrecision(mode="int8")), {}, {}),
    "muon": (dict(fsdp=2, tensor=2), CONFIG, {}, {}, dict(name="muon")),
    "adafactor": (dict(fsdp=2, tensor=2), CONFIG, {}, {}, dict(name="adafactor")),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", STEPS)
def test_a_step_is_the_same_program_and_its_state_keeps_its_types(case):
    """On Auto axes XLA may choose where a new state lies; told to leave it where it was, it makes the same program."""
    sizes, config, execution, step, optimizer = STEPS[case]
    found = []
    for model in both(sizes, config, **execution):
        trainer = trainer_of(model, dataclasses.replace(ANY, **optimizer), **step)
        state, layout = first_state(trainer, model), model.execution.layout
        places = jax.tree.map(lambda leaf: leaf.sharding, state), layout.replicated()
        advance = jax.jit(trainer.advance, out_shardings=places if not layout.explicit else None)
        batch = rows_of(model)
        program = advance.lower(state, batch).compile()
        new, metrics = program(state, batch)
        found.append((sent(program), new, metrics))
        assert not layout.explicit or specs(new) == specs(state)
    assert found[0][0] == found[1][0] and found[0][0].total() > 2
    assert same_bits(found[0][1:], found[1][1:])


@pytest.mark.slow
def test_a_program_of_ones_own_is_explicit_before_and_after(models):
    """A term of the loss made of logits, and an update of one's own; also where the mesh is set."""

    def loss(model, batch):
        plain, _ = token_loss_sum(model, batch)
        logits = model(batch.tokens, segment_ids=batch.segment_ids).logits
        if model.execution.layout.explicit:
            assert spec_of(logits) == P(("data", "fsdp"), None, "tensor") and spec_of(plain) == P()
        return plain + jnp.sum(jax.nn.logsumexp(2 * logits, axis=-1) ** 2)

    def update(model, batch):
        value, gradient = jax.value_and_grad(loss)(model, batch)
        assert not model.execution.layout.explicit or specs(gradient) == specs(model)
        return value, jax.tree.map(lambda weight, slope: weight - 0.1 * slope, model, gradient)

    auto, explicit = models
    wanted = jax.jit(update)(auto, rows_of(auto))
    value, new = jax.jit(update)(explicit, rows_of(explicit))
    assert_close((value, new), wanted, units=64)
    assert specs(new) == specs(explicit) and spec_of(new.embedding.table) == P("tensor", "fsdp")
    with jax.set_mesh(explicit.execution.layout.mesh):
        assert same_bits(jax.jit(update)(explicit, rows_of(explicit)), (value, new))


@pytest.mark.slow
def test_calls_and_gradients_are_the_same(models):
    """Outside of `jax.jit`, too, where `jax.grad` needs the mesh."""
    found = []
    for model in models:
        with jax.set_mesh(model.execution.layout.mesh):
            batch = rows_of(model)
            (loss, _), gradient = eqx.filter_value_and_grad(ed.next_token_loss, has_aux=True)(model, batch)
        found.append((loss, gradient, model(batch.tokens, segment_ids=batch.segment_ids)))
    assert same_bits(*found)
    _, gradient, out = found[1]
    assert specs(gradient) == specs(models[1])
    assert spec_of(out.logits) == P(("data", "fsdp"), None, "tensor")
    assert spec_of(out.hidden) == P(("data", "fsdp"), None, None)


@pytest.mark.slow
def test_caches_keep_their_types(models):
    """What one proposes may be committed in a program of one's own, and rows of caches be emptied and copied."""
    found = []
    for model in models:
        empty = ed.init_cache(CONFIG, 8, 16, layout=model.execution.layout, dtype=jnp.float32)

        @jax.jit
        def call(model, cache, tokens):
            out = model(tokens, cache=cache)
            hidden, proposal, _ = model.forward_uncommitted(tokens[:, :2], cache=out.cache)
            cache = out.cache.commit(proposal.entries, proposal.positions)
            return cache.reset(jnp.arange(8) < 3).with_row(1, out.cache, 5), hidden, proposal

        found.append((empty, *call(model, empty, some_tokens(8, 3))))
    assert same_bits(*found)
    empty, cache, _, proposal = found[1]
    assert specs(cache) == specs(empty) and spec_of(cache.length) == P(("data", "fsdp"))
    assert spec_of(jax.tree.leaves(proposal.entries)[0]) == P(None, ("data", "fsdp"), None, "tensor", None)
    assert specs(cache.reset(jnp.arange(8) < 3)) == specs(empty)


@pytest.mark.slow
def test_what_is_made_and_generated_is_the_same():
    """Every process can read the new tokens: they are whole."""
    prompt, found = np.arange(16).reshape(8, 2), []
    for explicit in (False, True):
        layout = ed.Layout.create(**CUBE, explicit=explicit)
        model = ed.init(CONFIG, key=jax.random.key(0), layout=layout)
        found.append((model, ed.generate(model, prompt, max_new_tokens=3, sampler=Greedy())))
    assert same_bits(*found) and found[1][1].is_fully_replicated
    with jax.set_mesh(layout.mesh):
        again = ed.init(CONFIG, key=jax.random.key(0), layout=layout)
    assert same_bits(again, model) and specs(again) == specs(model)


@pytest.mark.slow
@pytest.mark.parametrize("draft", [0, 1])
def test_streams_and_drafts_are_the_same(draft):
    prompt, found = np.arange(16).reshape(8, 2), []
    for model in both(CUBE, FURTHER):
        options: Any = dict(max_new_tokens=4, num_draft_tokens=draft)
        streamed = np.stack(list(ed.stream(model, prompt, **options)), axis=1)
        assert np.array_equal(streamed, ed.generate(model, prompt, **options))
        found.append(streamed)
    assert np.array_equal(*found)


@pytest.mark.slow
def test_checkpoints_serve_both(models, tmp_path):
    _, explicit = models
    state = first_state(trainer_of(explicit), explicit)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state, data_state={}, config="", wait=True)
        for model in models:
            back, _, _ = checkpoints.restore(trainer_of(model).abstract(model, key=jax.random.key(0)))
            assert same_bits(back, state) and specs(back.model) == specs(model)


@pytest.mark.slow
def test_layers_one_by_one_and_in_pieces():
    """Also those that `stage` splits; and what processes send each other to write it."""
    auto, explicit = both(dict(stage=2, fsdp=4), DEEP)
    assert same_bits(auto.unstacked(), explicit.unstacked())
    weight = max(jax.tree.leaves(explicit), key=lambda leaf: leaf.size)
    assert specs(explicit.unstacked()[0]) == [P(*spec[1:]) for spec in specs(explicit.scanned_layers[0].unit[0])]
    whole = np.zeros(weight.shape, weight.dtype)
    for cut, piece in _from_all_devices(weight, ()):
        whole[cut] = piece
    assert np.array_equal(whole, weight)


@pytest.mark.slow
def test_evaluation_low_rank_pairs_and_maps_of_teachers_are_the_same(models):
    found = []
    for model in models:
        pairs = add_lora(model, LoRAConfig(rank=2, targets=("*.mlp.*",)), key=jax.random.key(0))
        merged = merge_lora(jax.tree.map(lambda leaf: leaf + 1, pairs))
        assert specs(merged) == specs(model)
        found.append((evaluate(model, [rows_of(model)], 8).loss, merged))
    assert found[0][0] == found[1][0] and same_bits(found[0][1], found[1][1])
    plain = ed.get_config("tiny")
    config = llama_lti(
        dataclasses.replace(plain, blocks=plain.blocks[:2]), teacher_heads=8, teacher_kv_heads=8, teacher_head_dim=16
    )
    assert same_bits(*(materialize(model) for model in both(CUBE, config)))


def test_on_auto_axes_nothing_is_added(monkeypatch):
    def never(*_):
        raise AssertionError("types are changed")

    for name in ("reshard", "use_abstract_mesh"):
        monkeypatch.setattr(explicit_module, name, never)
    layout = ed.Layout.create(**CUBE, abstract=True)
    assert layout.automatically(max) is max
    model = ed.abstract(CONFIG, layout=layout)
    trainer = trainer_of(model)
    trainer.trace(trainer.abstract(model, key=jax.random.key(0)), abstract_batch(layout, 8, 16))


def test_words_of_results():
    """Names come from annotations; what is stacked is split along its last dimensions."""
    model = filled(CONFIG)
    hidden, proposal, _ = jax.eval_shape(
        lambda: model.forward_uncommitted(some_tokens(2, 3), cache=ed.init_cache(CONFIG, 2, 8))
    )
    hint = tuple[type(hidden), type(proposal)]
    words = output_axes((hidden, proposal), hint)
    assert words["1.positions"] == ("batch", "length")
    assert words["1.entries.0.0.mixer.key"] == ("batch", "length", "kv_heads", "head_dim")
    assert "0" not in words


def test_settings_say_so():
    config = TrainConfig(axis_types="explicit", mesh=dataclasses.replace(TrainConfig().mesh, data=1, fsdp=8))
    assert config.execution().layout.explicit and not TrainConfig().execution().layout.explicit


def test_errors(models):
    _, model = models
    other = ed.Layout.create(fsdp=8, explicit=True)
    with jax.set_mesh(other.mesh), refused(ConfigError, "'fsdp': 8", "jax.set_mesh"):
        model(some_tokens(8, 3))
    with refused(ConfigError, "Offload(", "explicit=True"):
        ed.Layout.create(fsdp=8, explicit=True, offload=ed.Offload(weights=("*",)))

    def layers_alone(model):
        ctx = ForwardContext(positions=jnp.zeros((8, 3), jnp.int32), execution=model.execution)
        return model.embedding(some_tokens(8, 3), ctx)

    with refused(ConfigError, "layout.automatically"):
        jax.jit(layers_alone)(model)
    within = model.execution.layout.automatically(layers_alone, lambda x: P("data", None, None))
    assert spec_of(jax.jit(within)(model)) == P("data", None, None)
    constrain = jax.jit(lambda x: model.execution.layout.constrain(x, "batch embed"))  # a type is no hint: it changes
    assert spec_of(constrain(model.embedding.table)) == P(("data", "fsdp"), None)
