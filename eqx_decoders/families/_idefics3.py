"""Idefics 3 and SmolVLM: the encoder, and the settings and tensors of their checkpoints."""

import dataclasses

from eqx_decoders.encoders.media_config import EncoderConfig
from eqx_decoders.encoders.projector import ProjectionConfig, ProjectorConfig
from eqx_decoders.encoders.stem import LearnedGrid
from eqx_decoders.families._siglip import siglip, siglip_weights
from eqx_decoders.families.multimodal import LLAMA_SIZES, MultimodalFamily, linear, needs_model_type, token, with_images
from eqx_decoders.families.settings_table import Defaults, Integer, Number, Only, Rule, Table, Unused, activation
from eqx_decoders.families.vision_fields import EncoderSizes, encoder_sizes, grid_side, vision_config


IMAGE = 128_257


def idefics3_encoder(sizes: EncoderSizes, *, side: int, eps: float = 1e-6) -> EncoderConfig:
    """Return SigLIP with positions at the same fraction of a grid of `side x side`; patches of a token are joined."""
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
        Rule("merge", lambda fields, values: values["_merge"]),
        activation("hidden_act", "mlp.activation", "gelu_pytorch_tanh"),
        *grid_side(224),
        Number("layer_norm_eps", "post_norm.eps", 1e-6),
        model_type=model_type,
        ignored={
            "initializer_range": "of new weights",
            "size": "of the processor",
            "max_image_size": "of the processor",
            "use_base_siglip": "the sizes say it",
            "tie_word_embeddings": "an encoder has none",
        },
    )


WEIGHTS = (
    *siglip_weights("model.vision_model."),
    *linear("model.connector.modality_projection.proj", "vision.projector.layers.0"),
)


def idefics3_family(kind: str, architecture: str) -> MultimodalFamily:
    """Return a family of checkpoints whose settings and tensors have Idefics 3's names."""
    return MultimodalFamily(
        text_type="llama",
        text_settings=(
            Defaults(LLAMA_SIZES),
            needs_model_type("llama"),
            Only("qk_layer_norms", False),
            Only("use_resampler", False),
            Unused(
                "perceiver_config pixel_shuffle_factor neftune_noise_alpha",
                "of a resampler that is not there, of the encoder, and of training",
            ),
        ),
        model_type=kind,
        architecture=architecture,
        settings=(
            Integer("scale_factor", "media.vision.stem.merge", 2, name="_merge"),
            _vision_config(f"{kind}_vision"),
            token("image_token_id", "image_token", IMAGE),
        ),
        build=with_images,
        weights=WEIGHTS,
        text_names={"model.": "model.text_model.", "lm_head.": "lm_head."},
        ignored_keys={
            "vocab_size": "text_config has it",
            "_pad_token_id": "for tokenizers and generation",
            "image_seq_len": "the sizes say it",
            "use_reentrant_checkpointing": "how transformers trains it",
        },
    )
