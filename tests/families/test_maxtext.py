"""GPT-3 and MaxText's blocks: parameter counts, comparison with NumPy in float64, and execution options."""

import dataclasses
import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_decoders as ed
from eqx_decoders.blocks.residual.residual import Chained
from eqx_decoders.data.batch import Batch
from eqx_decoders.families import maxtext
from eqx_decoders.families.common import DecoderSizes
from eqx_decoders.families.gpt3 import gpt3
from eqx_decoders.layers.attention.attention import AttentionConfig, QKNorm
from eqx_decoders.layers.mlp import LinearConfig, MLPConfig
from eqx_decoders.layers.moe.router import RouterConfig
from eqx_decoders.layers.norm import RMSNormConfig
from eqx_decoders.layers.rope import Rope
from eqx_decoders.sharding.axes import axes, named_leaves, product_axes
from eqx_decoders.training.lora import add_lora
from eqx_decoders.training.optimizer.optimizer import OptimizerConfig
from eqx_decoders.training.settings.lora import LoRAConfig
from eqx_decoders.training.step.step import Trainer
from tests.compare import assert_close
from tests.errors import refused
from tests.models import filled, packed, some_tokens
from tests.oracles import attention_by_hand, experts_by_hand, mlp_by_hand, norm_by_hand, wide


VOCAB, EMBED, MLP, LAYERS = 32_000, 2048, 7168, 16
ENDS = 2 * VOCAB * EMBED + EMBED  # table, head, final norm
PARAMETERS = {
    "maxtext-default": ENDS + LAYERS * (4 * EMBED * 16 * 128 + 3 * EMBED * MLP + EMBED),
    "maxtext-simple": ENDS + LAYERS * EMBED * EMBED,
    "maxtext-simple-mlp": ENDS + LAYERS * 2 * EMBED * MLP,
}
SMALL = DecoderSizes(
    vocab_size=32, embed_dim=8, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=4, mlp_dim=12, eps=1e-5
)
CUSTOM = maxtext.qwen3_custom_moe(
    DecoderSizes(vocab_size=32, embed_dim=8, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=4, mlp_dim=6),
    num_experts=4, num_experts_per_token=2, expert_dim=6, latent_dim=4, rope=Rope(theta=100.0),
)  # fmt: skip
POSITIONS, SAME_SEGMENT = np.tile(np.arange(4), (2, 1)), np.ones((2, 4), int)
TOKENS = some_tokens(2, 4)
run = eqx.filter_jit(lambda model, key=None: model(TOKENS, key=key))
step = eqx.filter_jit(lambda model, tokens, cache: model(tokens, cache=cache))


def normed(norm, x):
    return x if norm is None else np.apply_along_axis(functools.partial(norm_by_hand, norm), -1, x)


def head_by_hand(model, x):
    return normed(model.final_norm, x) @ wide(model.head.kernel)


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameter_counts_match_the_formula(name):
    assert ed.count_parameters(ed.get_config(name)) == PARAMETERS[name]


def test_default_block_is_the_sum_of_both_branches():
    model = filled(maxtext.default(SMALL))
    x = wide(model.embedding.table)[np.asarray(TOKENS)]
    for block in model.unstacked():
        n = normed(block.pre_mixer_norm, x)
        x = x + attention_by_hand(block.mixer, n, POSITIONS, SAME_SEGMENT) + mlp_by_hand(block.mlp, n)
    out = run(model)
    assert_close(out.hidden, x)
    assert_close(out.logits, head_by_hand(model, x))


@pytest.mark.slow
def test_default_block_applies_dropout_to_the_sum_of_both_branches():
    """Each feature of the sum is either dropped or doubled."""
    config = maxtext.default(dataclasses.replace(SMALL, num_layers=1), dropout=0.5)
    bare = dataclasses.replace(config.blocks[0], mlp=dataclasses.replace(config.blocks[0].mlp, dropout=0.0))
    model = filled(dataclasses.replace(config, blocks=(bare,), dropout=0.0))
    x = wide(model.embedding.table)[np.asarray(TOKENS)]
    branches = wide(run(model).hidden) - x
    change = wide(run(model, jax.random.key(1)).hidden) - x
    kept = np.abs(change - 2 * branches) < 1e-4
    gone = np.abs(change) < 1e-6
    assert np.all(kept ^ gone) and 0 < gone.mean() < 1


