"""Every legal name is really saved somewhere, and policies save what they say."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import print_saved_residuals

import eqx_decoders as ed
from eqx_decoders.data.config import DataConfig
from eqx_decoders.layers.attention.mla import LatentAttentionConfig
from eqx_decoders.layers.moe.experts import ExpertsConfig
from eqx_decoders.remat import NAMES, POLICIES, Remat, get_remat, save
from eqx_decoders.training.settings.run import TrainConfig
from tests.errors import refused
from tests.models import filled, packed, rich_decoder


def residuals(capsys, remat, config=None, **execution) -> str:
    """What the backward pass of a looped model finds saved, as JAX prints it."""
    model = filled(config or rich_decoder(2), remat=remat, scan=False, attention="chunked", **execution)
    tokens, segments = packed(2)
    leaves, tree = jax.tree.flatten(model)

    def loss(leaves):
        return jnp.mean(jax.tree.unflatten(tree, leaves)(tokens, segment_ids=segments).logits ** 2)

    capsys.readouterr()
    print_saved_residuals(loss, leaves)
    return capsys.readouterr().out


def plain_mlp():
    config = rich_decoder(2)
    first = dataclasses.replace(config.blocks[0], mlp=ed.get_config("tiny").blocks[0].mlp)
    first = dataclasses.replace(first, mlp=dataclasses.replace(first.mlp, gated=False, mlp_dim=24))
    return dataclasses.replace(config, blocks=(first, config.blocks[0]))


def latent_mixer():
    config = rich_decoder(1)
    mixer = LatentAttentionConfig(num_heads=2, q_rank=6, kv_rank=4, nope_dim=3, rope_dim=2, value_dim=5)
    return dataclasses.replace(config, blocks=(dataclasses.replace(config.blocks[0], mixer=mixer),))


def experts():
    config = rich_decoder(1)
    mlp = ExpertsConfig(num_experts=4, num_experts_per_token=2, mlp_dim=8)
    block = dataclasses.replace(config.blocks[0], mixer=None, pre_mixer_norm=None, mlp=mlp)
    return dataclasses.replace(config, blocks=(block,))


EXECUTIONS = {
    "cast_weight": dict(precision=ed.Precision(compute=jnp.bfloat16)),
    "quantization": dict(low_precision=ed.LowPrecision()),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(NAMES))
def test_every_legal_name_is_saved_somewhere(capsys, name):
    execution = EXECUTIONS.get(name, {})
    found = [
        f"named '{name}'" in residuals(capsys, Remat(save=(name,)), config, **execution)
        for config in (None, plain_mlp(), latent_mixer(), experts())
    ]
    assert any(found)


@pytest.mark.slow
def test_full_saves_no_name_and_minimal_saves_its_own(capsys):
    assert "named '" not in residuals(capsys, "full")
    text = residuals(capsys, "minimal")
    assert "named 'mlpwo'" in text and "named 'query_proj'" in text
    assert "named 'context'" not in text and "named 'attention_out'" not in text


def test_weights_that_are_only_cast_are_no_quantized_weights(capsys):
    """MaxText's policies with "quantization" save no copy of the weights where nothing is quantized."""
    bfloat16 = dict(precision=ed.Precision(compute=jnp.bfloat16))
    policies = "full", "minimal_with_quantization", Remat(save=("cast_weight",))
    full, minimal, casts = (
        residuals(capsys, policy, rich_decoder(1), **bfloat16).count("'cast_weight'") for policy in policies
    )
    assert casts > minimal == full  # that of the head, which is in no block
    rounded = residuals(capsys, "minimal_with_quantization", rich_decoder(1), low_precision=ed.LowPrecision())
    assert "named 'quantization'" in rounded


def test_saving_more_recomputes_less():
    """The gradient's products: fewer under `minimal` than under `full`, and fewest without remat."""
    tokens, segments = packed(2)

    def products(remat):
        model = filled(rich_decoder(2), remat=remat, scan=False, attention="dot")
        leaves, tree = jax.tree.flatten(model)
        loss = lambda leaves: jnp.mean(jax.tree.unflatten(tree, leaves)(tokens, segment_ids=segments).logits)  # noqa: E731
        return str(jax.make_jaxpr(jax.grad(loss))(leaves)).count("dot_general")

    assert products("full") > products("minimal") > products("none")


def test_table_has_the_known_names():
    assert {
        "none", "full", "minimal", "minimal_with_context", "minimal_with_quantization",
        "minimal_with_context_and_quantization", "save_dot_with_context_except_mlp", "save_dot_except_mlpwi",
        "save_dot_except_mlp", "save_qkv_proj", "qkv_proj_offloaded", "minimal_offloaded", "save_out_proj",
    } == set(POLICIES)  # fmt: skip


def test_custom_lists_reach_the_model():
    config = TrainConfig(
        remat="custom", remat_save=("context",), remat_offload=("mlpwo",), data=DataConfig(batch_size=16)
    )
    assert config.execution().remat == Remat(save=("context",), offload=("mlpwo",))


@pytest.mark.parametrize(
    "make, names",
    [
        (lambda: get_remat("minimal_ofloaded"), ["'minimal_ofloaded'", "'minimal_offloaded'"]),
        (lambda: Remat(save=("quary_proj",)), ["'quary_proj'", "'query_proj'"]),
        (lambda: Remat(save=("mlpwo",), offload=("mlpwo",)), ["mlpwo"]),
        (lambda: save(jnp.zeros(()), "mlpwoo"), ["'mlpwoo'", "'mlpwo'"]),
        (lambda: TrainConfig(remat="full", remat_save=("mlpwo",)), ["custom"]),
        (lambda: TrainConfig(remat="custom", remat_save=("mlpw",)), ["'mlpw'", "'mlpwo'"]),
    ],
    ids=["policy", "saved", "saved and offloaded", "name", "not custom", "custom"],
)
def test_misspelt_names_are_refused_with_the_nearest(make, names):
    with refused(ed.ConfigError, *names):
        make()


@pytest.mark.slow
def test_offloaded_names_go_to_the_host_and_come_back():
    """In the gradient's program: each block's queries, keys and values, and nothing else; for one name that alone."""
    tokens, segments = packed(2)
    query, key, value, fused = "[2,13,4,8]", "[2,13,2,8]", "[2,13,2,8]", "[2,13,8,8]"

    def moved(remat, to: str) -> list[str]:
        leaves, tree = jax.tree.flatten(filled(rich_decoder(2), remat=remat, scan=False, attention="chunked"))
        loss = lambda leaves: jnp.mean(jax.tree.unflatten(tree, leaves)(tokens, segment_ids=segments).logits)  # noqa: E731
        put = re.compile(rf"f32(?:<host>)?(\[\S+) = device_put\[[^]]*devices=\(MemorySpace\.{to},\)")
        return sorted(put.findall(str(jax.make_jaxpr(jax.grad(loss))(leaves))))

    for remat, shapes in (
        ("qkv_proj_offloaded", [query, key, value] * 2 + [fused]),  # the second block has a fused projection
        (Remat(offload=("query_proj",)), [query] * 2),
        (Remat(offload=("qkv_proj",), save=("key_proj", "value_proj")), [fused]),
        ("save_qkv_proj", []),
    ):
        assert moved(remat, "Host") == moved(remat, "Device") == sorted(shapes), remat
