"""End-of-turn tokens of chat templates."""

from pathlib import Path

import pytest
import tokenizers

from eqx_decoders.data.end_of_turn import NO_END_OF_TURN, end_of_turn_ids
from eqx_decoders.data.sources.documents import ChatDocument, Document, ReadReport
from eqx_decoders.data.store.shards import TokenizationConfig, write_shard
from eqx_decoders.io.text.chat_template import ChatTemplate
from eqx_decoders.io.text.tokenizer import ByteTokenizer, JsonTokenizer, decode, load_tokenizer


CHATS = Path(__file__).parents[1] / "fixtures" / "chats"
TOKENIZER = load_tokenizer(CHATS / "tokenizer.json")
TURNS = "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}END{% endfor %}"


def names(template: ChatTemplate) -> set[str]:
    return {decode(TOKENIZER, [index], special=True) for index in end_of_turn_ids(TOKENIZER, template)}


@pytest.mark.parametrize(
    "name, ends",
    [
        ("llama3", {"<|eot_id|>"}),
        ("qwen3", {"<|im_end|>"}),
        ("gemma3", {"<end_of_turn>"}),
        ("mistral", {"</s>"}),
        ("gpt_oss", {"<|return|>", "<|call|>"}),
    ],
)
def test_end_of_turn_tokens_of_published_templates(name, ends):
    variables = {"bos_token": "<s>", "eos_token": "</s>"}
    assert names(ChatTemplate(source=(CHATS / f"{name}.jinja").read_text(), variables=variables)) == ends


@pytest.mark.parametrize(
    "end, ends",
    [
        ("<|end|>\n", {"<|end|>"}),
        ("<|end|><|endoftext|>", {"<|end|>", "<|endoftext|>"}),
        ("\n\n", set()),
        (" the end.", set()),
        ("<|end|> the end.", set()),
        ("{{ raise_exception('no') }}", set()),
    ],
    ids=["end", "two", "newlines", "text", "end-and-text", "exception"],
)
def test_only_added_tokens_at_the_end_of_a_turn_count(end, ends):
    assert names(ChatTemplate(source=TURNS.replace("END", end))) == ends


def test_added_tokens_without_the_special_flag_count():
    inner = tokenizers.Tokenizer.from_file(str(CHATS / "tokenizer.json"))
    inner.add_tokens([tokenizers.AddedToken("<turn>", special=False), tokenizers.AddedToken("    ", special=False)])
    ends = end_of_turn_ids(JsonTokenizer(inner), ChatTemplate(source=TURNS.replace("END", "<turn>    \n")))
    assert ends == (inner.token_to_id("<turn>"),)


def test_no_end_of_turn_tokens_without_a_template_or_added_tokens():
    assert end_of_turn_ids(TOKENIZER, None) == ()
    assert end_of_turn_ids(ByteTokenizer(), ChatTemplate(source=TURNS)) == ()


@pytest.mark.parametrize(
    "answer, count",
    [
        ("{% generation %}{{ m.content }}{% endgeneration %}<|end|>", 1),
        ("{% generation %}{{ m.content }}<|end|>\n{% endgeneration %}", 0),
        ("{{ m.content }}<|end|>\n", 0),
        ("{{ m.content }}\n\n", 1),
    ],
    ids=["after-generation", "in-generation", "end", "no-end"],
)
def test_answers_without_an_end_of_turn_token_are_counted(answer, count, tmp_path):
    source = "{% for m in messages %}<|start|>{{ m.role }}<|message|>{% if m.role == 'user' %}{{ m.content }}<|end|>"
    source += f"{{% else %}}{answer}{{% endif %}}{{% endfor %}}"
    source += "{% if add_generation_prompt %}<|start|>assistant<|message|>{% endif %}"
    messages = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]
    report = ReadReport()
    documents = [Document("a.jsonl:1", chat=ChatDocument(messages))]
    config = TokenizationConfig(TOKENIZER, template=ChatTemplate(source=source))
    write_shard(tmp_path / "a", documents, config, report=report)
    assert report.notes == ({NO_END_OF_TURN: count} if count else {})
