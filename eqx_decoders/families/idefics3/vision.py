"""Idefics 3 (Laurençon et al. 2024) and SmolVLM 2 (Marafioti et al. 2025): Llama with a SigLIP encoder."""

import dataclasses

from eqx_decoders.encoders.media_config import EncoderConfig
from eqx_decoders.encoders.projector import ProjectionConfig, ProjectorConfig
from eqx_decoders.encoders.stem import LearnedGrid
from eqx_decoders.families._siglip import siglip, siglip_weights
from eqx_decoders.families.multimodal import LLAMA_SIZES, MultimodalFamily, linear, needs_model_type, token, with_images
from eqx_decoders.families.setting_rows import Defaults, Integer, Number, Only, Table, Unused, activation
from eqx_decoders.families.vision_fields import EncoderSizes, encoder_sizes, grid_side, outer_values, vision_config


IMAGE = 128_257


def idefics3_encoder(sizes: EncoderSizes, *, side: int, eps: float = 1e-6) -> EncoderConfig:
    """Return a SigLIP encoder whose `side x side` position embeddings are interpolated for each image.

    The projector maps `sizes.merge x sizes.merge` concatenated patches to one token.
    """
    encoder = siglip(sizes, side=side, eps=eps)
    return dataclasses.replace(
        encoder,
        stem=dataclasses.replace(encoder.stem, positions=LearnedGrid(side=side, resample="fraction")),
        projector=ProjectorConfig(group=sizes.merge**2, layers=(ProjectionConfig(dim=sizes.out_dim),)),
    )


# --- config.json ---


def _vision_config(model_type: str) -> Table:
    return vision_config(
        idefics3_encoder,
        *encoder_sizes(width=1152, heads=16, layers=12, mlp_dim=3072, size=32),
        *outer_values("merge"),
        activation("hidden_act", "mlp.activation", "gelu_pytorch_tanh"),
        *grid_side(224),
        Number("layer_norm_eps", "post_norm.eps", 1e-6),
        model_type=model_type,
        ignored={
            "initializer_range": "initialization only",
            "size max_image_size": "image processor setting",
            "use_base_siglip": "sizes of the encoder determine it",
            "tie_word_embeddings": "an image encoder has no word embeddings",
        },
    )


WEIGHTS = (
    *siglip_weights("model.vision_model."),
    *linear("model.connector.modality_projection.proj", "vision.projector.layers.0"),
)


def idefics3_family(model_type: str, architecture: str) -> MultimodalFamily:
    """Return a family of checkpoints with Idefics 3's names of settings and tensors."""
    return MultimodalFamily(
        text_type="llama",
        text_settings=(
            Defaults(LLAMA_SIZES),
            needs_model_type("llama"),
            Only("qk_layer_norms", False),
            Only("use_resampler", False),
            Unused("perceiver_config", "the resampler is not used"),
            Unused("pixel_shuffle_factor", "setting of the image encoder"),
            Unused("neftune_noise_alpha", "training only"),
        ),
        model_type=model_type,
        architecture=architecture,
        settings=(
            Integer("scale_factor", "media.vision.stem.merge", 2, name="_merge"),
            _vision_config(f"{model_type}_vision"),
            token("image_token_id", "image_token", IMAGE),
        ),
        build=with_images,
        weights=WEIGHTS,
        text_names={"model.": "model.text_model.", "lm_head.": "lm_head."},
        ignored_keys={
            "vocab_size": "text_config has it",
            "_pad_token_id": "for tokenizers and generation",
            "image_seq_len": "sizes of the encoder determine it",
            "use_reentrant_checkpointing": "training only",
        },
    )


IDEFICS3 = idefics3_family("idefics3", "Idefics3ForConditionalGeneration")
SMOLVLM = idefics3_family("smolvlm", "SmolVLMForConditionalGeneration")

_SMOLVLM_BASE = dict(
    model_type="smolvlm",
    image_token_id=49_190,
    scale_factor=4,
    vision_config=dict(image_size=512, patch_size=16, hidden_size=768, num_attention_heads=12),
)


FAMILIES = (IDEFICS3, SMOLVLM)

MODELS = {
    "smolvlm2-256m": _SMOLVLM_BASE | dict(
        text_config=dict(
            num_key_value_heads=3, rms_norm_eps=1e-05, rope_theta=100_000.0, hidden_size=576, intermediate_size=1536,
            num_attention_heads=9, num_hidden_layers=30, vocab_size=49_280,
        ),
    ),
    "smolvlm2-500m": _SMOLVLM_BASE | dict(
        text_config=dict(
            num_key_value_heads=5, rms_norm_eps=1e-05, rope_theta=100_000.0, hidden_size=960, intermediate_size=2560,
            num_attention_heads=15, vocab_size=49_280,
        ),
    ),
    "smolvlm2-2.2b": _SMOLVLM_BASE | dict(
        scale_factor=3,
        text_config=dict(
            rms_norm_eps=1e-05, rope_theta=130_000.0, hidden_size=2048, intermediate_size=8192, num_hidden_layers=24,
            vocab_size=49_280,
        ),
        vision_config=dict(image_size=378, patch_size=14, intermediate_size=4304, num_hidden_layers=27),
    ),
}  # fmt: skip
