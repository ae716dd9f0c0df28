"""The keywords of a JSON schema: a word that means nothing is a mistake that nobody would see in the answer.

By the standard, a keyword that is not known is ignored, also one that is only misspelt. What the standard has and
llguidance does not is refused by llguidance itself.
"""

WITH_A_SCHEMA = {
    "additionalItems", "additionalProperties", "contains", "contentSchema", "else", "if", "items", "not",
    "propertyNames", "then", "unevaluatedItems", "unevaluatedProperties",
}  # fmt: skip
WITH_SCHEMAS = {"allOf", "anyOf", "items", "oneOf", "prefixItems"}
WITH_NAMED_SCHEMAS = {"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"}
OTHERS = {
    "$anchor", "$comment", "$dynamicAnchor", "$dynamicRef", "$id", "$recursiveAnchor", "$recursiveRef", "$ref",
    "$schema", "$vocabulary", "const", "contentEncoding", "contentMediaType", "default", "dependencies",
    "dependentRequired", "deprecated", "description", "enum", "example", "examples", "exclusiveMaximum",
    "exclusiveMinimum", "format", "id", "maxContains", "maxItems", "maxLength", "maxProperties", "maximum",
    "minContains", "minItems", "minLength", "minProperties", "minimum", "multipleOf", "pattern", "readOnly",
    "required", "title", "type", "uniqueItems", "writeOnly",
    "discriminator",  # of OpenAPI, for readers of the schema: it is beside an anyOf or oneOf and changes nothing
}  # fmt: skip
KEYWORDS = WITH_A_SCHEMA | WITH_SCHEMAS | WITH_NAMED_SCHEMAS | OTHERS


def check_schema(schema: object) -> str | None:
    """What is the first keyword that JSON Schema does not have; None when there is none. x-... may be anything."""
    waiting = [schema]
    while waiting:
        found = waiting.pop()
        if not isinstance(found, dict):
            continue
        for word, value in found.items():
            if word not in KEYWORDS and not word.startswith("x-"):
                return f"the keyword {word!r}, which JSON Schema does not have"
            if word in WITH_SCHEMAS and isinstance(value, list):
                waiting += value
            elif word in WITH_NAMED_SCHEMAS and isinstance(value, dict):
                waiting += value.values()
            elif word in WITH_A_SCHEMA:
                waiting.append(value)
    return None
