"""Names of special tokens in message content are encoded as plain text if the template is configured to do so."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from eqx_decoders.data.chats import encode_spans, render_documents
from eqx_decoders.data.config import DataConfig
from eqx_decoders.data.dataset import open_tokens
from eqx_decoders.data.sources.documents import ChatDocument, Document
from eqx_decoders.errors import DataError
from eqx_decoders.io.processors.prompts import PromptFiles, expand, in_order
from eqx_decoders.io.text.chat_template import ChatTemplate, Conversation, load_chat_template
from eqx_decoders.io.text.special_names import NameEscaper, SpecialNames
from eqx_decoders.io.text.tokenizer import (
    ByteTokenizer,
    JsonTokenizer,
    hidden,
    load_tokenizer,
    with_special_tokens_as_text,
)
from tests.errors import refused


FIXTURE = Path(__file__).parents[2] / "fixtures" / "chat_llama"
SOURCE = "{% for m in messages %}<|{{ m.role }}|>{% if m.content is string %}{{ m.content }}{% else %}"
SOURCE += "{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}<|end|>{% endfor %}{{ tools | tojson if tools }}"
SOURCE += "{% if add_generation_prompt %}<|assistant|>{% endif %}"


@pytest.fixture(scope="module")
def tokenizer():
    found = load_tokenizer(FIXTURE)
    assert isinstance(found, JsonTokenizer)
    return found


@pytest.fixture(scope="module")
def template(tokenizer):
    return with_special_tokens_as_text(ChatTemplate(source=SOURCE), tokenizer)


def render(template, content, **variables):
    (found,) = template.render_many([Conversation([{"role": "user", "content": content}], variables)])
    return found


def letters(found) -> list[str]:
    return [found.text[start:stop] for start, stop in found.literal]


def test_finds_the_longest_of_overlapping_names():
    names = SpecialNames(["<a>", "<a><b>", "[X]", "<ab"])
    text = "<a><b><a>[X]<ab>[X<a"
    assert [text[start:stop] for start, stop in names.spans(text)] == ["<a><b>", "<a>", "[X]", "<ab"]
    assert [text[start:stop] for start, stop in names.spans(text, partial=True)][-1] == "<a"
    assert list(names.spans("<a", partial=True)) == [(0, 2)] and not list(names.spans("<a"))
    assert not list(SpecialNames(["<abc>"]).spans("<ab<", partial=False))
    assert list(SpecialNames(["ab"]).spans("aab")) == [(1, 3)]


@pytest.mark.slow(fast=("no name",))
@pytest.mark.parametrize(
    "content, found",
    [
        ("hello", []),
        ("a<|end|>b<|user|><|end|>", ["<|end|>", "<|user|>", "<|end|>"]),
        ("a <", ["<"]),  # `<` and the following text of the template could form a name
        ([{"text": "x<|en"}, {"text": "d|>y"}], ["<|en"]),
        ("\ue000<|end|>\ue001", ["<|end|>"]),  # characters of the private use area are not markers
    ],
    ids=["no name", "names", "start of a name", "parts", "private use"],
)
def test_renders_the_same_text_and_the_spans_of_names(template, content, found):
    rendered = render(template, content)
    assert rendered._replace(literal=()) == render(dataclasses.replace(template, literal=()), content)
    assert letters(rendered) == found


def test_spans_are_those_of_the_text_with_ascii_json(tokenizer):
    source = "{{ messages[0].content | tojson(ensure_ascii=true) }}{% for m in messages %}<{{ m.content }}>"
    source += "{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    found = render(with_special_tokens_as_text(ChatTemplate(source=source), tokenizer), "é<|end|>")
    assert found.text == '"\\u00e9<|end|>"<é<|end|>>é<|end|>' and letters(found) == ["<|end|>"] * 3
    assert found.generated == [(25, 33)] and found.messages == [(0, 15, 33)]
    assert found.literal == [(7, 14), (17, 24), (26, 33)]


def test_names_in_tools_are_escaped_and_roles_are_not(tokenizer, template):
    found = render(template, "x", tools=[{"name": "<|end|>"}])
    assert found.text == '<|user|>x<|end|>[{"name": "<|end|>"}]' and found.literal == [(27, 34)]
    ids = tokenizer.encode(found.text, special=True, literal=found.literal)
    assert np.isin(ids, tokenizer.encode("<|end|>", special=True)).sum() == 1


@pytest.mark.slow(fast=("inside", "alone"))
@pytest.mark.parametrize(
    "content",
    ["a<|end|>b", "<|end|>", " <|end|> é<|user|>", "<<|end|>>", "\U000f0000<|end|>"],
    ids=["inside", "alone", "several", "brackets", "private use"],
)
def test_names_in_messages_give_no_special_tokens(tokenizer, template, content):
    """The ids are the template's special tokens around the ids of the letters."""
    found = render(template, content)
    ids = tokenizer.encode(found.text, special=True, literal=found.literal).tolist()
    user, end = (int(tokenizer.encode(name, special=True)[0]) for name in ("<|user|>", "<|end|>"))
    assert ids == [user, *tokenizer.encode(content).tolist(), end]
    assert tokenizer.encode_prompt(found.text, literal=found.literal).tolist()[-len(ids) :] == ids
    ((many, mask),) = encode_spans(tokenizer, [found.text], [[(8, len(found.text) - 7)]], [found.literal])
    assert many.tolist() == ids and mask.tolist() == [False, *[True] * (len(ids) - 2), False]


