"""Arrays in the memory of the host: their choice, and their transfer to the device and back."""

import dataclasses
import fnmatch
from typing import Any

import equinox as eqx
import jax
from jaxtyping import Array, PyTree

from eqx_decoders.errors import CheckedFields


HOST = "pinned_host"  # the kind of memory that devices read and write directly


@dataclasses.dataclass(frozen=True, kw_only=True)
class Offload(CheckedFields):
    """Arrays in the memory of the host, which come to the device one layer at a time.

    Patterns match paths of weights, and choose among the matrices of stacked layers: all else is small, or needed at
    once.
    """

    weights: tuple[str, ...] = ()
    """Patterns of the paths of weights that the host keeps; each layer's are fetched where it runs, and with a remat
    policy again for its gradient, which goes to the host, too."""
    optimizer: tuple[str, ...] = ()
    """Patterns of the paths of weights whose optimizer state and running means the host keeps; each layer's are
    fetched, used and sent back. For adamw and lion."""

    def holds(self, field: str, name: str, words: tuple[str, ...]) -> bool:
        """Return whether the host holds the weight (or, by `field`, its state) at this path, with these axes."""
        return may_stream(name, words) and any(fnmatch.fnmatchcase(name, each) for each in getattr(self, field))


def may_stream(name: str, words: tuple[str, ...]) -> bool:
    """Return whether a weight is a matrix of each layer of a stack."""
    return name.startswith("scanned_layers.") and words[0] == "layers" and len(words) > 2


def is_on_host(x: Any) -> bool:
    """Return whether an array in a program that is being traced is in the host's memory."""
    return eqx.is_array(x) and jax.typeof(x).memory_space == jax.memory.Space.Host


def to_device(tree: PyTree) -> PyTree:
    """Return the tree with all arrays on the device; gradients of arrays of the host go back to it."""
    return jax.tree.map(lambda x: jax.device_put(x, jax.memory.Space.Device) if is_on_host(x) else x, tree)


def to_home(x: Array, like: Array) -> Array:
    """Return `x` in the memory of `like`."""
    return jax.device_put(x, jax.memory.Space.Host) if is_on_host(like) else x
