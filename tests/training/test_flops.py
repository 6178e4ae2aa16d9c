"""Compare floating-point operation counts with formulas written out by hand."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import eqx_decoders as ed
from eqx_decoders.blocks.residual.hyper_connections import HyperConnections
from eqx_decoders.layers.attention.attention import AttentionConfig
from eqx_decoders.layers.embedding.embedding import LearnedPositions
from eqx_decoders.layers.mask import Chunked, SlidingWindow
from eqx_decoders.layers.mlp import MLPConfig
from eqx_decoders.layers.moe.experts import ExpertsConfig
from eqx_decoders.layers.norm import RMSNormConfig
from eqx_decoders.sharding.axes import named_leaves
from eqx_decoders.training.flops import device_flops, flops_per_token, matmul_parameters, measured_flops, peak_flops
from eqx_decoders.training.lora import add_lora
from eqx_decoders.training.settings.lora import LoRAConfig
from tests.models import EMBED, HEAD_DIM, VOCAB, rich_decoder


TINY = ed.get_config("tiny")


def test_flops_of_a_tiny_model():
    attention = 256 * 64 * (4 + 2 + 2) + 4 * 64 * 256
    layer = attention + 3 * 256 * 704
    count = 5 * layer + 256 * 4096
    assert matmul_parameters(TINY) == count
    assert flops_per_token(TINY, 100) == 6 * count + 12 * 5 * 4 * 64 * 100
    assert flops_per_token(TINY, 100, backward=False) == flops_per_token(TINY, 100) / 3


def test_head_is_counted_once_tied_or_untied():
    untied = dataclasses.replace(TINY, tied=False)
    assert matmul_parameters(untied) == matmul_parameters(TINY)
    assert ed.count_parameters(untied) == ed.count_parameters(TINY) + 256 * 4096


def test_only_matrix_products_are_counted():
    """A local block with three projections, and a full block with a fused projection, biases, sinks and QK norms."""
    config = rich_decoder(2, positions=LearnedPositions(max_positions=64))
    block = EMBED * HEAD_DIM * (4 + 2 + 2) + 4 * HEAD_DIM * EMBED + 3 * EMBED * 24
    assert matmul_parameters(config) == 2 * block + EMBED * VOCAB


@pytest.mark.slow(fast=("SlidingWindow(size=8)-8",))
@pytest.mark.parametrize(("mask", "keys"), [(SlidingWindow(8), 8), (Chunked(8), 8), (SlidingWindow(500), 100)])
def test_windows_count_only_visible_keys(mask, keys):
    block = TINY.blocks[0]
    local = dataclasses.replace(block, mixer=dataclasses.replace(block.mixer, mask=mask))
    config = dataclasses.replace(TINY, blocks=(local, *TINY.blocks[1:]))
    assert flops_per_token(TINY, 100) - flops_per_token(config, 100) == 12 * 4 * 64 * (100 - keys)


def test_block_without_attention_has_no_score_flops():
    block = dataclasses.replace(TINY.blocks[0], mixer=None, pre_mixer_norm=None)
    config = dataclasses.replace(TINY, blocks=(block,))
    assert flops_per_token(config, 10) == flops_per_token(config, 1000) == 6 * (3 * 256 * 704 + 256 * 4096)


def test_cpu_flops_are_measured_and_shared_by_virtual_devices(monkeypatch):
    assert 1e6 < measured_flops(size=128, repeats=2) < 1e16
    monkeypatch.setattr("eqx_decoders.training.flops.measured_flops", lambda dtype: 7.0)
    for layout in (ed.Layout(), ed.Layout.create(data=8)):
        assert device_flops(layout, jnp.float32) == 7.0
        assert device_flops(layout, jnp.float32, peak_tflops=2.5) == 2.5e12


def test_experts_per_token_are_counted():
    experts = ExpertsConfig(num_experts=8, num_experts_per_token=3, mlp_dim=10, shared=MLPConfig(mlp_dim=20), bias=True)
    block = dataclasses.replace(TINY.blocks[0], mixer=None, pre_mixer_norm=None, mlp=experts)
    config = dataclasses.replace(TINY, blocks=(block,))
    assert matmul_parameters(config) == 256 * 8 + 3 * 256 * (3 * 10 + 20) + 256 * 4096
    mixer = AttentionConfig(num_heads=2, num_kv_heads=2, head_dim=8, out_dim=32)
    narrow = dataclasses.replace(experts, shared=None, bias=False)
    chained = dataclasses.replace(block, mixer=mixer, mlp=narrow, residual="chained", pre_mixer_norm=RMSNormConfig())
    count = 256 * 8 * 6 + 16 * 32 + 32 * 8 + 3 * 32 * 3 * 10 + 32 * 256
    assert matmul_parameters(dataclasses.replace(TINY, blocks=(chained,))) == count + 256 * 4096


def test_mtp_depths_and_their_head_are_counted_in_training():
    config = ed.with_mtp(TINY, 2)
    layer = 256 * 64 * (4 + 2 + 2) + 4 * 64 * 256 + 3 * 256 * 704
    more = 2 * (layer + 2 * 256 * 256 + 256 * 4096)
    assert matmul_parameters(config) == matmul_parameters(TINY) + more
    assert flops_per_token(config, 100) == flops_per_token(TINY, 100) + 6 * more + 12 * 2 * 4 * 64 * 100
    assert flops_per_token(config, 100, backward=False) == flops_per_token(TINY, 100, backward=False)


def test_mtp_projection_of_all_streams_is_counted():
    block = dataclasses.replace(TINY.blocks[0], residual=HyperConnections(streams=3))
    added = ed.with_mtp(dataclasses.replace(TINY, blocks=(block,)), 1)
    apart = dataclasses.replace(added, mtp=dataclasses.replace(added.mtp, all_streams=True))
    assert matmul_parameters(apart) - matmul_parameters(added) == 2 * 256 * 256


def test_flops_with_frozen_weights():
    """Per parameter: 2 for the forward pass, 2 if the gradient passes through it, 2 if it is trained.

    Attention scores count 6, or 2 without a gradient.
    """
    local = dataclasses.replace(TINY.blocks[0], mixer=dataclasses.replace(TINY.blocks[0].mixer, mask=SlidingWindow(8)))
    model = ed.abstract(dataclasses.replace(TINY, blocks=(local, *TINY.blocks[1:]), tied=False))
    attention, head = 256 * 64 * (4 + 2 + 2) + 4 * 64 * 256, 256 * 4096
    layer, scores = attention + 3 * 256 * 704, (2 * 4 * 64 * 8, 4 * 2 * 4 * 64 * 100)  # score FLOPs of both segments

    def flops(*patterns, of=model):
        trained = [name for name in named_leaves(of) if any(pattern in name for pattern in patterns)]
        return flops_per_token(of, 100, trainable=trained)

    assert flops("") == flops_per_token(model.config, 100)
    assert flops("head") == 2 * (5 * layer + sum(scores)) + 6 * head
    assert flops("scanned_layers.0.unit.0.mixer.query") == 4 * (5 * layer + head) + 2 * 256 * 4 * 64 + 6 * sum(scores)
    assert flops("scanned_layers.1.unit.0.mlp") == 2 * (layer + scores[0]) + 4 * (4 * layer + head) + 6 * scores[
        1
    ] + 2 * 4 * 3 * (256 * 704)
    adapted = add_lora(model, LoRAConfig(rank=4, targets=("*.mixer.query",)), key=jax.random.key(0))
    pairs = 5 * 4 * (256 + 4 * 64)
    assert flops("lora", of=adapted) == 4 * (5 * layer + head) + 6 * (pairs + sum(scores))


def test_peak_flops():
    want = {
        "TPU v4": 275e12,
        "TPU v5 lite": 197e12,
        "TPU v5p": 459e12,
        "TPU v6 lite": 918e12,
        "TPU7x": 1153.5e12,  # two devices a chip
        "NVIDIA A100-SXM4-80GB": 312e12,
        "NVIDIA H100 80GB HBM3": 989e12,
        "NVIDIA H100 PCIe": 756e12,
        "NVIDIA H200": 989e12,
        "NVIDIA B200": 2250e12,
        "TPU v4 lite": None,
        "cpu": None,
        "": None,
    }
    assert {kind: peak_flops(kind) for kind in want} == want
