"""Test Learning to Initialize: a Llama with attention weights computed from a frozen teacher."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_decoders as ed
from eqx_decoders.data.batch import Batch
from eqx_decoders.layers.attention.attention import AttentionConfig
from eqx_decoders.layers.attention.learned_init import projection_weights
from eqx_decoders.layers.mlp import MLPConfig
from eqx_decoders.layers.norm import RMSNormConfig
from eqx_decoders.sharding.axes import axes, named_leaves, path_name
from eqx_decoders.training.llama_lti import llama_lti, materialize, with_teacher
from eqx_decoders.training.lora import add_lora
from eqx_decoders.training.optimizer.optimizer import OptimizerConfig
from eqx_decoders.training.settings.lora import LoRAConfig
from eqx_decoders.training.step.step import Trainer
from tests.compare import assert_array_equal, assert_close
from tests.errors import refused
from tests.models import filled, packed, some_tokens
from tests.oracles import wide


def llama(num_heads: int, num_kv_heads: int, head_dim: int, layers: int = 2, embed_dim: int = 16, **changes):
    norm = RMSNormConfig()
    mixer = AttentionConfig(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)
    block = ed.BlockConfig(mixer=mixer, mlp=MLPConfig(mlp_dim=24), pre_mixer_norm=norm, pre_mlp_norm=norm)
    config = ed.DecoderConfig(vocab_size=32, embed_dim=embed_dim, blocks=(block,) * layers, final_norm=norm)
    return dataclasses.replace(config, **changes)


STUDENT, TEACHER = llama(4, 2, 8), llama(8, 4, 6)
SIZES = dict(teacher_heads=8, teacher_kv_heads=4, teacher_head_dim=6)
CONFIGS = {general: llama_lti(STUDENT, general=general, **SIZES) for general in (False, True)}
MESH = dict(data=2, fsdp=2, tensor=2)
run = eqx.filter_jit(lambda model, tokens, cache=None: model(tokens, cache=cache))


def mixers(model):
    return [block.mixer for segment in model.scanned_layers for block in segment.unit]


def named(model, part: str) -> dict:
    return {name: np.asarray(leaf) for name, leaf in named_leaves(model).items() if part in name}


@pytest.fixture(scope="module")
def teacher():
    return filled(TEACHER, seed=1)


def model_with_teacher(teacher, general: bool):
    return with_teacher(filled(CONFIGS[general]), teacher)


GENERAL = [pytest.param(False, id="factored"), pytest.param(True, id="general", marks=pytest.mark.slow)]


@pytest.fixture(scope="module", params=GENERAL)
def model(request, teacher):
    return model_with_teacher(teacher, request.param)


def test_llama_lti_changes_only_the_mixers_of_the_configuration():
    for config in CONFIGS.values():
        assert ed.find_repeats(config.blocks) == (((config.blocks[0],), 2),)
        assert config.blocks[0].mixer.attention == STUDENT.blocks[0].mixer
        restored = dataclasses.replace(config.blocks[0], mixer=STUDENT.blocks[0].mixer)
        assert dataclasses.replace(config, blocks=(restored,) * 2) == STUDENT
        assert hash(config) is not None


def test_the_teachers_kernels_are_copied(model, teacher):
    for learned, given in zip(mixers(model), mixers(teacher), strict=True):
        for one, other in zip(projection_weights(learned.teacher), projection_weights(given), strict=True):
            assert_array_equal(one, other)
            assert one.unsafe_buffer_pointer() != other.unsafe_buffer_pointer()


@pytest.mark.slow
def test_the_teachers_kernels_get_the_models_mesh_and_dtype(teacher):
    layout = ed.Layout.create(**MESH)
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), filled(CONFIGS[False]).place(layout))
    model = with_teacher(half, teacher)
    target = named_leaves(ed.abstract(CONFIGS[False], layout=layout))
    for name, leaf in named_leaves(model).items():
        assert leaf.sharding == target[name].sharding and leaf.dtype == jnp.bfloat16, name
    got, want = mixers(model)[0].teacher.out, mixers(teacher)[0].out
    assert_array_equal(got.astype(jnp.float32), want.astype(jnp.bfloat16).astype(jnp.float32))


@pytest.mark.slow
def test_materialized_model_is_a_llama_with_the_same_logits(model):
    plain = materialize(model)
    assert plain.config == STUDENT
    assert plain.execution == model.execution
    assert axes(plain) == axes(ed.abstract(STUDENT))
    assert jax.tree.structure(plain) == jax.tree.structure(filled(STUDENT))
    tokens = some_tokens(2, 7)
    assert_close(run(plain, tokens).logits, run(model, tokens).logits)
    maps, given = mixers(model)[0].maps, wide(mixers(model)[0].teacher.query)
    if hasattr(maps, "query"):
        query = np.einsum("lbxy,lxyuv->lbuv", given, wide(maps.query))
    else:
        query = np.einsum("lbxy,lxu,lyv->lbuv", given, wide(maps.query_heads), wide(maps.query_features))
    assert_close(mixers(plain)[0].query, query)
    assert_array_equal(named(plain, "mlp.up").popitem()[1], named(model, "mlp.up").popitem()[1])
    half = materialize(jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), model))
    assert {leaf.dtype for leaf in jax.tree.leaves(half)} == {jnp.dtype(jnp.bfloat16)}


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [MESH, dict(stage=2, tensor_sequence=2, fsdp=2)])
def test_materialized_model_is_on_the_models_mesh(model, mesh):
    layout = ed.Layout.create(**mesh)
    placed = materialize(model.place(layout))
    target = named_leaves(ed.abstract(STUDENT, layout=layout))
    for name, leaf in named_leaves(placed).items():
        assert leaf.sharding == target[name].sharding, name
    assert_close(mixers(placed)[0].query, mixers(materialize(model))[0].query)


@pytest.mark.slow
@pytest.mark.parametrize("general", GENERAL)
def test_identity_maps_reproduce_the_teacher(general):
    config = llama_lti(STUDENT, teacher_heads=4, teacher_kv_heads=2, teacher_head_dim=8, general=general)
    source, student = filled(STUDENT, seed=5), filled(config)

    def identity(leaf):
        rows = leaf.shape[1] * (leaf.shape[2] if general else 1)
        return jnp.broadcast_to(jnp.eye(rows).reshape(1, *leaf.shape[1:]), leaf.shape)

    student = eqx.tree_at(lambda m: mixers(m)[0].maps, student, jax.tree.map(identity, mixers(student)[0].maps))
    rest = named_leaves(source)
    student = jax.tree_util.tree_map_with_path(lambda path, leaf: rest.get(path_name(path), leaf), student)
    got, want = named(materialize(with_teacher(student, source)), ""), named(source, "")
    assert got.keys() == want.keys()
    for name in want:
        assert_array_equal(got[name], want[name], err_msg=name)


def weighted(model, tokens, segments):
    out = model(tokens, segment_ids=segments)
    return jnp.mean(out.logits * jnp.sin(jnp.arange(out.logits.size)).reshape(out.logits.shape)), out.logits


gradients = eqx.filter_jit(eqx.filter_value_and_grad(weighted, has_aux=True))


@pytest.mark.slow
@pytest.mark.parametrize("general", GENERAL)
def test_only_maps_have_gradients_with_and_without_a_mesh(teacher, general):
    model = model_with_teacher(teacher, general)
    tokens, segments = packed(8)
    (_, logits), gradient = gradients(model, tokens, segments)
    placed = model.place(ed.Layout.create(**MESH)).replace(remat="full")
    (_, sharded), other = gradients(placed, tokens, segments)
    assert_close(sharded, logits)
    assert len(named(gradient, ".maps.")) == (4 if general else 8)
    assert_close(other, gradient, floor=0.0)
    for name, leaf in named(gradient, "").items():
        assert np.any(leaf) != (".teacher." in name), name


@pytest.mark.slow
def test_cached_decoding_equals_the_forward_pass(teacher):
    model, tokens, pieces = model_with_teacher(teacher, False), some_tokens(2, 9), []
    cache = ed.init_cache(model.config, 2, 9, dtype=jnp.float32)
    for begin in (0, 3, 6):
        out = run(model, tokens[:, begin : begin + 3], cache)
        pieces, cache = [*pieces, out.logits], out.cache
    assert_close(jnp.concatenate(pieces, axis=1), run(model, tokens).logits)


@pytest.mark.slow
def test_training_does_not_change_the_teacher(teacher):
    """Weight decay does not change the teacher either, although its paths match the patterns."""
    model = model_with_teacher(teacher, False)
    names, start = set(named_leaves(model)), named(model, "")
    frozen = {name for name in names if ".teacher." in name}
    trainer = Trainer.create(OptimizerConfig(learning_rate=0.1, weight_decay=0.5, warmup_steps=0), model, steps=10)
    assert len(frozen) == 4 and trainer.trainable == names - frozen
    state = trainer.init(model, key=jax.random.key(0))
    tokens, segments = packed(4)
    for _ in range(2):
        state, metrics = trainer.step(state, Batch(tokens=tokens, segment_ids=segments))
    assert float(metrics.grad_norm) > 0
    for name, leaf in named(state.model, "").items():
        assert (leaf.tobytes() == start[name].tobytes()) == (name in frozen), name
    assert np.all(np.isfinite(mixers(teacher)[0].query))  # its buffers were not donated
    for pattern in ("*.teacher.*", "*.teacher.query"):
        with refused(ed.ConfigError, "OptimizerConfig.trainable", repr(pattern)):
            Trainer.create(OptimizerConfig(trainable=(pattern,)), model, steps=10)
    some = Trainer.create(OptimizerConfig(trainable=("*.mixer.*",)), model, steps=10)
    assert some.trainable == {name for name in names if ".maps." in name}


EMPTY = dataclasses.replace(STUDENT.blocks[0], mixer=None, pre_mixer_norm=None)
FUSED = dataclasses.replace(TEACHER.blocks[0], mixer=dataclasses.replace(TEACHER.blocks[0].mixer, fused_qkv=True))


@pytest.mark.slow(fast=("no-mixer",))
@pytest.mark.parametrize(
    "config, names",
    [
        pytest.param(llama(8, 4, 6, embed_dim=8), ["embed_dim=8", "16"], id="embed_dim"),
        pytest.param(llama(8, 4, 6, layers=3), ["((1, 3),)", "((1, 2),)"], id="layers"),
        pytest.param(llama(4, 4, 6), ["num_heads=4", "LearnedInitConfig.teacher_heads=8"], id="num_heads"),
        pytest.param(llama(8, 2, 6), ["num_kv_heads=2", "LearnedInitConfig.teacher_kv_heads=4"], id="num_kv_heads"),
        pytest.param(llama(8, 4, 8), ["head_dim=8", "LearnedInitConfig.teacher_head_dim=6"], id="head_dim"),
        pytest.param(llama(8, 4, 6, blocks=(FUSED, FUSED)), ["AttentionConfig", "fused_qkv=False"], id="fused_qkv"),
        pytest.param(llama(8, 4, 6, blocks=(EMPTY, EMPTY)), ["mixer=None", "AttentionConfig"], id="no-mixer"),
        pytest.param(CONFIGS[False], ["mixer=LearnedInitConfig(", "AttentionConfig"], id="learned-mixer"),
    ],
)
def test_incompatible_teachers_are_refused(config, names):
    with refused(ed.ConfigError, *names):
        with_teacher(filled(CONFIGS[False]), filled(config))


def test_plain_llama_refuses_a_teacher(teacher):
    with refused(ed.ConfigError, "with_teacher", "LearnedInitConfig", "llama_lti"):
        with_teacher(teacher, teacher)


def test_blocks_without_attention_and_mixed_blocks_are_refused():
    with refused(ed.ConfigError, "llama_lti", "mixer=None"):
        llama_lti(llama(4, 2, 8, blocks=(STUDENT.blocks[0], EMPTY)), **SIZES)
    mixed = dataclasses.replace(STUDENT, blocks=(STUDENT.blocks[0], CONFIGS[False].blocks[0]))
    with refused(ed.ConfigError, "materialize", "LearnedInitConfig", "llama_lti"):
        materialize(filled(mixed))
    apart = dataclasses.replace(STUDENT, blocks=(EMPTY, CONFIGS[False].blocks[0]))
    assert materialize(filled(apart)).config.blocks == (EMPTY, STUDENT.blocks[0])


def test_a_teacher_with_low_rank_pairs_is_refused(teacher):
    pairs = add_lora(teacher, LoRAConfig(rank=2), key=jax.random.key(0))
    with refused(ed.ConfigError, "with_teacher", "merge_lora"):
        with_teacher(filled(CONFIGS[False]), pairs)


@pytest.mark.slow
def test_materialize_keeps_low_rank_pairs_of_other_weights(teacher):
    model = model_with_teacher(teacher, False)
    with refused(ed.ConfigError, "LoRAConfig.targets", "'*.teacher.query'"):
        add_lora(model, LoRAConfig(targets=("*.teacher.query",)), key=jax.random.key(0))
    adapted = materialize(add_lora(model, LoRAConfig(rank=2, targets=("*.mlp.up",)), key=jax.random.key(0)))
    tokens = some_tokens(2, 7)
    assert named(adapted, "mlp.up.lora_a")
    assert_close(run(adapted, tokens).logits, run(materialize(model), tokens).logits)
