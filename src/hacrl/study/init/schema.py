"""The JSON schema of a config file, for editors that check TOML."""

from typing import Any

from hacrl.algorithms import ALGORITHMS
from hacrl.config import Config


def config_schema() -> dict[str, Any]:
    """The schema of a config. The table [algorithm] has the keys of the algorithm that it names."""
    schema = Config.model_json_schema()
    definitions = schema["$defs"]
    choices = []
    for name, kind in ALGORITHMS.items():
        table = kind.Settings.model_json_schema()
        definitions |= table.pop("$defs", {})
        table["properties"]["name"] |= {"const": name}
        table["required"] = [] if name == "hacpo" else ["name"]
        definitions[table["title"] + f"_{name}"] = table
        choices.append({"$ref": f"#/$defs/{table['title']}_{name}"})
    own = {"type": "object", "required": ["name"], "properties": {"name": {"pattern": ":"}}}
    field = schema["properties"]["algorithm"]
    schema["properties"]["algorithm"] = {
        "description": field.get("description", ""),
        "anyOf": [*choices, own],
    }
    return {"$schema": "http://json-schema.org/draft-07/schema#", "title": "hacrl config"} | schema
