"""Makes RULER's multikey-3 questions of any length, as the file that `kvq_ruler_niah_multikey_3_file_16k` reads.

lm-eval's own generator, with its seed: the questions depend on the model's tokenizer, on nothing else. Run from the
repository's root:

    python evals/ruler_data.py --model FILE.gguf --length 16k --out data/ruler/niah_multikey_3_16384.jsonl.gz
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from hfkvq.lm_eval.ruler import needles
from hfkvq.measure.models import find_model
from hfkvq.sizes import parse_count


def main() -> None:
    """Writes one question a line: input, outputs and length in tokens."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="whose tokens are counted")
    parser.add_argument("--length", type=parse_count, default=16384, help="tokens of prompt and answer")
    parser.add_argument("--questions", type=int, default=60)
    parser.add_argument("--out", type=Path, required=True, help="a file .jsonl or .jsonl.gz")
    given = parser.parse_args()
    made = needles(
        "niah_multikey_3",
        pretrained=find_model(given.model).path,
        max_seq_lengths=[given.length],
        ruler_samples=given.questions,
    )["test"]
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
