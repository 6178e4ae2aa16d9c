"""Test the tokens that a chat template adds after a completion; tokens of earlier turns never change."""

import pytest

from eqx_decoders.io.text.chat_template import ChatTemplate, Conversation, Rendered
from eqx_decoders.io.text.tokenizer import ByteTokenizer, load_tokenizer, with_special_tokens_as_text
from eqx_decoders.rl.turns import REASONING, ConversationEncoder, added_start, render_all, rewritten_turns
from tests.data.test_chats import FOLDER, template_of


TRIMS = "{% for m in messages %}<{{ m.role[0] }}>{{ m.content | trim }}</>{% endfor %}{% if add_generation_prompt %}<a>"
TRIMS += "{% endif %}"
TALK = [{"role": "user", "content": "2+2"}, {"role": "assistant", "content": "4"}, {"role": "user", "content": "3+3"}]


@pytest.mark.parametrize(
    ("content", "ending", "rendered", "added"),
    [
        ("4", "</>", "<a>4</>\n<u>5", "\n<u>5"),
        ("4", "", "<a>4</>\n<u>5", "</>\n<u>5"),  # a truncated completion
        (" 4 \n", "</>", "<a>4</><u>", "<u>"),
        (" 4\n", "</>", "<a> 4</><u>", "<u>"),
        ("4", "</>", "<a>4<eot><u>", None),  # it ended with another token
        ("4", "</>", "<b>4</><u>", None),
        ("<t>5</t>4", "</>", "<a>4</><u>", None),
        ("", "", "<a></><u>", "</><u>"),
        ("4", "", "<a>4", ""),
    ],
)
def test_text_added_by_a_rendering(content, ending, rendered, added):
    start = added_start("<a>", content, ending, rendered)
    assert start is None if added is None else rendered[start:] == added


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(FOLDER / "tokenizer.json")


@pytest.mark.slow(fast=("qwen3-4<|im_end|>",))
@pytest.mark.parametrize(
    ("name", "written"), [("qwen3", "4<|im_end|>"), ("llama3", "4<|eot_id|>"), ("mistral", " 4</s>")]
)
def test_added_tokens_encode_the_rendered_conversation(name, written, tokenizer):
    """If a completion is tokenized canonically, prompt + completion + added tokens encode the conversation."""
    template = with_special_tokens_as_text(template_of(name), tokenizer)
    assert template is not None
    completion, stop = written.split("4")[0] + "4", written.split("4")[1]
    more = [*TALK[:2], {"role": "user", "content": f"is {stop} the end?"}]
    asked = [Conversation(talk, {}, add_generation_prompt=True) for talk in (TALK[:1], TALK, more)]
    first, second, third = render_all(template, asked)
    assert isinstance(first, Rendered) and isinstance(second, Rendered) and isinstance(third, Rendered)
    encoder = ConversationEncoder(tokenizer, template)
    sampled = tokenizer.encode(written, special=True).tolist()
    assert tokenizer.decode(sampled[-1:]) == ""
    for rendered in (second, third):
        added = encoder.encode_added(first.text, completion, sampled[-1], rendered)
        assert added is not None and encoder.encode(first) + tuple(sampled) + added == encoder.encode(rendered)
        cut = encoder.encode_added(first.text, completion, None, rendered)
        assert cut == (sampled[-1], *added)
    other = next(each for each in range(tokenizer.vocab_size) if tokenizer.decode([each]) == "" and each != sampled[-1])
    assert encoder.encode_added(first.text, completion, other, second) is None  # it ended with another token
    encoder.close()


def test_removed_reasoning_starts_another_segment(tokenizer):
    template = template_of("qwen3")
    end = tokenizer.encode("<|im_end|>", special=True).tolist()[0]
    thought = {"role": "assistant", "content": REASONING + "4"}
    tool = [TALK[0], thought, {"role": "tool", "content": "5"}]
    talks = (TALK[:1], [TALK[0], thought, TALK[2]], tool)
    asked = [Conversation(talk, {}, add_generation_prompt=True) for talk in talks]
    first, second, third = render_all(template, asked)
    assert isinstance(first, Rendered) and isinstance(second, Rendered) and isinstance(third, Rendered)
    encoder = ConversationEncoder(tokenizer, template)
    assert encoder.encode_added(first.text, REASONING + "4", end, second) is None
    assert encoder.encode_added(first.text, REASONING + "4", end, third) is not None
    assert "reasoning" in rewritten_turns(template)
    assert rewritten_turns(ChatTemplate(source=TRIMS)) == () == rewritten_turns(None)
    rewritten = rewritten_turns(ChatTemplate(source=TRIMS.replace("<a>", "<a>!")))
    assert rewritten == ("plain",)


def test_contents_are_joined_without_a_template():
    encoder = ConversationEncoder(ByteTokenizer(), None)
    first, second = (encoder.render([Conversation(talk)]).result()[0] for talk in (TALK[:1], TALK))
    assert isinstance(first, Rendered) and isinstance(second, Rendered)
    assert encoder.encode(first) == (256, *b"2+2") and encoder.encode_added("2+2", "4", 257, second) == tuple(b"3+3")
    encoder.close()
