"""Makes RULER's multikey-3 questions of any length, as the file that `kvq_ruler_niah_multikey_3_file_16k` reads.

lm-eval's own generator, with its seed: the questions depend on the model's tokenizer, on nothing else. Run from the
repository's root:

    python evals/ruler_data.py --model FILE.gguf --length 16k --out data/ruler/niah_multikey_3_16384.jsonl.gz
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from hfkvq.measure.models import find_model, load_tokenizer
from hfkvq.sizes import parse_count


def needles(tokenizer: Any, length: int, questions: int) -> list[dict[str, Any]]:
    """Questions with ``input``, ``gen_prefix`` and ``outputs``; prompt and answer have at most ``length`` tokens."""
    # Importing upstream's generator sorts five million pairs of words, and begins a download that is not needed here.
    from lm_eval.tasks.ruler.niah_utils import TEMPLATE
    from lm_eval.tasks.ruler.prepare_niah import generate_samples, get_haystack

    # Upstream draws from Python's global generator.
    random.seed(42)
    return generate_samples(
        get_haystack(type_haystack="needle"),
        TOKENIZER=tokenizer,
        max_seq_length=length,
        template=TEMPLATE,
        num_samples=questions,
        type_haystack="needle",
        type_needle_k="uuids",
        type_needle_v="uuids",
    )


def main() -> None:
    """Writes one question a line: input, outputs and length in tokens."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="whose tokens are counted")
    parser.add_argument("--length", type=parse_count, default=16384, help="tokens of prompt and answer")
    parser.add_argument("--questions", type=int, default=60)
    parser.add_argument("--out", type=Path, required=True, help="a file .jsonl or .jsonl.gz")
    given = parser.parse_args()
    made = needles(load_tokenizer(find_model(given.model)), given.length, given.questions)
    lines = "".join(
        # The prompt begins the answer, as in the files that others have published.
        json.dumps({"input": f"{row['input']} {row['gen_prefix']}", "outputs": row["outputs"], "length": row["length"]})
        + "\n"
        for row in made
    )
    given.out.parent.mkdir(parents=True, exist_ok=True)
    # Without a date, so that the same questions are the same bytes.
    packed = given.out.suffix == ".gz"
    given.out.write_bytes(gzip.compress(lines.encode(), mtime=0) if packed else lines.encode())


if __name__ == "__main__":
    main()
