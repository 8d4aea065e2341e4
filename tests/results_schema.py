"""The published schema of results, and who holds a document against it."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import ddpm_lab

SCHEMA = json.loads((Path(ddpm_lab.__file__).parent / "schemas" / "benchmark_results_1.json").read_text())


@cache
def validator() -> Any:
    """Refuses what the schema does not name. Importing jsonschema takes two seconds, which no collection should."""
    import jsonschema  # noqa: PLC0415

    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    return jsonschema.Draft202012Validator(SCHEMA, format_checker=jsonschema.FormatChecker())