def inner_of(kind: str):
    """Return tokenizers of other kinds, whose vocabularies also contain special tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

    if kind == "unigram":
        pieces = ["<unk>", "<s>", "</s>", "▁", "▁hi", "hi", *"abhis/<>", *(f"<0x{byte:02X}>" for byte in range(256))]
        inner = Tokenizer(models.Unigram([(piece, -float(i)) for i, piece in enumerate(pieces)], 0, True))
        inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        inner.decoder = decoders.Metaspace()
    else:
        words = {word: i for i, word in enumerate(["<unk>", "<s>", "</s>", "hi", "<", "s", ">", "/"])}
        inner = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
        inner.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Whitespace(), pre_tokenizers.Punctuation("isolated")]
        )
        inner.normalizer = normalizers.NFC()
    inner.add_special_tokens([AddedToken(name, special=True, rstrip=True) for name in ("<unk>", "<s>", "</s>")])
    return inner


@pytest.mark.parametrize("kind", ["unigram", "words"])
def test_special_tokens_in_the_vocabulary_are_not_found_as_letters(kind):
    tokenizer = JsonTokenizer(inner_of(kind))
    text = "<s> hi</s> hi</s>hi"
    ids = tokenizer.encode(text, special=True, literal=[(6, 10)]).tolist()
    assert ids.count(1) == 1 and ids.count(2) == 1 and ids[0] == 1
    assert tokenizer.encode(text, special=True).tolist().count(2) == 2
    # nothing else changes: special tokens strip the same spaces, and the first word gets the same prefix
    renamed = tokenizer.renamed
    assert (
        renamed.inner.encode(renamed.text(text, []), add_special_tokens=False).ids
        == tokenizer.encode(text, special=True).tolist()
    )


def test_substituted_names_are_random(tokenizer):
    first, second = (JsonTokenizer(tokenizer._inner).renamed for _ in range(2))
    text = first.text("<|end|>", [])
    assert text != second.text("<|end|>", []) and len(text) == 7
    end = int(tokenizer.encode("<|end|>", special=True)[0])
    assert first.inner.encode(text).ids[-1] == end and end not in second.inner.encode(text).ids


@pytest.mark.slow
def test_messages_without_names_encode_as_in_transformers(tokenizer):
    recorded = json.loads((FIXTURE / "rendered.json").read_text())
    template = with_special_tokens_as_text(load_chat_template(FIXTURE), tokenizer)
    for one in recorded["chats"]:
        found = template.rendered(one["messages"], add_generation_prompt=one["add_generation_prompt"])
        literal = [found.text[start:stop] for start, stop in found.literal if stop - start > 1]
        ids = tokenizer.encode(found.text, special=True, literal=found.literal).tolist()
        assert found.text == one["text"] and (bool(literal) or ids == one["ids"])


def test_placeholders_in_plain_text_are_not_expanded(tokenizer):
    text, literal = "<img> <img> a <vid>", [(6, 11)]
    kinds = [PromptFiles("image", "<img>", ["<long one>"]), PromptFiles("video", "<vid>", ["v"])]
    assert in_order(hidden(text, literal), kinds) == ["image", "video"]
    written, moved = expand(text, kinds, literal)
    assert written == "<long one> <img> a v" and [written[start:stop] for start, stop in moved] == ["<img>"]
    with refused(DataError, "2 placeholders '<img>'", "images", "1"):
        expand(text, kinds)


def test_trained_conversations_have_no_special_tokens_of_content(tokenizer, template):
    messages = [{"role": "user", "content": "a<|end|>"}, {"role": "assistant", "content": "b<|user|>c"}]
    (found,) = render_documents(iter([Document("x", chat=ChatDocument(messages))]), template)
    ((ids, mask),) = encode_spans(tokenizer, [found.text or ""], [found.spans or ()], [found.literal])
    user, end = (int(tokenizer.encode(name, special=True)[0]) for name in ("<|user|>", "<|end|>"))
    assert ids.tolist().count(end) == 2 and ids.tolist().count(user) == 1
    assert ids[mask].tolist() == [*tokenizer.encode("b<|user|>c").tolist(), end]
    ((ids, _),) = encode_spans(ByteTokenizer(), [found.text or ""], [found.spans or ()], [found.literal])
    assert bytes(ids.tolist()).decode() == found.text


def test_special_tokens_in_content_of_the_data_config(tokenizer, tmp_path):
    (tmp_path / "a.jsonl").write_text(
        json.dumps({"messages": [{"role": "user", "content": "<|end|>"}, {"role": "assistant", "content": "b"}]})
    )
    counts, hashes = [], []
    end = int(tokenizer.encode("<|end|>", special=True)[0])
    for number, kept in enumerate((True, False)):
        config = DataConfig(
            path=str(tmp_path / "a.jsonl"), held_out_fraction=0.0, cache_dir=str(tmp_path / "cache"),
            special_tokens_in_content=kept,
        )  # fmt: skip
        template = ChatTemplate(source=SOURCE)
        (store,) = open_tokens(config, tokenizer, tmp_path / str(number), template=template).values()
        counts.append(store[0].tolist().count(end))
        hashes.append(store.content_hash)
    assert counts == [3, 2] and hashes[0] != hashes[1]


def test_search_time_does_not_grow_with_the_number_of_names():
    looked = []

    class Counted(frozenset):
        def __contains__(self, piece):
            looked.append(piece)
            return super().__contains__(piece)

    names = SpecialNames([f"<unused{number}>" for number in range(6000)])
    names.names = Counted(names.names)
    assert len(list(names.spans("<p><unused17></p>" * 100))) == 100 and len(looked) < 100 * 3 * 6
    assert NameEscaper([]).escape({"messages": []}) == ({"messages": []}, {})
