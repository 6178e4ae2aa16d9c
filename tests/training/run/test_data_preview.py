"""What a run is trained on, shown: targets between marks, counts, and no more work than that takes."""

import json
from pathlib import Path

import pytest

from eqx_decoders.data.config import DataConfig
from eqx_decoders.training.config import TrainConfig
from eqx_decoders.training.run import data_preview as module
from eqx_decoders.training.run.data_preview import describe_data


FIXTURE = str(Path(__file__).parents[2] / "fixtures" / "chat_llama")
CHAT = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "she sells\x1b[2J"}]


@pytest.fixture
def settings(tmp_path):
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps({"messages": CHAT, "id": i}) + "\n" for i in range(9)))

    def build(name="chats.jsonl", data=(), **options):
        data = DataConfig(**{"path": str(tmp_path / name), "held_out_fraction": 0.0} | dict(data))
        return TrainConfig(run_dir=str(tmp_path / "run"), dataset=data, **options)

    return build


@pytest.mark.slow
def test_conversations_are_shown_with_their_targets(settings, tmp_path):
    text = describe_data(settings(init_from=FIXTURE))
    shown = "<|begin|><|user|>hello<|end|>\n\n<|assistant|>⟦she sells\ufffd[2J<|end|>\n\n⟧"
    assert text.count(shown) == 3, "and nothing that a terminal obeys"
    assert "--- document 2: 19 tokens, 10 targets ---" in text
    assert (
        "\n\n9 documents to train on, 171 tokens, 90 of them targets (52.6%)\n0 are longer than --seq-len 256" in text
    )
    assert "<|assistant|>\x1b[32mshe sells" in describe_data(settings(init_from=FIXTURE), color=True)
    assert not (tmp_path / "run").exists(), "nothing is written"


def test_only_the_first_documents_are_read(settings, monkeypatch):
    monkeypatch.setattr(module, "MOST", 4)
    monkeypatch.setattr(module, "TOKENS", 10)
    text = describe_data(settings(init_from=FIXTURE, data={"seq_len": 16}))
    assert "4 documents to train on, of the first 4, 76 tokens" in text and "… and 9 tokens more" in text
    assert "4 are longer than --seq-len 16" in text


def test_texts_with_a_tokenizer_of_their_own(settings, tmp_path):
    (tmp_path / "a.txt").write_text("one two three " * 9)
    text = describe_data(settings("a.txt", bpe_vocab_size=300))
    assert f"<|endoftext|>⟦{'one two three ' * 9}<|endoftext|>⟧" in text and "longer than" not in text
    assert "1 document to train on" in text
    text = describe_data(settings("a.txt", tokenizer="bytes"))
    assert f"⟦{'one two three ' * 9}⟧" in text and "128 tokens, 127 of them targets (99.2%)" in text


def test_a_template_of_ones_own(settings, tmp_path):
    (tmp_path / "t.jinja").write_text("{% for m in messages %}{{ m.role }}:\n{{ m.content }}{{ eos_token }}{% endfor %}"
                                      "{% if add_generation_prompt %}assistant:\n{% endif %}")  # fmt: skip
    text = describe_data(settings(data={"chat_template": str(tmp_path / "t.jinja")}))
    assert "user:\nhello<|endoftext|>assistant:\n⟦she sells\ufffd[2J<|endoftext|>⟧" in text


def test_each_source_of_a_mixture_is_shown(settings, tmp_path):
    (tmp_path / "a.txt").write_text("one two three " * 9)
    paths = [f"{tmp_path / 'a.txt'}=1", f"{tmp_path / 'chats.jsonl'}=3"]
    text = describe_data(settings(init_from=FIXTURE, data={"path": paths}))
    a, chats = text.split("=== chats ===")
    assert a.startswith("=== a ===\n\n--- document 0") and "1 document to train on" in a and "one two" in a
    assert chats.count("⟦she sells") == 3 and "9 documents to train on" in chats


def test_held_out_data_of_ones_own_are_not_among_the_first(settings, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MOST", 6)
    for name, count in (("few", 4), ("many", 9)):
        lines = [json.dumps({"text": f"{name} {number}"}) for number in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    data = {"held_out_path": str(tmp_path / "many.jsonl")}
    assert "4 documents to train on, " in (text := describe_data(settings("few.jsonl", data, tokenizer="bytes")))
    assert "of the first" not in text
    data = {"held_out_path": str(tmp_path / "few.jsonl")}
    assert "6 documents to train on, of the first 6," in describe_data(settings("many.jsonl", data, tokenizer="bytes"))
