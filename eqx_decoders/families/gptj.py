"""GPT-J (Wang and Komatsuzaki 2021): attention and MLP in parallel after one norm, pairs of neighbors rotated."""

from eqx_decoders.families import _gpt2
from eqx_decoders.families.common import DecoderSizes, decoder_sizes, plain_mlp, renamed
from eqx_decoders.families.config_keys import ACTIVATIONS
from eqx_decoders.families.hf_table import Family
from eqx_decoders.families.settings_table import Integer, only, value_at
from eqx_decoders.families.weight_rows import self_attention
from eqx_decoders.layers.norm import LayerNormConfig
from eqx_decoders.layers.rope import Rope
from eqx_decoders.model.decoder_config import DecoderConfig


def gptj(shape: DecoderSizes, *, rotary_dim: int = 64) -> DecoderConfig:
    """Return a decoder of GPT-J's blocks, which rotate the first `rotary_dim` features of a head."""
    norm, rope = LayerNormConfig(eps=shape.eps), Rope(fraction=rotary_dim / shape.head_dim, pairing="interleaved")
    block = shape.block(shape.attention(rope=rope), shape.mlp(gated=False, bias=True), norm, parallel=1)
    return shape.decoder(block, norm, head_bias=True)


def _rotary_dim(config: DecoderConfig) -> int:
    attention = value_at(config, "attention")
    return attention.rope.rotated(attention.head_dim)


FAMILY = Family(
    model_type="gptj",
    architecture="GPTJForCausalLM",
    settings=(
        *_gpt2.defaults(vocab_size=50_400, n_embd=4096, n_layer=28, n_head=16),
        decoder_sizes(eps=1e-5, activation="gelu_new", words={"gelu_new": "gelu_tanh", **ACTIVATIONS}, keys=_gpt2.KEYS),
        Integer("rotary_dim", _rotary_dim, 64, name="rotary_dim"),
        # these stand in published files, and transformers does not read them
        *only(rotary=True, scale_attn_weights=True),
    ),
    build=gptj,
    weights=(
        *_gpt2.ENDS,
        *renamed(self_attention(_gpt2.LAYER, "attn."), {"o_proj": "out_proj"}),
        *plain_mlp(_gpt2.LAYER + "mlp.", up="fc_in", down="fc_out"),
    ),
    ignored_tensors=_gpt2.IGNORED_TENSORS,
    ignored_keys=_gpt2.IGNORED_KEYS | {"n_positions": "a promise, not a limit: rotary positions have no table"},
)


MODELS = {
    "gptj-6b": dict(model_type="gptj"),
}  # fmt: skip
