"""Registry of families by `model_type`, and of published models by name.

The module of a family is imported when one of its families or models is first used.
"""

import importlib
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

from eqx_decoders.errors import ConversionError, check, check_option
from eqx_decoders.families.family import Family
from eqx_decoders.families.multimodal import ExtendedModel, MultimodalFamily
from eqx_decoders.model.decoder_config import DecoderConfig


# A published model: the keys of its `config.json`, a function that returns its configuration, or an `ExtendedModel`.
ModelBuilder = Mapping[str, Any] | Callable[[], DecoderConfig] | ExtendedModel

# For each module of this package: the model types that its families read (including aliases), and the words before the
# first "-" in the names of its models. `save_hf` tries the families in this order for a model that was not loaded.
MODULES: dict[str, tuple[str, str]] = {
    "llama": ("llama", "tiny llama2 llama3 llama3.1 llama3.2 llama3.3"),
    "mistral.text": ("mistral ministral ministral3 mixtral", "mistral ministral ministral3 mixtral"),
    "qwen.text": ("qwen2 qwen3 qwen3_moe qwen2_moe", "qwen2.5 qwen3 qwen1.5 qwen2"),
    "gemma.text": ("gemma gemma2 vaultgemma gemma3_text", "gemma gemma2 vaultgemma gemma3"),
    "gemma.gemma4": ("gemma4_text", "gemma4"),
    "olmo.text": ("olmo2 olmo3 olmo flex_olmo olmoe", "olmo olmo2 olmo3 flexolmo olmoe"),
    "gpt2": ("gpt2 gpt_bigcode gptj", "gpt2 santacoder starcoder gptj"),
    "gpt_oss": ("gpt_oss", "gpt"),
    "llama4.text": ("llama4_text", "llama4"),
    "deepseek.text": ("deepseek_v3 kimi_k2 deepseek_v32 deepseek_v2", "deepseek2 deepseek3 kimi deepseek32"),
    "deepseek.v4": ("deepseek_v4", "deepseek4"),
    "apertus": ("apertus", "apertus"),
    "phi.text": ("phimoe phi phi3", "phi3.5 phi1 phi1.5 phi2 phi3 phi4"),
    "dbrx": ("dbrx", "dbrx"),
    "jetmoe": ("jetmoe", "jetmoe"),
    "longcat_flash": ("longcat_flash", "longcat"),
    "glm.dense": ("glm glm4", "glm4 glm"),
    "glm.sparse": ("glm4_moe glm4_moe_lite glm_moe_dsa", "glm4.5 glm4.6 glm4.7 glm5"),
    "dots1": ("dots1", "dots1"),
    "hy_v3": ("hy_v3", "hy3"),
    "solar_open": ("solar_open", "solar"),
    "youtu": ("youtu", "youtu"),
    "qwen.hybrid": ("qwen3_next qwen3_5_text qwen3_5_moe_text", "qwen3 qwen3.5"),
    "qwen.qwen4_exp": ("qwen4_exp_text qwen4_exp", "qwen4"),
    "nemotron.hybrid": ("nemotron_h", "nemotron nemotron3"),
    "granite.hybrid": ("granitemoehybrid", "granite4"),
    "kimi_linear": ("kimi_linear", "kimi"),
    "starcoder2": ("starcoder2", "starcoder2"),
    "gpt_neox": ("gpt_neox", "pythia gpt"),
    "falcon.text": ("falcon", "falcon falcon2"),
    "cohere": ("cohere cohere2", "command aya"),
    "minimax.m2": ("minimax_m2", "minimax"),
    "minimax.m3": ("minimax_m3_vl_text", "minimax"),
    "nemotron.dense": ("nemotron", "minitron"),
    "stablelm": ("stablelm", "stablelm stable stablelm2"),
    "internlm3": ("internlm3", "internlm3"),
    "mamba.mamba2": ("mamba2 bamba", "mamba2 mamba bamba"),
    "granite.text": ("granite granitemoe granitemoeshared", "granite3 granite3.1 granite3.3"),
    "smollm3": ("smollm3", "smollm3"),
    "exaone4": ("exaone4", "exaone4"),
    "seed_oss": ("seed_oss", "seed"),
    "ernie4_5": ("ernie4_5 ernie4_5_moe", "ernie4.5"),
    "arcee": ("arcee", "afm"),
    "hyperclovax": ("hyperclovax", "hyperclovax"),
    "helium": ("helium", "helium1"),
    "afmoe": ("afmoe", "trinity"),
    "qwen.vision": ("qwen3_vl qwen3_vl_moe qwen3_5 qwen3_5_moe", "qwen3 qwen3.5"),
    "qwen.omni": ("qwen3_omni_moe_thinker qwen3_omni_moe", "qwen3"),
    "qwen.qwen2_5_vl": ("qwen2_5_vl", "qwen2.5"),
    "gemma.gemma3_vision": ("gemma3", "gemma3"),
    "gemma.gemma4_vision": ("gemma4", "gemma4"),
    "llama4.vision": ("llama4", "llama4"),
    "mistral.vision": ("mistral3", "mistral ministral3"),
    "idefics3.vision": ("smolvlm idefics3", "smolvlm2"),
    "internvl.vision": ("internvl", "internvl3 internvl3.5"),
    "glm.vision": ("glm4v glm4v_moe glm46v", "glm4.1v glm4.5v glm4.6v"),
    "llava.vision": ("llava llava_next", "llava1.5 llava1.6 granite"),
    "opt": ("opt", "opt"),
    "modernbert_decoder": ("modernbert-decoder", "ettin"),
    "bloom": ("bloom", "bloom"),
    "mpt": ("mpt", "mpt"),
    "gemma.gemma3n": ("gemma3n_text", "gemma3n"),
    "gemma.gemma3n_vision": ("gemma3n", "gemma3n"),
    "mimo": ("mimo", "mimo"),
    "mimo_v2_flash": ("mimo_v2_flash", "mimo"),
    "phi.multimodal": ("phi4_multimodal", "phi4"),
    "nanochat": ("nanochat", "nanochat"),
    "bitnet": ("bitnet", "bitnet"),
    "lfm2.text": ("lfm2 lfm2_moe", "lfm2"),
    "lfm2.vision": ("lfm2_vl lfm2-vl", "lfm2"),
    "hunyuan": ("hunyuan_v1_dense hunyuan_v1_moe", "hunyuan"),
    "mamba.mamba1": ("mamba falcon_mamba", "mamba falcon"),
    "jamba": ("jamba", "jamba"),
    "olmo.hybrid": ("olmo_hybrid", "olmo"),
    "falcon.h1": ("falcon_h1", "falcon"),
    "minimax.text_01": ("minimax", "minimax"),
    "zamba2": ("zamba2", "zamba2"),
    "gemma.recurrent_gemma": ("recurrent_gemma", "recurrentgemma"),
    "rwkv": ("rwkv", "rwkv4"),
    "xlstm": ("xlstm", "xlstm"),
    "diffllama": ("diffllama", "diffllama"),
    "doge": ("doge", "doge"),
    "gpt3": ("", "gpt3"),
    "maxtext": ("", "maxtext qwen3 deepseek"),
    "tiny_vision": ("", "tiny"),
}
_MODULE_OF_TYPE = {kind: module for module, (types, _) in MODULES.items() for kind in types.split()}


