"""Host offloading: which arrays are stored in host memory, and their transfers between host and device."""

import dataclasses
import fnmatch
from typing import Any

import equinox as eqx
import jax
from jaxtyping import Array, PyTree

from eqx_decoders.errors import CheckedFields


HOST = "pinned_host"  # memory kind of JAX: host memory that devices access directly


@dataclasses.dataclass(frozen=True, kw_only=True)
class Offload(CheckedFields):
    """Weights and optimizer states that are stored in host memory and fetched to the device layer by layer.

    Patterns match paths of weights, such as `*.mlp.*`. Only matrices of scanned layers are offloaded. Other weights are
    small, or are needed as one array.
    """

    weights: tuple[str, ...] = ()
    """Path patterns of weights in host memory. The weights of a layer are fetched when it runs and, with a remat
    policy, again in its backward pass. Their gradients are sent to the host."""
    optimizer: tuple[str, ...] = ()
    """Path patterns of weights whose optimizer state and EMA are in host memory. They are fetched, updated and sent
    back layer by layer. Supported by adamw and lion."""

    def holds(self, field: str, name: str, axis_names: tuple[str, ...]) -> bool:
        """Return whether a weight or its optimizer state is stored in host memory.

        **Arguments:**

        - `field`: `"weights"` or `"optimizer"`.
        - `name`, `axis_names`: path and logical axes of the weight.
        """
        patterns = getattr(self, field)
        return can_offload(name, axis_names) and any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def can_offload(name: str, axis_names: tuple[str, ...]) -> bool:
    """Return whether a weight can be offloaded: whether it is a matrix of scanned layers."""
    return name.startswith("scanned_layers.") and axis_names[0] == "layers" and len(axis_names) > 2


def is_on_host(x: Any) -> bool:
    """Return whether a traced array is in host memory."""
    return eqx.is_array(x) and jax.typeof(x).memory_space == jax.memory.Space.Host


def to_device(tree: PyTree) -> PyTree:
    """Return the tree with all arrays in device memory. Gradients of arrays from host memory return to host memory."""
    return jax.tree.map(lambda x: jax.device_put(x, jax.memory.Space.Device) if is_on_host(x) else x, tree)


def to_memory_of(x: Array, like: Array) -> Array:
    """Return `x` in the same memory (host or device) as `like`."""
    return jax.device_put(x, jax.memory.Space.Host) if is_on_host(like) else x
