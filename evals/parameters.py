"""Takes what `hfkvq bench tune --json FILE` found on a GPU into the package, where it was worth it.

    PYTHONPATH=. python evals/parameters.py FILE...

Replaces the GPU's rows in `hfkvq.kernels.triton.configs.SHIPPED`; of a variant only what differs from the knobs before.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from hfkvq.kernels.triton.configs import SHIPPED
from hfkvq.measure.bench.tune import WORTHWHILE


def rows_of(record: dict[str, Any]) -> dict[str, dict[str, dict[str, int]]]:
    """{kernel: {key: knobs}} of a run's findings that gained more than two per cent."""
    found: dict[str, dict[str, dict[str, int]]] = {}
    for each in record["findings"]:
        changed = {name: value for name, value in each["after"].items() if value != each["before"][name]}
        if changed and each["share"] <= WORTHWHILE:
            found.setdefault(each["kernel"], {})[each["key"]] = changed
    return found


def main() -> None:
    """Every file in turn."""
    table = json.loads(SHIPPED.read_text(encoding="utf-8"))
    for name in sys.argv[1:]:
        record = json.loads(Path(name).read_text(encoding="utf-8"))
        table.pop(record["gpu"], None)
        if rows := rows_of(record):
            table[record["gpu"]] = rows
        print(f"{record['gpu']}: {sum(map(len, rows.values()))} of {len(record['findings'])} variants")
    lines = [f" {json.dumps(gpu)}: {json.dumps(kernels)}" for gpu, kernels in table.items()]
    SHIPPED.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
