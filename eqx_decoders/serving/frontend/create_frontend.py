"""Frontends of models that were loaded with their tokenizers."""

import contextlib

from eqx_decoders.errors import ConversionError
from eqx_decoders.inference.text_model import TextModel
from eqx_decoders.io.processors.processor import Processor
from eqx_decoders.io.text.tokenizer import JsonTokenizer
from eqx_decoders.serving.frontend.prompts import TextFrontend


def create_frontend(text: TextModel, *, special_tokens_in_content: bool = False) -> TextFrontend:
    """Create the frontend of a model, with the processor in its directory, if there is one.

    special_tokens_in_content: names of special tokens in messages become these tokens; else they are plain text,
    since clients pass on what strangers wrote.
    """
    text = text if special_tokens_in_content else text.with_special_tokens_as_text()
    origin, tokenizer, processor = text.model.origin, text.tokenizer, None
    directory = None if origin is None or text.model.config.media is None else origin.directory
    if directory is not None and isinstance(tokenizer, JsonTokenizer):
        with contextlib.suppress(ConversionError):  # a directory without a processor: text only
            processor = Processor.load(directory)  # with its own tokenizer, for its own thread
            processor = processor.with_special_tokens_as_text(() if text.chat is None else text.chat.literal)
    for one in (tokenizer, None if processor is None else processor.tokenizer):
        if isinstance(one, JsonTokenizer) and text.chat is not None and text.chat.literal:
            one.renamed  # noqa: B018 - made now, as it takes a second
    return TextFrontend(
        tokenizer=tokenizer,
        chat=text.chat,
        stop_ids=text.stop_ids,
        defaults=text.model.generation_config,
        config=text.model.config if processor is not None else None,
        processor=processor,
        directory=None if processor is None or directory is None else str(directory),
    )
