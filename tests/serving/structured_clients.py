"""Request structured output with LangChain, instructor, Pydantic AI and OpenAI's client."""

import functools
import json
import sys
from typing import Any, Literal

import instructor
import openai
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider


URL, LENGTH = sys.argv[1], 400


class Answer(BaseModel):
    """A short answer."""

    city: Literal["Paris", "Rome"]
    days: int = Field(ge=1, le=3)


def weather(city: Literal["Paris", "Rome"], days: Literal[1, 2]) -> str:
    """Return the weather."""
    return f"{city}, {days}"


def report(name: str, call: Any) -> None:
    try:
        value = call()
        print(json.dumps({"name": name, "value": Answer.model_validate(value).model_dump()}), flush=True)
    except Exception as error:
        print(json.dumps({"name": name, "error": f"{type(error).__name__}: {error}"[:600]}), flush=True)


def langchain() -> None:
    chat = ChatOpenAI(base_url=URL, api_key="x", model="m", max_tokens=LENGTH, max_retries=0, temperature=0)
    for method in ("json_schema", "function_calling"):
        structured = chat.with_structured_output(Answer, method=method)
        report(f"langchain {method}", functools.partial(structured.invoke, "hi"))
    for choice in ("any", "weather"):
        bound = chat.bind_tools([weather], tool_choice=choice, parallel_tool_calls=False)
        report(f"langchain tool_choice={choice}", functools.partial(arguments_of, bound))
    strict = chat.bind_tools([weather], tool_choice="required", strict=True)
    report("langchain strict", functools.partial(arguments_of, strict))


def arguments_of(bound: Any) -> Any:
    return bound.invoke("hi").tool_calls[0]["args"]


def through_instructor(client: openai.OpenAI) -> None:
    body = dict(model="m", messages=[{"role": "user", "content": "hi"}], response_model=Answer)
    options = dict(max_tokens=LENGTH, max_retries=0, temperature=0)
    for mode in ("TOOLS", "TOOLS_STRICT", "JSON_SCHEMA"):
        chat = instructor.from_openai(client, mode=getattr(instructor.Mode, mode)).chat.completions
        report(f"instructor {mode}", functools.partial(chat.create, **body, **options))
    chat = instructor.from_openai(client, mode=instructor.Mode.TOOLS).chat.completions
    report("instructor stream", lambda: [*chat.create_partial(**body, **options)][-1].model_dump())


def pydantic_ai() -> None:
    model = OpenAIChatModel("m", provider=OpenAIProvider(base_url=URL, api_key="x"))
    settings: Any = {"max_tokens": LENGTH, "temperature": 0}
    kinds: dict[str, Any] = {"type": Answer, "ToolOutput": ToolOutput(Answer), "NativeOutput": NativeOutput(Answer)}
    for name, kind in kinds.items():
        agent = Agent(model, output_type=kind, model_settings=settings, retries=0)
        report(f"pydantic-ai {name}", functools.partial(lambda agent: agent.run_sync("hi").output, agent))


def through_openai(client: openai.OpenAI) -> None:
    body: Any = dict(model="m", messages=[{"role": "user", "content": "hi"}], max_tokens=LENGTH, temperature=0)
    report(
        "openai parse", lambda: client.chat.completions.parse(**body, response_format=Answer).choices[0].message.parsed
    )
    tools = dict(tools=[openai.pydantic_function_tool(Answer)], tool_choice="required")

    def call() -> Any:
        return client.chat.completions.parse(**body, **tools).choices[0].message.tool_calls[0].function.parsed_arguments

    report("openai tool", call)


if __name__ == "__main__":
    openai_client = openai.OpenAI(base_url=URL, api_key="x", max_retries=0)
    langchain()
    through_instructor(openai_client)
    pydantic_ai()
    through_openai(openai_client)
