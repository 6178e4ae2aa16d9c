"""Configuration of multi-token prediction."""

import dataclasses

from eqx_decoders.blocks.block import BlockConfig
from eqx_decoders.errors import CheckedFields, NonNegativeFloat, PositiveInt, check
from eqx_decoders.layers.moe.experts import ExpertsConfig
from eqx_decoders.layers.norm import NormConfig
from eqx_decoders.layers.shared_transformer import AidedMixerConfig


def needs_model(block: BlockConfig) -> bool:
    """Return whether a block's layers need what only a model's layers have, such as token ids."""
    hashed = isinstance(block.mlp, ExpertsConfig) and block.mlp.router.hashed_tokens is not None
    return hashed or block.shared_name is not None or isinstance(block.mixer, AidedMixerConfig)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MTPConfig(CheckedFields):
    """`h_k[t] = block(A norm(embed(token[t + k])) + B norm(h_{k-1}[t]))`, and the model's head on `norm(h_k)`.

    h_0 is the residual stream after the last layer. Embedding and head are the model's, all else is a depth's own.

    **Arguments:**

    - `num_depths`: number of tokens after the next one that are predicted.
    - `block`: the layer of each depth.
    - `norm`: of the embedding, of the stream, and before the head.
    - `normed_stream`: the first depth reads the stream after the final norm (DeepSeek's published weights expect it).
    - `normed_depths`: later depths read h_{k-1} after the norm before the head (MiMo-V2).
    - `all_streams`: depths read, and hand on, all residual streams: B and its norm are those of each one (DeepSeek-V4).
        Before the head they are added up as the model's are, with weights of the depth's own where these have any.
    - `joint_norm`: the norm of the stream is one of all residual streams side by side, with a scale for each (Qwen 4).
    - `model_norm`: before the head stands the model's final norm, or none where it has none, not one of each depth's
        own (ERNIE 4.5, Qwen 4).
    - `loss_weight`: of the depths' cross-entropy, the mean over all their targets, in the training loss.
    """

    num_depths: PositiveInt
    block: BlockConfig
    norm: NormConfig
    normed_stream: bool = False
    normed_depths: bool = False
    all_streams: bool = False
    joint_norm: bool = False
    model_norm: bool = False
    loss_weight: NonNegativeFloat = 0.1

    def __post_init__(self):
        super().__post_init__()
        alone = self.block.shortcut_from is None and getattr(self.block.mlp, "shortcut", None) is None
        check(alone, "MTPConfig.block must have no shortcut of experts: it stands alone.")
        norms = [name for name in ("normed_stream", "normed_depths") if getattr(self, name)]
        rule = "excludes normed_stream and normed_depths, whose norm is of the sum of the streams"
        check(not (self.all_streams and norms), f"MTPConfig.all_streams=True {rule}.")
        check(self.all_streams or not self.joint_norm, "MTPConfig.joint_norm=True needs all_streams=True.")
        rule = "excludes normed_depths: the norm that they read is one of each depth's own"
        check(not (self.model_norm and self.normed_depths), f"MTPConfig.model_norm=True {rule}.")
