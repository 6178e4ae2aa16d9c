"""Configuration of multi-token prediction."""

import dataclasses

from eqx_decoders.blocks.block import BlockConfig
from eqx_decoders.errors import CheckedFields, NonNegativeFloat, PositiveInt, check
from eqx_decoders.layers.moe.experts import ExpertsConfig
from eqx_decoders.layers.norm import NormConfig
from eqx_decoders.layers.shared_transformer import AidedMixerConfig


def depends_on_model(block: BlockConfig) -> bool:
    """Return whether a block depends on other layers or on token ids, so that it cannot run in an MTP depth.

    Such blocks route tokens by their ids, reuse keys, values or selected keys of an earlier layer, or use a shared
    transformer block.
    """
    routes_by_token_id = isinstance(block.mlp, ExpertsConfig) and block.mlp.router.hashed_tokens is not None
    return routes_by_token_id or block.shared_from is not None or isinstance(block.mixer, AidedMixerConfig)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MTPConfig(CheckedFields):
    """Configuration of multi-token prediction (MTP): `num_depths` blocks that predict tokens after the next token.

    Depth k computes `h_k[t] = block(A norm(embed(token[t + k])) + B norm(h_{k-1}[t]))`, and its logits are the model's
    head applied to `norm(h_k)`. h_0 is the residual stream after the last layer. Embedding and head are shared with the
    model; all other weights are separate for each depth.

    **Arguments:**

    - `num_depths`: number of tokens after the next token that are predicted.
    - `block`: configuration of the block of each depth.
    - `norm`: configuration of the norms of the embedding, of the stream, and before the head.
    - `normed_stream`: the first depth reads the stream after the final norm (DeepSeek's published weights expect it).
    - `normed_depths`: later depths read h_{k-1} after the norm before the head (MiMo-V2).
    - `all_streams`: depths read and return all residual streams (DeepSeek-V4). B and its norm are applied to each
        stream separately. Before the head the streams are summed as in the model; if that sum has weights, each depth
        has separate weights for it.
    - `joint_norm`: one norm over the concatenation of all residual streams, with a separate scale for each stream
        (Qwen 4), in place of one norm that is applied to each stream.
    - `model_norm`: depths use the model's final norm (or no norm, if the model has none) before the head, in place of a
        separate norm for each depth (ERNIE 4.5, Qwen 4).
    - `loss_weight`: weight of the depths' cross-entropy (mean over the targets of all depths) in the training loss.
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
        has_shortcut = self.block.shortcut_from is not None or (
            self.block.mlp is not None and self.block.mlp.shares_as is not None
        )
        check(
            not has_shortcut,
            "MTPConfig.block must not use shortcut-connected experts, because an MTP depth has a single block: "
            "set shortcut=None and shortcut_from=None.",
        )
        check(
            not (self.all_streams and (self.normed_stream or self.normed_depths)),
            "MTPConfig.all_streams=True excludes normed_stream and normed_depths, because the norm that they use is "
            "applied to the sum of the streams. Set them to False.",
        )
        check(self.all_streams or not self.joint_norm, "MTPConfig.joint_norm=True needs all_streams=True.")
        check(
            not (self.model_norm and self.normed_depths),
            "MTPConfig.model_norm=True excludes normed_depths=True, which needs a separate norm for each depth. "
            "Set one of them to False.",
        )