def test_simple_block_is_one_matrix_product():
    model = filled(maxtext.simple(SMALL))
    x = wide(model.embedding.table)[np.asarray(TOKENS)]
    for block in model.unstacked():
        x = x @ wide(block.mlp.kernel)
    out = run(model)
    assert_close(out.hidden, x)
    assert_close(out.logits, head_by_hand(model, x))


def test_simple_mlp_block_is_two_matrix_products():
    model = filled(maxtext.simple_mlp(SMALL))
    x = wide(model.embedding.table)[np.asarray(TOKENS)]
    for block in model.unstacked():
        x = x @ wide(block.mlp.up) @ wide(block.mlp.down)
    out = run(model)
    assert_close(out.hidden, x)
    assert_close(out.logits, head_by_hand(model, x))


def test_linear_kernel_is_sharded_on_both_axes_and_has_unit_gain():
    config = maxtext.simple(SMALL)
    layout = ed.Layout.create(fsdp=4, tensor=2)
    model = ed.abstract(config, layout=layout)
    assert axes(model)["scanned_layers.0.unit.0.mlp.kernel"] == ("layers", "embed", "mlp")
    kernel = model.scanned_layers[0].unit[0].mlp.kernel
    assert kernel.sharding.shard_shape(kernel.shape) == (2, 8 // 4, 8 // 2)
    new = LinearConfig().build(128, key=jax.random.key(0)).kernel
    assert float(jnp.var(new)) == pytest.approx(1 / 128, rel=0.05)
    assert float(jnp.abs(new).max()) < 2.3 / np.sqrt(128)  # truncated at two standard deviations, then rescaled


NORMS = dict(
    pre_mixer_norm=RMSNormConfig(), post_mixer_norm=RMSNormConfig(eps=0.5), post_mlp_norm=RMSNormConfig(eps=0.1)
)


@pytest.mark.slow(fast=("none-none", "none-linear", "none-mlp"))
@pytest.mark.parametrize("mlp", [None, LinearConfig(), MLPConfig(mlp_dim=12)], ids=["none", "linear", "mlp"])
@pytest.mark.parametrize(
    "mixer", [None, AttentionConfig(num_heads=2, num_kv_heads=1, head_dim=4)], ids=["none", "attention"]
)
def test_residual_none_has_no_skip_connection(mixer, mlp):
    norms = {name: norm for name, norm in NORMS.items() if {"mixer": mixer, "mlp": mlp}[name.split("_")[1]]}
    config = ed.BlockConfig(mixer=mixer, mlp=mlp, residual="none", **norms)
    decoder = ed.DecoderConfig(vocab_size=32, embed_dim=8, blocks=(config,), final_norm=None)
    model = filled(decoder)
    (block,) = model.unstacked()
    x = wide(model.embedding.table)[np.asarray(TOKENS)]
    if mixer:
        x = normed(block.pre_mixer_norm, x)
        x = normed(block.post_mixer_norm, attention_by_hand(block.mixer, x, POSITIONS, SAME_SEGMENT))
    if mlp:
        x = x @ wide(block.mlp.kernel) if isinstance(mlp, LinearConfig) else mlp_by_hand(block.mlp, x)
        x = normed(block.post_mlp_norm, x)
    assert_close(run(model).hidden, x)


@pytest.mark.slow
def test_model_without_attention_trains():
    model = filled(maxtext.simple(SMALL))
    trainer = Trainer.create(OptimizerConfig(learning_rate=0.02, warmup_steps=0), model, steps=10)
    state, losses = trainer.init(model, key=jax.random.key(0)), []
    for _ in range(4):
        state, metrics = trainer.step(state, Batch(tokens=TOKENS))
        losses.append(float(metrics.loss))
    assert losses[-1] < losses[0] - 0.05


def weighted(model, tokens, segments):
    out = model(tokens, segment_ids=segments)
    return jnp.mean(out.logits * jnp.sin(jnp.arange(out.logits.size)).reshape(out.logits.shape)), out.logits


gradients = eqx.filter_jit(eqx.filter_value_and_grad(weighted, has_aux=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    "config", [maxtext.simple(SMALL), maxtext.simple_mlp(SMALL), CUSTOM], ids=["simple", "simple_mlp", "custom"]
)
def test_scan_remat_and_sharding_do_not_change_gradients(config):
    tokens, segments = packed(8)
    model = filled(config, scan=False)
    placed = model.replace(scan=True, remat="full").place(ed.Layout.create(data=2, fsdp=2, tensor=2))
    want, got = gradients(model, tokens, segments), gradients(placed, tokens, segments)
    assert_close(got, want, floor=0.0)


@pytest.mark.slow
def test_decoding_without_residuals_equals_one_call():
    mixer = AttentionConfig(num_heads=2, num_kv_heads=1, head_dim=4)
    block = ed.BlockConfig(mixer=mixer, mlp=LinearConfig(), residual="none", pre_mixer_norm=RMSNormConfig())
    model = filled(ed.DecoderConfig(vocab_size=32, embed_dim=8, blocks=(block,), final_norm=None))
    cache, pieces = ed.init_cache(model.config, 2, 4, dtype=jnp.float32), []
    for token in range(4):
        out = step(model, TOKENS[:, token : token + 1], cache)
        pieces, cache = [*pieces, out.logits], out.cache
    assert_close(jnp.concatenate(pieces, axis=1), run(model).logits)


# --- the variant of Qwen3 with experts: a narrow activation between attention and experts ---


@pytest.fixture(scope="module")
def custom():
    return filled(CUSTOM)


@pytest.fixture(scope="module")
def logits(custom):
    return np.asarray(run(custom).logits)


def test_sizes_of_the_custom_model_match_maxtext():
    config = ed.get_config("qwen3-custom-30b-a3b")
    (block,) = set(config.blocks)
    norm = RMSNormConfig(eps=1e-6)
    assert (config.vocab_size, config.embed_dim, len(config.blocks), config.tied) == (151_936, 2048, 48, False)
    assert block.mixer == AttentionConfig(
        num_heads=16, num_kv_heads=2, head_dim=256, rope=Rope(theta=1e7), qk_norm=QKNorm(norm=norm), out_dim=768
    )
    assert (block.residual, block.pre_mixer_norm, block.post_mixer_norm) == (Chained(), norm, None)
    assert (block.pre_mlp_norm, block.post_mlp_norm) == (norm, None)
    experts = block.mlp
    assert (experts.num_experts, experts.num_experts_per_token, experts.mlp_dim) == (128, 8, 2048)
    assert experts.router == RouterConfig(order="score_first", renormalize=True)
    attention = 2048 * (16 + 2 + 2) * 256 + 16 * 256 * 768 + 2 * 256
    layer = attention + 2048 + 768 + 768 * 128 + 128 * 3 * 768 * 2048 + 768 * 2048
    assert ed.count_parameters(config) == 48 * layer + 2 * 151_936 * 2048 + 2048


@pytest.mark.slow
def test_one_residual_connection_spans_both_layers(custom, logits):
    x = wide(custom.embedding.table)[np.asarray(TOKENS)]
    for block in custom.unstacked():
        latent = attention_by_hand(block.mixer, normed(block.pre_mixer_norm, x), POSITIONS, SAME_SEGMENT)
        assert latent.shape == (2, 4, 4)
        fed, _ = experts_by_hand(block.mlp, normed(block.pre_mlp_norm, latent), POSITIONS)
        x = x + fed @ wide(block.residual.up)
    assert_close(logits, normed(custom.final_norm, x) @ wide(custom.head.kernel))


@pytest.mark.slow
def test_decoding_of_the_custom_model_equals_one_call(custom, logits):
    cache, pieces = ed.init_cache(custom.config, 2, 4, dtype=jnp.float32), []
    for token in range(4):
        out = step(custom, TOKENS[:, token : token + 1], cache)
        pieces, cache = [*pieces, out.logits], out.cache
    assert_close(jnp.concatenate(pieces, axis=1), logits)


@pytest.mark.slow
def test_new_weights_have_product_axes(custom):
    """Optimizers and low-rank adapters treat them as matrices."""
    words = axes(custom)
    prefix = "scanned_layers.0.unit.0."
    assert product_axes(words[f"{prefix}mixer.out"]) == (("heads", "head_dim"), ("latent",))
    assert product_axes(words[f"{prefix}residual.up"]) == (("latent",), ("embed",))
    adapted = add_lora(custom, LoRAConfig(rank=2, targets=("*.mixer.out", "*.up")), key=jax.random.key(0))
    assert any(name.endswith("up.lora_a") for name in named_leaves(adapted))


def test_custom_model_has_no_hugging_face_format(custom, tmp_path):
    with refused(ed.ConversionError, "transformers"):
        ed.save_hf(custom, tmp_path / "new")


def test_out_dim_requires_a_chained_block():
    for residual in ("sequential", "parallel", "none"):
        with refused(ed.ConfigError, "out_dim=4", "BlockConfig.residual='chained'"):
            dataclasses.replace(CUSTOM.blocks[0], residual=residual)


@pytest.mark.slow
def test_dropout_applies_to_the_output_of_the_chained_block():
    block = dataclasses.replace(CUSTOM.blocks[0], dropout=0.5)
    dropping, bare = (filled(dataclasses.replace(CUSTOM, blocks=(one,))) for one in (block, CUSTOM.blocks[0]))
    run = eqx.filter_jit(lambda model, key: model(TOKENS, key=key).hidden)
    x, y = (wide(run(model, jax.random.key(1))) for model in (bare, dropping))
    gone = np.abs(y) < 1e-6
    assert np.all(gone ^ (np.abs(y - 2 * x) < 1e-4)) and 0 < gone.mean() < 1


# --- GPT-3 ---

# layers, embed, mlp, heads, head_dim, vocab, positions
GPT3_SIZES = {
    "gpt3-52k": (1, 16, 64, 2, 8, 1024, 2048),
    "gpt3-6b": (48, 3072, 12_288, 12, 256, 32_768, 16_384),
    "gpt3-22b": (48, 6144, 24_576, 24, 256, 32_768, 16_384),
    "gpt3-175b": (96, 12_288, 49_152, 96, 128, 50_304, 16_384),
}
# parameters of the smallest model, counted by hand: token and position tables, final norm, block
GPT3_PARAMETERS = {"gpt3-52k": 16_384 + 32_768 + 32 + 3280}
GPT3_SMALL = DecoderSizes(
    vocab_size=32, embed_dim=8, num_layers=2, num_heads=2, num_kv_heads=2, head_dim=4, mlp_dim=12, eps=1e-5, tied=True,
    activation="gelu_tanh",
)  # fmt: skip


@pytest.mark.parametrize("name", GPT3_SIZES)
def test_parameter_counts_of_gpt3_match_the_formula(name):
    layers, embed, mlp, heads, head_dim, vocab, positions = GPT3_SIZES[name]
    wide = heads * head_dim
    norm = 2 * embed
    attention = (embed + 1) * 3 * wide + (wide + 1) * embed
    feed_forward = (embed + 1) * mlp + (mlp + 1) * embed
    count = (vocab + positions) * embed + layers * (2 * norm + attention + feed_forward) + norm
    assert ed.count_parameters(ed.get_config(name)) == count == GPT3_PARAMETERS.get(name, count)


def test_names_of_gpt3_models_give_billions_of_parameters():
    for name, billions in (("gpt3-6b", 6), ("gpt3-22b", 22), ("gpt3-175b", 175)):
        assert ed.count_parameters(ed.get_config(name)) / 1e9 == pytest.approx(billions, rel=0.07)


def test_new_norms_of_gpt3_store_a_scale_of_zero():
    block = gpt3(GPT3_SMALL, max_positions=4).blocks[0].pre_mixer_norm.build(8)
    assert not np.any(block.scale) and not np.any(block.bias)


def test_dropout_argument_sets_all_dropout_fields():
    config = gpt3(GPT3_SMALL, max_positions=16, dropout=0.1)
    assert (config.dropout, config.blocks[0].dropout, config.blocks[0].mlp.dropout) == (0.1,) * 3
    config = maxtext.default(maxtext.BASE, dropout=0.25)
    assert (config.dropout, config.blocks[0].dropout, config.blocks[0].mlp.dropout) == (0.25,) * 3


@pytest.mark.slow
def test_forward_pass_of_gpt3_matches_the_formula():
    model = filled(gpt3(GPT3_SMALL, max_positions=16))
    tokens = some_tokens(2, 5)
    positions, same_segment = np.tile(np.arange(5), (2, 1)), np.ones((2, 5), int)
    table = wide(model.embedding.table)

    x = table[np.asarray(tokens)] + wide(model.positions.table)[:5]
    for block in model.unstacked():
        x = x + attention_by_hand(block.mixer, normed(block.pre_mixer_norm, x), positions, same_segment)
        x = x + mlp_by_hand(block.mlp, normed(block.pre_mlp_norm, x))
    want = normed(model.final_norm, x) @ table.T
    cache = ed.init_cache(model.config, 2, 8, dtype=jnp.float32)
    out = eqx.filter_jit(model)(tokens, cache=cache)
    assert_close(out.logits, want)
    assert out.cache.length.tolist() == [5, 5]
