"""Reports about checkpoints of unknown model types: a comparison with the known families."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from eqx_decoders.families.comparison import Ranking, group_tensors, pattern_of, rank, word_difference
from eqx_decoders.families.comparison_report import comparison_report, shape_meanings
from eqx_decoders.families.registry import library_families
from eqx_decoders.io.huggingface.directory import Directory, tensor_shapes
from tests.errors import assert_names
from tests.families.samples import FIXTURES


FEW = ("llama", "mistral", "gemma2")


def ranking_of(directory: Path, among: tuple[str, ...] = FEW) -> Ranking:
    """Return the ranking among `families` (all if empty), without the family of the directory."""
    content = json.loads((directory / "config.json").read_text())
    library = [family for family, _ in library_families().values() if family.text is None]
    own_type = content["model_type"]
    others = [family for family in library if own_type not in (family.model_type, *family.aliases)]
    others = [family for family in others if not among or family.model_type in among]
    return rank(others, content, tensor_shapes(Directory(directory)))


def report_of(ranking: Ranking) -> str:
    """Return the report without line breaks within sentences."""
    return comparison_report(ranking).replace("\n    ", " ")


def changed_model(folder: Path, config: dict, words: dict[str, str] | None = None, **tensors: np.ndarray) -> Path:
    """Write InternLM's fixture with changed keys (`...` removes one), renamed tensors, and additional tensors."""
    shutil.copytree(FIXTURES / "internlm3_bias", folder)
    content = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps({key: value for key, value in content.items() if value is not ...}))
    tensors = load_file(folder / "model.safetensors") | tensors
    for old, new in (words or {}).items():
        tensors = {name.replace(old, new): tensor for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


# fixture, families to compare with (empty: all), the nearest family, and parts of the report
SIBLINGS = {
    "ministral_mixed": (FEW, "llama", ["sliding_window=4 is not read. Families that read it: `gemma2`"]),
    "olmo2": ((), "olmo3", ["rope_parameters: Unknown keys: rope_theta", "`exaone4`"]),
    "seed_oss": ((), "llama", ["attention_out_bias=true is not read", "residual_dropout=0.1 is not read. It probably"]),
    "internlm3_bias": ((), "llama", ["Tensors that differ from `llama`:\n  none"]),
    "arcee_yarn": ((), "llama", ["The checkpoint lacks model.layers.{layer}.mlp.gate_proj.weight [40, 24]"]),
    "apertus": ((), "arcee", ["hidden_act=xielu", "attention_layernorm is what `arcee` calls input_layernorm."]),
    "gemma2_odd": (
        (),
        "vaultgemma",
        ["Other families store pre_mlp_norm.scale or post_mixer_norm.scale under such a name."],
    ),
    "gpt_oss_yarn": (
        ("mixtral", "llama", "minimax_m3_vl_text"),
        "mixtral",
        [
            "swiglu_limit=1.5 is not read. Families that read it: `minimax_m3_vl_text` as experts.limit.",
            "router may be what `mixtral` calls gate.",
        ],
    ),
}


@pytest.mark.slow(fast=("ministral_mixed", "gpt_oss_yarn"))
@pytest.mark.parametrize("fixture", SIBLINGS)
def test_nearest_family_of_a_sibling(fixture):
    among, nearest, parts = SIBLINGS[fixture]
    ranking = ranking_of(FIXTURES / fixture, among)
    assert ranking.nearest.family.model_type == ranking.candidates[0].family.model_type == nearest
    assert_names(report_of(ranking), *parts)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fixture", "question"),
    [
        ("cohere_bias", "features that RoPE pairs: half; interleaved in"),
        ("cohere_bias", "residual connection: Sequential; Parallel in `cohere2`"),
        ("gemma_mqa", "factor of embeddings: 1;"),
        ("helium", "features that RoPE pairs: half; interleaved in"),
        ("granite_moe", "order of selection and scores in the router: select_first"),
    ],
)
def test_open_questions_name_values_of_similar_families(fixture, question):
    assert question in report_of(ranking_of(FIXTURES / fixture, ()))


