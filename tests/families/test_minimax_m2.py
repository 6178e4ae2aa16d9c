"""MiniMax M2: the file as published."""

import pytest

import eqx_decoders as ed
from tests.families.samples import decode


M2 = dict(
    architectures=["MiniMaxM2ForCausalLM"], model_type="minimax_m2", attention_dropout=0.0, attn_type_list=[1] * 62,
    auto_map={"AutoConfig": "configuration_minimax_m2.MiniMaxM2Config"}, eos_token_id=None, head_dim=128,
    hidden_act="silu", hidden_size=3072, initializer_range=0.02, intermediate_size=1536,
    layernorm_full_attention_beta=1.0, layernorm_linear_attention_beta=1.0, layernorm_mlp_beta=1.0,
    max_position_embeddings=196608, mlp_intermediate_size=8192, mtp_transformer_layers=1, num_attention_heads=48,
    num_experts_per_tok=8, num_hidden_layers=62, num_key_value_heads=8, num_local_experts=256, num_mtp_modules=3,
    output_router_logits=False, qk_norm_type="per_layer", rms_norm_eps=1e-06, rope_theta=5000000, rotary_dim=64,
    router_aux_loss_coef=0.001, router_jitter_noise=0.0, scoring_func="sigmoid", shared_intermediate_size=0,
    shared_moe_mode="sigmoid", sliding_window=None, tie_word_embeddings=False, use_cache=True, use_mtp=True,
    use_qk_norm=True, use_routing_bias=True, vocab_size=200064,
)  # fmt: skip


def test_the_published_configuration_is_ours():
    assert decode(M2) == ed.get_config("minimax-m2-229b-a10b")


@pytest.mark.parametrize(
    "keys",
    [
        dict(attn_type_list=[0] * 62),
        dict(shared_intermediate_size=8),
        dict(use_routing_bias=False),
        dict(partial_rotary_factor=0.25),
    ],
    ids=str,
)
def test_other_models_of_the_kind_are_refused(keys):
    (key,) = keys
    with pytest.raises(ed.ConversionError, match=key):
        decode(M2 | keys)
