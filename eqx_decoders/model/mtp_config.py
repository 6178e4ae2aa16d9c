"""Configuration of multi-token prediction."""

import dataclasses

from eqx_decoders.blocks.block import BlockConfig
from eqx_decoders.errors import check_integer, check_number
from eqx_decoders.layers.norm import NormConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class MTPConfig:
    """`h_k[t] = block(project([norm(embed(token[t + k])), norm(h_{k-1}[t])]))`, and the model's head on `norm(h_k)`.

    h_0 is the residual stream after the last layer. Embedding and head are the model's, all else is a depth's own.

    **Arguments:**

    - `num_depths`: number of tokens after the next one that are predicted.
    - `block`: the layer of each depth.
    - `norm`: of the embedding, of the stream, and before the head.
    - `normed_stream`: the first depth reads the stream after the final norm (DeepSeek's published weights expect it).
    - `loss_weight`: of the depths' cross-entropy, the mean over all their targets, in the training loss.
    """

    num_depths: int
    block: BlockConfig
    norm: NormConfig
    normed_stream: bool = False
    loss_weight: float = 0.1

    def __post_init__(self):
        check_integer("MTPConfig.num_depths", self.num_depths)
        check_number("MTPConfig.loss_weight", self.loss_weight, least=0)
