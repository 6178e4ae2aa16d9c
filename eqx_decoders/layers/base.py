"""Interfaces of the layers of a decoder block (mixers, MLPs, experts).

A layer is a pair of classes: a frozen dataclass derived from `MixerConfig`, `ChannelConfig` or `ExtraConfig`, and the
module that its `build` returns, which has a method `branch` (see `BranchLayer`).
"""

import abc
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

from jaxtyping import Array, PRNGKeyArray, PyTree

import eqx_decoders.layers
from eqx_decoders.context import ForwardContext
from eqx_decoders.errors import CheckedFields, ConfigError


class RegisteredConfig(CheckedFields, abc.ABC):
    """Base class of configurations that saved models name by their class.

    Defining a subclass registers it. Raises ConfigError if the library has a class of the same name.
    """

    _classes: ClassVar[dict[str, type["RegisteredConfig"]]] = {}  # by class name

    def __init_subclass__(cls, **options: Any):
        super().__init_subclass__(**options)
        if not cls.__module__.startswith("eqx_decoders."):
            getattr(eqx_decoders.layers, cls.__name__, None)  # import the library's class of this name, if there is one
        known = RegisteredConfig._classes.get(cls.__name__, cls)
        in_library = (known.__module__.startswith("eqx_decoders."), cls.__module__.startswith("eqx_decoders."))
        if known.__module__ != cls.__module__ and any(in_library):
            own, other = (cls, known) if in_library[0] else (known, cls)
            raise ConfigError(
                f"class {own.__name__} of {own.__module__}: {other.__module__} has a class of this name. Use another "
                "name, since saved configurations refer to classes by their names."
            )
        RegisteredConfig._classes[cls.__name__] = cls

    @classmethod
    def registered(cls) -> list[type["RegisteredConfig"]]:
        """Return this class and its subclasses; of classes with one name, the one that was defined last."""
        return [registered for registered in RegisteredConfig._classes.values() if issubclass(registered, cls)]


class LayerConfig(RegisteredConfig):
    """Base class of the configurations of layers. Subclasses are frozen dataclasses; see `MixerConfig`.

    - `takes`: names of the inputs in `Inputs.by_layer` that the layer reads from `ForwardContext.layer_inputs`.
    - `reads_streams`: whether the layer reads and returns all residual streams instead of one.
    - `encoder_only`: whether the layer needs all tokens at once. It has no cache, so only encoders support it.
    """

    takes: ClassVar[tuple[str, ...]] = ()
    reads_streams: ClassVar[bool] = False
    encoder_only: ClassVar[bool] = False

    @abc.abstractmethod
    def build(self, embed_dim: int, *, key: PRNGKeyArray) -> Any:
        """Return the layer with new weights, for a residual stream of `embed_dim` features."""

    def cache_shape(self, max_length: int) -> Any:
        """Return the shape of the cache for sequences of up to `max_length` tokens (`layers.cache`); None: no cache."""
        return None

    @property
    def depends_on_token_order(self) -> bool:
        """Whether permuting tokens together with their positions changes the result; by default if there is a cache."""
        return type(self).cache_shape is not LayerConfig.cache_shape

    def token_products(self, length: int) -> int:
        """Return the multiplications per token other than by weights, in a sequence of `length` tokens (for FLOPs)."""
        return 0


class MixerConfig(LayerConfig):
    """Base class of the configurations of token mixers (`BlockConfig.mixer`).

    - `built_by_layer`: whether `build` takes `layer`, the index of the layer in the decoder, for initial weights.
    - `out_dim`: features of the output; None for the features of the input.
    """

    built_by_layer: ClassVar[bool] = False
    out_dim: ClassVar[int | None] = None

    def inner_mixers(self) -> tuple["MixerConfig", ...]:
        """Return the mixers of which this one consists: itself, unless it combines others."""
        return (self,)

    @property
    def table_shape(self) -> tuple[int, int] | None:
        """Shape of the table of relative positions that all layers of an encoder share; None: the layer uses none."""
        return None

    @property
    def shares_as(self) -> str | None:
        """Name under which this layer shares `BranchResult.shared` with later layers; None: it shares no value."""
        return None

    @property
    def shared_from(self) -> str | None:
        """Name under which an earlier layer shares the value that this layer uses; None: no shared value is used."""
        return None


class ChannelConfig(LayerConfig):
    """Base class of the configurations of channel mixers (`BlockConfig.mlp`)."""

    @property
    def shares_as(self) -> str | None:
        """Name under which this layer shares `BranchResult.shared` with later layers; None: it shares no value."""
        return None


class ExtraConfig(LayerConfig):
    """Base class of the configurations of extra layers (`BlockConfig.pre_layers` and `post_layers`)."""


class BranchResult(NamedTuple):
    """Result of a layer in a decoder block.

    **Arguments:**

    - `out`: the layer's output, to be added to the residual stream.
    - `entries`: new keys/values or new state, to be committed to the layer's cache; a tree with the structure of the
        cache. None for a layer without a cache.
    - `stats`: values for fields of `BlockStats`, by name.
    - `shared`: anything else that the layer shares with later layers, such as an indexer's selection of keys; None for
        nothing.
    """

    out: Array
    entries: Any = None
    stats: Mapping[str, Any] = MappingProxyType({})
    shared: Any = None


class BranchInputs(NamedTuple):
    """Arguments of `BranchLayer.branch`, as a tuple."""

    x: Array
    ctx: ForwardContext
    past: Any
    key: PRNGKeyArray | None


@runtime_checkable
class BranchLayer(Protocol):
    """Layer that can be used in a decoder block."""

    def branch(self, x: Array, ctx: ForwardContext, past: Any, key: PRNGKeyArray | None) -> BranchResult:
        """Run the layer.

        **Arguments:**

        - `x`: input of the layer, `[batch, length, embed]`, after the block's norm.
        - `ctx`: positions, segments and options of the forward pass.
        - `past`: the layer's cached keys and values or state; None without a cache.
        - `key`: random key for dropout; None: no dropout.
        """
        ...


@runtime_checkable
class StaggeredLayer(BranchLayer, Protocol):
    """Layer that routes tokens to other devices, which can be overlapped with computation for other parts of the batch.

    `route` and `run_routed` together compute what `branch` computes; see `blocks/batch_overlap.py`.
    """

    def route(self, inputs: BranchInputs) -> PyTree:
        """Compute everything for one part of the batch that needs no communication: the routes of its tokens."""
        ...

    def run_routed(self, parts: Sequence[BranchInputs], routed: Sequence[PyTree]) -> list[BranchResult]:
        """Communicate, and compute the results of all parts. `routed`: results of `route` for each part."""
        ...
