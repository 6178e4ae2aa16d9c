"""Test conversations: text, ids and targets equal those of transformers; unsafe templates are refused."""

import json
from pathlib import Path

import numpy as np
import pytest

from eqx_decoders.data import chats as chats_module
from eqx_decoders.data.chats import (
    EMPTY_MESSAGE,
    REASONING_OMITTED,
    TEXT_OMITTED,
    TOOLS_OMITTED,
    encode_spans,
    render_documents,
)
from eqx_decoders.data.config import DataConfig
from eqx_decoders.data.dataset import make_dataset
from eqx_decoders.data.sources.documents import ChatDocument, Document, ReadReport
from eqx_decoders.data.store.store import open_store
from eqx_decoders.errors import ConversionError, DataError
from eqx_decoders.io.text import chat_rendering
from eqx_decoders.io.text.chat_template import ChatTemplate
from eqx_decoders.io.text.tokenizer import ByteTokenizer, load_tokenizer
from tests.errors import refused


FOLDER = Path(__file__).parents[1] / "fixtures" / "chats"
RECORDED = json.loads((FOLDER / "chats.json").read_text())
FORMATS = list(RECORDED["templates"])
CHATML = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
CHATML += "{% if add_generation_prompt %}<|assistant|>{% endif %}"


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(FOLDER / "tokenizer.json")


def template_of(name: str, marked: bool = False) -> ChatTemplate:
    """Return the template of a format. With `marked`, comments at generation blocks become the blocks."""
    source = (FOLDER / f"{name}.jinja").read_text()
    if marked:
        for word in ("generation", "endgeneration"):
            source = source.replace("{#- " + word, "{%- " + word).replace(word + " #}", word + " %}")
            source = source.replace(word + " -#}", word + " -%}")
        assert source.count("{%- generation") == 1
    return ChatTemplate(source=source, variables=RECORDED["templates"][name]["variables"], where=f"{name}.jinja")


def write(path: Path, *records) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def document(*roles: str, first: int = 0, **variables) -> Document:
    messages = [{"role": role, "content": f"{role} {number}"} for number, role in enumerate(roles)]
    return Document("a.jsonl:1", chat=ChatDocument(messages, first, variables))


def targets_of_documents(template: ChatTemplate | str, *documents: Document) -> list[list[str]]:
    """Return the targets of each document."""
    template = ChatTemplate(source=template) if isinstance(template, str) else template
    found = render_documents(iter(documents), template)
    return [[(one.text or "")[start:stop] for start, stop in one.spans or ()] for one in found]


@pytest.mark.slow(fast=("llama3-plain",))
@pytest.mark.parametrize("marked", [False, True], ids=["plain", "marked"])
@pytest.mark.parametrize("name", FORMATS)
def test_ids_and_targets_equal_those_of_transformers(name, marked, tokenizer, tmp_path):
    """This holds for the store and for batches."""
    expected = {chat: want for chat, want in RECORDED["templates"][name]["chats"].items() if want is not None}
    if name == "gemma3":  # the template omits tool calls
        expected = {
            chat: want for chat, want in expected.items() if "tool_calls" not in str(RECORDED["conversations"][chat])
        }
    # transformers trains on empty answers
    expected = {chat: want for chat, want in expected.items() if chat not in ("empty answers", "blanks")}
    records = [RECORDED["conversations"][chat] for chat in expected]
    wanted = [want for want in expected.values() if want["mask"]]  # a conversation without targets is dropped
    path, template = write(tmp_path / "a.jsonl", *records), template_of(name, marked)
    store = open_store(tmp_path / "s", tokenizer, path=path, held_out_fraction=0.0, template=template)
    assert len(store) == len(wanted) == len(records) - 1 >= 9
    ids, masks = [np.array(want["ids"]) for want in wanted], [np.zeros(len(want["ids"]), bool) for want in wanted]
    for mask, want in zip(masks, wanted, strict=True):
        for start, stop in want["mask"]:
            mask[start:stop] = True
        mask[0] = False  # the first token has no prediction
    for number, (one, mask) in enumerate(zip(ids, masks, strict=True)):
        assert store[number].tolist() == one.tolist() and store.targets(number).tolist() == mask.tolist(), number
        assert tokenizer.encode(wanted[number]["text"], special=True).tolist() == one.tolist()
    counts = store.counts("train")
    assert counts.tokens == sum(map(len, ids)) and counts.targets == sum(map(np.sum, masks))
    config = DataConfig(path=path, held_out_fraction=0.0, batch_size=1, seq_len=int(store.sizes(0, len(store)).max()))
    with make_dataset(config, tokenizer, folder=tmp_path / "s", template=template) as batches:
        found = []
        for _ in range(batches.rows_per_epoch):
            batch = next(batches)
            for segment in range(1, int(batch.segment_ids.max()) + 1):
                here = batch.segment_ids[0] == segment
                found.append((batch.tokens[0][here].tolist(), batch.loss_mask[0][here].tolist()))
    assert sorted(found) == sorted((a.tolist(), b.tolist()) for a, b in zip(ids, masks, strict=True))


