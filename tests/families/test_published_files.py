"""Keys and names of published files, which transformers does not write any more, or never has."""

import pytest

import eqx_decoders as ed
from tests.families.samples import decode, sample


CLASSES = {"internlm3": "InternLM3", "jetmoe": "JetMoE", "mpt": "MPT", "phimoe": "PhiMoE"}
# Keys with the values that they have there, of which the first has another one that is refused.
KEYS = [
    ("apertus", dict(mlp_bias=False, post_norm=False, qk_norm=True), True),
    ("apertus", dict(post_norm=False), True),
    ("apertus", dict(qk_norm=True), False),
    ("dbrx", dict(router_aux_loss_coef=0.05), None),
    ("opt", dict(learned_embeddings=True), False),
    ("opt", dict(scale_embeddings=False), True),
    ("recurrent_gemma", dict(embeddings_scale_by_sqrt_dim=True), False),
    ("xlstm", dict(cell_norm_eps=..., mlstm_round_up_to_multiple_of=64, igate_bias_init_range=-10.0), 1e-5),
    ("xlstm", dict(add_post_blocks_norm=True, add_forward_backend_padding=False), False),
    ("xlstm", dict(add_post_norm=False, add_embedding_dropout=False, force_bos_token_insert=True), True),
    ("xlstm", dict(add_qk_norm=False), True),
]


@pytest.mark.parametrize("kind", CLASSES)
def test_a_class_of_code_beside_the_file(kind):
    content = sample(kind)
    assert decode(content | dict(architectures=[f"{CLASSES[kind]}ForCausalLM"])) == decode(content)
    with pytest.raises(ed.ConversionError, match="architectures="):
        decode(content | dict(architectures=[f"{CLASSES[kind]}ForSequenceClassification"]))


@pytest.mark.parametrize(("kind", "keys", "other"), KEYS)
def test_a_key_may_have_its_published_value_alone(kind, keys, other):
    content, first = sample(kind), next(iter(keys))
    keys = {key: content["norm_eps"] if value is ... else value for key, value in keys.items()}
    assert decode(content | keys) == decode(content)
    if other is not None:
        with pytest.raises(ed.ConversionError, match=f"{first}=.* is not supported"):
            decode(content | {first: other})


def test_experts_of_tokens_in_turn_are_refused():
    content = sample("dbrx")
    uniform, chosen = (
        content | dict(ffn_config=content["ffn_config"] | dict(uniform_expert_assignment=x)) for x in (True, False)
    )
    assert decode(chosen) == decode(content)
    with pytest.raises(ed.ConversionError, match="uniform_expert_assignment=true"):
        decode(uniform)


def test_an_older_name_of_the_types_of_blocks():
    content = sample("recurrent_gemma", "block_types", _block_types=["attention", "recurrent"])
    assert decode(content) == decode(sample("recurrent_gemma", block_types=["attention", "recurrent"]))
    assert decode(content) != decode(sample("recurrent_gemma"))


def test_features_of_a_head_are_those_of_its_values():
    content = sample("xlstm", v_dim_factor=2.0)
    config = decode(content)
    assert decode(content | dict(head_dim=config.blocks[0].mixer.value_dim)) == config
    with pytest.raises(ed.ConversionError, match="head_dim="):
        decode(content | dict(head_dim=config.blocks[0].mixer.key_dim))
