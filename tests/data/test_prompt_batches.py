"""Test tokenized prompts and their batches."""

import json
import re

import pytest
from tokenizers import processors

from eqx_decoders.data.prompt_batches import PromptBatches, Prompts, read_prompts, read_tasks
from eqx_decoders.errors import DataError
from eqx_decoders.io.text.chat_template import ChatTemplate
from eqx_decoders.io.text.tokenizer import ByteTokenizer, JsonTokenizer, train_bpe
from tests.errors import refused


TEMPLATE = ChatTemplate(
    source="{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)


def write(path, *rows):
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def read(path, most=40, template: ChatTemplate | None = TEMPLATE):
    return read_prompts(str(path), ByteTokenizer(), max_tokens=most, template=template)


@pytest.fixture
def file(tmp_path):
    chat = [{"role": "user", "content": "2+2"}]
    rows = [{"prompt": "1+1=", "answer": 2, "more": {"a": [1]}}, {"messages": chat, "answer": 4}, {"prompt": "x" * 60}]
    return write(tmp_path / "prompts.jsonl", *rows)


def test_texts_and_conversations(file):
    found, tokenizer = read(file), ByteTokenizer()
    text, chat = found.prompts
    assert text.tokens == (tokenizer.bos_id, *tokenizer.encode("1+1=").tolist())
    assert tokenizer.decode(list(chat.tokens)) == "<user>2+2<a>"
    assert text.record == {"prompt": "1+1=", "answer": 2, "more": {"a": [1]}}
    assert chat.record["prompt"] == [{"role": "user", "content": "2+2"}] and chat.record["answer"] == 4
    assert found.num_too_long == 1 and found.max_length == 12
    assert re.search(r"\b1\b.*\b40\b", found.describe())


def test_tasks_may_be_any_json_objects(tmp_path):
    tasks = read_tasks(str(write(tmp_path / "tasks.jsonl", {"number": 3}, {"prompt": "a"})))
    assert tasks.prompts == [(0, (), {"number": 3}), (1, (), {"prompt": "a"})] and tasks.describe() == "2 tasks"
    with refused(DataError, "bad.jsonl:1"):
        read_tasks(str(write(tmp_path / "bad.jsonl", 3)))
    with refused(DataError, "bad.jsonl"):
        read_tasks(str(write(tmp_path / "bad.jsonl")))


@pytest.mark.parametrize(
    ("row", "names"),
    [
        pytest.param({"answer": 1}, ["bad.jsonl:1", "'prompt'", "'messages'"], id="no-prompt"),
        pytest.param({"prompt": 3}, ["bad.jsonl:1", "'prompt'"], id="number"),
        pytest.param({"prompt": "a", "images": ["a.png"]}, ["bad.jsonl:1", "images"], id="images"),
        pytest.param({"messages": [{"role": "assistant", "content": "a"}]}, ["bad.jsonl:1"], id="answer"),
        pytest.param({"messages": []}, ["bad.jsonl:1", "message"], id="empty"),
        pytest.param({"prompt": "x" * 60}, ["40 tokens", "--seq-len"], id="long"),
    ],
)
def test_invalid_prompt_records_are_refused(tmp_path, row, names):
    with refused(DataError, *names):
        read(write(tmp_path / "bad.jsonl", row))


def test_conversations_need_a_template(file):
    with refused(DataError, "prompts.jsonl:2", "chat template"):
        read(file, template=None)


def test_messages_and_tools_that_a_template_omits_are_reported(tmp_path):
    source = "{% for m in messages if m.role == 'user' %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    users = ChatTemplate(source=source)
    chat = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "2+2"}]
    row = {"prompt": chat, "tools": [{"type": "function", "function": {"name": "add"}}]}
    lines = read(write(tmp_path / "a.jsonl", row, row), template=users).describe().splitlines()
    assert len(lines) == 3 and all(line.startswith("warning: 2 prompts") for line in lines[1:])
    with refused(DataError, "'narrator'"):
        read(write(tmp_path / "b.jsonl", {"prompt": [{**chat[0], "role": "narrator"}, chat[1]]}), template=users)


def prompts_of_steps(batches, steps):
    return [[(each.number, each.record["prompt"]) for each in next(batches)] for _ in range(steps)]


def test_epochs_contain_every_prompt_and_resume_exactly(tmp_path):
    found = read(write(tmp_path / "prompts.jsonl", *({"prompt": str(number)} for number in range(10))))
    whole, batches = PromptBatches(found, count=4, seed=1), PromptBatches(found, count=4, seed=1)
    rows = prompts_of_steps(whole, 10)
    flat = [each for row in rows for each in row]
    assert [number for number, _ in flat] == list(range(40))
    epochs = [tuple(prompt for _, prompt in flat[start : start + 10]) for start in range(0, 40, 10)]
    assert all(sorted(epoch) == sorted(epochs[0]) for epoch in epochs) and len(set(epochs)) == 4
    assert prompts_of_steps(batches, 3) == rows[:3] and batches.epochs == 1.2
    more = batches.take(2)  # replacements for other prompts
    state = json.loads(json.dumps(batches.get_state()))
    assert [each.number for each in more] == [12, 13]
    other = PromptBatches(found, count=4, seed=1)
    other.set_state(state)
    assert prompts_of_steps(other, 2) == prompts_of_steps(batches, 2)
    with refused(DataError, "seed", "1", "2"):
        PromptBatches(found, count=4, seed=2).set_state(state)


def test_held_out_prompts_are_read_once_in_order(tmp_path):
    found = read(write(tmp_path / "prompts.jsonl", *({"prompt": str(number)} for number in range(5))))
    batches = PromptBatches(found, count=2, seed=1, held_out=True)
    for _ in range(2):
        prompts = [each.record["prompt"] for batch in batches.rewind() for each in batch]
        assert prompts == ["0", "1", "2", "3", "4"]


def test_hash_depends_on_all_fields_of_records(tmp_path):
    one, other = (read(write(tmp_path / "a.jsonl", {"prompt": "a", "answer": answer})) for answer in (1, 2))
    assert isinstance(one, Prompts) and one.content_hash != other.content_hash


def test_empty_prompt_requires_a_start_token(tmp_path):
    path = write(tmp_path / "a.jsonl", {"prompt": "a"}, {"prompt": ""})
    assert [prompt.tokens for prompt in read(path).prompts][1] == (ByteTokenizer().bos_id,)
    inner = train_bpe(["a b"], 300)._inner
    inner.post_processor = processors.Sequence([])  # adds no token
    tokenizer = JsonTokenizer(inner)
    with refused(DataError, "a.jsonl:2", "'prompt'"):
        read_prompts(str(path), tokenizer, max_tokens=40)
