"""Idefics 3 and SmolVLM: the encoder, and the settings and tensors of their checkpoints."""

import dataclasses
import functools
from typing import Any

from eqx_decoders.encoders.media_config import EncoderConfig, MediaConfig
from eqx_decoders.encoders.projector import ProjectionConfig, ProjectorConfig
from eqx_decoders.encoders.stem import LearnedGrid
from eqx_decoders.families._siglip import siglip
from eqx_decoders.families.config_reader import ACTIVATIONS, Fields, activation_name
from eqx_decoders.families.hf_table import Family
from eqx_decoders.families.multimodal import (
    MultimodalFamily,
    attention,
    check_model_type,
    finish,
    linear,
    norm,
    plain_mlp,
    with_defaults,
)
from eqx_decoders.families.vision_fields import (
    KERNEL,
    EncoderSizes,
    read_side,
    read_sizes,
    vision_fields,
    vision_of,
    write_sizes,
)
from eqx_decoders.families.weight_rows import Weight
from eqx_decoders.model.decoder_config import DecoderConfig


IMAGE = 128_257


def idefics3_encoder(sizes: EncoderSizes, *, side: int, eps: float = 1e-6) -> EncoderConfig:
    """Return SigLIP with positions at the same fraction of a grid of `side x side`; patches of a token are joined."""
    encoder = siglip(sizes, side=side, eps=eps)
    return dataclasses.replace(
        encoder,
        stem=dataclasses.replace(encoder.stem, positions=LearnedGrid(side=side, resample="fraction")),
        projector=ProjectorConfig(group=sizes.merge**2, layers=(ProjectionConfig(dim=sizes.out_dim),)),
    )


def idefics3(text: DecoderConfig, vision: EncoderConfig, *, image_token: int) -> DecoderConfig:
    """Return a decoder with this encoder."""
    return dataclasses.replace(text, media=MediaConfig(vision=vision, image_token=image_token))


# --- config.json ---


def _adapt(text: Family) -> Family:
    """Accept the settings that published files have besides a Llama's."""

    def read(fields: Fields) -> DecoderConfig:
        check_model_type(fields, text.model_type)
        fields.allow_only("qk_layer_norms", False)
        fields.allow_only("use_resampler", False)
        for key in ("perceiver_config", "pixel_shuffle_factor", "neftune_noise_alpha"):
            fields.take(key, None)  # of a resampler that is not there, of the encoder, and of training
        return text.read(fields)

    return with_defaults(dataclasses.replace(text, read=read), _DEFAULTS)


# transformers' defaults for keys that text_config lacks.
_DEFAULTS = {
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}


def _read(fields: Fields, config: DecoderConfig) -> DecoderConfig:
    table = vision_fields(fields)
    sizes = read_sizes(table, width=1152, heads=16, layers=12, mlp_dim=3072, size=32)
    encoder_sizes = EncoderSizes(
        **sizes,
        out_dim=config.embed_dim,
        merge=fields.integer("scale_factor", 2),
        activation=table.word("hidden_act", ACTIVATIONS, "gelu_pytorch_tanh"),
    )
    side = read_side(table, sizes["size"], 224)
    vision = idefics3_encoder(encoder_sizes, side=side, eps=table.number("layer_norm_eps", 1e-6))
    ignored = {
        "initializer_range": "of new weights",
        "size": "of the processor",
        "max_image_size": "of the processor",
        "use_base_siglip": "the sizes say it",
        "tie_word_embeddings": "an encoder has none",
    }
    finish(fields, "vision_config", table, ignored)
    return idefics3(config, vision, image_token=fields.integer("image_token_id", IMAGE, least=0))


def _write(config: DecoderConfig, *, kind: str) -> dict[str, Any]:
    media, vision = vision_of(config)
    stem: Any = vision.stem
    mlp: Any = vision.blocks[0].mlp
    post_norm: Any = vision.post_norm
    return {
        "image_token_id": media.image_token,
        "scale_factor": stem.merge,
        "vision_config": {
            "model_type": f"{kind}_vision",
            **write_sizes(vision),
            "layer_norm_eps": post_norm.eps,
            "hidden_act": activation_name(mlp.activation),
        },
    }


_VISION = "model.vision_model."
_LAYER = _VISION + "encoder.layers.{layer}."
WEIGHTS = (
    Weight(_VISION + "embeddings.patch_embedding.weight", "vision.stem.kernel", KERNEL),
    Weight(_VISION + "embeddings.patch_embedding.bias", "vision.stem.bias", "embed -> embed"),
    Weight(
        _VISION + "embeddings.position_embedding.weight",
        "vision.stem.positions.table",
        "positions embed -> positions embed",
    ),
    *norm(_LAYER + "layer_norm1", "vision.pre_mixer_norm"),
    *norm(_LAYER + "layer_norm2", "vision.pre_mlp_norm"),
    *attention(_LAYER, out="out_proj"),
    *plain_mlp(_LAYER + "mlp.", "fc1", "fc2"),
    *norm(_VISION + "post_layernorm", "vision.post_norm"),
    *linear("model.connector.modality_projection.proj", "vision.projector.layers.0"),
)


def idefics3_family(kind: str, architecture: str) -> MultimodalFamily:
    """Return a family of checkpoints whose settings and tensors have Idefics 3's names."""
    return MultimodalFamily(
        text="llama",
        adapt=_adapt,
        model_type=kind,
        architecture=architecture,
        read=_read,
        write=functools.partial(_write, kind=kind),
        weights=WEIGHTS,
        names={"model.": "model.text_model.", "lm_head.": "lm_head."},
        ignored_keys={
            "vocab_size": "text_config has it",
            "_pad_token_id": "for tokenizers and generation",
            "image_seq_len": "the sizes say it",
            "use_reentrant_checkpointing": "how transformers trains it",
        },
    )
