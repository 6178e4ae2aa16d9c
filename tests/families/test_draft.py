"""Drafts of families that are not here: the nearest family, what differs, and a table that reads the checkpoint."""

import ast
import dataclasses
import inspect
import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import eqx_decoders as ed
from eqx_decoders import families
from eqx_decoders.cli.family_files import register_file
from eqx_decoders.families.draft.draft_report import comments, report
from eqx_decoders.families.draft.notes import literal
from eqx_decoders.families.draft.questions import notes_of
from eqx_decoders.families.draft.ranking import rank
from eqx_decoders.families.draft.renames import difference
from eqx_decoders.families.draft.source import draft_source, python_name
from eqx_decoders.families.draft.tensor_groups import grouped, pattern_of
from eqx_decoders.families.llama import FAMILY as LLAMA
from eqx_decoders.io.huggingface.directory import Directory, tensor_shapes
from tests.errors import assert_names, refused
from tests.families.samples import FIXTURES


@pytest.fixture(autouse=True)
def as_before(monkeypatch):
    """What a test registers or takes out is undone."""
    for name in ("FAMILIES", "_NAMES", "_MODELS", "_OWN_TYPES", "_OWN_MODELS"):
        monkeypatch.setattr(families, name, type(getattr(families, name))(getattr(families, name)))


FEW = ("llama", "mistral", "gemma2")


def draft_of(directory: Path, among: tuple[str, ...] = FEW) -> tuple[str, str, str]:
    """The nearest family without the directory's own, the text of the draft, and the report; all families for ()."""
    content = json.loads((directory / "config.json").read_text())
    families.FAMILIES.pop(content["model_type"], None)
    families._NAMES.pop(content["model_type"], None)
    known = families.library_families()
    text = [family for name, (family, _) in known.items() if family.text is None and name in (among or known)]
    ranking = rank(text, content, tensor_shapes(Directory(directory)))
    comparison, notes = ranking.nearest, notes_of(ranking.nearest, ranking.words)
    nearest, module = known[comparison.family.model_type]
    source = draft_source(comparison, notes, inspect.getsource(sys.modules[module]))
    shares = [each.shares for each in ranking.likeness]
    return nearest.model_type, source, report(shares, ranking.suspects, comparison, notes, source)