def test_reasoning_of_earlier_turns_is_removed():
    """The conversation is rendered as a single text. Reasoning of the last turn is a target."""
    chat = RECORDED["conversations"]["thoughts beside"]
    found = targets_of_documents(template_of("qwen3"), Document("x", chat=ChatDocument(chat["messages"])))
    assert found == [["4<|im_end|>\n", "<think>\nhm\n\nwell\n</think>\n\n6<|im_end|>\n"]]
    found = targets_of_documents(template_of("gpt_oss"), Document("x", chat=ChatDocument(chat["messages"])))
    last = "<|channel|>analysis<|message|>hm\n\nwell<|end|><|start|>assistant<|channel|>final<|message|>6<|return|>"
    assert found == [["<|channel|>final<|message|>4<|end|>", last]]


@pytest.mark.slow(fast=("plain",))
@pytest.mark.parametrize("marked", [False, True], ids=["plain", "marked"])
def test_only_completions_are_targets(marked):
    talk = document("user", "assistant", "user", "assistant", "user", "assistant")
    for first, want in ((0, [1, 3, 5]), (2, [3, 5]), (4, [5]), (5, [5])):
        chat = talk._replace(chat=talk.chat._replace(first=first))
        found = targets_of_documents(template_of("llama3", marked), chat)
        assert found == [[f"assistant {number}<|eot_id|>" for number in want]], first


def test_conversations_and_texts_stay_in_order(monkeypatch):
    monkeypatch.setattr(chats_module, "MAX_CHATS_PER_CHUNK", 3)
    documents = [
        document("user", "assistant", first=0, k=i) if i % 3 else Document(str(i), f"text {i}") for i in range(8)
    ]
    found = list(render_documents(iter(documents), ChatTemplate(source=CHATML.replace("m.role", "m.role ~ k"))))
    assert [one.text.partition("|>")[0] for one in found] == [f"<|user{i}" if i % 3 else f"text {i}" for i in range(8)]


def test_headers_may_depend_on_variables():
    """With enable_thinking=False the generation prompt is longer than the header, and splits the last span."""
    talk = document("user", "assistant", "user", "assistant", enable_thinking=False)
    assert targets_of_documents(template_of("qwen3"), talk, document("user", "assistant")) == [
        ["assistant 1<|im_end|>\n", "<think>\n\n</think>\n\n", "assistant 3<|im_end|>\n"],
        ["<think>\n\n</think>\n\nassistant 1<|im_end|>\n"],
    ]


FORMS = {
    "the request within the loop": "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>"
    "{% if loop.last and add_generation_prompt %}<assistant>{% endif %}{% endfor %}",
    "an end where nothing is asked": "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% else %}</all>{% endif %}",
    "a macro": "{% macro one(m) %}<{{ m.role }}>{{ m.content }}</s>{% endmacro %}"
    "{% for m in messages %}{{ one(m) }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}",
    "other loops": "{% for m in messages %}"
    "{% for n in messages %}{% if n.role == 'x' %}{% break %}{% endif %}{% endfor %}"
    "{% if m.role == 'x' %}{% continue %}{% endif %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}",
    "thoughts asked for": "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>as{% endif %}",
    "a line at the end": "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}{{ '!' }}"
    "{% if add_generation_prompt %}<assistant>{% endif %}",
    "a beginning": "{% for m in messages %}{{ 'all' if loop.first }}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}",
}


