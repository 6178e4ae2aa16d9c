"""Tokens of texts and conversations that a model scores."""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from eqx_decoders.io.text.tokenizer import decode
from eqx_decoders.serving.frontend.prompts import PreparedPrompt, PromptPreparer


MOST_SPACES = 8  # tokens that a chat template may write behind the end of a turn

Conversation = tuple[list[dict[str, Any]], dict[str, Any]]  # messages, and variables of the template


@runtime_checkable
class Scored(Protocol):
    """Request for scores."""

    @property
    def prompts(self) -> Sequence[Any]: ...
    @property
    def add_special_tokens(self) -> bool: ...


async def scored_prompts(
    preparer: PromptPreparer, request: Scored, chat: Conversation | None, client: str
) -> list[PreparedPrompt]:
    """Return the tokens of texts, of token ids, and of a conversation without spaces behind the end of its last turn.

    There a score is read, as in training.
    """
    found, special, stop_ids = list[PreparedPrompt](), request.add_special_tokens, preparer.frontend.stop_ids
    for prompt in request.prompts:
        text = isinstance(prompt, str)
        found.append(
            await preparer.text(prompt, special=special, client=client, param="input")
            if text
            else PreparedPrompt(prompt)
        )
    if chat is not None:
        prompt = await preparer.chat(*chat, answer=False, client=client)
        ends = [place for place, token in enumerate(prompt.ids, 1) if token in stop_ids]
        behind = prompt.ids[ends[-1] :] if ends else prompt.ids
        spaces = len(behind) <= MOST_SPACES and not decode(preparer.frontend.tokenizer, behind).strip()
        found.append(PreparedPrompt(prompt.ids[: ends[-1]]) if ends and spaces else prompt)
    return found
