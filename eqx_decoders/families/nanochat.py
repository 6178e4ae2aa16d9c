"""nanochat (Karpathy 2025): norms without scales, RoPE with reversed rotation, QK norm after RoPE, MLPs with ReLU²."""

import dataclasses

from eqx_decoders.families.common import LAYER, DecoderSizes, decoder_sizes, llama_weights, plain_mlp
from eqx_decoders.families.family import Family
from eqx_decoders.families.rope_config import rope_settings
from eqx_decoders.families.setting_rows import Number
from eqx_decoders.layers.attention.attention import QKNorm
from eqx_decoders.layers.norm import RMSNormConfig
from eqx_decoders.layers.rope import Rope
from eqx_decoders.model.decoder_config import DecoderConfig


def nanochat(shape: DecoderSizes, *, rope: Rope = Rope(), logit_cap: float | None = 15.0) -> DecoderConfig:
    """Return a decoder of nanochat blocks.

    **Arguments:**

    - `shape`: sizes of the decoder.
    - `rope`: rotary embedding; its rotation is reversed.
    - `logit_cap`: soft cap of the logits; None: no cap.
    """
    norm = RMSNormConfig(eps=shape.eps, scale=False)
    reversed_rope = dataclasses.replace(rope, reverse=True)
    mixer = shape.attention(rope=reversed_rope, qk_norm=QKNorm(norm=norm, when="after_rope"))
    block = shape.block(mixer, shape.mlp(gated=False), norm)
    return shape.decoder(block, norm, embedding_norm=norm, logit_soft_cap=logit_cap)


FAMILY = Family(
    model_type="nanochat",
    architecture="NanoChatForCausalLM",
    settings=(
        decoder_sizes(activation="relu2"),
        Number("final_logit_softcapping", "logit_soft_cap", 15.0, null=None, name="logit_cap"),
        rope_settings(),
    ),
    build=nanochat,
    weights=llama_weights(mlp=plain_mlp(LAYER + "mlp.", up="fc1", down="fc2")),
)


_BASE = dict(model_type="nanochat", vocab_size=65_536)

MODELS = {
    "nanochat-d20": _BASE | dict(
        hidden_size=1280, num_hidden_layers=20, num_attention_heads=10, intermediate_size=5120,
    ),
    "nanochat-d32": _BASE | dict(
        hidden_size=2048, num_hidden_layers=32, num_attention_heads=16, intermediate_size=8192,
    ),
}  # fmt: skip
