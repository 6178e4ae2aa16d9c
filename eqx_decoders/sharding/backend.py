"""What suits each platform: one table of choices, which a layout has as `layout.backend`.

Layers ask for a choice by its name and never for a platform: results are the same, speed and memory are not. A new
platform is a row of `BACKENDS`.
"""

import dataclasses
import functools
from typing import Literal


@dataclasses.dataclass(frozen=True, kw_only=True)
class Backend:
    """Forms of computation that suit a platform; the defaults suit accelerators of any kind.

    **Arguments:**

    - `platform`: as JAX calls it.
    - `compute_dtype`: dtype of activations where none is given.
    - `native_int8`: multiplies numbers of 8 bits as they are.
    - `widens_half`: multiplies 16-bit numbers as float32, so caches are in float32, and few queries are cast to it
        rather than a cache to theirs.
    - `flat_products`: products as one matrix product each (`numerics.einsum`).
    - `doubles_one_row`: one row is multiplied as two equal ones: the compiler would write its products with a weight of
        several dimensions to memory, all of them, before it adds them up.
    - `separate_layers`: layers of a model for inference as arrays of their own, views that a scan would copy.
    - `unrolled_layers`: programs of inference without a scan over layers, which would copy each one's arrays; who owns
        a model may cut its arrays for good (`unstack_in_place`).
    - `few_rows`: a decoding step of as few rows as there are answers, each read only as far as it is filled.
    - `reads_before_writes`: a cache is read as a whole before it is written, since it would be copied otherwise.
    - `slots_together`: slots of an engine that one call of a program empties, or fills with the same prompt: each call
        costs the host time.
    - `branches_wait`: the host waits for the condition of a branch before it launches what comes after: programs that
        run at each token have none.
    - `parallel_programs`: programs that don't need each other's results may run at a time.
    - `shares_cores`: all devices compute on the same cores.
    - `loss_tile_bytes`: logits of one tile of the fused loss.
    - `short_attention`: lengths below this have all their scores computed at once.
    - `attention_kernels`: kernels of its own for longer ones, by their names in the registry, the best first.
    - `attention_blocks`: queries and keys of a block, where there is no kernel.
    - `unrolled_attention`: float32 rows up to this length are attended to without a loop over keys.
    - `keeps_masks`: a mask for all heads is computed once, which the compiler would compute for each.
    - `values_by_head`: values of a past are read in the order in which a cache has them.
    - `pallas_tpu`, `pallas_gpu`: runs Pallas kernels for TPUs, or for GPUs; elsewhere they are interpreted.
    - `paged_kernel`: attention reads pages where they are, by a kernel that goes with this one of the registry;
        None: they are gathered.
    - `sums_state_reads`: one token reads a recurrent state by sums, where a product would copy it.
    - `gradient_rings`: gradients of gathered weights are added up in rings beside their products: the compiler has no
        sum of which each device gets its piece.
    - `ragged_exchange`: rows of any number are sent to other devices.
    - `few_token_experts`: so few tokens read the weights of their experts one by one.
    - `expert_blocks`: where no kernel can multiply them, rows of experts go through a loop over blocks.
    """

    platform: str
    compute_dtype: Literal["float32", "bfloat16"] = "bfloat16"
    native_int8: bool = True
    widens_half: bool = False
    flat_products: bool = False
    doubles_one_row: bool = False
    separate_layers: bool = False
    unrolled_layers: bool = False
    few_rows: bool = False
    reads_before_writes: bool = False
    slots_together: int = 8
    branches_wait: bool = False
    parallel_programs: bool = True
    shares_cores: bool = False
    loss_tile_bytes: int = 256 * 2**20
    short_attention: int = 512
    attention_kernels: tuple[str, ...] = ()
    attention_blocks: tuple[int, int] = (512, 512)
    unrolled_attention: int = 0
    keeps_masks: bool = False
    values_by_head: bool = False
    pallas_tpu: bool = False
    pallas_gpu: bool = False
    paged_kernel: str | None = None
    sums_state_reads: bool = False
    gradient_rings: bool = False
    ragged_exchange: bool = False
    few_token_experts: bool = False
    expert_blocks: bool = True

    def describe(self) -> str:
        """Return the choices in which it differs from any accelerator: `"tpu: attention_kernels=('interval',), …"`."""
        usual, chosen = Backend(platform=self.platform), vars(self)
        words = [f"{name}={value}" for name, value in chosen.items() if value != getattr(usual, name)]
        return f"{self.platform}: {', '.join(words) or 'as any accelerator'}"


BACKENDS = {
    "cpu": Backend(
        platform="cpu",
        compute_dtype="float32",
        native_int8=False,
        widens_half=True,
        flat_products=True,
        separate_layers=True,
        few_rows=True,
        slots_together=1,
        reads_before_writes=True,
        shares_cores=True,
        loss_tile_bytes=64 * 2**20,
        short_attention=32,
        attention_blocks=(128, 256),  # a tile of all heads has to fit the cache (measured)
        unrolled_attention=512,
        keeps_masks=True,
        values_by_head=True,
    ),
    "gpu": Backend(
        platform="gpu",
        doubles_one_row=True,
        unrolled_layers=True,
        reads_before_writes=True,
        branches_wait=True,
        loss_tile_bytes=2**30,  # an H100 adds up the kernel's gradient from memory: 8 % of a 1b model's step (measured)
        attention_kernels=("cudnn", "triton"),
        pallas_gpu=True,
        paged_kernel="triton",
    ),
    "tpu": Backend(
        platform="tpu",
        attention_kernels=("interval",),
        pallas_tpu=True,
        paged_kernel="interval",
        sums_state_reads=True,
        gradient_rings=True,
        ragged_exchange=True,
        few_token_experts=True,
        expert_blocks=False,
    ),
}

# Choices that a mesh of several devices does not allow: what they would change is split.
_ONE_DEVICE = ("flat_products", "separate_layers", "few_rows")


@functools.cache
def backend_of(platform: str, *, single: bool = True) -> Backend:
    """Return the choices for the devices of a platform; for a mesh of several of them unless `single`."""
    backend = BACKENDS.get(platform, Backend(platform=platform))
    if single:
        return backend
    # CPUs that talk to each other hang where two programs run at a time
    return dataclasses.replace(backend, **dict.fromkeys(_ONE_DEVICE, False), parallel_programs=not backend.shares_cores)
