"""How many floating-point operations a model needs, by counting, and how many a device can do."""

import dataclasses
import math
import time

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from eqx_decoders.axes import axes, named_leaves
from eqx_decoders.block import BlockConfig, MixerConfig
from eqx_decoders.create import abstract
from eqx_decoders.decoder import DecoderConfig
from eqx_decoders.layers.experts import ExpertsConfig
from eqx_decoders.layers.latent import LatentAttentionConfig
from eqx_decoders.layers.mask import Chunked, SlidingWindow
from eqx_decoders.layout import Layout


# Dense bf16 products of one JAX device, from the vendors' data sheets (without sparsity).
_TPU_FLOPS = {
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5": 459e12,
    "TPU v5p": 459e12,
    "TPU v6 lite": 918e12,
    "TPU v6e": 918e12,
}
_GPU_FLOPS = (  # the first that begins the name; SXM where nothing else is said
    ("NVIDIA A100", 312e12),
    ("NVIDIA H100 PCIe", 756e12),
    ("NVIDIA H100 NVL", 835e12),
    ("NVIDIA H100", 989e12),
    ("NVIDIA H200 NVL", 835e12),
    ("NVIDIA H200", 989e12),
    ("NVIDIA B200", 2250e12),
)


def matmul_parameters(config: DecoderConfig) -> int:
    """Weights that multiply every token: all matrices, the head among them, without tables that are only looked up.

    Of experts as many as a token uses; the head once more for each depth of multi-token prediction.
    """
    model = abstract(config)
    words, total = axes(model), 0
    for name, leaf in named_leaves(model).items():
        inside = [word for word in words[name] if word != "layers"]
        looked_up = name == "positions.table" or (name == "embedding.table" and not config.tied)
        if len(inside) >= 2 and not looked_up and not name.endswith("_bias"):
            total += math.prod(leaf.shape)
    depths = 0 if config.mtp is None else config.mtp.num_depths
    ahead = () if config.mtp is None else (config.mtp.block,) * depths
    idle = sum(_idle(block, config.embed_dim) for block in (*config.blocks, *ahead))
    return total - idle + depths * config.embed_dim * config.vocab_size


def _idle(block: BlockConfig, embed_dim: int) -> int:
    """Weights of the experts that a token does not use."""
    experts = block.mlp
    if not isinstance(experts, ExpertsConfig):
        return 0
    width = (getattr(block.mixer, "out_dim", None) if block.wiring == "chained" else None) or embed_dim
    return 3 * width * experts.mlp_dim * (experts.num_experts - experts.num_experts_per_token)


def flops_per_token(config: DecoderConfig, seq_len: int, *, backward: bool = True) -> float:
    """Model FLOPs of a training step per token: `6 N + 12 * sum over layers of (heads * head_dim * keys)`.

    N are the weights that multiply; keys are `seq_len`, or the window where there is one (Chowdhery et al. 2022,
    appendix B: a causal mask is not counted as half). head_dim is the mean of a query's and a value's, keys and values
    of latent attention being made from their latent. Recomputation is not counted. Without `backward` a third of it,
    and no multi-token prediction.
    """
    attention = 0
    config = config if backward else dataclasses.replace(config, mtp=None)
    ahead = () if config.mtp is None else (config.mtp.block,) * config.mtp.num_depths
    for block in (*config.blocks, *ahead):
        if block.mixer is not None:
            mask = block.mixer.mask
            keys = min(seq_len, mask.size) if isinstance(mask, SlidingWindow | Chunked) else seq_len
            attention += block.mixer.num_heads * keys * _scored_and_mixed(block.mixer)
    return (6.0 if backward else 2.0) * (matmul_parameters(config) + attention)


def _scored_and_mixed(mixer: MixerConfig) -> int:
    """Features of a head's query and of its value together."""
    return mixer.head_dim + (mixer.value_dim if isinstance(mixer, LatentAttentionConfig) else mixer.head_dim)


def device_flops(layout: Layout, dtype: DTypeLike) -> float | None:
    """FLOP/s of all the layout's devices together; on CPU as measured in `dtype`, else bf16 peaks; None if unknown."""
    if layout.platform == "cpu":  # forced devices share one CPU
        return measured_flops(dtype)
    devices = jax.devices()[:1] if layout.mesh is None else list(layout.mesh.devices.flat)
    each = peak_flops(devices[0].device_kind)
    return None if each is None else each * len(devices)


def peak_flops(device_kind: str) -> float | None:
    """Dense bf16 FLOP/s of one device, by its `jax.Device.device_kind`; None where no data sheet says it."""
    if device_kind in _TPU_FLOPS:
        return _TPU_FLOPS[device_kind]
    return next((flops for name, flops in _GPU_FLOPS if device_kind.startswith(name)), None)


def measured_flops(dtype: DTypeLike = jnp.float32, *, size: int = 2048, repeats: int = 5) -> float:
    """FLOP/s of a `size`-cubed product on the default device, the best of some: the roof where no table knows it."""
    x = jnp.ones((size, size), dtype)
    product = jax.jit(jnp.matmul)
    product(x, x).block_until_ready()
    best = math.inf
    for _ in range(repeats):
        begin = time.perf_counter()
        product(x, x).block_until_ready()
        best = min(best, time.perf_counter() - begin)
    return 2.0 * size**3 / best