@pytest.mark.slow(fast=("the request within the loop",))
@pytest.mark.parametrize("name", FORMS)
def test_forms_of_templates(name):
    talks = document("user", "assistant", "user", "assistant"), document("assistant", "user", "assistant")
    # The last answer is split where the generation prompt ends; no token crosses this position.
    is_split = name == "thoughts asked for"
    assert targets_of_documents(FORMS[name], *talks) == [
        ["assistant 1</s>", *(("as", "sistant 3</s>") if is_split else ("assistant 3</s>",))],
        ["assistant 0</s>", *(("as", "sistant 2</s>") if is_split else ("assistant 2</s>",))],
    ]


def test_header_ends_where_generation_prompt_and_answer_differ():
    source = "{% for m in messages %}<{{ m.role }}>{{ '+1' if m.role == 'assistant' }}{{ m.content }}</s>{% endfor %}"
    source += "{% if add_generation_prompt %}<assistant>-1{% endif %}"
    assert targets_of_documents(source, document("user", "assistant")) == [["+1assistant 1</s>"]]


def test_headers_are_detected_once_for_all_tools(monkeypatch):
    rendered, real = [], ChatTemplate.render_many
    monkeypatch.setattr(ChatTemplate, "render_many", lambda self, many: rendered.append(len(many)) or real(self, many))
    talks = [document("user", "assistant", tools=[{"name": str(number)}]) for number in range(5)]
    assert len(targets_of_documents(CHATML, *talks)) == 5 and rendered == [3 + 5 + 5]


LOOP = "{% for m in messages %}"
REQUEST = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
COLLECTED = "{% set x = namespace(t='') %}" + LOOP + "{% set x.t = x.t ~ '<|' ~ m.role ~ '|>' ~ m.content ~ '</s>' %}"
# Published templates (DeepSeek, Reka, Nemotron and Gemma 4) with the expected targets.
BY_REQUEST = {
    "collected first": (COLLECTED + "{% endfor %}{{ x.t }}" + REQUEST, ["assistant 1</s>", "assistant 3</s>"]),
    "by number": (
        "{% for i in range(messages | length) %}<|{{ messages[i].role }}|>{{ messages[i].content }}</s>{% endfor %}"
        + REQUEST,
        ["assistant 1</s>", "assistant 3</s>"],
    ),
    "no header behind tools": (
        "{% set x = namespace(tool=false) %}"
        + LOOP
        + "{% if m.role == 'assistant' %}{{ '<|assistant|>' if not x.tool }}"
        "{{ m.content }}</s>{% else %}<|{{ m.role }}|>{{ m.content }}{% endif %}{% set x.tool = m.role == 'tool' %}"
        "{% endfor %}{% if add_generation_prompt and not x.tool %}<|assistant|>{% endif %}",
        ["assistant 1</s>", "assistant 3</s>"],
    ),
    "the last turn apart": (
        "{% set last = messages[-1] if messages[-1].role == 'assistant' %}{% if last %}"
        "{% set messages = messages[:-1] %}{% endif %}" + LOOP + "<|{{ m.role }}|>{{ m.content }}</s>{% endfor %}"
        "{% if last %}<|assistant|><think>{{ last.content }}</s>{% endif %}"
        "{% if add_generation_prompt %}<|assistant|><think>{% endif %}",
        ["assistant 1</s>", "assistant 3</s>"],
    ),
    "another header behind tools": (
        "{% set x = namespace(tool=false) %}" + LOOP + "<|{{ 'turn' if x.tool else m.role }}|>{{ m.content }}</s>"
        "{% set x.tool = m.role == 'tool' %}{% endfor %}{% if add_generation_prompt %}"
        "{{ '<|think|>' if x.tool else '<|assistant|>' }}{% endif %}",
        ["assistant 1</s>", "<|turn|>assistant 3</s>"],
    ),
}


@pytest.mark.slow(fast=("by number",))
@pytest.mark.parametrize("name", BY_REQUEST)
def test_turns_are_located_by_generation_prompts(name):
    source, learned = BY_REQUEST[name]
    talk = document("user", "assistant", "tool", "assistant")
    assert targets_of_documents(source, talk, talk) == [learned, learned]
    assert targets_of_documents(source, talk._replace(chat=talk.chat._replace(first=2))) == [learned[1:]]