class FamilyRegistry(Mapping[str, Family]):
    """Mapping from `model_type` to family. Aliases are not keys."""

    def __init__(self):
        self._families: dict[str, Family] = {}  # imported families, by model type and by alias
        self._registered: dict[str, Family] = {}  # families that users registered, by model type

    def __getitem__(self, model_type: str) -> Family:
        family = self.find(model_type)
        if family.model_type != model_type:
            raise KeyError(model_type)
        return family

    def __iter__(self) -> Iterator[str]:
        for types, _ in MODULES.values():
            yield from (kind for kind in types.split() if self.find(kind).model_type == kind)
        yield from self._registered

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def find(self, name: str) -> Family:
        """Return the family with this model type or alias. Raises KeyError."""
        if name not in self._families:
            for family in _families_in(_import(_MODULE_OF_TYPE[name])):
                self._add(family)
        return self._families[name]

    def names(self) -> set[str]:
        """Return all model types and aliases."""
        return _MODULE_OF_TYPE.keys() | self._families.keys()

    def register(self, family: Family) -> None:
        """Add a user's family; it replaces a registered family of the same model type.

        Raises ConfigError if the library has a family with this model type or one of the aliases.
        """
        for name in (family.model_type, *family.aliases):
            field = "model_type" if name == family.model_type else "aliases"
            check(
                name not in _MODULE_OF_TYPE,
                f"Family.{field}={name!r} belongs to a family of the library: use another name.",
            )
        replaced = self._registered.pop(family.model_type, None)
        self._families = {name: other for name, other in self._families.items() if other is not replaced}
        self._registered[family.model_type] = self._add(family)

    def _add(self, family: Family) -> Family:
        if isinstance(family, MultimodalFamily):
            family = family.with_texts(self.find)
        self._families.update(dict.fromkeys((family.model_type, *family.aliases), family))
        return family


