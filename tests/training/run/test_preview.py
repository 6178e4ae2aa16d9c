"""Test the preview of training data: documents with marked targets, and counts."""

import json
import re
from pathlib import Path

import pytest

from eqx_decoders.data.config import DataConfig
from eqx_decoders.training.run import preview as module
from eqx_decoders.training.run.preview import describe_data
from eqx_decoders.training.settings.run import TrainConfig


FIXTURE = str(Path(__file__).parents[2] / "fixtures" / "chat_llama")
CHAT = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "she sells\x1b[2J"}]


@pytest.fixture
def settings(tmp_path):
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps({"messages": CHAT, "id": i}) + "\n" for i in range(9)))

    def build(name="chats.jsonl", data=(), **options):
        data = DataConfig(**{"path": str(tmp_path / name), "held_out_fraction": 0.0} | dict(data))
        return TrainConfig(run_dir=str(tmp_path / "run"), data=data, **options)

    return build


def counts(text: str) -> list[str]:
    """Return the numbers of the last paragraph: documents, tokens, targets, their share, long documents, `seq_len`."""
    return re.findall(r"\d[\d,.]*%?(?<![,.])", text.rpartition("\n\n")[2])


@pytest.mark.slow
def test_conversations_are_shown_with_their_targets(settings, tmp_path):
    text = describe_data(settings(init_from=FIXTURE))
    shown = "<|begin|><|user|>hello<|end|>\n\n<|assistant|>⟦she sells\ufffd[2J<|end|>\n\n⟧"
    assert text.count(shown) == 3  # without control characters
    assert re.search(r"document 2\b.*\b19\b.*\b10\b", text)  # tokens and targets
    assert counts(text) == ["9", "171", "90", "52.6%", "0", "256"]
    assert "<|assistant|>\x1b[32mshe sells" in describe_data(settings(init_from=FIXTURE), color=True)
    assert not (tmp_path / "run").exists()


def test_only_the_first_documents_are_read(settings, monkeypatch):
    monkeypatch.setattr(module, "MAX_DOCUMENTS", 4)
    monkeypatch.setattr(module, "MAX_TOKENS", 10)
    text = describe_data(settings(init_from=FIXTURE, data={"seq_len": 16}))
    assert counts(text)[:3] == ["4", "4", "76"] and counts(text)[-2:] == ["4", "16"]
    assert re.search(r"… \D*\b9\b", text)  # number of omitted tokens


def test_texts_with_a_new_tokenizer(settings, tmp_path):
    (tmp_path / "a.txt").write_text("one two three " * 9)
    text = describe_data(settings("a.txt", bpe_vocab_size=300))
    assert f"<|endoftext|>⟦{'one two three ' * 9}<|endoftext|>⟧" in text and "--seq-len" not in text
    assert counts(text)[0] == "1"
    text = describe_data(settings("a.txt", tokenizer="bytes"))
    assert f"⟦{'one two three ' * 9}⟧" in text and counts(text)[1:4] == ["128", "127", "99.2%"]


def test_separate_chat_template(settings, tmp_path):
    (tmp_path / "t.jinja").write_text("{% for m in messages %}{{ m.role }}:\n{{ m.content }}{{ eos_token }}{% endfor %}"
                                      "{% if add_generation_prompt %}assistant:\n{% endif %}")  # fmt: skip
    text = describe_data(settings(data={"chat_template": str(tmp_path / "t.jinja")}))
    assert "user:\nhello<|endoftext|>assistant:\n⟦she sells\ufffd[2J<|endoftext|>⟧" in text


def test_each_source_of_a_mixture_is_shown(settings, tmp_path):
    (tmp_path / "a.txt").write_text("one two three " * 9)
    paths = [f"{tmp_path / 'a.txt'}=1", f"{tmp_path / 'chats.jsonl'}=3"]
    text = describe_data(settings(init_from=FIXTURE, data={"path": paths}))
    a, chats = text.split("=== chats ===")
    assert a.startswith("=== a ===\n\n") and counts(a.rstrip())[0] == "1" and "one two" in a
    assert chats.count("⟦she sells") == 3 and counts(chats)[0] == "9"


def test_preview_excludes_separate_held_out_data(settings, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MAX_DOCUMENTS", 6)
    for name, count in (("few", 4), ("many", 9)):
        lines = [json.dumps({"text": f"{name} {number}"}) for number in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    data = {"held_out_path": str(tmp_path / "many.jsonl")}
    assert counts(describe_data(settings("few.jsonl", data, tokenizer="bytes")))[0] == "4"
    data = {"held_out_path": str(tmp_path / "few.jsonl")}
    assert counts(describe_data(settings("many.jsonl", data, tokenizer="bytes")))[:2] == [
        "6",
        "6",
    ]  # counts of the first 6 documents
