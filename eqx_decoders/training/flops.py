"""Floating-point operations that a model needs, by counting, and that a device can do."""

import dataclasses
import math
import sys
import time
from collections.abc import Collection

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from eqx_decoders.blocks.repeats import find_repeats
from eqx_decoders.families.summary import active_parameters
from eqx_decoders.model.decoder import Decoder
from eqx_decoders.model.decoder_config import DecoderConfig
from eqx_decoders.model.init import abstract
from eqx_decoders.sharding.axes import axes, named_leaves
from eqx_decoders.sharding.chips import chip_of
from eqx_decoders.sharding.layout import Layout


# Dense bf16 products of GPUs, from the vendor's data sheets (without sparsity); those of TPUs are in `sharding.chips`.
_GPU_FLOPS = (  # the first that begins the name; SXM where nothing else is said
    ("NVIDIA A100", 312e12),
    ("NVIDIA H100 PCIe", 756e12),
    ("NVIDIA H100 NVL", 835e12),
    ("NVIDIA H100", 989e12),
    ("NVIDIA H200 NVL", 835e12),
    ("NVIDIA H200", 989e12),
    ("NVIDIA B200", 2250e12),
)

_HEAD = sys.maxsize  # the last place that a weight can have


def matmul_parameters(config: DecoderConfig) -> int:
    """Count the weights that multiply every token: all matrices with the head, without tables that are looked up.

    Of experts as many as a token uses; the head once more for each depth of multi-token prediction.
    """
    return sum(_products(abstract(config)).values())


def _products(model: Decoder) -> dict[str, int]:
    """Return the weights of each matrix that multiply a token, by its path; those of encoders multiply patches."""
    config, words, active, products = model.config, axes(model), active_parameters(model), {}
    for name, size in active.items():
        inside = [word for word in words[name] if word != "layers"]
        looked_up = (
            name.startswith(("vision.", "audio."))
            or name == "positions.table"
            or (name == "embedding.table" and not config.tied)
        )
        if len(inside) >= 2 and size > 0 and not looked_up and not name.endswith("_bias"):
            products[name] = (
                size * (1 + config.mtp.num_depths) if "vocab" in inside and config.mtp is not None else size
            )
    if config.mtp is not None and config.mtp.all_streams:  # each stream by the same matrix
        products["mtp.depth.stream_kernel"] *= config.residual.streams
    shared = config.shared_transformer
    if shared is not None:  # each layer that uses it multiplies by one of its blocks
        uses = sum(getattr(block.mixer, "transformer", None) == shared for block in config.blocks)
        products |= {n: size * uses // shared.count for n, size in products.items() if n.startswith("shared.")}
    return products


def flops_per_token(
    model: DecoderConfig | Decoder,
    seq_len: int,
    *,
    trainable: Collection[str] | None = None,
    backward: bool = True,
) -> float:
    """Compute the FLOPs of a training step per token: `6 N + 12 * sum over layers of (heads * head_dim * keys)`.

    N are the weights that multiply; keys are `seq_len`, or the window where there is one (Chowdhery et al. 2022,
    appendix B: a causal mask is not counted as half). head_dim is the mean of a query's and a value's, keys and values
    of latent attention being made from their latent; of a recurrent layer the products with its state count.
    Recomputation is not counted. Without `backward` a third of it, and no multi-token prediction.

    `trainable` are the paths of the weights that are trained, None for all. Others cost 4 and not 6: forward, and the
    gradient through them to what is trained before them; where nothing is, 2.
    """
    if isinstance(model, DecoderConfig):
        model = abstract(model if backward else dataclasses.replace(model, mtp=None))
    config, products = model.config, _products(model)
    trained = () if not backward else named_leaves(model) if trainable is None else trainable
    first = min(map(_place, trained), default=_HEAD + 1)
    total = 0
    for name, size in products.items():
        place = _HEAD if name == "embedding.table" else _place(name)
        total += size * ((4 if place >= first else 2) + 2 * (name in trained))
    stacks = [
        (_place(f"scanned_layers.{i}"), unit * repeats) for i, (unit, repeats) in enumerate(find_repeats(config.blocks))
    ]
    ahead = () if config.mtp is None else (config.mtp.block,) * config.mtp.num_depths
    for place, blocks in (*stacks, (_HEAD, ahead)):
        for block in blocks:
            counts = (layer.token_products(seq_len) for layer in block.branches().values())
            total += sum(counts) * (6 if place >= first else 2)
    return float(total)


def _place(name: str) -> int:
    """Return the position of a weight on the way from tokens to logits: tables, then the scanned layers in order."""
    part, index, *_ = (*name.split("."), "")
    return (
        1 + int(index)
        if part == "scanned_layers"
        else {"embedding": 0, "positions": 0, "per_layer_embedding": 0, "shared": 1}.get(part, _HEAD)
    )


def device_flops(layout: Layout, dtype: DTypeLike, peak_tflops: float | None = None) -> float:
    """Return the FLOP/s of all the layout's devices together: the given figure, the data sheet's, or a measured one.

    Data sheets are of bf16; measured is a product in `dtype`. Devices of a CPU share it, so it counts once.
    """
    count = 1 if layout.mesh is None or layout.backend.devices_share_cores else layout.mesh.size
    known = peak_flops(layout.device.device_kind) if peak_tflops is None else peak_tflops * 1e12
    return count * (measured_flops(dtype) if known is None else known)


def peak_flops(device_kind: str) -> float | None:
    """Return the dense bf16 FLOP/s of one device, by its `jax.Device.device_kind`; None without a data sheet."""
    chip = chip_of(device_kind)
    if chip is not None:
        return chip.bf16 / chip.devices
    return next((flops for name, flops in _GPU_FLOPS if device_kind.startswith(name)), None)


def measured_flops(dtype: DTypeLike = jnp.float32, *, size: int = 2048, repeats: int = 5) -> float:
    """Measure the FLOP/s of a `size`-cubed product on the default device, the best of several."""
    x = jnp.ones((size, size), dtype)
    product = jax.jit(jnp.matmul)
    product(x, x).block_until_ready()
    best = math.inf
    for _ in range(repeats):
        begin = time.perf_counter()
        product(x, x).block_until_ready()
        best = min(best, time.perf_counter() - begin)
    return 2.0 * size**3 / best