@pytest.mark.slow
def test_the_number_of_renderings_per_turn_is_bounded(monkeypatch):
    rendered, real = [], ChatTemplate.render_many
    monkeypatch.setattr(ChatTemplate, "render_many", lambda self, many: rendered.append(len(many)) or real(self, many))
    monkeypatch.setattr(chats_module, "MAX_CHARACTERS_PER_CHUNK", 300)
    source, learned = BY_REQUEST["by number"]
    assert targets_of_documents(source, *[document("user", "assistant", "tool", "assistant")] * 3) == [learned] * 3
    assert max(rendered) == 6


CALLS = [{"type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}}]


def calling(**message) -> Document:
    talk = document("user", "assistant", "tool", "assistant")
    messages = list(talk.chat.messages)
    messages[1] = {"role": "assistant", "tool_calls": CALLS, **message}
    return talk._replace(chat=ChatDocument(messages, 0, {"tools": [{"name": "weather"}]}))


@pytest.mark.slow
def test_tool_calls_that_a_template_omits_are_refused():
    """The templates of SmolLM and Granite omit tool calls."""
    source = "{{ tools | tojson }}" + LOOP + "<|{{ m.role }}|>{{ m.content }}</s>{% endfor %}" + REQUEST
    assert targets_of_documents(source, document("user", "assistant")) == [["assistant 1</s>"]]
    with refused(DataError, "a.jsonl:1", "'weather'"):
        targets_of_documents(source, calling(content=""))
    named = source.replace(
        "{{ m.content }}", "{{ m.content }}{% for c in m.tool_calls %}{{ c.function.name }}{% endfor %}"
    )
    assert targets_of_documents(named, calling(content="")) == [["weather</s>", "assistant 3</s>"]]
    marked = LOOP + "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
    marked += "{% for c in m.tool_calls %}{{ c.function.name }}{% endfor %}{% endif %}{% endfor %}"
    with refused(DataError, "a.jsonl:1", "calls"):
        targets_of_documents(marked, calling(content="x"))
    assert targets_of_documents(marked, calling(content="x")._replace(chat=calling(content="x").chat._replace(first=2)))


def test_headers_of_conversations_with_different_variables():
    source = "{% set end = '<nothink>' if enable_thinking == false else '' %}" + LOOP
    source += "<|{{ m.role }}|>{{ end if m.role == 'assistant' }}{{ m.content }}</s>{% endfor %}"
    source += "{% if add_generation_prompt %}<|assistant|>{{ end }}{% endif %}"
    talks = [document("user", "assistant", enable_thinking=thinks) for thinks in (True, False, True)]
    assert targets_of_documents(source, *talks) == [["assistant 1</s>"]] * 3


TWO_SOURCES = ChatTemplate(
    source="{% for m in messages %}[{{ m.role }}]{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}",
    tool_source="TOOLS{% for m in messages %}[{{ m.role }}]{{ '<think></think>' if m.role == 'assistant' }}"
    "{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}[assistant]<think></think>{% endif %}",
)


def test_chats_with_and_without_tools_have_separate_sources_and_headers():
    tools = [{"name": "f"}]
    chats = [document("user", "assistant", **({"tools": tools} if number % 2 else {})) for number in range(40)]
    found = list(render_documents(iter(chats), TWO_SOURCES))
    assert [each.text.startswith("TOOLS") for each in found] == [number % 2 == 1 for number in range(40)]
    assert [each.text[slice(*each.spans[0])] for each in found] == ["assistant 1</s>"] * 40


def test_messages_that_a_template_omits_are_reported_or_refused():
    source = "{% for m in messages if m.role in ('user', 'assistant') %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
    source += "{% if add_generation_prompt %}<assistant>{% endif %}"
    report = ReadReport()
    chats = [document("system", "user", "assistant"), document("user", "assistant", "tool", "assistant")]
    assert len(list(render_documents(iter(chats), ChatTemplate(source=source), report))) == 2
    assert sorted(report.notes.values()) == [1, 1]
    assert all(any(role in note for note in report.notes) for role in ("'system'", "'tool'"))
    messages = [{"role": role, "content": "Q"} for role in ("narrator", "user", "assistant")]
    with refused(DataError, "narrator"):
        targets_of_documents(source, Document("a.jsonl:1", chat=ChatDocument(messages)))
    merged = "{% for m in messages if m.role != 'system' %}<{{ m.role }}>{{ messages[0].content if loop.first }}"
    merged += "{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    report = ReadReport()
    list(render_documents(iter(chats[:1]), ChatTemplate(source=merged), report))
    assert not any("'system'" in note for note in report.notes)


def test_reasoning_and_tools_that_a_template_omits_are_reported():
    messages = [
        {"role": "user", "content": "question"},
        {"role": "assistant", "content": "answer", "reasoning_content": "long thoughts"},
    ]
    tools = [{"type": "function", "function": {"name": "weather"}}]
    inline = [messages[0], {"role": "assistant", "content": "<think>\nlong thoughts\n</think>\n\nanswer"}]
    chats = [ChatDocument(messages), ChatDocument(inline), ChatDocument(messages[:1] * 2 + inline, 3, {"tools": tools})]
    chats.append(ChatDocument([{"role": "system", "content": "weather", "tools": [{"name": "search"}]}, *messages]))
    documents = [Document("a.jsonl:1", chat=chat) for chat in chats]
    strips = CHATML.replace("{{ m.content }}", "{{ m.content.split('</think>')[-1] | trim }}")
    report = ReadReport()
    list(render_documents(iter(documents), ChatTemplate(source=strips), report))
    assert report.notes == {REASONING_OMITTED: 4, TOOLS_OMITTED: 2}
    writes = "{{ tools | tojson if tools }}" + CHATML.replace(
        "{{ m.content }}",
        "{{ m.reasoning_content }}{{ m.content | replace('<think>', '[') | replace('</think>', ']') }}",
    )
    report = ReadReport()
    list(render_documents(iter(documents[:3]), ChatTemplate(source=writes), report))
    assert not report.notes


def test_text_of_a_call_that_a_template_omits_is_reported():
    source = "{% for m in messages %}<|{{ m.role }}|>{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% else %}"
    source += "{{ m.content }}{% endif %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    for content, notes in ((None, {}), ("let me look", {TEXT_OMITTED: 1})):
        report = ReadReport()
        list(render_documents(iter([calling(content=content)]), ChatTemplate(source=source), report))
        assert report.notes == notes


def test_an_empty_tool_list_means_no_tools():
    source = "{% if tools is not none %}TOOLS{% endif %}" + TWO_SOURCES.source
    for template in (TWO_SOURCES, ChatTemplate(source=source)):
        (found,) = render_documents(iter([document("user", "assistant", tools=[])]), template)
        assert found.text == "[user]user 0</s>[assistant]assistant 1</s>"


UNSAFE = {
    "twice": LOOP + "{{ m.content }}{% endfor %}" + LOOP + "{{ m.content }}{% endfor %}",
    "the next by the turn": LOOP + "{% if m.role == 'assistant' %}{{ m.content }}{% for n in messages %}"
    "{% if n.role == 'tool' %}{{ n.content }}{% endif %}{% endfor %}"
    "{% elif m.role != 'tool' %}{{ m.content }}{% endif %}{% endfor %}",
    "the next by number": LOOP + "{% if m.role == 'assistant' %}{{ m.content ~ messages[2].content }}"
    "{% elif m.role != 'tool' %}{{ m.content }}{% endif %}{% endfor %}",
    "marks that hold nothing": LOOP
    + "{{ m.content }}{% endfor %}{% if false %}{% generation %}{% endgeneration %}{% endif %}",
}


@pytest.mark.slow(fast=("twice", "marks that hold nothing"))
@pytest.mark.parametrize("name", UNSAFE)
def test_turns_with_unknown_spans_are_refused(name):
    talk = document("user", "assistant", "tool", "assistant")
    with refused(DataError, "a.jsonl:1", "assistant"):
        targets_of_documents(UNSAFE[name], talk)


def test_errors_name_the_record():
    good, bad = document("user", "assistant"), document("user")._replace(where="b.jsonl:7")
    rule = "{% if messages | length == 1 and '@' not in messages[0].content %}{{ raise_exception('no') }}{% endif %}"
    picky = CHATML + rule
    with refused(DataError, "b.jsonl:7", "TemplateError"):
        targets_of_documents(picky, good, bad)
    wrong = bad._replace(chat=ChatDocument([{"role": "user", "content": 3}]))
    with refused(DataError, "b.jsonl:7: messages[0]: content='3'"):
        targets_of_documents(CHATML, good, wrong)
    with refused(DataError, "a.jsonl:1", "--init-from"):
        list(render_documents(iter([good]), None))


def test_conversations_without_an_assistant_message_are_dropped():
    assert (
        len(targets_of_documents(CHATML, document("user"), document("user", "assistant"), document("user", "system")))
        == 1
    )


def test_character_limit_is_per_conversation():
    chats = [
        [{"role": "user", "content": "q"}, {"role": "assistant", "content": f"a {number}"}] for number in range(12)
    ]
    documents = [Document("x", chat=ChatDocument(messages)) for messages in chats]
    found = targets_of_documents("{{ 'x' * 1_000_000 }}" + CHATML, *documents)
    assert found == targets_of_documents(CHATML, *documents) and found[11][0].startswith("a 11")


@pytest.mark.slow(fast=("time",))
@pytest.mark.parametrize(
    "source, name",
    [
        pytest.param(
            "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "0.3", id="time"
        ),
        pytest.param("{{ ''.__class__.__mro__ }}", "__class__", id="class"),
        pytest.param("{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}", "10,000,000", id="size"),
        pytest.param("{{ messages[0].update({}) }}", "update", id="update"),
        pytest.param("{% for m in messages %}{% set _ = loop.__class__ %}{% endfor %}", "", id="loop-class"),
        pytest.param("{% for %}", "TemplateSyntaxError", id="syntax"),
    ],
)
def test_hostile_templates_are_refused(source, name, monkeypatch, tmp_path):
    monkeypatch.setattr(chat_rendering, "MAX_SECONDS", 0.3)
    path = write(tmp_path / "a.jsonl", {"messages": document("user", "assistant").chat.messages})
    with refused((DataError, ConversionError), name) as caught:
        open_store(tmp_path / "s", ByteTokenizer(), path=path, template=ChatTemplate(source=source))
    assert str(caught.value).isprintable() and not (tmp_path / "s" / "manifest.json").exists()


def test_characters_with_several_tokens(tokenizer):
    """Only the first token of a span's last character is a target, as in transformers."""
    ((ids, mask),) = encode_spans(tokenizer, ["ab🦊cd🦊ef"], [[(2, 4), (5, 6)]])
    assert len(ids) == 14 and np.flatnonzero(mask).tolist() == [2, 3, 4, 5, 6, 8]
    ((ids, mask),) = encode_spans(ByteTokenizer(), ["ab🦊cd"], [[(0, 1), (2, 3)]])
    assert bytes(ids[mask].tolist()).decode() == "a🦊"


@pytest.mark.parametrize("marked", [False, True], ids=["plain", "marked"])
def test_empty_answers_are_not_targets(marked):
    answer = "{% generation %}{{ m.content }}<|end|>{% endgeneration %}" if marked else "{{ m.content }}<|end|>"
    source = "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}" + answer
    source += "{% else %}{{ m.content }}<|end|>{% endif %}{% endfor %}"
    source += "{% if add_generation_prompt %}<|assistant|>{% endif %}"

    def read(*answers: dict, report: ReadReport):
        messages = [turn for one in answers for turn in ({"role": "user", "content": "q"}, {"role": "assistant"} | one)]
        documents = iter([Document("a.jsonl:1", chat=ChatDocument(messages))])
        found = render_documents(documents, ChatTemplate(source=source), report)
        return [[str(one.text)[start:stop] for start, stop in one.spans or ()] for one in found]

    report = ReadReport()
    assert read({"content": ""}, {"content": "yes"}, {"content": " "}, report=report) == [["yes<|end|>"]]
    assert report.notes == {EMPTY_MESSAGE: 1} and not report.dropped
    report = ReadReport()
    assert read({"content": ""}, report=report) == []
    assert list(report.dropped.values()) == [1] and not report.notes
    report = ReadReport()
    assert read({"content": "", "reasoning_content": "why"}, report=report) == [["<|end|>"]]
    assert EMPTY_MESSAGE not in report.notes
