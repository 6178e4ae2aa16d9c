"""What a JSON Schema says about the values it allows: types, literals and members, with references resolved.

Tool-call formats that do not write arguments as JSON need this to constrain the arguments.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from eqx_decoders.errors import ConfigError
from eqx_decoders.io.text.output_parsing.tool_arguments import resolve_reference
from eqx_decoders.serving.frontend.api_errors import shown
from eqx_decoders.serving.frontend.json_schemas import NUMBER_RULES, OBJECT_RULES, STRING_RULES


MAX_VISITS = 50_000  # visited subschemas for one grammar
MAX_REFERENCES = 8  # levels of nested references and compositions
MAX_NESTING = 4  # levels of nested anyOf and oneOf in the schema of an object
ALL_TYPES = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})

LOWER_BOUNDS = ("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties")
UPPER_BOUNDS = ("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties")
MERGED_RULES = frozenset(
    {
        *("anyOf", "oneOf", "items", "prefixItems"),
        *(*OBJECT_RULES, *STRING_RULES, *NUMBER_RULES, *LOWER_BOUNDS, *UPPER_BOUNDS),
    }
)
RULES = MERGED_RULES | {"$ref", "allOf", "type"}  # keywords that restrict values


class VisitBudget:
    """Bound on the number of schemas that are visited for one grammar.

    Nested references can repeat a schema exponentially often.
    """

    def __init__(self):
        self._count = 0

    def spend(self) -> None:
        """Count one visit. Raises ConfigError after MAX_VISITS visits."""
        self._count += 1
        if self._count > MAX_VISITS:
            raise ConfigError(
                f"The JSON Schema is not supported: its references and compositions expand to more than {MAX_VISITS:,} "
                "schemas. Use fewer references and compositions."
            )


class Arguments(NamedTuple):
    """Members of an object.

    - `properties`: schemas of the declared members.
    - `required`: names of the required members.
    - `additional`: schema of undeclared members; True: any value; False: no undeclared members.
    """

    properties: Mapping[str, Any]
    required: frozenset[str]
    additional: Any


class SchemaReader:
    """Reader of a JSON Schema and its subschemas.

    **Arguments:**

    - `root`: the schema within which `$ref` is resolved.
    - `budget`: shared by the readers of all schemas of one grammar.
    """

    def __init__(self, root: Mapping[str, Any], budget: VisitBudget | None = None):
        self.root, self._budget = root, VisitBudget() if budget is None else budget

    def types(self, schema: Any, depth: int = 0) -> frozenset[str]:
        """Return the names of the JSON types that a schema allows; all types if they cannot be determined."""
        self._budget.spend()
        schema = self._resolved(schema)
        if not isinstance(schema, dict) or depth > MAX_REFERENCES:
            return ALL_TYPES
        types = ALL_TYPES
        literals = _literals(schema)
        if literals is not None:
            types = types & {type_of(value) for value in literals}
        declared = schema.get("type")
        if isinstance(declared, str | list):
            names = {declared} if isinstance(declared, str) else {name for name in declared if isinstance(name, str)}
            if names <= ALL_TYPES:
                types = types & (names | ({"integer"} if "number" in names else set()))
        for keyword in ("anyOf", "oneOf"):
            options = schema.get(keyword)
            if isinstance(options, list):
                types = types & frozenset().union(*(self.types(option, depth + 1) for option in options))
        all_of = schema.get("allOf")
        for option in all_of if isinstance(all_of, list) else ():
            types = types & self.types(option, depth + 1)
        return types

    def literals(self, schema: Any, depth: int = 0) -> list[Any] | None:
        """Return all values that a schema allows if `const` and `enum` list them; otherwise None."""
        schema = self._resolved(schema)
        literals = _literals(schema)
        if literals is not None or not isinstance(schema, dict) or depth > MAX_REFERENCES:
            return literals
        for keyword in ("anyOf", "oneOf"):
            options = [self.literals(option, depth + 1) for option in schema.get(keyword) or ()]
            if not options and schema.get("type") == "null":
                return [None]
            if options and all(option is not None for option in options):
                return [value for option in options for value in option or ()]
        found = (self.literals(option, depth + 1) for option in schema.get("allOf") or ())
        return next((option for option in found if option is not None), None)

    def text_literals(self, schema: Any, depth: int = 0) -> list[str] | None:
        """Return all strings that a schema allows if `const` and `enum` list them; otherwise None."""
        schema = self._resolved(schema)
        if "string" not in self.types(schema):
            return []
        literals = self.literals(schema)
        if literals is not None:
            return [value for value in literals if isinstance(value, str)]
        if not isinstance(schema, dict) or depth > MAX_REFERENCES:
            return None
        for keyword in ("anyOf", "oneOf"):
            options = [self.text_literals(option, depth + 1) for option in schema.get(keyword) or ()]
            if options and all(option is not None for option in options):
                return [value for option in options for value in option or ()]
        found = (self.text_literals(option, depth + 1) for option in schema.get("allOf") or ())
        return next((option for option in found if option is not None), None)

    def alternatives(self, schema: Any, depth: int = 0) -> list[Arguments]:
        """Return the alternatives for the members of an object. There are several with `anyOf` and `oneOf`.

        Tool-call formats that do not write arguments as JSON need the members. Raises ConfigError for keywords that
        cannot be expressed in these formats.
        """
        schema = self.merged(schema)
        if not isinstance(schema, dict):
            return [Arguments({}, frozenset(), True)] if schema else []
        keyword = next((keyword for keyword in ("anyOf", "oneOf") if keyword in schema), None)
        if keyword is not None:
            if depth > MAX_NESTING:
                raise ConfigError(
                    f"The JSON Schema is not supported: `{keyword}` is nested more than {MAX_NESTING} levels deep. "
                    "Use fewer levels."
                )
            base = {name: value for name, value in schema.items() if name != keyword}
            options = [self.alternatives({"allOf": [base, option]}, depth + 1) for option in schema[keyword]]
            return [arguments for option in options for arguments in option]
        if "object" not in self.types(schema):
            return []
        declared, required = schema.get("properties", {}), list(schema.get("required", ()))
        additional = schema.get("additionalProperties", not declared)
        undeclared = {
            name: additional if isinstance(additional, dict) else {} for name in required if name not in declared
        }
        closed = "additionalProperties" in schema and additional is False
        if (closed and undeclared) or any(declared.get(name) is False for name in required):
            return []
        properties = {name: inner for name, inner in {**declared, **undeclared}.items() if inner is not False}
        minimum, maximum = schema.get("minProperties", 0), schema.get("maxProperties")
        num_allowed = len(properties) if additional is False else float("inf")
        unsupported = "patternProperties" if schema.get("patternProperties") else None
        unsupported = "minProperties" if minimum > len(required) else unsupported
        unsupported = "maxProperties" if maximum is not None and maximum < num_allowed else unsupported
        if unsupported is not None:
            raise ConfigError(
                f"{unsupported}={shown(schema[unsupported])} is not supported in tool-call formats that do not "
                "write arguments as JSON. Remove it."
            )
        return [Arguments(properties, frozenset(required), additional)]

    def merged(self, schema: Any, depth: int = 0) -> Any:
        """Return a schema with `$ref` resolved and with `allOf` merged into one schema.

        Raises ConfigError for schemas of `allOf` that cannot be merged.
        """
        self._budget.spend()
        if not isinstance(schema, dict):
            return schema
        if depth > MAX_REFERENCES:
            raise ConfigError(
                f"The JSON Schema is not supported: `$ref` and `allOf` are nested more than {MAX_REFERENCES} levels "
                "deep. Use fewer levels."
            )
        if "$ref" not in schema and "allOf" not in schema:
            return schema
        parts: list[Any] = [{name: value for name, value in schema.items() if name not in ("$ref", "allOf")}]
        if "$ref" in schema:
            parts.append(self.merged(self._resolved({"$ref": schema["$ref"]}), depth + 1))
        parts += [self.merged(part, depth + 1) for part in schema.get("allOf", ())]
        result = dict[str, Any]()
        for part in parts:
            if part is False:
                return False
            if isinstance(part, dict):
                result = self._merge(result, part)
        return result

    def _merge(self, first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
        for closed, other in ((first, second), (second, first)):
            names = other.get("properties", {}).keys() - closed.get("properties", {}).keys()
            if closed.get("additionalProperties", True) is not True and names:
                raise ConfigError(
                    f"The JSON Schema is not supported: `allOf` combines additionalProperties with the property "
                    f"{min(names)!r} of another schema. Declare all properties in one schema."
                )
        result = dict(first)
        for keyword, value in second.items():
            known = result.get(keyword, value)
            if keyword not in result or known == value:
                result[keyword] = value
            elif keyword == "properties":
                both = {name: {"allOf": [known[name], value[name]]} for name in known.keys() & value.keys()}
                result[keyword] = {**known, **value, **both}
            elif keyword == "required":
                result[keyword] = [*known, *(name for name in value if name not in known)]
            elif keyword == "type":
                result[keyword] = sorted(self.types({"type": known}) & self.types({"type": value}))
            elif keyword == "enum":
                result[keyword] = [item for item in known if item in value]
            elif keyword in LOWER_BOUNDS:
                result[keyword] = max(known, value)
            elif keyword in UPPER_BOUNDS:
                result[keyword] = min(known, value)
            elif keyword == "additionalProperties" and True in (known is True, value is True):
                result[keyword] = value if known is True else known
            elif keyword in ("pattern", "format", "multipleOf"):
                result["allOf"] = [*result.get("allOf", ()), {keyword: value}]
            elif keyword in MERGED_RULES:
                raise ConfigError(
                    f"The JSON Schema is not supported: `allOf` combines different values of `{keyword}`. "
                    f"Write one schema with one `{keyword}`."
                )
        return result

    def _resolved(self, schema: Any) -> Any:
        """Return the schema to which `$ref` refers within the root schema. Other schemas are returned unchanged."""
        for _ in range(MAX_REFERENCES):
            reference = schema.get("$ref") if isinstance(schema, dict) else None
            if not isinstance(reference, str):
                return schema
            schema = resolve_reference(reference, self.root)
        return schema


def type_of(value: Any) -> str:
    names = {type(None): "null", bool: "boolean", int: "integer", float: "number", str: "string", list: "array"}
    return names.get(type(value), "object")


def _literals(schema: Any) -> list[Any] | None:
    """Return the values of `const` or `enum`; None if a schema has neither."""
    if not isinstance(schema, dict):
        return None
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) and values else None
