"""FLOPs that a model needs per token, counted from its configuration, and FLOP/s of devices."""

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


# Dense bf16 FLOP/s of GPUs, from the vendor's data sheets (without sparsity). `sharding.chips` has those of TPUs.
# The first entry with which the name of the device starts is used; names without a form factor are SXM modules.
_GPU_FLOPS = (
    ("NVIDIA A100", 312e12),
    ("NVIDIA H100 PCIe", 756e12),
    ("NVIDIA H100 NVL", 835e12),
    ("NVIDIA H100", 989e12),
    ("NVIDIA H200 NVL", 835e12),
    ("NVIDIA H200", 989e12),
    ("NVIDIA B200", 2250e12),
)

# Stages of a forward pass, in order: embedding tables, each run of scanned layers, and everything after them
_EMBEDDING_STAGE = 0
_FIRST_LAYER_STAGE = 1
_HEAD_STAGE = sys.maxsize


def matmul_parameters(config: DecoderConfig) -> int:
    """Count the parameters by which each token is multiplied: all matrices including the output head.

    Tables that are looked up are not counted. Experts count as often as a token uses them. The head counts once more
    for each depth of multi-token prediction.
    """
    return sum(_matmul_parameters_by_path(abstract(config)).values())


def _matmul_parameters_by_path(model: Decoder) -> dict[str, int]:
    """Return the number of parameters of each matrix that multiplies tokens. Encoders multiply patches, not tokens."""
    config, axis_names, active, parameters = model.config, axes(model), active_parameters(model), {}
    for name, size in active.items():
        matrix_axes = [axis for axis in axis_names[name] if axis != "layers"]
        is_encoder = name.startswith(("vision.", "audio."))
        is_table = name == "positions.table" or (name == "embedding.table" and not config.tied)
        if len(matrix_axes) < 2 or size == 0 or is_encoder or is_table or name.endswith("_bias"):
            continue
        is_head = "vocab" in matrix_axes
        parameters[name] = size * (1 + config.mtp.num_depths) if is_head and config.mtp is not None else size
    if config.mtp is not None and config.mtp.all_streams:  # the same matrix multiplies each residual stream
        parameters["mtp.depth.stream_kernel"] *= config.residual.streams
    shared = config.shared_transformer
    if shared is not None:  # each layer that uses it multiplies by one of its blocks
        uses = sum(getattr(block.mixer, "transformer", None) == shared for block in config.blocks)
        parameters |= {
            name: size * uses // shared.count for name, size in parameters.items() if name.startswith("shared.")
        }
    return parameters


def flops_per_token(
    model: DecoderConfig | Decoder,
    seq_len: int,
    *,
    trainable: Collection[str] | None = None,
    backward: bool = True,
) -> float:
    """Compute the FLOPs of a training step per token: `6 N + 12 * sum over layers of (heads * head_dim * keys)`.

    N is the number of parameters of `matmul_parameters`. `keys` is `seq_len`, or the window size of windowed attention.
    The count follows Chowdhery et al. 2022, appendix B: a causal mask does not halve it, and recomputed activations are
    not counted. `head_dim` is the mean of the sizes of a query and a value; for latent attention, these are the sizes
    after the projection from the latent. A recurrent layer counts the products with its state.

    **Arguments:**

    - `model`: a model or its configuration.
    - `seq_len`: number of tokens of a sequence.
    - `trainable`: paths of the trained weights. None: all weights are trained. A frozen weight has no gradient and
        costs 4 instead of 6 FLOPs per parameter, or 2 if no weight before it is trained, because then the gradient of
        its input is not needed.
    - `backward`: whether to count the backward pass. Without it, the FLOPs are a third, and multi-token prediction is
        not counted.
    """
    if isinstance(model, DecoderConfig):
        model = abstract(model if backward else dataclasses.replace(model, mtp=None))
    config, parameters = model.config, _matmul_parameters_by_path(model)
    if not backward:
        trainable = ()
    elif trainable is None:
        trainable = named_leaves(model)
    first_trained = min(map(_stage, trainable), default=_HEAD_STAGE + 1)
    total = 0
    for name, size in parameters.items():
        stage = _HEAD_STAGE if name == "embedding.table" else _stage(name)  # a tied table multiplies as the head
        total += size * ((4 if stage >= first_trained else 2) + 2 * (name in trainable))
    runs = [
        (_FIRST_LAYER_STAGE + index, unit * repeats)
        for index, (unit, repeats) in enumerate(find_repeats(config.blocks))
    ]
    mtp_blocks = () if config.mtp is None else (config.mtp.block,) * config.mtp.num_depths
    for stage, blocks in (*runs, (_HEAD_STAGE, mtp_blocks)):
        for block in blocks:
            products = sum(layer.token_products(seq_len) for layer in block.branches().values())
            total += products * (6 if stage >= first_trained else 2)
    return float(total)


def _stage(name: str) -> int:
    """Return the stage of the forward pass in which a weight is used first, given the path of the weight."""
    part, index, *_ = (*name.split("."), "")
    if part == "scanned_layers":
        return _FIRST_LAYER_STAGE + int(index)
    if part in ("embedding", "positions", "per_layer_embedding"):
        return _EMBEDDING_STAGE
    return _FIRST_LAYER_STAGE if part == "shared" else _HEAD_STAGE


def device_flops(layout: Layout, dtype: DTypeLike, peak_tflops: float | None = None) -> float:
    """Return the peak FLOP/s of all devices of a layout together.

    The devices of a CPU backend share its cores, so that they count as one device.

    **Arguments:**

    - `layout`: the devices.
    - `dtype`: dtype of the products that are measured for devices without a data sheet. Data sheets are for bf16.
    - `peak_tflops`: peak TFLOP/s of a device. None: use the data sheet, or measure.
    """
    count = 1 if layout.mesh is None or layout.backend.devices_share_cores else layout.mesh.size
    known = peak_flops(layout.device.device_kind) if peak_tflops is None else peak_tflops * 1e12
    return count * (measured_flops(dtype) if known is None else known)


def peak_flops(device_kind: str) -> float | None:
    """Return the dense bf16 FLOP/s of a device by its `jax.Device.device_kind`; None for an unknown device."""
    chip = chip_of(device_kind)
    if chip is not None:
        return chip.bf16 / chip.devices
    return next((flops for name, flops in _GPU_FLOPS if device_kind.startswith(name)), None)


def measured_flops(dtype: DTypeLike = jnp.float32, *, size: int = 2048, repeats: int = 5) -> float:
    """Measure the FLOP/s of a product of two `[size, size]` matrices on the default device: the best of `repeats`."""
    x = jnp.ones((size, size), dtype)
    product = jax.jit(jnp.matmul)
    product(x, x).block_until_ready()
    seconds = math.inf
    for _ in range(repeats):
        start = time.perf_counter()
        product(x, x).block_until_ready()
        seconds = min(seconds, time.perf_counter() - start)
    return 2.0 * size**3 / seconds
