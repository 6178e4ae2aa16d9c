"""Features of images that are added to the stream after a layer (DeepStack; Meng et al. 2024)."""

import dataclasses
from typing import ClassVar

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from eqx_decoders.context import ForwardContext
from eqx_decoders.layers.base import BranchResult, ExtraConfig


DEEPSTACK = "deepstack"  # the name under which layers take them


@dataclasses.dataclass(frozen=True, kw_only=True)
class AddedFeaturesConfig(ExtraConfig):
    """Configuration of `x + features`: features of this layer for each token, or 0; a layer after the MLP."""

    takes: ClassVar[tuple[str, ...]] = (DEEPSTACK,)

    def build(self, embed_dim: int, *, key: PRNGKeyArray) -> "AddedFeatures":
        return AddedFeatures()


class AddedFeatures(eqx.Module):
    """Layer that adds given features to the stream: `x + features`."""

    def __call__(
        self, x: Float[Array, "batch length embed"], ctx: ForwardContext
    ) -> Float[Array, "batch length embed"]:
        features = ctx.layer_inputs.get(DEEPSTACK)
        return jnp.zeros_like(x) if features is None else features.astype(x.dtype)

    def branch(self, x: Array, ctx: ForwardContext, past: None, key: PRNGKeyArray | None) -> BranchResult:
        """Call the layer for a block."""
        return BranchResult(self(x, ctx))
