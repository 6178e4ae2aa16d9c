"""Test copies of the weights in the compute dtype: equal results, and no copies of float32 weights."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_decoders as ed
from eqx_decoders.layers.norm import RMSNormConfig
from eqx_decoders.rl.compute_dtype import cast_weights, weights_cast_to_compute_dtype
from eqx_decoders.sharding.axes import named_leaves
from eqx_decoders.sharding.backend import backend_of
from tests.commands import ROOT
from tests.models import filled, rich_decoder
from tests.steps import SPARSE


BF16 = ed.Precision(compute=jnp.bfloat16)


def model_and_copy(model):
    """Return a model, the model with copied weights, and the names of the copied weights."""
    names = weights_cast_to_compute_dtype(model)
    return model, cast_weights(model, names), names


@pytest.mark.slow
def test_logits_with_copied_weights_are_equal_to_the_bit():
    """All matrices are copied; norms and routers are shared."""
    config = rich_decoder(2)
    config = dataclasses.replace(config, blocks=(*config.blocks, SPARSE))
    model, other, names = model_and_copy(filled(config, precision=BF16))
    kept = {name.rsplit(".", 1)[-1] for name in named_leaves(model) if name not in names}
    assert {"query", "qkv", "up", "down", "table"} <= {name.rsplit(".", 1)[-1] for name in names}
    assert "scale" in kept and "mlp.router.kernel" in " ".join(set(named_leaves(model)) - names)
    for name, leaf in named_leaves(other).items():
        assert leaf.dtype == (jnp.bfloat16 if name in names else jnp.float32)
        assert name in names or leaf is named_leaves(model)[name]
    tokens = np.asarray([[3, 1, 4, 1, 5]], np.int32)
    assert jnp.array_equal(*(each(tokens).logits for each in (model, other)))
    assert weights_cast_to_compute_dtype(filled(config)) == frozenset()


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_same_weights_are_copied_on_accelerators(platform, monkeypatch):
    config = rich_decoder(2)
    model = filled(dataclasses.replace(config, blocks=(*config.blocks, SPARSE)), precision=BF16)
    want = weights_cast_to_compute_dtype(model)
    monkeypatch.setattr(ed.Layout, "backend", backend_of(platform))
    assert weights_cast_to_compute_dtype(model) == want


def test_unused_weights_are_not_copied():
    """MTP layers are not copied, because drafting uses separate programs."""
    config = rich_decoder(1)
    mtp = ed.MTPConfig(num_depths=1, block=config.blocks[0], norm=RMSNormConfig())
    model = filled(dataclasses.replace(config, mtp=mtp), precision=BF16)
    names = weights_cast_to_compute_dtype(model)
    assert names and not any(name.startswith("mtp.") for name in names)


@pytest.mark.slow
def test_cached_decoding_with_copied_weights_is_equal_to_the_bit():
    config = rich_decoder(3)
    model, other, _ = model_and_copy(filled(config, precision=BF16))
    cache, tokens = ed.init_cache(config, 2, 8), jnp.asarray([[3, 1, 4, 1, 5], [2, 6, 5, 3, 5]])
    for part in (tokens, tokens[:, :1], tokens[:, :1]):
        outputs = [each(part, cache=cache) for each in (model, other)]
        assert jnp.array_equal(outputs[0].logits, outputs[1].logits)
        cache = outputs[0].cache


@pytest.mark.slow
def test_copies_have_the_sharding_of_the_weights():
    layout = ed.Layout.create(fsdp=2, tensor=2, devices=jax.devices()[:4])
    model, other, names = model_and_copy(filled(rich_decoder(3), precision=BF16).place(layout))
    first, second = named_leaves(model), named_leaves(other)
    assert names and all(first[name].sharding == second[name].sharding for name in first)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["deepseek3_groups", "gemma3_pattern", "gpt_oss_yarn", "mamba2", "qwen3_next", "rwkv", "lfm2_bias", "kimi_linear"],
)
def test_copied_weights_of_families(name):
    """Norms, routers, and float32 weights of recurrent layers are not copied."""
    load = functools.partial(ed.load_hf, ROOT / "tests" / "fixtures" / name, precision=BF16)
    model, other, names = model_and_copy(load())
    sizes = {name: leaf.size for name, leaf in named_leaves(model).items()}
    assert sum(sizes[name] for name in names) > 0.6 * sum(sizes.values())
    tokens = np.random.default_rng(0).integers(0, 40, (1, 7)).astype(np.int32)
    assert jnp.array_equal(model(tokens).logits, other(tokens).logits)
