"""XLA options for TPUs that differ from XLA's defaults, each with a reason and the projects that use it.

The table contains only options that other projects use in large runs and that do not change results. Reductions on
SparseCores (`…_sparse_core_collective_offload_reduce_scatter` and `…_all_reduce`) are left out, because wrong losses
were reported on v6e and v7x. Asynchronous all-gathers that are fused with products are enabled only on v5e: for other
chips libtpu refuses the combination, because results can be wrong. On v5p and v6e, `xla_enable_async_all_gather` by
itself leaves all-gathers of weights synchronous (libtpu 0.0.52), so they run on the SparseCores.
"""

import os
from collections.abc import Mapping, MutableMapping
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, NamedTuple


FlagsName = Literal["auto", "none"]


class Option(NamedTuple):
    """XLA option: value, reason, projects that use it, and chips. Empty `chips`: all chips."""

    name: str
    value: str
    reason: str
    source: str
    chips: tuple[str, ...] = ()


_BOTH = "MaxText, axlearn"
_TORUS = "MaxText (its scripts of DiLoCo and gpt-oss-20b for v5p, of gemma4-e4b for v6e)"
_OVERLAP = "all-gathers of weights overlap with products"
_GATHERS = ("v5e", "v5p", "v6e")

OPTIONS: tuple[Option, ...] = (
    Option("xla_tpu_scoped_vmem_limit_kib", "81920", "larger tiles of products, and room for kernels of experts",
           "MaxText (for MoE models; 98304 for dense models)", ("v5p", "v6e")),
    Option("xla_tpu_scoped_vmem_limit_kib", "65536", "larger tiles of products", "MaxText", ("v7x",)),
    Option("xla_enable_async_all_gather", "true", _OVERLAP, _BOTH, _GATHERS),
    Option("xla_tpu_overlap_compute_collective_tc", "true", _OVERLAP, _BOTH, _GATHERS),
    Option("xla_tpu_enable_async_collective_fusion_fuse_all_gather", "true", _OVERLAP, _BOTH, ("v5e",)),
    Option("xla_tpu_enable_async_collective_fusion_multiple_steps", "true",
    "one all-gather overlaps with several products", _BOTH,
           ("v5e",)),
    Option("xla_jf_spmd_threshold_for_windowed_einsum_mib", "1000000",
           "no windowed einsums, which are slower on this chip", _BOTH, ("v6e",)),
    Option("xla_tpu_enable_sparse_core_collective_offload_all_gather", "true",
           "all-gathers run on the SparseCores and overlap with products", _BOTH, ("v5p", "v6e", "v7x")),
    Option("xla_tpu_enable_sparse_core_collective_offload_2d_all_gather", "true",
           "the same along two axes of the torus", _TORUS, ("v5p", "v6e")),
    Option("xla_tpu_enable_sparse_core_collective_offload_3d_all_gather", "true",
           "the same along three axes of the torus", _TORUS, ("v5p",)),
    Option("xla_tpu_use_tc_device_shape_on_sc", "true", "required by the options above", "MaxText",
           ("v5p", "v6e", "v7x")),
    Option("xla_sc_disable_megacore_partitioning", "true", "required by the options above if two cores are one device",
           "MaxText", ("v5p",)),
    Option("xla_tpu_enable_data_parallel_all_reduce_opt", "true",
           "all-reduces between slices overlap with the backward pass", _BOTH),
    Option("xla_tpu_data_parallel_opt_different_sized_ops", "true", "the same for gradients of different sizes", _BOTH),
)  # fmt: skip

# prefixes of accelerator types, and PCI device ids of Google's chips (jax._src.hardware_utils)
_TYPES = {"v4": "v4", "v5litepod": "v5e", "v5e": "v5e", "v5p": "v5p", "v6e": "v6e", "tpu7": "v7x", "v7x": "v7x"}
_PCI = {"0x005e": "v4", "0x0062": "v5p", "0x0063": "v5e", "0x006f": "v6e", "0x0076": "v7x"}
_GOOGLE = "0x1ae0"


def options(chip: str | None) -> dict[str, str]:
    """Return the options for a chip, given its name in `chips.CHIPS`. None: only options for all chips."""
    return {option.name: option.value for option in OPTIONS if not option.chips or chip in option.chips}


def generation(environ: Mapping[str, str] = os.environ, bus: Path = Path("/sys/bus/pci/devices")) -> str | None:
    """Return the TPU generation of this host, from environment variables or the PCI bus, without JAX; or None."""
    type_name = environ.get("TPU_ACCELERATOR_TYPE") or environ.get("ACCELERATOR_TYPE") or ""
    named = next((chip for begin, chip in _TYPES.items() if type_name.lower().startswith(begin)), None)
    if named is not None:
        return named
    for device in sorted(bus.glob("*")):
        try:
            vendor, kind = ((device / name).read_text().strip() for name in ("vendor", "device"))
        except OSError:
            continue
        if vendor == _GOOGLE and kind in _PCI:
            return _PCI[kind]
    return None


def set_options(name: FlagsName, environ: MutableMapping[str, str] = os.environ) -> dict[str, str]:
    """Add the options for this host's TPU to LIBTPU_INIT_ARGS, which libtpu reads when JAX initializes. Returns them.

    Options that are already in LIBTPU_INIT_ARGS or XLA_FLAGS are not changed. Nothing is added without libtpu, or if
    JAX_PLATFORMS excludes TPUs.
    """
    platforms = environ.get("JAX_PLATFORMS", "")
    if name == "none" or (platforms and "tpu" not in platforms) or find_spec("libtpu") is None:
        return {}
    present = environ.get("LIBTPU_INIT_ARGS", "")
    names = {word.lstrip("-").partition("=")[0] for word in f"{present} {environ.get('XLA_FLAGS', '')}".split()}
    added = {option: value for option, value in options(generation(environ)).items() if option not in names}
    environ["LIBTPU_INIT_ARGS"] = " ".join(
        [*present.split(), *(f"--{option}={value}" for option, value in added.items())]
    )
    return added
