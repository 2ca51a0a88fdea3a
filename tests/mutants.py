"""Mutants: faults put into sealing, windows, rows, routing, eviction and attention, which the tests have to find.

    python tests/mutants.py [--only NAME] [--json FILE] [--before FILE] [--timeout 900]

Each mutant changes one place of a copy of the repository and runs the tests of its subject there, up to the first
failure. Run it before and after tests are removed; with the outcomes of before, a mutant first meets the test that
killed it then, and the command ends with status 1 if one lives that died before. Where code moves, the snippet here
moves with it; a snippet that is not found, or found twice, is an error.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
CONTRACT, LAYER = "tests/caches/test_contract.py", "tests/caches/test_layer.py"

TESTS = {
    "windows": ("tests/caches/test_row_states.py tests/kernels/test_windows.py", "tests/kernels/test_due.py", LAYER),
    "append": ("tests/kernels/test_append.py -k reference", LAYER),
    "step": (
        "tests/kernels/test_step.py -k reference",
        "tests/kernels/test_step.py",
        "tests/caches/test_graphs.py -k steps_of_every_scheme",
        "tests/caches/test_static.py tests/caches/test_graphs.py",
    ),
    "seal": (
        "tests/caches/test_sliding.py -k long_prompt",
        "tests/caches/test_faults.py -k counted_as_sealed",
        f"{CONTRACT}::test_recording_the_past_keeps_the_newest_unsealed",
        "tests/caches/test_schemes.py",
        f"{CONTRACT}::test_prompts_of_every_length {CONTRACT}::test_dense_is_close_to_what_was_given",
        f"{LAYER} tests/caches/test_sliding.py tests/caches/test_mixkvq.py",
    ),
    "pages": ("tests/kernels/test_quantize.py", "tests/kernels/test_seal.py"),
    "attention": ("tests/kernels/test_decode.py -k reference", f"{LAYER} tests/caches/test_sliding.py"),
    "crop": (
        f"{CONTRACT} -k crop",
        "tests/caches/test_sliding.py tests/caches/test_faults.py",
        "tests/caches/test_triaxial.py tests/caches/test_keep_tokens.py",
    ),
    "rows": (
        f"{CONTRACT}::test_moved_rows_are_the_rows_fed_alone",
        f"{LAYER} -k share_a_page",
        "tests/caches/test_sliding.py tests/caches/test_faults.py tests/caches/test_arkv.py",
    ),
    "routing": ("tests/caches/test_routing.py", "tests/caches/test_triaxial.py"),
    "eviction": (
        "tests/caches/test_eviction_schemes.py",
        "tests/caches/test_arkv.py -k Equations",
        "tests/caches/test_arkv.py tests/caches/test_papers.py",
        "tests/caches/test_token_eviction.py",
        f"{CONTRACT}::test_moved_rows_are_the_rows_fed_alone -k budget",
        "tests/caches/test_keep_tokens.py",
    ),
    "masks": (
        LAYER,
        f"{CONTRACT}::test_left_padding_in_a_model tests/caches/test_sliding.py",
        "tests/caches/test_generate.py -k lossless_is_dynamic_cache",
        "tests/caches/test_models.py tests/caches/test_static.py",
    ),
}
"""Selections of tests by subject, the quickest first: the next one is run where nothing has failed."""


class Mutant(NamedTuple):
    """One fault: in `file`, `old` becomes `new`; `tests` names a list of `TESTS`."""

    name: str
    tests: str
    file: str
    old: str
    new: str


WINDOWS, ROWS = "kernels/windows.py", "caches/store/row_lengths.py"
FILL, SEAL, ROUTE = "caches/store/windows.py", "caches/store/kvstore.py", "caches/store/routing.py"
CROP = SHARE = "caches/store/rows.py"
APPEND = "kernels/append.py"
STEP, DECODE, PAGES = "kernels/step/ops.py", "kernels/decode.py", "kernels/quantize.py"
RANK, KEPT, EVICT, POLICY = (
    "caches/schemes/score_inputs.py",
    "caches/eviction/token_evictor.py",
    "caches/eviction/evictor.py",
    "caches/schemes/eviction.py",
)
ATTEND, SCORES = "caches/attention/interface.py", "caches/schemes/score_inputs.py"

MUTANTS = [
    # Windows and the rule of what is due.
    Mutant("due-local", "windows", WINDOWS, "max(max(rest - local, 0) // unit", "max(max(rest - local + 1, 0) // unit"),
    Mutant("due-unit", "windows", WINDOWS, "// unit * unit - sealed, 0)", "- sealed, 0)"),
    Mutant("due-rows", "windows", WINDOWS, "((rest - local).clamp(min=0) //", "((rest - local).clamp(min=1) //"),
    Mutant("due-most", "windows", WINDOWS, "(unit - 1 + tokens) // unit", "tokens // unit"),
    Mutant("due-sink", "windows", WINDOWS, "rest = (counters[LENGTH] - sink).clamp", "rest = counters[LENGTH].clamp"),
    Mutant("due-ring", "windows", WINDOWS, "(token % max(tail, 1))", "(token % max(tail - 1, 1))"),
    Mutant("due-position", "windows", WINDOWS, "= sink + total[:, None] + place", "= total[:, None] + place"),
    Mutant("forecast-hold", "windows", ROWS, "max(windows.local[1], hold)", "windows.local[1]"),
    Mutant("forecast-tail", "windows", ROWS, "max(need_keys, behind - keys)", "max(need_keys, behind - keys - 1)"),
    Mutant("forecast-most", "windows", ROWS, "most = max(most, new_keys, new_values)", "most = max(most, new_keys)"),
    Mutant("fill-sink", "windows", FILL, "if old < sink:", "if old < sink - 1:"),
    Mutant("fill-ring", "windows", FILL, "behind = max(rest - ring, old - sink, 0", "behind = max(rest - ring + 1, 0"),
    Mutant("fill-padding", "windows", FILL, "(0 if padding is None else padding.lead) - old", "0 - old"),
    Mutant("fill-old", "windows", FILL, "new = (token >= old[:, None]) & ", "new = (token > old[:, None]) & "),
    Mutant("append-sink", "append", APPEND, "held = (token < sink.shape[2])", "held = (token <= sink.shape[2])"),
    Mutant("append-count", "append", APPEND, "counters[LENGTH].add_(tokens)", "counters[LENGTH].add_(1)"),
    Mutant("append-values", "append", APPEND, "), (values, rotate_values))", "), (values, rotate_keys))"),
    # The recorded step.
    Mutant("step-full", "step", STEP, "fits = counters[START] + length <= capacity", "fits = length <= capacity"),
    Mutant("step-room", "step", STEP, "+ due[at] <= room)", "<= room)"),
    Mutant("step-settle", "step", STEP, "    counters[-2:] += new\n", "    counters[-2:-1] += new[:1]\n"),
    Mutant("step-keeps", "step", STEP, "x.copy_(torch.where(fits.view", "x.copy_(torch.where(~fits.view"),
    Mutant("step-sums", "step", STEP, "count = count + q.shape[2]", "count = count + 1"),
    Mutant("step-abs", "step", STEP, "q.abs().double()", "q.double()"),
    Mutant("step-order", "step", STEP, "seal_due(state, plan, tokens, (1,))", "seal_due(state, plan, tokens, (0,))"),
    # Sealing.
    Mutant("seal-hold", "seal", SEAL, "local = max(self.sizes.local[0], hold), ", "local = self.sizes.local[0], "),
    Mutant("seal-rollback", "seal", SEAL, "            counters.copy_(before)\n            raise", "            raise"),
    Mutant("seal-window", "seal", SEAL, "torch.minimum(new, (end - room - count).clamp(min=0))", "new * 0"),
    Mutant("seal-position", "seal", SEAL, "torch.arange(sink, sink + most[0]", "torch.arange(0, most[0]"),
    Mutant("seal-counts", "routing", SEAL, "self.counters[RUNS:].add_(route.added)", "pass"),
    Mutant("seal-weight", "seal", "kernels/seal.py", "query if rule else None", "None"),
    # Bytes of pages.
    Mutant("pages-round", "pages", PAGES, "* inverse + 0.5)", "* inverse)"),
    Mutant("pages-clamp", "pages", PAGES, "code = torch.minimum(code, groups.levels)", "code = code + 0"),
    Mutant("pages-raise", "pages", PAGES, "upper * 4.0", "upper * 2.0"),
    Mutant("pages-norm", "pages", PAGES, 'if "norm" in named:', 'if "norm" in named and side == "keys":'),
    Mutant("pages-whole", "pages", PAGES, "= gathered.masked_fill(~used[:, :, ", "= gathered.masked_fill(used[:, :, "),
    # Rows: crop and reorder.
    Mutant("crop-unit", "crop", CROP, ".minimum(count, rest // layout.unit * layout.unit)", ".minimum(count, rest)"),
    Mutant("crop-settled", "crop", CROP, "seen - tokens < state.settled", "seen - tokens < 0"),
    Mutant("crop-start", "crop", CROP, "counters[START].clamp(max=seen - tokens)", "counters[START]"),
    Mutant("crop-torn", "crop", CROP, "    if bool(torn):", "    if False:"),
    Mutant("crop-window", "crop", CROP, "if tokens and seen - tokens < held:", "if False:"),
    Mutant(
        "crop-parts",
        "crop",
        CROP,
        "state if ring else reordered(state, layout, torch.arange(state.batch, device=state.device))",
        "state",
    ),
    Mutant("reorder-full", "rows", SHARE, " = (counts.amin(0) // page)[rows]", " = (counts.amax(0) // page)[rows]"),
    Mutant("reorder-slack", "rows", SHARE, " = max(keys.local, values.local) + max(keys.unit, values.unit)", " = 0"),
    Mutant("reorder-windows", "rows", SHARE, "=[window[rows] for window in state.windows]", "=list(state.windows)"),
    Mutant("reorder-ring", "rows", SHARE, "   if state.format.ring:\n        return ", "   if False:\n        return "),
    # Routing by width.
    Mutant("route-whole", "routing", ROUTE, "count = count // fmt.page_size * fmt.page_size", "count = count + 0"),
    Mutant("route-next", "routing", ROUTE, "count[:, None]), i + 1, run_of)", "count[:, None]), len(formats), run_of)"),
    Mutant("route-start", "routing", ROUTE, "column = counters[START][:, None] + position", "column = position + 0"),
    Mutant("route-key", "routing", ROUTE, ".padding), id(scheme), layout, hold,", ".padding), id(scheme), layout,"),
    Mutant("route-known", "routing", CROP, " in state.windows],\n        history=None,", " in state.windows],"),
    Mutant("route-untagged", "routing", ROUTE, "torch.where(column < codes.shape[1], found, UNTAGGED)", "found"),
    # Eviction.
    Mutant("evict-gamma", "eviction", RANK, "seen.mean + gamma *", "seen.mean + 0.5 * gamma *"),
    Mutant("evict-sides", "eviction", RANK, "torch.where(past, mixed[:, 0], mixed[:, 1])", "mixed.sum(1)"),
    Mutant("evict-past", "eviction", POLICY, "padding=kernel // 2)[:, 0] * past", "padding=kernel // 2)[:, 0]"),
    Mutant("evict-expected", "eviction", RANK, "(scale * scale / 2)", "(scale / 2)"),
    Mutant("evict-tiers", "eviction", RANK, "(best.cumsum(1) <= whole[:, None])", "(best.cumsum(1) < whole[:, None])"),
    Mutant("evict-first", "eviction", RANK, "judged = (evidence.rank >= first)", "judged = (evidence.rank >= 0)"),
    Mutant("evict-room", "eviction", POLICY, "first + max(self.window, hold)\n        return", "first\n        return"),
    Mutant("evict-when", "eviction", POLICY, "argmax(-1) + 1, most), most)", "argmax(-1) + 2, most + 1), most + 1)"),
    Mutant("evict-history", "eviction", KEPT, "torch.where(old.isnan(), scores, policy.merge(old, scores))", "scores"),
    Mutant("evict-newest", "eviction", KEPT, " = max(policy.window, layer.hold)\n        stays", " = 1\n        stays"),
    Mutant("evict-stuck", "eviction", KEPT, 'self._stick("padding stands among its tokens")', "pass"),
    Mutant("evict-padding", "eviction", EVICT, "self._real = column >= layer.padding.lead[:, None]", "pass"),
    Mutant("evict-rows", "eviction", EVICT, "= rows.to(held.device)", "= torch.arange(len(rows), device=held.device)"),
    # Attention.
    Mutant("attend-causal", "attention", DECODE, ":, None] <= newest[..., None])", ":, None] < newest[..., None] + 2)"),
    Mutant("attend-window", "attention", DECODE, "(newest - window)[..., None])", "(newest - window - 1)[..., None])"),
    Mutant("attend-softcap", "attention", DECODE, ".tanh(logits / softcap) * softcap", ".tanh(logits / softcap)"),
    Mutant("attend-tail", "attention", DECODE, "(columns(tail_length) - sealed) % tail_length", "columns(tail_length)"),
    Mutant(
        "attend-sides",
        "attention",
        DECODE,
        "if store.ordered and not (alike and torch.equal(counters[RUNS], counters[RUNS + 1])):\n",
        "if False:\n",
    ),
    Mutant("attend-scaling", "masks", ATTEND, "shape[-1] ** -0.5 if scaling is None else scaling", "shape[-1] ** -0.5"),
    Mutant("attend-capped", "masks", ATTEND, 'kwargs.get("softcap") or 0.0', "0.0"),
    Mutant(
        "mask-plain",
        "masks",
        ATTEND,
        "columns is None or (columns.shape[1] == kv_length and bool(columns.all()))",
        "True",
    ),
    Mutant("mask-window", "masks", ATTEND, "window is not None and kv_length <= window and", "window is not None and"),
]


def copy_of_repository(folder: Path) -> None:
    """Copies what tests read; folders that they only read are linked."""
    for path in ROOT.iterdir():
        if path.name in ("hfkvq", "tests", "evals"):
            shutil.copytree(path, folder / path.name, ignore=shutil.ignore_patterns("__pycache__"))
        elif not path.name.startswith(".") or path.name == ".git":
            (folder / path.name).symlink_to(path)


def preload() -> None:
    """Imports other packages once: children that are forked afterwards import this repository alone."""
    os.environ.setdefault("TRITON_INTERPRET", "1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for name in (
        "torch._dynamo",
        "transformers.models.llama.modeling_llama",
        "triton.runtime.interpreter",
        "hypothesis",
    ):
        importlib.import_module(name)


def run_tests(selection: list[str], folder: Path, log: Path) -> None:
    """A child's work: pytest's status is the exit status, and ``log`` has what it prints."""
    with log.open("w", encoding="utf-8") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    os.environ["PYTHONPATH"] = str(folder)
    import pytest

    options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--tb=no", "-m", "not slow and not gpu"]
    code = int(pytest.main(options + selection))
    sys.stdout.flush()
    os._exit(code)


def run(mutant: Mutant, folder: Path, timeout: float, first: str = "") -> tuple[str, float, str]:
    """Outcome ("killed", "survived" or "timeout"), seconds, and the test that failed; test ``first`` is run before."""
    path, log = folder / "hfkvq" / mutant.file, folder / "log.txt"
    text = path.read_text(encoding="utf-8")
    if text.count(mutant.old) != 1:
        raise SystemExit(
            f"{mutant.name}: its snippet is there {text.count(mutant.old)} times in {mutant.file}, not once"
        )
    path.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
    began, outcome, failed = time.monotonic(), "survived", ""
    for tests in ([first] if first else [], *(selection.split() for selection in TESTS[mutant.tests])):
        if outcome != "survived" or not tests:
            continue
        child = multiprocessing.get_context("fork").Process(target=run_tests, args=(tests, folder, log))
        child.start()
        child.join(timeout)
        if child.exitcode is None:
            # An endless loop is found, too.
            child.kill()
            outcome = "timeout"
        elif child.exitcode in (1, 2):
            lines = log.read_text(encoding="utf-8").splitlines()
            outcome, failed = "killed", next((x for x in lines if x.startswith(("FAILED", "ERROR"))), "")
        elif child.exitcode != 0 and tests != [first]:
            # The test of before may be gone.
            raise SystemExit(f"{mutant.name}: pytest ended with {child.exitcode}:\n{log.read_text(encoding='utf-8')}")
    path.write_text(text, encoding="utf-8")
    return outcome, time.monotonic() - began, failed.split(" - ")[0].removeprefix("FAILED ")


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", action="append", help="names of mutants, or of their subjects")
    parser.add_argument("--json", type=Path, help="file for the outcomes, written after each mutant")
    parser.add_argument("--before", type=Path, help="outcomes of an earlier run: what died there has to die")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for a mutant's tests")
    given = parser.parse_args()
    chosen = [m for m in MUTANTS if not given.only or m.name in given.only or m.tests in given.only]
    before = {} if given.before is None else {row["name"]: row for row in json.loads(given.before.read_text())}
    rows: list[dict[str, object]] = []
    preload()
    with tempfile.TemporaryDirectory() as name:
        copy_of_repository(Path(name))
        for mutant in chosen:
            first = before.get(mutant.name, {}).get("test", "").removeprefix("FAILED ")
            outcome, seconds, failed = run(mutant, Path(name), given.timeout, first)
            rows.append({"name": mutant.name, "outcome": outcome, "test": failed, "seconds": round(seconds, 1)})
            print(f"{mutant.name:20} {outcome:9} {seconds:6.1f} s  {failed}", flush=True)
            if given.json:
                given.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    alive = [str(row["name"]) for row in rows if row["outcome"] == "survived"]
    print(f"{len(rows) - len(alive)} of {len(rows)} killed; alive: {', '.join(alive) or 'none'}")
    lost = [name for name in alive if before.get(name, {}).get("outcome", "killed") != "survived"]
    if given.before is not None:
        print(f"alive that were killed before: {', '.join(lost) or 'none'}")
    return bool(lost)


if __name__ == "__main__":
    sys.exit(main())