def test_report_of_renamed_modules_other_keys_and_unknown_tensors(tmp_path):
    alphas = {f"model.layers.{layer}.mlp.act.alpha": np.ones(1, np.float32) for layer in range(2)}
    norms = {f"model.layers.{layer}.self_attn.q_norm.weight": np.ones(32, np.float32) for layer in range(2)}
    words = {"model.layers.": "transformer.blocks.", ".input_layernorm.": ".attn_norm.", ".self_attn.": ".mixer."}
    config = dict(model_type="nova-9", hidden_act="swoosh", num_hidden_layers=..., n_layers=2)
    config |= dict(attention_bias=..., final_logit_softcapping=30.0, token_boost=1.5, attn_drop=0.1, use_turbo=False)
    ranking = ranking_of(changed_model(tmp_path / "nova", config, words, **alphas, **norms))
    nearest = ranking.nearest
    assert nearest.family.model_type == "llama"
    assert nearest.prefix == ("model.layers.", "transformer.blocks.")
    assert {(rename.family_words, rename.file_words) for rename in nearest.renames} == {
        (".input_layernorm.", ".attn_norm."), (".self_attn.", ".mixer."),
    }  # fmt: skip
    assert [str(group) for group in nearest.unexplained] == ["transformer.blocks.{layer}.mlp.act.alpha [1]"]
    assert {path for _, path in nearest.disabled} == {
        "mixer.query_bias", "mixer.key_bias", "mixer.value_bias", "mixer.out_bias", "mixer.query_norm.scale",
    }  # fmt: skip
    assert not nearest.different and not nearest.missing
    assert nearest.reading.renamed == {"n_layers": "num_hidden_layers"}
    assert set(nearest.reading.refused) == {"hidden_act"}
    assert set(nearest.reading.unread) == {"final_logit_softcapping", "token_boost", "attn_drop", "use_turbo"}
    assert_names(
        report_of(ranking),
        "The prefix of layers is 'transformer.blocks.' instead of 'model.layers.'.",
        "attn_norm is what `llama` calls input_layernorm.",
        "mixer.q_proj.bias [32] is mixer.query_bias of `llama`, which these settings do not turn on.",
        "act.alpha [1] is not explained. By its shape it may be a single number.",
        "n_layers is called num_hidden_layers by `llama`.",
        "`llama` refuses a value: hidden_act=swoosh is not known here.",
        "final_logit_softcapping=30.0 is not read. Families that read it: `gemma2` as logit_soft_cap.",
        "token_boost=1.5 is not read. No family reads it.",
        "attn_drop=0.1 is not read. It probably has no effect: dropout",
        "use_turbo=false is not read. It seems to turn a feature off.",
    )


def test_report_of_other_shapes_layers_and_missing_tensors(tmp_path):
    directory = changed_model(tmp_path / "model", dict(model_type="nova", intermediate_size=48))
    tensors = load_file(directory / "model.safetensors")
    del tensors["model.layers.1.self_attn.o_proj.weight"], tensors["model.norm.weight"]
    save_file(tensors, directory / "model.safetensors")
    ranking = ranking_of(directory, ("llama",))
    assert {group.pattern.split(".")[-2] for group, _ in ranking.nearest.different} == {
        "gate_proj", "up_proj", "down_proj", "o_proj",
    }  # fmt: skip
    assert_names(
        report_of(ranking),
        "o_proj.weight [24, 32] is in layer 0, and in layers 0, 1 of `llama`.",
        "The checkpoint lacks model.norm.weight [24], which `llama` has.",
    )


def test_a_family_that_cannot_build_the_model_is_compared_by_names(tmp_path):
    config = dict(model_type="nova", hidden_size=...)
    ranking = ranking_of(changed_model(tmp_path / "model", config, {".mlp.": ".ffn."}), ("llama",))
    assert ranking.nearest.reading.config is None
    assert {group.pattern.split(".")[3] for group in ranking.nearest.unexplained} == {"ffn"}
    assert_names(report_of(ranking), "`llama` cannot build a model from these settings", "hidden_size")


def test_an_index_without_files_is_enough(tmp_path):
    shutil.copy(FIXTURES / "seed_oss" / "config.json", tmp_path)
    names = load_file(FIXTURES / "seed_oss" / "model.safetensors").keys()
    index = {"weight_map": dict.fromkeys(names, "model-00001-of-00001.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert set(tensor_shapes(Directory(tmp_path)).values()) == {None}
    report = report_of(ranking_of(tmp_path, ("llama",)))
    assert report == report_of(ranking_of(FIXTURES / "seed_oss", ("llama",)))


HOSTILE = '"""\n\x1b[31m\\ \u2028 # \x00'


def test_reports_have_only_printable_characters(tmp_path):
    config = {"model_type": HOSTILE, "architectures": [HOSTILE], HOSTILE: HOSTILE, "x": {HOSTILE: 1}, "y": float("nan")}
    tensors = {f"model.layers.{layer}.{HOSTILE}.weight": np.ones(24, np.float32) for layer in range(2)}
    report = comparison_report(ranking_of(changed_model(tmp_path / "hostile", config, **tensors)))
    assert all(line.isprintable() for line in report.split("\n"))


def test_patterns_and_shapes():
    assert (
        pattern_of("model.layers.12.mlp.experts.3.up.weight") == "model.layers.{layer}.mlp.experts.{expert}.up.weight"
    )
    assert pattern_of("model.norm1.weight") == "model.norm1.weight"
    groups = group_tensors({"a.0.b": (2,), "a.1.b": (3,), "c": None})
    assert groups["a.{layer}.b"].layers == {0, 1} and groups["a.{layer}.b"].shapes == ((2,), (3,))
    assert groups["c"].shapes == () and groups["c"].rank is None
    assert word_difference("a.{layer}.x.weight", "a.{layer}.y.z.weight") == (".x.", ".y.z.")
    assert word_difference("model.norm.weight", "norm_f.weight") == ("model.norm.", "norm_f.")
    sizes = dict(embed=24, mlp=40, heads=4, kv_heads=2, head_dim=8, vocab=64)
    assert shape_meanings((64, 24), sizes) == [
        "a fused projection of queries, keys and values", "an embedding table or an output head",
    ]  # fmt: skip
    assert shape_meanings((40, 24), sizes) == ["a gate or up projection"] and shape_meanings((7, 7), sizes) == []
