"""Prompts as tokens, and the cursor that deals them out."""

import json

import pytest
from tokenizers import processors

from eqx_decoders.data.prompt_batches import PromptBatches, Prompts, read_prompts, read_tasks
from eqx_decoders.errors import DataError
from eqx_decoders.io.text.chat_template import ChatTemplate
from eqx_decoders.io.text.tokenizer import ByteTokenizer, JsonTokenizer, train_bpe


TEMPLATE = ChatTemplate(
    source="{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)


def write(path, *rows):
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def read(path, most=40, template: ChatTemplate | None = TEMPLATE):
    return read_prompts(str(path), ByteTokenizer(), most_tokens=most, template=template)


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
    assert found.too_long == 1 and "left out: 1 of more than 40" in found.describe() and found.longest == 12


def test_tasks_are_any_objects(tmp_path):
    tasks = read_tasks(str(write(tmp_path / "tasks.jsonl", {"number": 3}, {"prompt": "a"})))
    assert tasks.prompts == [(0, (), {"number": 3}), (1, (), {"prompt": "a"})] and tasks.describe() == "2 tasks"
    for rows, says in (([3], "must hold a JSON object"), ([], "is empty|has no task")):
        with pytest.raises(DataError, match=says):
            read_tasks(str(write(tmp_path / "bad.jsonl", *rows)))


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"answer": 1}, "row|line 1.*has no field 'prompt' or 'messages'"),
        ({"prompt": 3}, "field 'prompt' must be"),
        ({"prompt": "a", "images": ["a.png"]}, "has images: prompts are read as text alone"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "there is nothing to be answered"),
        ({"messages": []}, "at least one message"),
        ({"prompt": "x" * 60}, "all 1 have more than 40 tokens: raise --seq-len"),
    ],
)
def test_bad_records(tmp_path, row, says):
    with pytest.raises(DataError, match=says):
        read(write(tmp_path / "bad.jsonl", row))


def test_conversations_need_a_template(file):
    with pytest.raises(DataError, match="there is no chat template"):
        read(file, template=None)


def test_what_a_template_leaves_out_is_reported(tmp_path):
    source = "{% for m in messages if m.role == 'user' %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    users = ChatTemplate(source=source)
    chat = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "2+2"}]
    row = {"prompt": chat, "tools": [{"type": "function", "function": {"name": "add"}}]}
    lines = read(write(tmp_path / "a.jsonl", row, row), template=users).describe().splitlines()
    assert len(lines) == 3 and all(
        line.startswith("warning: 2 prompts: the chat template leaves") for line in lines[1:]
    )
    with pytest.raises(DataError, match="'narrator'"):
        read(write(tmp_path / "b.jsonl", {"prompt": [{**chat[0], "role": "narrator"}, chat[1]]}), template=users)


def dealt(batches, steps):
    return [[(each.number, each.record["prompt"]) for each in next(batches)] for _ in range(steps)]


def test_every_prompt_comes_once_in_an_epoch_and_the_cursor_goes_on(tmp_path):
    found = read(write(tmp_path / "prompts.jsonl", *({"prompt": str(number)} for number in range(10))))
    whole, batches = PromptBatches(found, count=4, seed=1), PromptBatches(found, count=4, seed=1)
    rows = dealt(whole, 10)
    flat = [each for row in rows for each in row]
    assert [number for number, _ in flat] == list(range(40))
    epochs = [tuple(prompt for _, prompt in flat[start : start + 10]) for start in range(0, 40, 10)]
    assert all(sorted(epoch) == sorted(epochs[0]) for epoch in epochs) and len(set(epochs)) == 4
    assert dealt(batches, 3) == rows[:3] and batches.epochs == 1.2
    more = batches.take(2)  # in place of others
    state = json.loads(json.dumps(batches.get_state()))
    assert [each.number for each in more] == [12, 13]
    other = PromptBatches(found, count=4, seed=1)
    other.set_state(state)
    assert dealt(other, 2) == dealt(batches, 2)
    with pytest.raises(DataError, match="seed was 1 and is 2"):
        PromptBatches(found, count=4, seed=2).set_state(state)


def test_held_out_prompts_are_one_pass_in_their_order(tmp_path):
    found = read(write(tmp_path / "prompts.jsonl", *({"prompt": str(number)} for number in range(5))))
    batches = PromptBatches(found, count=2, seed=1, held_out=True)
    for _ in range(2):
        prompts = [each.record["prompt"] for batch in batches.rewind() for each in batch]
        assert prompts == ["0", "1", "2", "3", "4"]


def test_the_hash_is_of_what_a_reward_reads_too(tmp_path):
    one, other = (read(write(tmp_path / "a.jsonl", {"prompt": "a", "answer": answer})) for answer in (1, 2))
    assert isinstance(one, Prompts) and one.content_hash != other.content_hash


def test_an_empty_prompt_needs_a_token_that_starts_texts(tmp_path):
    path = write(tmp_path / "a.jsonl", {"prompt": "a"}, {"prompt": ""})
    assert [prompt.tokens for prompt in read(path).prompts][1] == (ByteTokenizer().bos_id,)
    inner = train_bpe(["a b"], 300)._inner
    inner.post_processor = processors.Sequence([])  # puts nothing before a text
    tokenizer = JsonTokenizer(inner)
    with pytest.raises(DataError, match=r"a\.jsonl:2.*'prompt'"):
        read_prompts(str(path), tokenizer, most_tokens=40)
