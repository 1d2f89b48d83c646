"""Checks a file of JSON against a schema, with no room for keys that the schema does not name: SCHEMA FILE"""

import json
import sys

import jsonschema


def objects(value):
    if isinstance(value, dict):
        yield value
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from objects(item)


schema, printed = (json.load(open(path, encoding="utf-8")) for path in sys.argv[1:])
for definition in objects(schema["$defs"]):
    if definition.get("type") == "object" and "properties" in definition:
        definition["additionalProperties"] = False
jsonschema.Draft202012Validator.check_schema(schema)
jsonschema.Draft202012Validator(schema).validate(printed)
