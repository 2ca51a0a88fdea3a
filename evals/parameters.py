"""Takes what `evals/kernel_tuning.py --json FILE` found on a GPU into the package, where it was worth it.

    PYTHONPATH=. python evals/parameters.py FILE...

Adds to the GPU's rows in `hfkvq.kernels.triton.configs.SHIPPED` what differs from the knobs before, and so from what
these rows said: other variants, and knobs that a run has left as they were, stay.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from evals.kernel_tuning import WORTHWHILE
from hfkvq.kernels.triton.configs import SHIPPED


def rows_of(record: dict[str, Any]) -> dict[str, dict[str, dict[str, int]]]:
    """{kernel: {key: knobs}} of a run's findings that gained more than two per cent."""
    found: dict[str, dict[str, dict[str, int]]] = {}
    for each in record["findings"]:
        changed = {name: value for name, value in each["after"].items() if value != each["before"][name]}
        if changed and each["share"] <= WORTHWHILE:
            found.setdefault(each["kernel"], {})[each["key"]] = changed
    return found


def add(table: dict[str, Any], record: dict[str, Any]) -> int:
    """Puts a run's findings into the table, and says how many."""
    rows = rows_of(record)
    for kernel, keys in rows.items():
        own = table.setdefault(record["gpu"], {}).setdefault(kernel, {})
        for key, knobs in keys.items():
            own[key] = own.get(key, {}) | knobs
    return sum(map(len, rows.values()))


def text_of(table: dict[str, Any]) -> str:
    """The table as the file has it: a line for the knobs of each key."""
    return (
        re.sub(r"{\s+([^{}]+?)\s+}", lambda knobs: "{" + " ".join(knobs[1].split()) + "}", json.dumps(table, indent=1))
        + "\n"
    )


def main() -> None:
    """Every file in turn."""
    table = json.loads(SHIPPED.read_text(encoding="utf-8"))
    for name in sys.argv[1:]:
        record = json.loads(Path(name).read_text(encoding="utf-8"))
        print(f"{record['gpu']}: {add(table, record)} of {len(record['findings'])} variants")
    SHIPPED.write_text(text_of(table), encoding="utf-8")


if __name__ == "__main__":
    main()
