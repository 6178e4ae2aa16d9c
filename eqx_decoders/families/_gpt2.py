"""Settings and tensors that GPT-2, GPT-BigCode and GPT-J share."""

from eqx_decoders.core.config_reader import Fields
from eqx_decoders.families.common import ends
from eqx_decoders.families.settings_table import Defaults, Renamed, Rule, Setting, Values
from eqx_decoders.families.weight_rows import Weight, norm_weights


def _default_mlp(fields: Fields, values: Values) -> None:
    if fields.take("n_inner", None) is None:
        fields.content["n_inner"] = 4 * fields.integer("n_embd")


KEYS = {
    "hidden_size": "n_embd",
    "intermediate_size": "n_inner",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
    "hidden_act": "activation_function",
    "rms_norm_eps": "layer_norm_epsilon",
    **dict.fromkeys(("num_key_value_heads", "head_dim", "attention_bias")),
}
_TWINS = ("hidden_size", "max_position_embeddings", "num_attention_heads", "num_hidden_layers")


def defaults(**sizes: int) -> tuple[Setting, ...]:
    """Return what stands before the sizes: other spellings, which transformers takes as well, and its defaults."""
    return Renamed({key: KEYS[key] for key in _TWINS}), Defaults(sizes), Rule("", _default_mlp)


DEFAULTS = defaults(vocab_size=50_257, n_embd=768, n_layer=12, n_head=12, n_positions=1024)
_SUMMARY = ("type", "use_proj", "activation", "proj_to_labels", "first_dropout")
IGNORED_KEYS = {
    **dict.fromkeys((f"summary_{key}" for key in _SUMMARY), "for a classification head"),
    "n_ctx": "an older name of n_positions",
    **dict.fromkeys(("n_special", "predict_special_tokens"), "of the first GPT"),
}
# the causal mask, which old files store
IGNORED_TENSORS = r"(transformer\.)?h\.\d+\.attn\.(masked_)?bias"
LAYER = "transformer.h.{layer}."
# embeddings, norms and the head
ENDS = (
    *ends("transformer.wte", "transformer.ln_f"),
    Weight("transformer.wpe.weight", "positions.table", "positions embed -> positions embed"),
    *norm_weights(LAYER, pre_mixer_norm="ln_1", pre_mlp_norm="ln_2"),
)
