"""Validation of configuration fields: every rule, its error message, and the values that it accepts."""

import dataclasses
import json
import math
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import pytest

from eqx_decoders.errors import (
    AtLeast,
    CheckedFields,
    ConfigError,
    FiniteFloat,
    InRange,
    NonEmpty,
    NonNegativeFloat,
    NonNegativeInt,
    OneOf,
    PositiveFloat,
    PositiveInt,
    Rate,
    check,
)
from tests.ids import short


@dataclasses.dataclass(frozen=True, kw_only=True)
class Declared(CheckedFields):
    positive: PositiveInt = 1
    natural: NonNegativeInt = 0
    pair: Annotated[int, AtLeast(2)] = 2
    capped: Annotated[int, AtLeast(1, maximum=8)] = 8
    above: PositiveFloat = 1.0
    least: NonNegativeFloat = 0.0
    rate: Rate = 0.0
    share: Annotated[float, InRange(above=0, maximum=1)] = 1.0
    finite: FiniteFloat = 0.0
    word: Literal["left", "right"] = "left"
    number: Literal[2, 4] = 2
    named: Annotated[str, OneOf(("silu", "gelu"))] = "silu"
    optional: PositiveInt | None = None
    optional_word: Literal["left", "right"] | None = None
    sizes: tuple[PositiveInt, ...] = ()
    words: tuple[Literal["left", "right"], ...] | None = None
    filled: Annotated[tuple[NonNegativeInt, ...], NonEmpty("layer")] = (0,)
    pairs: tuple[tuple[NonNegativeInt, PositiveFloat], ...] = ()
    free: Any = None
    mixed: int | str | None = None


@pytest.mark.parametrize(
    "fields",
    [
        {"positive": 1},
        {"natural": 0},
        {"capped": 1},
        {"above": 1},
        {"above": 1e-30},
        {"rate": 0},
        {"share": 1},
        {"finite": -1e30},
        {"number": 4},
        {"named": "gelu"},
        {"optional": 3},
        {"optional_word": "right"},
        {"sizes": (1, 2)},
        {"words": ("left",)},
        {"words": ()},
        {"pairs": ((0, 0.5), (1, 2))},
        {"free": ...},
        {"mixed": "a"},
        {"mixed": -1},
    ],
)
def test_accepts_declared_values(fields):
    declared = Declared(**fields)
    assert all(getattr(declared, name) == value for name, value in fields.items())


NUMBER, INTEGER, WORD = "must be a finite number", "must be an integer of at least", "is not known"


REFUSED = [
    ({"positive": 0}, f"positive=0 {INTEGER} 1."),
    ({"positive": 1.0}, f"positive=1.0 {INTEGER} 1."),
    ({"positive": True}, f"positive=True {INTEGER} 1."),
    ({"positive": np.int64(0)}, f"positive=np.int64(0) {INTEGER} 1."),
    ({"positive": np.float32(2)}, f"positive=np.float32(2.0) {INTEGER} 1."),
    ({"positive": np.True_}, f"positive=np.True_ {INTEGER} 1."),
    ({"above": np.float32("nan")}, f"above=np.float32(nan) {NUMBER} above 0."),
    ({"above": np.True_}, f"above=np.True_ {NUMBER} above 0."),
    ({"positive": None}, f"positive=None {INTEGER} 1."),
    ({"natural": -1}, f"natural=-1 {INTEGER} 0."),
    ({"pair": 1}, f"pair=1 {INTEGER} 2."),
    ({"capped": 0}, f"capped=0 {INTEGER} 1 and at most 8."),
    ({"capped": 9}, f"capped=9 {INTEGER} 1 and at most 8."),
    ({"above": 0}, f"above=0 {NUMBER} above 0."),
    ({"above": math.nan}, f"above=nan {NUMBER} above 0."),
    ({"above": math.inf}, f"above=inf {NUMBER} above 0."),
    ({"above": True}, f"above=True {NUMBER} above 0."),
    ({"above": "1"}, f"above='1' {NUMBER} above 0."),
    ({"least": -0.1}, f"least=-0.1 {NUMBER} of at least 0."),
    ({"rate": 1}, f"rate=1 {NUMBER} of at least 0 and below 1."),
    ({"rate": -1}, f"rate=-1 {NUMBER} of at least 0 and below 1."),
    ({"share": 0}, f"share=0 {NUMBER} above 0 and of at most 1."),
    ({"share": 1.5}, f"share=1.5 {NUMBER} above 0 and of at most 1."),
    ({"finite": math.nan}, f"finite=nan {NUMBER}."),
    ({"finite": None}, f"finite=None {NUMBER}."),
    ({"word": "rigth"}, f"word='rigth' {WORD}. Did you mean 'right'? Known: left, right."),
    ({"word": None}, f"word=None {WORD}. Known: left, right."),
    ({"number": 3}, f"number=3 {WORD}. Known: 2, 4."),
    ({"named": "gelo"}, f"named='gelo' {WORD}. Did you mean 'gelu'? Known: silu, gelu."),
    ({"optional": 0}, f"optional=0 {INTEGER} 1."),
    ({"optional_word": "up"}, f"optional_word='up' {WORD}. Known: left, right."),
    ({"sizes": (1, 0)}, f"sizes[1]=0 {INTEGER} 1."),
    ({"sizes": (None,)}, f"sizes[0]=None {INTEGER} 1."),
    ({"sizes": "12"}, "sizes='12' must be a tuple, such as ('12',)."),
    ({"sizes": 3}, "sizes=3 must be a tuple, such as (3,)."),
    ({"sizes": None}, "sizes=None must be a tuple, such as (None,)."),
    ({"words": ("left", "up")}, f"words[1]='up' {WORD}. Known: left, right."),
    ({"filled": ()}, "filled=() must have at least one layer."),
    ({"filled": []}, "filled=() must have at least one layer."),
    ({"filled": (0, -1)}, f"filled[1]=-1 {INTEGER} 0."),
    ({"pairs": ((0, 1.0), (1, 0))}, f"pairs[1][1]=0 {NUMBER} above 0."),
    ({"pairs": ((0, 1.0, 2.0),)}, "pairs[0]=(0, 1.0, 2.0) must have 2 elements."),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED, ids=[short(fields) for fields, _ in REFUSED])
