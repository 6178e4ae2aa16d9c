"""MaxText's variant of Qwen3 with experts: a narrow stretch between attention and experts, against NumPy and itself."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_decoders as ed
from eqx_decoders.axes import axes, named_leaves, product_axes
from eqx_decoders.families.qwen3_moe import qwen3_custom_moe
from eqx_decoders.families.shape import Shape
from eqx_decoders.layers.attention import AttentionConfig, QKNorm
from eqx_decoders.layers.norm import RMSNormConfig
from eqx_decoders.layers.rope import Rope
from eqx_decoders.layers.router import RouterConfig
from eqx_decoders.training.lora import LoRAConfig, add_lora
from tests.oracles import attention_by_hand, experts_by_hand, norm_by_hand, wide
from tests.strategies import filled, packed, some_tokens


SHAPE = Shape(vocab_size=32, embed_dim=8, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=4, mlp_dim=6, eps=1e-6)
CONFIG = qwen3_custom_moe(
    SHAPE, num_experts=4, num_experts_per_token=2, expert_dim=6, latent_dim=4, rope=Rope(theta=100.0)
)
TOKENS = some_tokens(2, 4)
step = eqx.filter_jit(lambda model, tokens, cache: model(tokens, cache=cache))


def close(got, want, tolerance: float = 2e-5):
    np.testing.assert_allclose(np.asarray(got), want, rtol=0, atol=tolerance * np.abs(want).max())


def normed(norm, x):
    return np.apply_along_axis(lambda row: norm_by_hand(norm, row), -1, x)


@pytest.fixture(scope="module")
def model():
    return filled(CONFIG)


@pytest.fixture(scope="module")
def logits(model):
    return np.asarray(eqx.filter_jit(lambda model: model(TOKENS).logits)(model))


def test_sizes_are_those_of_maxtext():
    config = ed.get_config("qwen3-custom-30b-a3b")
    (block,) = set(config.blocks)
    norm = RMSNormConfig(eps=1e-6)
    assert (config.vocab_size, config.embed_dim, len(config.blocks), config.tied) == (151_936, 2048, 48, False)
    assert block.mixer == AttentionConfig(
        num_heads=16, num_kv_heads=2, head_dim=256, rope=Rope(theta=1e7), qk_norm=QKNorm(norm=norm), out_dim=768
    )
    assert (block.wiring, block.pre_mixer_norm, block.post_mixer_norm) == ("chained", norm, None)
    assert (block.pre_mlp_norm, block.post_mlp_norm) == (norm, None)
    experts = block.mlp
    assert (experts.num_experts, experts.num_experts_per_token, experts.mlp_dim) == (128, 8, 2048)
    assert experts.router == RouterConfig(order="score_first", renormalize=True)
    attention = 2048 * (16 + 2 + 2) * 256 + 16 * 256 * 768 + 2 * 256
    layer = attention + 2048 + 768 + 768 * 128 + 128 * 3 * 768 * 2048 + 768 * 2048
    assert ed.count_parameters(config) == 48 * layer + 2 * 151_936 * 2048 + 2048


def test_one_residual_connection_is_around_both_layers(model, logits):
    x = wide(model.embedding.table)[np.asarray(TOKENS)]
    positions, same = np.tile(np.arange(4), (2, 1)), np.ones((2, 4), int)
    for block in model.unstacked():
        latent = attention_by_hand(block.mixer, normed(block.pre_mixer_norm, x), positions, same)
        assert latent.shape == (2, 4, 4)
        fed, _ = experts_by_hand(block.mlp, normed(block.pre_mlp_norm, latent), positions)
        x = x + fed @ wide(block.up)
    close(logits, normed(model.final_norm, x) @ wide(model.head.kernel))


def test_it_decodes_as_it_runs(model, logits):
    cache, pieces = ed.init_cache(model.config, 2, 4, dtype=jnp.float32), []
    for token in range(4):
        out = step(model, TOKENS[:, token : token + 1], cache)
        pieces, cache = [*pieces, out.logits], out.cache
    close(jnp.concatenate(pieces, axis=1), logits)


def weighted(model, tokens, segments):
    out = model(tokens, segment_ids=segments)
    return jnp.mean(out.logits * jnp.sin(jnp.arange(out.logits.size)).reshape(out.logits.shape)), out.logits


gradients = eqx.filter_jit(eqx.filter_value_and_grad(weighted, has_aux=True))


def test_it_is_the_same_scanned_rematerialised_and_sharded():
    tokens, segments = packed(8)
    model = filled(CONFIG, scan=False)
    placed = model.replace(scan=True, remat="full").place(ed.Layout.create(data=2, fsdp=2, tensor=2))
    want, got = gradients(model, tokens, segments), gradients(placed, tokens, segments)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        close(one, np.asarray(other))


def test_both_new_matrices_are_matrices(model):
    """To optimisers and to low-rank adapters."""
    words = axes(model)
    prefix = "segments.0.unit.0."
    assert product_axes(words[f"{prefix}mixer.out"]) == (("heads", "head_dim"), ("latent",))
    assert product_axes(words[f"{prefix}up"]) == (("latent",), ("embed",))
    adapted = add_lora(model, LoRAConfig(rank=2, targets=("*.mixer.out", "*.up")), key=jax.random.key(0))
    assert any(name.endswith("up.lora_a") for name in named_leaves(adapted))


def test_it_has_no_hugging_face_form(model, tmp_path):
    with pytest.raises(ed.ConversionError, match="No family of Hugging Face has this model"):
        ed.save_hf(model, tmp_path / "new")


def test_a_narrow_output_needs_a_chained_block():
    for wiring in ("sequential", "parallel", "plain"):
        with pytest.raises(ed.ConfigError, match=r"out_dim=4 needs BlockConfig\.wiring='chained'"):
            dataclasses.replace(CONFIG.blocks[0], wiring=wiring)


def test_dropout_is_that_of_the_whole_output():
    block = dataclasses.replace(CONFIG.blocks[0], dropout=0.5)
    dropping, bare = (filled(dataclasses.replace(CONFIG, blocks=(one,))) for one in (block, CONFIG.blocks[0]))
    run = eqx.filter_jit(lambda model, key: model(TOKENS, key=key).hidden)
    x, y = (wide(run(model, jax.random.key(1))) for model in (bare, dropping))
    gone = np.abs(y) < 1e-6
    assert np.all(gone ^ (np.abs(y - 2 * x) < 1e-4)) and 0 < gone.mean() < 1
