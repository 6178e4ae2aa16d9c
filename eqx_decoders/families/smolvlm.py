"""SmolVLM 2 (Marafioti et al. 2025): Idefics 3 with SmolLM 2, a smaller Llama."""

from eqx_decoders.families._idefics3 import idefics3_family


FAMILY = idefics3_family("smolvlm", "SmolVLMForConditionalGeneration")


_SETTINGS = dict(
    model_type="smolvlm",
    image_token_id=49_190,
    scale_factor=4,
    vision_config=dict(image_size=512, patch_size=16, hidden_size=768, num_attention_heads=12),
)

MODELS = {
    "smolvlm2-256m": _SETTINGS | dict(
        text_config=dict(
            num_key_value_heads=3, rms_norm_eps=1e-05, rope_theta=100_000.0, hidden_size=576, intermediate_size=1536,
            num_attention_heads=9, num_hidden_layers=30, vocab_size=49_280,
        ),
    ),
    "smolvlm2-500m": _SETTINGS | dict(
        text_config=dict(
            num_key_value_heads=5, rms_norm_eps=1e-05, rope_theta=100_000.0, hidden_size=960, intermediate_size=2560,
            num_attention_heads=15, vocab_size=49_280,
        ),
    ),
    "smolvlm2-2.2b": _SETTINGS | dict(
        scale_factor=3,
        text_config=dict(
            rms_norm_eps=1e-05, rope_theta=130_000.0, hidden_size=2048, intermediate_size=8192, num_hidden_layers=24,
            vocab_size=49_280,
        ),
        vision_config=dict(image_size=378, patch_size=14, intermediate_size=4304, num_hidden_layers=27),
    ),
}  # fmt: skip
