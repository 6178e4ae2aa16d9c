"""Published models by name, and families of checkpoints by their `model_type`."""

from collections.abc import Callable, Mapping

from eqx_decoders.errors import ConversionError, check, check_word
from eqx_decoders.families import (
    afmoe,
    apertus,
    arcee,
    bamba,
    bitnet,
    bloom,
    cohere,
    cohere2,
    dbrx,
    deepseek_v2,
    deepseek_v3,
    deepseek_v4,
    deepseek_v32,
    diffllama,
    doge,
    dots1,
    ernie4_5,
    ernie4_5_moe,
    exaone4,
    falcon,
    falcon_h1,
    falcon_mamba,
    flex_olmo,
    gemma,
    gemma2,
    gemma3,
    gemma3_vision,
    gemma3n,
    gemma3n_vision,
    gemma4,
    gemma4_vision,
    glm,
    glm4,
    glm4_moe,
    glm4_moe_lite,
    glm4v,
    glm4v_moe,
    glm46v,
    glm_moe_dsa,
    gpt2,
    gpt3,
    gpt_bigcode,
    gpt_neox,
    gpt_oss,
    gptj,
    granite,
    granite_hybrid,
    granite_moe,
    granite_moe_shared,
    helium,
    hunyuan,
    hunyuan_moe,
    hy_v3,
    hyperclovax,
    idefics3,
    internlm3,
    internvl,
    jamba,
    jetmoe,
    kimi_linear,
    lfm2,
    lfm2_moe,
    lfm2_vl,
    llama,
    llama4,
    llama4_vision,
    llava,
    llava_next,
    longcat_flash,
    mamba,
    mamba2,
    maxtext,
    mimo,
    mimo_v2_flash,
    minimax,
    minimax_m2,
    minimax_m3_vl_text,
    ministral,
    ministral3,
    mistral,
    mistral3,
    mixtral,
    modernbert_decoder,
    mpt,
    nanochat,
    nemotron,
    nemotron_h,
    olmo,
    olmo2,
    olmo3,
    olmo_hybrid,
    olmoe,
    opt,
    phi,
    phi3,
    phi4_multimodal,
    phimoe,
    qwen2,
    qwen2_5_vl,
    qwen2_moe,
    qwen3,
    qwen3_5,
    qwen3_5_moe,
    qwen3_5_moe_vision,
    qwen3_5_vision,
    qwen3_moe,
    qwen3_next,
    qwen3_omni,
    qwen3_vl,
    qwen3_vl_moe,
    qwen4_exp,
    recurrent_gemma,
    rwkv,
    seed_oss,
    smollm3,
    smolvlm,
    solar_open,
    stablelm,
    starcoder2,
    tiny_vision,
    vaultgemma,
    xlstm,
    youtu,
    zamba2,
)
from eqx_decoders.families.hf_table import Family
from eqx_decoders.families.multimodal import ExtendedModel, MultimodalFamily
from eqx_decoders.model.decoder_config import DecoderConfig


# In the order in which they are tried for a model that does not say what it came from.
_PUBLISHED = (
    *(llama, mistral, qwen2, qwen3, gemma, gemma2, gemma3, gemma4, olmo3, gpt2),
    *(mixtral, qwen3_moe, gpt_oss, llama4, deepseek_v3, deepseek_v32, deepseek_v4, deepseek_v2),
    *(apertus, phimoe, dbrx, jetmoe, longcat_flash),
    *(olmo2, flex_olmo, glm, glm4, glm4_moe, glm4_moe_lite, glm_moe_dsa),
    *(qwen2_moe, dots1, hy_v3, solar_open, youtu),
    *(qwen3_next, qwen3_5, qwen3_5_moe, qwen4_exp, nemotron_h, granite_hybrid, kimi_linear),
    *(starcoder2, gpt_neox, falcon, cohere, cohere2, minimax_m2, minimax_m3_vl_text),
    *(nemotron, stablelm, ministral, ministral3, internlm3, vaultgemma, gpt_bigcode, mamba2, bamba),
    *(granite, smollm3, exaone4, seed_oss, ernie4_5, arcee, hyperclovax, helium),
    *(granite_moe, granite_moe_shared, ernie4_5_moe, afmoe),
    *(qwen3_vl, qwen3_vl_moe, qwen3_5_vision, qwen3_5_moe_vision, qwen3_omni, qwen2_5_vl),
    *(gemma3_vision, gemma4_vision),
    *(llama4_vision, mistral3, smolvlm, idefics3, internvl, glm4v, glm4v_moe, glm46v, llava, llava_next),
    *(phi, gptj, opt, modernbert_decoder, bloom, mpt, gemma3n, gemma3n_vision),
    *(mimo, mimo_v2_flash),
    *(phi3, phi4_multimodal),
    *(olmo, olmoe, nanochat, bitnet, lfm2, lfm2_moe, lfm2_vl, hunyuan, hunyuan_moe),
    *(mamba, falcon_mamba, jamba, olmo_hybrid, falcon_h1, minimax, zamba2),
    *(recurrent_gemma, rwkv, xlstm, diffllama, doge),
)