def another_model(folder: Path, config: dict, names: dict[str, str] | None = None, **more: np.ndarray) -> Path:
    """InternLM's fixture with other keys, words in the names of tensors, and more tensors."""
    shutil.copytree(FIXTURES / "internlm3_bias", folder)
    content = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps({key: value for key, value in content.items() if value is not ...}))
    tensors = load_file(folder / "model.safetensors") | more
    for old, new in (names or {}).items():
        tensors = {name.replace(old, new): tensor for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


def worst_logit(directory: Path) -> float:
    expected = np.load(directory / "expected.npz")
    return float(np.abs(np.asarray(ed.load_hf(directory)(expected["input_ids"]).logits) - expected["logits"]).max())


# a fixture, families to compare it with (all for none), the nearest one, and what its draft has
SIBLINGS = {
    "ministral_mixed-few": ("ministral_mixed", FEW, "llama", "with_masks(config, masks)"),  # Llama reads no windows
    "ministral_mixed": ("ministral_mixed", (), "llama", "with_masks(config, masks)"),
    "olmo2": ("olmo2", (), "exaone4", 'over="heads"'),
    "seed_oss": ("seed_oss", (), "llama", 'Only("attention_out_bias", True'),
    "internlm3_bias": ("internlm3_bias", (), "llama", "def internlm3("),
    "arcee_yarn": ("arcee_yarn", (), "llama", "gated=False"),
    "phi_qk_norm": ("phi_qk_norm", (), "hunyuan_v1_dense", "residual=Parallel()"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("fixture", "among", "nearest", "code"), SIBLINGS.values(), ids=SIBLINGS)
def test_the_draft_of_a_sibling_gives_the_logits_of_transformers(fixture, among, nearest, code, tmp_path):
    """As if its family were not there."""
    directory = FIXTURES / fixture
    found, source, _ = draft_of(directory, among)
    assert found == nearest and code in source and not comments(source, "QUESTION: ")
    (tmp_path / "draft.py").write_text(source)
    register_file(str(tmp_path / "draft.py"))
    assert worst_logit(directory) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fixture", "code", "suspect"),
    [
        ("cohere_bias", "residual=Parallel()", "rope.pairing=interleaved"),
        ("nemotron_bias", "rope_settings(fraction=0.5)", "norm.offset=1.0"),
        ("gemma_mqa", "def gemma(", "embedding_scale="),
        ("helium", "def helium(", "rope.pairing=interleaved"),
        ("starcoder2_window", "sliding_window=", "rope.pairing=interleaved"),
    ],
)
def test_what_a_draft_finds_of_less_near_families(fixture, code, suspect):
    """And what no name shows: the report says what families with the same names have."""
    _, source, text = draft_of(FIXTURES / fixture, ())
    assert code in source and suspect in text
    windows = [question for question in comments(source, "QUESTION: ") if "sliding_window=" in question]
    assert bool(windows) == (fixture == "starcoder2_window")


def test_renamed_modules_other_keys_and_unknown_tensors(tmp_path):
    """Llama with other names, biases and norms of heads that its table has rows for, and what nothing explains."""
    number = {f"model.layers.{layer}.mlp.act.alpha": np.ones(1, np.float32) for layer in range(2)}
    heads = {f"model.layers.{layer}.self_attn.q_norm.weight": np.ones(32, np.float32) for layer in range(2)}
    heads |= {name.replace("q_norm", "k_norm"): np.ones(16, np.float32) for name in heads}
    names = {"model.layers.": "transformer.blocks.", ".input_layernorm.": ".attn_norm.", ".self_attn.": ".mixer."}
    config = dict(model_type="nova-9", architectures=["NovaForCausalLM"], hidden_act="swoosh", attention_bias=...)
    config |= dict(num_hidden_layers=..., n_layers=2, token_boost=1.5, attn_drop=0.1, use_turbo=False)
    base = json.loads((FIXTURES / "internlm3_bias" / "config.json").read_text())
    assert base["num_attention_heads"] * base["head_dim"] == 32
    directory = another_model(tmp_path / "nova", config, names, **number, **heads)
    nearest, source, text = draft_of(directory)
    assert nearest == "llama"
    questions = comments(source, "QUESTION: ")
    assert [
        word for word in ("swoosh", "token_boost=1.5", "act.alpha [1]") if not any(word in q for q in questions)
    ] == []
    assert len(questions) == 3
    tree = ast.parse(source)
    assert "FAMILY" in {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    for code in (
        'model_type="nova-9"',
        'Renamed({"n_layers": "num_hidden_layers"})',
        'Only("use_turbo", False, written=True)',
        '"attn_drop": "',
        '"model.layers.": "transformer.blocks."',
        '".input_layernorm.": ".attn_norm."',
        '".self_attn.": ".mixer."',
        "qkv_bias=True",
        'QKNorm(norm=block.pre_mixer_norm or block.post_mixer_norm, over="heads")',
    ):
        assert code in source, code
    assert_names(text, '"use_turbo" = False', "attn_drop: ", "attn_norm", "input_layernorm", "act.alpha [1]")

    # it imports, and reads the checkpoint where its questions are none
    (tmp_path / "nova.py").write_text(source)
    register_file(str(tmp_path / "nova.py"))
    with refused(ed.ConversionError, "hidden_act=swoosh"):
        ed.abstract_hf(directory)
    content = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(content | {"hidden_act": "silu"}))
    with refused(ed.ConversionError, 2, "act.alpha"):
        ed.abstract_hf(directory)
    tensors = load_file(directory / "model.safetensors")
    save_file({name: x for name, x in tensors.items() if "alpha" not in name}, directory / "model.safetensors")
    mixer = ed.abstract_hf(directory).config.blocks[0].mixer
    assert mixer.qk_norm.over == "heads" and mixer.qkv_bias and mixer.out_bias


def test_an_index_without_files_is_enough(tmp_path):
    shutil.copy(FIXTURES / "seed_oss" / "config.json", tmp_path)
    names = load_file(FIXTURES / "seed_oss" / "model.safetensors").keys()
    table = {"weight_map": dict.fromkeys(names, "model-00001-of-00001.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(table))
    assert set(tensor_shapes(Directory(tmp_path)).values()) == {None}
    nearest, source, _ = draft_of(tmp_path, ("llama",))
    assert (nearest, source) == draft_of(FIXTURES / "seed_oss", ("llama",))[:2]


HOSTILE = '"""\nimport os\nos.abort()\n"""\\ \u2028 # \x00'


def test_words_of_a_file_are_never_code(tmp_path):
    config = {"model_type": HOSTILE, "architectures": [HOSTILE], HOSTILE: HOSTILE, "x": {HOSTILE: 1}, "y": float("nan")}
    tensors = {f"model.layers.{layer}.{HOSTILE}.weight": np.ones(24, np.float32) for layer in range(2)}
    _, source, text = draft_of(another_model(tmp_path / "hostile", config, **tensors))
    tree = ast.parse(source)
    names = {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    assert names <= {"dataclasses"} and "os" not in {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    (call,) = (
        node.value for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "FAMILY"
    )
    assert {kw.arg: ast.literal_eval(kw.value) for kw in call.keywords if kw.arg == "model_type"} == {
        "model_type": HOSTILE
    }
    assert all(line.isprintable() for line in (*source.split("\n"), *text.split("\n")))


def test_words():
    assert (
        pattern_of("model.layers.12.mlp.experts.3.up.weight") == "model.layers.{layer}.mlp.experts.{expert}.up.weight"
    )
    assert pattern_of("model.norm1.weight") == "model.norm1.weight"
    groups = grouped({"a.0.b": (2,), "a.1.b": (3,), "c": None})
    assert groups["a.{layer}.b"].layers == {0, 1} and groups["a.{layer}.b"].shape is None and groups["c"].shapes == ()
    assert difference("a.{layer}.x.weight", "a.{layer}.y.z.weight") == (".x.", ".y.z.")
    assert difference("model.norm.weight", "norm_f.weight") == ("model.norm.", "norm_f.")
    assert [python_name(kind) for kind in ("Phi-3.5", "3d", "class", "../x", "é")] == [
        "phi_3_5", "family_3d", "family_class", "___x", "_",
    ]  # fmt: skip
    shadows = ("json", "sys", "numpy", "pytest", "map_blocks", "renamed", "dataclasses", "tuple")
    assert [python_name(kind) for kind in shadows] == [f"family_{kind}" for kind in shadows]
    assert python_name("llama_sizes", ("llama_sizes",)) == "family_llama_sizes"
    value = {"a": [True, None, 1.5, "é\n"], 'q"\\': float("inf")}
    assert eval(literal(value)) == value and literal(value).isascii()


def test_a_draft_hides_no_name_that_it_uses(tmp_path, monkeypatch):
    """Its own file in the working directory is none that it would hide."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    Path("own_type.py").write_text("")
    assert python_name("own_type") == "own_type"
    _, source, _ = draft_of(another_model(tmp_path / "model", {"model_type": "decoder_sizes"}))
    assert "def family_decoder_sizes(" in source and "build=family_decoder_sizes" in source


def test_a_family_of_ones_own():
    own = dataclasses.replace(LLAMA, model_type="own", aliases=("older",))
    ed.register_family(own, {"own-1b": lambda: ed.get_config("tiny")})
    assert families.find_family("older") is families.FAMILIES["own"] is own and "own-1b" in ed.list_models()
    again = dataclasses.replace(own, architecture="OwnForCausalLM")
    ed.register_family(again)  # as where a notebook runs its cell again
    assert families.find_family("own") is again
    ed.register_family(own, {"qwen3": lambda: ed.get_config("tiny")})  # a name of a model is none of a family
    for wrong, models, name in (
        (dataclasses.replace(LLAMA, model_type="qwen3"), {}, "'qwen3'"),
        (LLAMA, {}, "'llama'"),
        (dataclasses.replace(own, aliases=("kimi_k2",)), {}, "'kimi_k2'"),
        (own, {"tiny": lambda: ed.get_config("tiny")}, "tiny"),
    ):
        with refused(ed.ConfigError, name):
            ed.register_family(wrong, models)