FAMILIES = FamilyRegistry()
_REGISTERED_MODELS: dict[str, ModelBuilder] = {}


def register_family(family: Family, models: Mapping[str, ModelBuilder] = {}) -> None:
    """Register a family, so that `load_hf`, `save_hf` and all programs read and write its checkpoints.

    `models`: see `register_models`. The family replaces a registered family of the same model type. Raises ConfigError
    if the library has a family with the same model type, or a model with one of the names.
    """
    _check_models(models)
    FAMILIES.register(family)
    register_models(models)


def register_models(models: Mapping[str, ModelBuilder]) -> None:
    """Register models by name, for `get_config` and `--model`.

    A model is a function that returns its configuration, or the keys of its `config.json`, including `model_type`. It
    replaces a registered model of the same name. Raises ConfigError if the library has a model of this name.
    """
    _check_models(models)
    _REGISTERED_MODELS.update(models)


def _check_models(models: Mapping[str, Any]) -> None:
    for name in models:
        check(_library_model(name) is None, f"register_models: {name!r} is a model of the library. Use another name.")


def library_families() -> dict[str, tuple[Family, str]]:
    """Return the library's families and the names of their modules, by `model_type`."""
    return {
        kind: (FAMILIES[kind], f"{__package__}.{module}")
        for module, (types, _) in MODULES.items()
        for kind in types.split()
        if FAMILIES.find(kind).model_type == kind
    }


def is_known(model_type: str) -> bool:
    """Return whether a family has this `model_type` or alias."""
    return model_type in FAMILIES.names()


def find_family(model_type: str) -> Family:
    """Return the family with this `model_type` or alias. Raises ConversionError if there is no such family."""
    try:
        name = check_option("config.json: model_type", model_type[:80], sorted(FAMILIES.names()), ConversionError)
    except ConversionError as error:
        raise ConversionError(
            f"{error} To compare the checkpoint with these families, run: eqx-decoders convert compare DIRECTORY"
        ) from None
    return FAMILIES.find(name)


def list_models() -> tuple[str, ...]:
    """Return the names of all models that `get_config` supports, sorted."""
    library_models = (name for module in MODULES for name in _import(module).MODELS)
    return tuple(sorted({*library_models, *_REGISTERED_MODELS}))


def get_config(name: str) -> DecoderConfig:
    """Return the configuration of a model of `list_models`, such as `"llama3-8b"` or `"tiny"`.

    Edit it with `dataclasses.replace`. Raises ConfigError if there is no such model.
    """
    if not is_model(name):
        check_option("get_config: name", name, list_models(), listed_by="list_models()")
    model: Any = _REGISTERED_MODELS.get(name) or _library_model(name)
    if isinstance(model, Mapping):
        return find_family(model["model_type"]).decode(model)[0]
    return model.add_encoders(get_config(model.text)) if isinstance(model, ExtendedModel) else model()


def is_model(name: str) -> bool:
    """Return whether `get_config` supports a name."""
    return name in _REGISTERED_MODELS or _library_model(name) is not None


def _library_model(name: str) -> ModelBuilder | None:
    for module, (_, words) in MODULES.items():
        if name.partition("-")[0] in words.split():
            models = _import(module).MODELS
            if name in models:
                return models[name]
    return None


def _import(module: str) -> ModuleType:
    return importlib.import_module(f"{__package__}.{module}")


def _families_in(module: ModuleType) -> tuple[Family, ...]:
    return (module.FAMILY,) if hasattr(module, "FAMILY") else module.FAMILIES
