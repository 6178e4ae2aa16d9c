"""Implementation choices per platform (CPU, GPU, TPU), which a layout has as `layout.backend`.

Layers read a choice by its name and never check the platform. Choices affect speed, memory and rounding; `auto` options
use `compute_dtype`. To support another platform, add an entry to `BACKENDS`.
"""

import dataclasses
import functools
from typing import Literal


@dataclasses.dataclass(frozen=True, kw_only=True)
class Backend:
    """Implementation choices that suit a platform. The defaults suit accelerators in general.

    - `platform`: name of the platform in JAX.

    **Dtypes and devices:**

    - `compute_dtype`: default dtype of activations.
    - `native_int8`: 8-bit integers are multiplied without a conversion.
    - `upcasts_16_bit`: 16-bit values are multiplied in float32. Caches are then stored in float32, and attention of a
        few queries casts the queries to float32 instead of casting the cache.
    - `devices_share_cores`: all devices use the same processor cores.
    - `parallel_programs`: programs that do not depend on each other may run at the same time.

    **Products of weights** (`numerics`):

    - `flat_products`: contractions are flattened to one matrix product (`numerics.einsum`).
    - `duplicates_single_row`: a product with a single row is computed with two equal rows. For a single row, the
        compiler would write all element-wise products with a multi-dimensional weight to memory before it sums them.
    - `gradient_rings`: gradients of gathered weights are reduce-scattered in rings that overlap with their products,
        because the compiler has no reduce-scatter for them (`numerics.rings`).

    **Experts** (`layers.moe`):

    - `ragged_exchange`: experts use a ragged all-to-all, which sends different numbers of tokens to each device.
    - `all_experts_for_few_tokens`: for a few tokens, all experts are computed without sorting the tokens.
    - `grouped_matmul_loop`: grouped matrix products of experts without a kernel use a loop over row tiles.

    **Training loss** (`training.head`):

    - `loss_tile_bytes`: size of the logits of a tile in the fused loss.

    **Attention and recurrences** (`layers.attention`, `layers.recurrent`):

    - `pallas_tpu`, `pallas_gpu`: the platform runs Pallas kernels for TPU or GPU. On other platforms they run in
        interpret mode.
    - `attention_kernels`: names of the platform's attention kernels for longer sequences, in order of preference.
    - `min_blockwise_attention`: if there are fewer queries or keys than this, attention computes all scores at once.
    - `attention_tiles`: query and key tile sizes of the `chunked` attention kernel.
    - `max_unrolled_attention`: maximum float32 sequence length for which the `chunked` kernel unrolls the loop over
        query tiles, each with all its keys.
    - `materializes_masks`: an attention mask is computed once for all heads. The compiler would compute it for each
        head.
    - `cached_values_by_head`: attention reads cached values in the memory order of the cache, heads before tokens.
    - `paged_kernel`: attention kernel that reads pages of a paged cache in place. It is used if the attention kernel is
        `"auto"` or has the same name. None: pages are gathered.
    - `reads_state_by_sums`: decoding reads a recurrent state by element-wise products and sums. A matrix product would
        copy the state.

    **Inference programs** (`inference`, `serving`):

    - `separate_layers`: models for inference store the layers of a stack as separate arrays. A scan would copy slices
        of a stacked array.
    - `unrolled_layers`: inference programs unroll the layers instead of scanning, because a scan would copy the arrays
        of each layer. The owner of a model can split its stacked arrays permanently (`unstack_in_place`).
    - `active_rows_only`: a decoding step computes only the running sequences, and attention reads the cache of each
        sequence up to its length.
    - `reads_before_writes`: a cache is read completely before it is written, because the compiler would copy it
        otherwise.
    - `slots_per_call`: number of engine slots that one call of a program empties, or fills with the same prompt. Fewer
        calls save time on the host.
    - `branches_block_host`: at a branch, the host waits for the condition before it launches further work. The engine
        then compiles separate sampling programs without branches for the usual batches.
    """

    platform: str
    compute_dtype: Literal["float32", "bfloat16"] = "bfloat16"
    native_int8: bool = True
    upcasts_16_bit: bool = False
    devices_share_cores: bool = False
    parallel_programs: bool = True

    flat_products: bool = False
    duplicates_single_row: bool = False
    gradient_rings: bool = False

    ragged_exchange: bool = False
    all_experts_for_few_tokens: bool = False
    grouped_matmul_loop: bool = True

    loss_tile_bytes: int = 256 * 2**20

    pallas_tpu: bool = False
    pallas_gpu: bool = False
    attention_kernels: tuple[str, ...] = ()
    min_blockwise_attention: int = 512
    attention_tiles: tuple[int, int] = (512, 512)
    max_unrolled_attention: int = 0
    materializes_masks: bool = False
    cached_values_by_head: bool = False
    paged_kernel: str | None = None
    reads_state_by_sums: bool = False

    separate_layers: bool = False
    unrolled_layers: bool = False
    active_rows_only: bool = False
    reads_before_writes: bool = False
    slots_per_call: int = 8
    branches_block_host: bool = False

    def describe(self) -> str:
        """Return the choices that differ from the defaults: `"tpu: attention_kernels=('interval',), …"`."""
        default = Backend(platform=self.platform)
        changes = [f"{name}={value}" for name, value in vars(self).items() if value != getattr(default, name)]
        return f"{self.platform}: {', '.join(changes) or 'default choices'}"


BACKENDS = {
    "cpu": Backend(
        platform="cpu",
        compute_dtype="float32",
        native_int8=False,
        upcasts_16_bit=True,
        flat_products=True,
        separate_layers=True,
        active_rows_only=True,
        slots_per_call=1,
        reads_before_writes=True,
        devices_share_cores=True,
        loss_tile_bytes=64 * 2**20,
        min_blockwise_attention=32,
        attention_tiles=(128, 256),  # measured: the tile of all heads must fit into the CPU's cache
        max_unrolled_attention=512,  # measured: a training step of 512 tokens is 12 % faster on AVX-512
        materializes_masks=True,
        cached_values_by_head=True,
    ),
    "gpu": Backend(
        platform="gpu",
        duplicates_single_row=True,
        unrolled_layers=True,
        reads_before_writes=True,
        branches_block_host=True,
        # Large tiles: the gradient of the output head is read and written per tile (8 % of a 1B model's step on H100).
        loss_tile_bytes=2**30,
        attention_kernels=("cudnn", "triton"),
        pallas_gpu=True,
        paged_kernel="triton",
    ),
    "tpu": Backend(
        platform="tpu",
        attention_kernels=("interval",),
        pallas_tpu=True,
        paged_kernel="interval",
        reads_state_by_sums=True,
        gradient_rings=True,
        ragged_exchange=True,
        all_experts_for_few_tokens=True,
        grouped_matmul_loop=False,
    ),
}

# Choices that are disabled on a mesh of several devices, because the arrays that they affect are sharded.
_SINGLE_DEVICE_CHOICES = ("flat_products", "separate_layers", "active_rows_only")


@functools.cache
def backend_of(platform: str, *, single: bool = True) -> Backend:
    """Return the choices for a platform, with the defaults of `Backend` for a platform that is not in `BACKENDS`.

    `single`: whether there is only one device. Otherwise, choices that sharded arrays do not support are disabled.
    """
    backend = BACKENDS.get(platform, Backend(platform=platform))
    if single:
        return backend
    # Collectives between CPU devices deadlock if two programs run at the same time.
    disabled = dict.fromkeys(_SINGLE_DEVICE_CHOICES, False)
    return dataclasses.replace(backend, **disabled, parallel_programs=not backend.devices_share_cores)
