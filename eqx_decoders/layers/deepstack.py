"""Image features that are added to the residual stream after a layer (DeepStack; Meng et al. 2024)."""

import dataclasses
from typing import ClassVar

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from eqx_decoders.context import ForwardContext
from eqx_decoders.layers.base import BranchResult, ExtraConfig


DEEPSTACK = "deepstack"  # name of the features in `ForwardContext.layer_inputs`


@dataclasses.dataclass(frozen=True, kw_only=True)
class AddedFeaturesConfig(ExtraConfig):
    """Configuration of a layer after the MLP that adds `ForwardContext.layer_inputs[DEEPSTACK]` to the stream.

    The features have the shape `[batch, length, embed]`. If they are absent nothing is added.
    """

    takes: ClassVar[tuple[str, ...]] = (DEEPSTACK,)  # names of layer inputs that the layer reads

    def build(self, embed_dim: int, *, key: PRNGKeyArray) -> "AddedFeatures":
        return AddedFeatures()


class AddedFeatures(eqx.Module):
    """Layer whose output, to be added to the residual stream, is the features of this layer for each token."""

    def __call__(
        self, x: Float[Array, "batch length embed"], ctx: ForwardContext
    ) -> Float[Array, "batch length embed"]:
        features = ctx.layer_inputs.get(DEEPSTACK)
        return jnp.zeros_like(x) if features is None else features.astype(x.dtype)

    def branch(self, x: Array, ctx: ForwardContext, past: None, key: PRNGKeyArray | None) -> BranchResult:
        """Run the layer in a block; see `BranchLayer`."""
        return BranchResult(self(x, ctx))