def _builder(model: Callable[[], DecoderConfig] | ExtendedModel) -> Callable[[], DecoderConfig]:
    if isinstance(model, ExtendedModel):
        return lambda: model.add_encoders(get_config(model.text))
    return model


def _collect_families() -> dict[str, Family]:
    families: dict[str, Family] = {}
    for module in _PUBLISHED:  # text families stand before those with encoders
        family = module.FAMILY
        if isinstance(family, MultimodalFamily):
            family = family.with_texts(families.__getitem__)
        families[family.model_type] = family
    return families


_MODELS: dict[str, Callable[[], DecoderConfig]] = {
    name: _builder(model)
    for module in (*_PUBLISHED, gpt3, maxtext, tiny_vision)
    for name, model in module.MODELS.items()
}
FAMILIES = _collect_families()
_NAMES = FAMILIES | {alias: family for family in FAMILIES.values() for alias in family.aliases}


# what `register_family` has added, which it may replace: model_types, and names of models
_OWN_TYPES: set[str] = set()
_OWN_MODELS: set[str] = set()


def register_family(family: Family, models: Mapping[str, Callable[[], DecoderConfig]] = {}) -> None:
    """Add a family of one's own: `load_hf`, `save_hf` and all else then read and write its checkpoints, too.

    `models` are configurations by name, for `get_config`. What is registered again is replaced. Raises ConfigError for
    a name that the library has.
    """
    if isinstance(family, MultimodalFamily):
        family = family.with_texts(find_family)
    names = (family.model_type, *family.aliases)
    for name in names:
        known = name in _NAMES and name not in _OWN_TYPES
        check(not known, f"Family.model_type={name!r} is that of a family of the library: take another name.")
    taken = [name for name in models if name in _MODELS and name not in _OWN_MODELS]
    check(not taken, f"register_family: models has {', '.join(taken)}, which the library has: take other names.")
    FAMILIES[family.model_type] = family
    _NAMES.update(dict.fromkeys(names, family))
    _MODELS.update({name: _builder(model) for name, model in models.items()})
    _OWN_TYPES.update(names)
    _OWN_MODELS.update(models)


def library_families() -> dict[str, tuple[Family, str]]:
    """Return the library's families by `model_type`, each with the name of its module."""
    modules = {module.FAMILY.model_type: module.__name__ for module in _PUBLISHED}
    return {kind: (family, modules[kind]) for kind, family in FAMILIES.items() if kind in modules}


def is_known(model_type: str) -> bool:
    """Return whether some family has this `model_type`."""
    return model_type in _NAMES


def find_family(model_type: str) -> Family:
    """Return the family of a checkpoint that calls itself `model_type`. Raises ConversionError."""
    try:
        return _NAMES[check_word("config.json: model_type", model_type[:80], _NAMES, ConversionError)]
    except ConversionError as error:
        draft = "Of another one `eqx-decoders convert draft DIRECTORY` drafts the table, for `--family FILE.py`"
        raise ConversionError(f"{error} {draft}.") from None


def list_models() -> tuple[str, ...]:
    """Return the names that `get_config` knows."""
    return tuple(sorted(_MODELS))


def get_config(name: str) -> DecoderConfig:
    """Return the configuration of a published model, or of `"tiny"`; edit it with `dataclasses.replace`."""
    return _MODELS[check_word("get_config: name", name, _MODELS)]()
