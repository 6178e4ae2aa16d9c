"""Options of XLA for TPUs that differ from its defaults, each with a reason and with programs that use it.

Only options of large runs of others, which change no result. Left out are sums that SparseCores do
(`…_sparse_core_collective_offload_reduce_scatter` and `…_all_reduce`), which were reported to give wrong losses on v6e
and v7x. Gathers that are asynchronous and fused into products are for v5e alone: elsewhere libtpu refuses the two
together, as they may give wrong results. On v5p and v6e `xla_enable_async_all_gather` alone leaves all gathers of
weights synchronous (libtpu 0.0.52): there the SparseCores do them.
"""

import os
from collections.abc import Mapping, MutableMapping
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, NamedTuple


FlagsName = Literal["auto", "none"]


class Option(NamedTuple):
    """An option: its value, its reason, programs that use it, and its chips (none: all)."""

    name: str
    value: str
    reason: str
    source: str
    chips: tuple[str, ...] = ()


_BOTH = "MaxText, axlearn"
_TORUS = "MaxText (its scripts of DiLoCo and gpt-oss-20b for v5p, of gemma4-e4b for v6e)"
_OVERLAP = "gathers of weights go on beside products"
_GATHERS = ("v5e", "v5p", "v6e")

OPTIONS: tuple[Option, ...] = (
    Option("xla_tpu_scoped_vmem_limit_kib", "81920", "larger tiles of products; experts' kernels find room, too",
           "MaxText (of experts; of dense models 98304)", ("v5p", "v6e")),
    Option("xla_tpu_scoped_vmem_limit_kib", "65536", "larger tiles of products", "MaxText", ("v7x",)),
    Option("xla_enable_async_all_gather", "true", _OVERLAP, _BOTH, _GATHERS),
    Option("xla_tpu_overlap_compute_collective_tc", "true", _OVERLAP, _BOTH, _GATHERS),
    Option("xla_tpu_enable_async_collective_fusion_fuse_all_gather", "true", _OVERLAP, _BOTH, ("v5e",)),
    Option("xla_tpu_enable_async_collective_fusion_multiple_steps", "true", "one gather beside several products", _BOTH,
           ("v5e",)),
    Option("xla_jf_spmd_threshold_for_windowed_einsum_mib", "1000000",
           "no products in rings of small pieces, which are slower there", _BOTH, ("v6e",)),
    Option("xla_tpu_enable_sparse_core_collective_offload_all_gather", "true",
           "gathers go on beside products, on the SparseCores", _BOTH, ("v5p", "v6e", "v7x")),
    Option("xla_tpu_enable_sparse_core_collective_offload_2d_all_gather", "true",
           "the same along two axes of the torus", _TORUS, ("v5p", "v6e")),
    Option("xla_tpu_enable_sparse_core_collective_offload_3d_all_gather", "true",
           "the same along three axes of the torus", _TORUS, ("v5p",)),
    Option("xla_tpu_use_tc_device_shape_on_sc", "true", "what the options above need", "MaxText",
           ("v5p", "v6e", "v7x")),
    Option("xla_sc_disable_megacore_partitioning", "true", "what the options above need where two cores are one device",
           "MaxText", ("v5p",)),
    Option("xla_tpu_enable_data_parallel_all_reduce_opt", "true", "sums between slices go on behind the backward pass",
           _BOTH),
    Option("xla_tpu_data_parallel_opt_different_sized_ops", "true", "the same for gradients of different sizes", _BOTH),
)  # fmt: skip

# How accelerator types begin, and the devices that Google's chips are on the PCI bus (jax._src.hardware_utils).
_TYPES = {"v4": "v4", "v5litepod": "v5e", "v5e": "v5e", "v5p": "v5p", "v6e": "v6e", "tpu7": "v7x", "v7x": "v7x"}
_PCI = {"0x005e": "v4", "0x0062": "v5p", "0x0063": "v5e", "0x006f": "v6e", "0x0076": "v7x"}
_GOOGLE = "0x1ae0"


def options(chip: str | None) -> dict[str, str]:
    """Return the options for a chip by its name in `chips.CHIPS`; None: those for all."""
    return {option.name: option.value for option in OPTIONS if not option.chips or chip in option.chips}


def generation(environ: Mapping[str, str] = os.environ, bus: Path = Path("/sys/bus/pci/devices")) -> str | None:
    """Return the TPU generation of this host, before JAX starts, by its VM's variables or its PCI bus; or None."""
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
    """Add the options of this host's TPU to LIBTPU_INIT_ARGS, which libtpu reads when JAX first looks for devices.

    Options there or in XLA_FLAGS stay as they are. Nothing is set where there is no libtpu, or where JAX_PLATFORMS
    leaves TPUs out. Returns the added options.
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