def test_refuses_other_values(fields, message):
    with pytest.raises(ConfigError) as error:
        Declared(**fields)
    assert str(error.value) == f"Declared.{message}"


def test_numpy_scalars_become_python_numbers():
    pairs: Any = [(np.int32(1), np.float32(0.5))]
    declared = Declared(positive=np.int64(2), above=np.float32(0.75), sizes=np.asarray([3, 4]), pairs=pairs)  # pyright: ignore[reportArgumentType]
    assert json.dumps(dataclasses.asdict(declared)) == json.dumps(
        dataclasses.asdict(Declared(positive=2, above=0.75, sizes=(3, 4), pairs=((1, 0.5),)))
    )


def test_sequences_become_tuples():
    declared = Declared(sizes=[1, 2], words=iter(["left"]))  # pyright: ignore[reportArgumentType]
    assert declared.sizes == (1, 2) and declared.words == ("left",)
    assert hash(declared) == hash(Declared(sizes=(1, 2), words=("left",)))


def test_rules_about_several_fields_follow_and_messages_name_the_subclass():
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Base(CheckedFields):
        low: PositiveInt = 1

        def __post_init__(self):
            super().__post_init__()
            check(self.low < 100, "base")

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Derived(Base):
        high: PositiveInt = 5

        def __post_init__(self):
            super().__post_init__()
            check(self.low <= self.high, "derived")

    assert Derived(low=5).high == 5
    for fields, message in (
        ({"low": 0}, r"^Derived\.low=0 "),
        ({"high": 0}, r"^Derived\.high=0 "),
        ({"low": 100}, "^base$"),
        ({"low": 6}, "^derived$"),
    ):
        with pytest.raises(ConfigError, match=message):
            Derived(**fields)


def test_a_subclass_can_redeclare_a_field():
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Narrow(Declared):
        checked_name: ClassVar[str | None] = "--"
        positive: Annotated[int, AtLeast(10)] = 10

    with pytest.raises(ConfigError, match=r"^--positive=9 must be an integer of at least 10\."):
        Narrow(positive=9)
    assert Declared(positive=9).positive == 9


@pytest.mark.parametrize(
    "kind", [PositiveInt | Literal["auto"], PositiveInt | PositiveFloat | None], ids=["word", "number"]
)
def test_rules_that_would_not_be_checked_are_refused(kind):
    cls = dataclasses.make_dataclass("Cls", [("field", kind)], bases=(CheckedFields,))
    with pytest.raises(TypeError, match="a union declares the rules of a single type"):
        cls(1)
