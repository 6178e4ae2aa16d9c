"""Further layers of a block, beside its mixer and its MLP."""

import dataclasses

import equinox as eqx
from jaxtyping import PRNGKeyArray

from eqx_decoders.errors import check, check_number
from eqx_decoders.layers.base import BranchLayer
from eqx_decoders.layers.norm import Norm, NormConfig
from eqx_decoders.layers.registry import FurtherConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExtraLayerConfig:
    """A further layer of a block, with a norm before it and one on its output: `scale * post(layer(pre(x)))`.

    **Arguments:**

    - `layer`: one of `layers.registry.FurtherConfig`.
    - `pre_norm`, `post_norm`: its norms; None for none.
    - `scale`: multiplies what it makes (a half in Conformers; Gulati et al. 2020).
    """

    layer: FurtherConfig
    pre_norm: NormConfig | None = None
    post_norm: NormConfig | None = None
    scale: float = 1.0

    def __post_init__(self):
        rule = "must be one of layers.kinds.FurtherConfig: what experts tell of their loads is told of the MLP's alone"
        check(isinstance(self.layer, FurtherConfig), f"BranchConfig.layer={self.layer!r} {rule}.")
        check_number("ExtraLayerConfig.scale", self.scale, above=0)

    def build(self, embed_dim: int, *, key: PRNGKeyArray) -> "ExtraLayer":
        norms = (None if norm is None else norm.build(embed_dim) for norm in (self.pre_norm, self.post_norm))
        return ExtraLayer(self.layer.build(embed_dim, key=key), *norms, config=self)


class ExtraLayer(eqx.Module):
    """A further layer of a block."""

    layer: BranchLayer
    pre_norm: Norm | None
    post_norm: Norm | None
    config: ExtraLayerConfig = eqx.field(static=True)
