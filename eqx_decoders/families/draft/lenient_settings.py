"""The settings of a checkpoint read with the table of another family: what fits, and what doesn't."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from eqx_decoders.core.config_reader import Fields
from eqx_decoders.errors import ConversionError, EqxDecodersError
from eqx_decoders.families.config_keys import ALLOWED_VALUES, GENERATION_KEYS, IGNORED_KEYS
from eqx_decoders.families.hf_table import Family
from eqx_decoders.families.settings_table import Setting, public
from eqx_decoders.model.decoder_config import DecoderConfig


OUTSIDE = ("model_type", "architectures", "dtype", "torch_dtype", "quantization_config", "auto_map")
_FRACTION = "partial_rotary_factor"
_MOST_TRIES = 50


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reading:
    """Settings of a `config.json` as a family reads them.

    **Arguments:**

    - `config`: the configuration that they describe; None where the family can't build one.
    - `error`: why not.
    - `read`: keys that rows of the family asked for.
    - `unknown`: keys with a value that the family neither reads nor ignores.
    - `refused`: values that the family refuses, with its sentences; the configuration is that without them.
    - `renamed`: keys of the file that stand for those of the family.
    - `fraction`: the rotated part of each head, which the family does not read; None for all of it.
    """

    config: DecoderConfig | None
    error: str = ""
    read: frozenset[str] = frozenset()
    unknown: tuple[str, ...] = ()
    refused: Mapping[str, str] = dataclasses.field(default_factory=dict)
    renamed: Mapping[str, str] = dataclasses.field(default_factory=dict)
    fraction: float | None = None


def read_leniently(family: Family, content: Mapping[str, Any], renamed: Mapping[str, str]) -> Reading:
    """Read what can be read; `renamed` are keys of the file that stand for those of the family."""
    reading = _read(family, content, renamed)
    if not any(_FRACTION in sentence for sentence in (*reading.refused.values(), reading.error)):
        return reading
    tables = {key: value for key, value in content.items() if isinstance(value, dict)}
    fractions = [table[_FRACTION] for table in (content, *tables.values()) if isinstance(table.get(_FRACTION), float)]
    if len(set(fractions)) != 1:
        return reading
    whole = {key: {k: v for k, v in table.items() if k != _FRACTION} for key, table in tables.items()}
    whole = {key: value for key, value in {**content, **whole}.items() if key != _FRACTION}
    return dataclasses.replace(_read(family, whole, renamed), fraction=fractions[0])


def _read(family: Family, content: Mapping[str, Any], renamed: Mapping[str, str]) -> Reading:
    fields = Fields({renamed.get(key, key): value for key, value in content.items() if key not in OUTSIDE})
    values: dict[str, Any] = {}
    refused: dict[str, str] = {}
    for setting in family.settings:
        fields, error = _read_row(setting, fields, values, refused)
        if error:
            return Reading(config=None, error=error, read=fields.read_keys, renamed=renamed)
    read = fields.read_keys
    for key, allowed in ALLOWED_VALUES.items():
        if key in read:
            continue
        try:
            fields.allow_only(key, *allowed)
        except ConversionError as error:
            refused[key] = str(error).partition(": ")[2]
    try:
        config, error = family.build(**public(values)), ""
    except Exception as found:  # a table that was made for other files
        config, error = None, str(found)
    known = fields.read_keys | family.ignored_keys.keys() | IGNORED_KEYS.keys() | GENERATION_KEYS.keys()
    unknown = tuple(key for key, value in fields.content.items() if key not in known and value is not None)
    return Reading(config=config, error=error, read=read, unknown=unknown, refused=refused, renamed=renamed)


def _read_row(setting: Setting, fields: Fields, values: dict[str, Any], refused: dict[str, str]) -> tuple[Fields, str]:
    """Read one row, if need be without values that it refuses; return the fields, and the error that remains."""
    for _ in range(_MOST_TRIES):
        trial, sentence = fields.without(), ""
        try:
            setting.read(trial, values)
            return trial, ""
        except EqxDecodersError as error:
            sentence = str(error)
        except Exception as error:  # of a row whose file has another form
            return trial, f"{type(error).__name__}: {error}"
        wrong = _refused_key(sentence, fields.content)
        if wrong is None:
            return trial, sentence
        fields = fields.without(wrong)
        refused[wrong] = sentence.partition(": ")[2] or sentence
    return fields, "too many settings are refused"


def _refused_key(sentence: str, content: Mapping[str, Any]) -> str | None:
    """Return the key whose value a sentence of `Fields` refuses."""
    found = re.match(r"config\.json: (\w+)(?:: |=| has )", sentence)
    return found[1] if found and found[1] in content else None
