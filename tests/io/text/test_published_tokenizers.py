"""Token ids and rendered chats equal those of transformers for directories with different files.

`tests/tools/make_tokenizers.py` writes the directories and the expected values.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from eqx_decoders.errors import ConversionError, DataError
from eqx_decoders.io.text.chat_template import load_chat_template
from eqx_decoders.io.text.tokenizer import JsonTokenizer, load_tokenizer
from tests.errors import refused


FIXTURES = Path(__file__).parents[2] / "fixtures" / "tokenizers"
CONTENT = json.loads((FIXTURES / "cases.json").read_text())
CASES = {case["name"]: case for case in CONTENT["cases"]}


def write(folder: Path, case: dict[str, Any], *missing: str) -> Path:
    for file, source in case["vocabulary"].items():
        shutil.copyfile(FIXTURES / source, folder / file)
    for file, content in case["files"].items():
        (folder / file).parent.mkdir(exist_ok=True)
        (folder / file).write_text(content if isinstance(content, str) else json.dumps(content))
    for file in missing:
        (folder / file).unlink()
    return folder


def load(folder: Path) -> JsonTokenizer:
    tokenizer = load_tokenizer(folder)
    assert isinstance(tokenizer, JsonTokenizer)
    return tokenizer


def check(tokenizer: JsonTokenizer, case: dict[str, Any]) -> None:
    for text, ids, prompt in zip(CONTENT["texts"], case["ids"], case["prompts"], strict=True):
        assert tokenizer.encode(text, special=True).tolist() == ids, text
        assert tokenizer.encode_prompt(text).tolist() == prompt, text
    assert (tokenizer.bos_id, tokenizer.eos_id) == (case["bos"], case["eos"])


@pytest.mark.parametrize("name", CASES)
def test_ids_equal_those_of_transformers(name, tmp_path):
    tokenizer = load(write(tmp_path, CASES[name]))
    check(tokenizer, CASES[name])
    (tmp_path / "saved").mkdir()
    tokenizer.save(tmp_path / "saved")
    check(load(tmp_path / "saved"), CASES[name])


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if "chat" in name])
def test_chats_equal_those_of_transformers(name, tmp_path):
    case = CASES[name]
    folder = write(tmp_path, case)
    try:
        template = load_chat_template(folder)
    except ConversionError:
        template = None
    tools = [{"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": "object"}}}]
    for key, variables in (("chat", {}), ("chat_with_tools", {"tools": tools})):
        rendered = None
        if template is not None:
            rendered = template.render(CONTENT["messages"], add_generation_prompt=False, **variables)
        assert rendered == case[key], key


@pytest.mark.parametrize("name", ["llama: added, eos", "gpt2: added, eos", "qwen2: added, eos", "llama: decoder, eos"])
def test_names_the_missing_file_with_the_id_of_eos(name, tmp_path):
    folder, case = write(tmp_path, CASES[name]), CASES[name]
    for file in case["files"]:
        if file == "added_tokens.json":
            (folder / file).unlink()
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings.pop("added_tokens_decoder", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    with refused(DataError, "eos_token='<|im_end|>'", "added_tokens.json"):
        load(folder)


@pytest.mark.parametrize("file", ["vocab.json", "merges.txt"])
def test_a_bpe_needs_both_of_its_files(file, tmp_path):
    with refused(DataError, tmp_path, "vocab.json", "merges.txt", f"Download {file}"):
        load(write(tmp_path, CASES["gpt2: bare"], file))


def test_a_class_with_unknown_word_splitting_is_refused(tmp_path):
    folder = write(tmp_path, CASES["qwen2: bare"], "tokenizer_config.json")
    with refused(DataError, "tokenizer_class=None", "tokenizer_config.json"):
        load(folder)
    (folder / "config.json").write_text('{"model_type": "qwen3"}')
    check(load(folder), CASES["qwen2: bare"])


def test_vocab_and_merges_without_other_files_are_gpt2(tmp_path):
    check(load(write(tmp_path, CASES["gpt2: bare"], "tokenizer_config.json")), CASES["gpt2: bare"])


def test_special_tokens_without_ids_are_added_in_the_order_of_transformers(tmp_path):
    """The order is bos, eos, unk, …, pad. Tokens of the class and named tokens are in one order."""
    folder = write(tmp_path, CASES["qwen2: bare"])
    size = len(json.loads((folder / "vocab.json").read_text()))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "Qwen2Tokenizer", "pad_token": "<pad>"}')
    tokenizer = load(folder)
    assert [tokenizer.name_of(index) for index in (size, size + 1)] == ["<|endoftext|>", "<pad>"]
    assert tokenizer.eos_id == size


@pytest.mark.parametrize("name", ["llama: added", "unigram: added", "gpt2: added", "llama3: added"])
def test_added_tokens_have_the_ids_that_the_files_give(name, tmp_path):
    """Ids may leave a gap after the vocabulary, or replace a piece such as `<unused0>`."""
    folder, size = write(tmp_path, CASES[name]), load(write(tmp_path, CASES[name])).vocab_size
    near = size - 8
    (folder / "added_tokens.json").write_text(json.dumps({"<far>": size + 9, "<next>": size + 3, "<near>": near}))
    tokenizer = load(folder)
    assert [tokenizer.name_of(index) for index in (near, size + 3, size + 9)] == ["<near>", "<next>", "<far>"]
    found = tokenizer.encode("a<far>b<next>c<near>", special=True).tolist()
    assert [index for index in found if index in (near, size + 3, size + 9)] == [size + 9, size + 3, near]
    assert tokenizer.vocab_size == size + 10


def test_files_of_different_tokenizers_are_refused(tmp_path):
    folder = write(tmp_path, CASES["llama: added"])
    (folder / "added_tokens.json").write_text('{"</s>": 7}')
    with refused(DataError, "'</s>'", "7", "2", "added_tokens.json"):
        load(folder)


@pytest.mark.parametrize("name", ["unigram: added", "gpt2: bare"])
@pytest.mark.parametrize("index", [20_000_000, 999_999_999])
def test_ids_far_beyond_the_vocabulary_are_refused(name, index, tmp_path):
    folder = write(tmp_path, CASES[name])
    settings = json.loads((folder / "tokenizer_config.json").read_text()) if "added" in name else {}
    settings = (
        {"tokenizer_class": "GPT2Tokenizer"} | settings | {"added_tokens_decoder": {str(index): {"content": "@"}}}
    )
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    with refused(DataError, "'@'", index):
        load(folder)


@pytest.mark.parametrize(
    "settings, named",
    [
        ({"added_tokens_decoder": []}, ["added_tokens_decoder"]),
        ({"added_tokens_decoder": {"x": {"content": "a"}}}, ["added_tokens_decoder", "x"]),
        ({"added_tokens_decoder": {"-1": {"content": "a"}}}, ["added_tokens_decoder", "-1"]),
        ({"added_tokens_decoder": {"400": {"content": 3}}}, ["added_tokens_decoder[400]", "3"]),
        ({"added_tokens_decoder": {"400": {"content": "a", "lstrip": "yes"}}}, ["added_tokens_decoder[400]", "lstrip"]),
        ({"additional_special_tokens": [3]}, ["additional_special_tokens=3"]),
    ],
    ids=["list", "no id", "negative id", "content", "lstrip", "additional"],
)
def test_malformed_added_tokens_are_refused(settings, named, tmp_path):
    folder = write(tmp_path, CASES["gpt2: bare"])
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"} | settings))
    with refused(DataError, *named):
        load(folder)
