"""SmolLM3 (Hugging Face 2025): Llama blocks, without RoPE in every fourth layer."""

from collections.abc import Collection

from eqx_decoders.blocks.block import BlockConfig
from eqx_decoders.families.common import DecoderSizes, decoder_sizes, layer_masks, llama_weights
from eqx_decoders.families.family import Family
from eqx_decoders.families.rope_config import rope_settings, rotated_layers
from eqx_decoders.families.setting_rows import Flag
from eqx_decoders.layers.mask import Mask
from eqx_decoders.layers.rope import Rope
from eqx_decoders.model.decoder_config import DecoderConfig


def smollm3(
    shape: DecoderSizes, *, rotated: Collection[int], masks: tuple[Mask, ...], rope: Rope, mlp_bias: bool = False
) -> DecoderConfig:
    """Return a decoder of SmolLM3 blocks with RoPE in the `rotated` layers, counted from 0.

    `masks`: the attention mask of each layer.
    """

    def block(index: int, mask: Mask) -> BlockConfig:
        mixer = shape.attention(mask=mask, rope=rope if index in rotated else None)
        return shape.block(mixer, shape.mlp(bias=mlp_bias))

    return shape.decoder(map(block, range(shape.num_layers), masks))


FAMILY = Family(
    model_type="smollm3",
    architecture="SmolLM3ForCausalLM",
    settings=(
        decoder_sizes(num_kv_heads=4, tied=True),
        Flag("mlp_bias", "mlp.bias", False, name="mlp_bias"),
        rotated_layers(),
        layer_masks(lambda index, values: index not in values["rotated"], window=None, switch="use_sliding_window"),
        rope_settings(theta=2e6, required=False),
    ),
    build=smollm3,
    weights=llama_weights(),
    ignored_keys={"no_rope_layer_interval max_window_layers": "no_rope_layers and layer_types determine it"},
)


MODELS = {
    "smollm3-3b": dict(
        model_type="smollm3", vocab_size=128_256, hidden_size=2048, num_hidden_layers=36, num_attention_heads=16,
        intermediate_size=11_008, rope_theta=5_000_000.0,
    ),
}  # fmt: skip
