"""Train the reference model on one GPU within a wall-clock budget, and score it by greedy generation.

Run from the root of the checkout, after `tokenizer.py`:

    PYTHONPATH=. python evals/reference/train.py --shape hd128 --minutes 8.5 --text gsm8k_train.jsonl --out out/hd128

The budget holds everything from the start of the process: compilation, training, saving and scoring. A short run on the
CPU shows that all parts work: `--steps 6 --device cpu --batch 2 --length 256 --workers 1 --evaluate 2`.
"""

from __future__ import annotations

import time

BEGIN = time.perf_counter()

import argparse  # noqa: E402
import copy  # noqa: E402
import json  # noqa: E402
import math  # noqa: E402
import multiprocessing  # noqa: E402
import os  # noqa: E402
import platform  # noqa: E402
import queue as queues  # noqa: E402
import random  # noqa: E402
import re  # noqa: E402
import shutil  # noqa: E402
import signal  # noqa: E402
import traceback  # noqa: E402
from collections import deque  # noqa: E402
from collections.abc import Callable, Iterator  # noqa: E402
from dataclasses import asdict, dataclass  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
import transformers  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from transformers import (  # noqa: E402
    AttentionInterface,
    AutoModelForCausalLM,
    DeepseekV3Config,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

from hfkvq.measure.reference import chat, tasks, tools  # noqa: E402

CHECKPOINT = Path(__file__).resolve().parent / "checkpoint"
ATTENTION = "reference_causal"
SHARES = {"recall": 0.40, "arithmetic": 0.25, "tools": 0.25, "text": 0.10}
# Classes of answers, reported apart. Marks of a token: 0 padding, 1 context, else 8 * (answer's number + 1) + class.
CLASSES = ("recall<60", "recall", "steps<=6", "steps", "tools", "text")
TASK_OF_CLASS = ("recall", "recall", "arithmetic", "arithmetic", "tools", "text")
LONG_FROM = 0.75
LARGEST_FILE = 15_900_000


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the result but the clock."""

    shape: str
    batch: int
    length: int
    peak_rate: float = 2e-3
    final_rate: float = 0.02
    warmup_steps: int = 150
    flat_until: float = 0.30
    weight_decay: float = 0.05
    beta1: float = 0.9
    beta2: float = 0.95
    clip: float = 1.0
    context_weight: float = 0.05
    # Weights by class of `CLASSES`; text is only there to read like text.
    answer_weights: tuple[float, ...] = (3.0, 3.0, 1.0, 1.0, 2.0, 0.2)
    rope_theta: float = 100_000.0
    seed: int = 0

    def rows(self, progress: float) -> tuple[int, int]:
        """Return rows and tokens per row; the last quarter of training has rows twice as long."""
        if progress < LONG_FROM:
            return self.batch, self.length
        return max(self.batch // 2, 1), 2 * self.length

    def rate(self, step: int, progress: float) -> float:
        """Return the learning rate: warm-up by steps, then flat, then a cosine, both by progress."""
        warm = min(1.0, (step + 1) / self.warmup_steps)
        done = max(0.0, (min(progress, 1.0) - self.flat_until) / (1.0 - self.flat_until))
        cosine = self.final_rate + (1.0 - self.final_rate) * 0.5 * (1.0 + math.cos(math.pi * done))
        return self.peak_rate * warm * cosine


def model_config(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> PreTrainedConfig:
    """Return the architecture: 7.6 to 7.8 million parameters, the embedding tied."""
    common = {
        "vocab_size": len(tokenizer),
        "hidden_size": 256,
        "num_hidden_layers": 8,
        "max_position_embeddings": tokenizer.model_max_length,
        "rope_parameters": {"rope_type": "default", "rope_theta": recipe.rope_theta},
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "use_cache": True,
    }
    if recipe.shape == "mla":
        # Latent attention without experts.
        return DeepseekV3Config(
            num_attention_heads=8,
            num_key_value_heads=8,
            q_lora_rank=None,
            kv_lora_rank=128,
            qk_nope_head_dim=32,
            qk_rope_head_dim=32,
            v_head_dim=64,
            intermediate_size=704,
            first_k_dense_replace=8,
            **common,
        )
    heads = {
        "hd128": {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128, "intermediate_size": 704},
        "hd64": {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 768},
    }[recipe.shape]
    return Qwen3Config(**common, **heads)


class Documents:
    """Endless stream of tokenized documents, in the proportions of `SHARES` by tokens."""

    def __init__(self, tokenizer_file: Path, problems: list[str], seed: int) -> None:
        self.tokenizer = Tokenizer.from_file(str(tokenizer_file))
        self.problems = problems
        self.rng = random.Random(f"documents/{seed}")
        self.start, self.assistant, self.end, self.separator = (
            self._token(text) for text in (chat.IM_START, "assistant", chat.IM_END, "<|endoftext|>")
        )
        self.drawn = dict.fromkeys(SHARES if problems else [task for task in SHARES if task != "text"], 0.0)
        self.ready: deque[tuple[np.ndarray, np.ndarray]] = deque()

    def _token(self, text: str) -> int:
        token = self.tokenizer.token_to_id(text)
        if token is None:
            raise ValueError(f"the tokenizer has no token {text!r}; train it again with tokenizer.py")
        return token

    def _draw(self, progress: float, length: int) -> tuple[str, int]:
        """Return the text of a new document and its class; easy ones come first."""
        rng = self.rng
        task = min(self.drawn, key=lambda name: self.drawn[name] / SHARES[name])
        seed = rng.getrandbits(62)
        if task == "text":
            return rng.choice(self.problems), CLASSES.index("text")
        if task == "tools":
            return tools(seed=seed).text, CLASSES.index("tools")
        if task == "recall":
            # A record is about 14 tokens, a further question about 30.
            most = max(2, min(int(8 + 104 * min(progress / 0.15, 1.0)) * length // 2048, (length - 250) // 16))
            count = rng.randint(max(2, most // 2), most) if rng.random() < 0.5 else rng.randint(2, most)
            questions = rng.randint(1, min(12, count))
            document = tasks.recall(count, seed=seed, questions=questions)
            return document.text, int(count >= 60)
        most = int(2 + 12 * min(progress / 0.12, 1.0))
        count = rng.randint(max(1, most // 2), most) if rng.random() < 0.5 else rng.randint(1, most)
        return tasks.arithmetic(count, seed=seed).text, 2 + int(count > 6)

    def _refill(self, progress: float, length: int) -> None:
        texts, classes = [], []
        for _ in range(32):
            text, kind = self._draw(progress, length)
            task = TASK_OF_CLASS[kind]
            # An estimate keeps the shares between two refills; about 2.6 characters make a token.
            self.drawn[task] += len(text) / 2.6
            texts.append(text)
            classes.append(kind)
        for encoding, kind in zip(
            self.tokenizer.encode_batch_fast(texts, add_special_tokens=False), classes, strict=True
        ):
            ids = np.array([*encoding.ids, self.separator], dtype=np.int16)
            marks = np.ones_like(ids)
            starts = np.flatnonzero((ids[:-1] == self.start) & (ids[1:] == self.assistant)) + 3
            ends = np.flatnonzero(ids == self.end)
            for number, first in enumerate(starts):
                last = ends[np.searchsorted(ends, first)]
                marks[first : last + 1] = 8 * (number + 1) + kind
            self.ready.append((ids, marks))

    def batch(self, rows: int, length: int, progress: float) -> tuple[np.ndarray, np.ndarray]:
        """Return tokens and marks, (rows, length + 1) i16 each; documents are never cut, rows end in padding."""
        ids = np.full((rows, length + 1), self.separator, dtype=np.int16)
        marks = np.zeros((rows, length + 1), dtype=np.int16)
        waiting: list[tuple[np.ndarray, np.ndarray]] = []
        for row in range(rows):
            filled, answers, misses = 0, 0, 0
            while misses < 6:
                room = length + 1 - filled
                fitting = next((i for i, (document, _) in enumerate(waiting) if len(document) <= room), None)
                if fitting is not None:
                    document, mark = waiting.pop(fitting)
                else:
                    if not self.ready:
                        self._refill(progress, length)
                    document, mark = self.ready.popleft()
                    if len(document) > room:
                        misses += 1
                        if len(document) <= length + 1:
                            waiting.append((document, mark))
                        continue
                end = filled + len(document)
                ids[row, filled:end] = document
                marks[row, filled:end] = np.where(mark > 1, mark + 8 * answers, mark)
                answers += int(mark.max()) >> 3
                filled = end
        self.ready.extendleft(waiting)
        return ids, marks


def read_problems(path: Path | None) -> list[str]:
    """Return grade-school problems as conversations, without the calculator's annotations."""
    if path is None:
        return []
    problems = []
    for line in path.read_text(encoding="utf-8").splitlines():
        problem = json.loads(line)
        answer = re.sub(r"<<.*?>>", "", problem["answer"])
        prompt = chat.render([{"role": "user", "content": problem["question"]}])
        problems.append(f"{prompt}{answer}{chat.IM_END}\n")
    return problems


def produce(number: int, problems: list[str], recipe: Recipe, batches: Any, progress: Any) -> None:
    """Fill the queue with batches until the process is ended; the body of one worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    documents = Documents(CHECKPOINT / "tokenizer.json", problems, 1_000_003 * recipe.seed + number)
    while True:
        now = progress.value
        batches.put(documents.batch(*recipe.rows(now), now))


class Feeder:
    """Batches from worker processes; when they fall behind, an earlier batch is used again."""

    def __init__(self, recipe: Recipe, problems: list[str], workers: int) -> None:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        context = multiprocessing.get_context("fork")
        self.batches = context.Queue(maxsize=4 * workers)
        self.progress = context.Value("d", 0.0)
        self.recent: deque[tuple[np.ndarray, np.ndarray]] = deque(maxlen=256)
        self.rng = random.Random(recipe.seed)
        self.reused = 0
        self.workers = [
            context.Process(target=produce, args=(i, problems, recipe, self.batches, self.progress), daemon=True)
            for i in range(workers)
        ]
        for worker in self.workers:
            worker.start()

    def __iter__(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield batches; a batch is waited for only while there is none to use again."""
        while True:
            try:
                batch = self.batches.get(timeout=0.02 if self.recent else 120.0)
                self.recent.append(batch)
            except queues.Empty:
                if not self.recent:
                    raise RuntimeError("the data workers gave nothing in two minutes") from None
                batch = self.rng.choice(self.recent)
                self.reused += 1
            yield batch

    def close(self) -> None:
        """End the workers."""
        for worker in self.workers:
            worker.terminate()
        self.batches.cancel_join_thread()
        self.batches.close()


def causal_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Plain causal attention in the dtype of the values, which autocast made bf16."""
    query, key = query.to(value.dtype), key.to(value.dtype)
    if not GROUPED_KERNEL:
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    out = F.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=options.get("scaling"), enable_gqa=GROUPED_KERNEL
    )
    return out.transpose(1, 2), None


def has_grouped_kernel(config: PreTrainedConfig) -> bool:
    """Tell whether a fused attention kernel takes fewer key heads than query heads, forward and backward."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    shape = {"dtype": torch.bfloat16, "device": "cuda", "requires_grad": True}
    query = torch.randn(2, config.num_attention_heads, 256, config.head_dim, **shape)
    key, value = (torch.randn(2, config.num_key_value_heads, 256, config.head_dim, **shape) for _ in range(2))
    try:
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION]):
            F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True).sum().backward()
        torch.cuda.synchronize()
    except RuntimeError as error:
        print(f"keys are repeated for attention: {error}", flush=True)
        return False
    return True


GROUPED_KERNEL = True
AttentionInterface.register(ATTENTION, causal_attention)


class Trainer:
    """Model, optimizer and the compiled step."""

    def __init__(self, recipe: Recipe, config: PreTrainedConfig, device: torch.device, use_compile: bool) -> None:
        self.recipe, self.device = recipe, device
        torch.manual_seed(recipe.seed)
        self.model = AutoModelForCausalLM.from_config(config).to(device=device, dtype=torch.float32).train()
        self.model.set_attn_implementation(ATTENTION)
        decayed = [p for p in self.model.parameters() if p.ndim >= 2]
        plain = [p for p in self.model.parameters() if p.ndim < 2]
        self.optimizer = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": recipe.weight_decay}, {"params": plain, "weight_decay": 0.0}],
            lr=recipe.peak_rate,
            betas=(recipe.beta1, recipe.beta2),
            fused=device.type == "cuda",
        )
        self.weights = torch.tensor([0.0, recipe.context_weight, *recipe.answer_weights], device=device)
        self.head: Callable[..., tuple[Tensor, Tensor, Tensor]] = self._head
        self.compiled = use_compile and self._compile()
        if not self.compiled:
            self._rehearse()

    def _compile(self) -> bool:
        """Compile each layer (they share their code) and the head, for both shapes; False if that fails."""
        torch._dynamo.config.recompile_limit = 64
        begin = time.perf_counter()
        try:
            for layer in self.model.model.layers:
                layer.compile(dynamic=False)
            self.head = torch.compile(self._head, dynamic=False)
            self._rehearse()
        except Exception:
            traceback.print_exc()
            print("compilation failed; going on without it", flush=True)
            for layer in self.model.model.layers:
                layer._compiled_call_impl = None
            self.head = self._head
            torch._dynamo.reset()
            return False
        print(f"compiled in {time.perf_counter() - begin:.0f} s", flush=True)
        return True

    def _rehearse(self) -> None:
        """Run both shapes forward and backward, without a step."""
        for progress in (0.0, 1.0):
            rows, length = self.recipe.rows(progress)
            zeros = torch.zeros(rows, length + 1, dtype=torch.long, device=self.device)
            self.loss(zeros, torch.ones_like(zeros))[0].backward()
            self.optimizer.zero_grad(set_to_none=True)
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            print(f"at most {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB allocated", flush=True)

    def _head(self, hidden: Tensor, weight: Tensor, targets: Tensor, marks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = F.linear(hidden, weight).float().flatten(0, 1)
        nll = F.cross_entropy(logits, targets.flatten(), reduction="none").view_as(targets)
        weights = self.weights[torch.where(marks > 1, marks % 8 + 2, marks)]
        correct = logits.argmax(-1).view_as(targets) == targets
        return (nll * weights).sum() / weights.sum(), nll.detach(), correct

    def loss(self, ids: Tensor, marks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the weighted loss, and per token its loss and whether it is predicted, (rows, length) each."""
        inner = self.model.model
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            hidden = inner.embed_tokens(ids[:, :-1])
            positions = torch.arange(hidden.shape[1], device=self.device)[None]
            embeddings = inner.rotary_emb(hidden, positions)
            for layer in inner.layers:
                hidden = layer(hidden, attention_mask=None, position_embeddings=embeddings)
            return self.head(inner.norm(hidden), self.model.lm_head.weight, ids[:, 1:], marks[:, 1:])

    def step(self, ids: Tensor, marks: Tensor, rate: float) -> tuple[Tensor, Tensor, Tensor]:
        """Do one step of the optimizer; returns what `loss` returns."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        loss, nll, correct = self.loss(ids, marks)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach(), nll, correct

    def rounded(self) -> PreTrainedModel:
        """Return a bf16 copy of the model, with the usual attention."""
        # Models share the config they are given, and the attention is chosen there.
        config = copy.deepcopy(self.model.config)
        model = AutoModelForCausalLM.from_config(config).to(device=self.device, dtype=torch.bfloat16).eval()
        model.load_state_dict(self.model.state_dict())
        model.set_attn_implementation("sdpa")
        model.generation_config = GenerationConfig(
            do_sample=False,
            eos_token_id=self.model.config.eos_token_id,
            pad_token_id=self.model.config.pad_token_id,
        )
        return model


def save(model: PreTrainedModel, result: dict[str, Any], out: Path) -> None:
    """Write the weights and `training.json`; each file is replaced whole."""
    part = out.with_name(out.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    model.save_pretrained(part)
    size = (part / "model.safetensors").stat().st_size
    if size >= LARGEST_FILE:
        raise ValueError(f"model.safetensors has {size} bytes; at most {LARGEST_FILE} are allowed")
    for file in part.iterdir():
        file.replace(out / file.name)
    part.rmdir()
    write_result(result | {"weight_bytes": size}, out)


def write_result(result: dict[str, Any], out: Path) -> None:
    """Write `training.json`."""
    part = out / "training.json.part"
    part.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    part.replace(out / "training.json")


def answer_report(nll: Tensor, correct: Tensor, marks: np.ndarray) -> dict[str, dict[str, float]]:
    """Return per class the mean loss on answers and the share of answers whose every token is predicted."""
    marks = marks[:, 1:]
    rows, columns = np.nonzero(marks > 1)
    loss, right = nll.float().cpu().numpy()[rows, columns], correct.cpu().numpy()[rows, columns]
    found = marks[rows, columns]
    report: dict[str, dict[str, float]] = {}
    answer = rows.astype(np.int64) * 65_536 + found
    for kind, name in enumerate(CLASSES):
        chosen = found % 8 == kind
        if chosen.any():
            _, index = np.unique(answer[chosen], return_inverse=True)
            wrong = np.bincount(index, weights=~right[chosen])
            report[name] = {"loss": round(float(loss[chosen].mean()), 4), "exact": round(float((wrong == 0).mean()), 4)}
    return report


@torch.inference_mode()
def evaluate(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, task: str, count: int, batch: int = 100
) -> dict[str, float]:
    """Score greedy generation on the evaluation set of a task."""
    begin = time.perf_counter()
    examples = tasks.evaluation_set(task, count)
    limit = max(len(tokenizer(example.answer).input_ids) for example in examples) + 8
    right = 0
    for first in range(0, count, batch):
        part = examples[first : first + batch]
        inputs = tokenizer([example.prompt for example in part], return_tensors="pt", padding=True).to(model.device)
        out = model.generate(
            input_ids=inputs.input_ids, attention_mask=inputs.attention_mask, max_new_tokens=limit, do_sample=False
        )
        texts = tokenizer.batch_decode(out[:, inputs.input_ids.shape[1] :], skip_special_tokens=True)
        right += sum(example.score(text) for example, text in zip(part, texts, strict=True))
    return {"accuracy": right / count, "examples": count, "seconds": round(time.perf_counter() - begin, 1)}


def environment(device: torch.device) -> dict[str, Any]:
    """Return versions and hardware."""
    return {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "gpu": torch.cuda.get_device_name() if device.type == "cuda" else None,
    }


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=("hd128", "hd64", "mla"), default="hd128")
    parser.add_argument("--minutes", type=float, default=8.5, help="wall-clock budget of the whole process")
    parser.add_argument("--reserve", type=float, default=45.0, help="seconds of the budget kept for saving and scoring")
    parser.add_argument("--steps", type=int, help="train for this many steps instead of by the clock")
    parser.add_argument("--text", type=Path, help="GSM8K train.jsonl; without it there is no text in the mixture")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--batch", type=int, default=48)
    parser.add_argument("--length", type=int, default=2_048)
    parser.add_argument("--rate", type=float, default=2e-3, help="peak learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=8, help="processes that make data")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--evaluate", type=int, default=200, help="examples per evaluation set; 0 scores none")
    parser.add_argument("--log-every", type=int, default=200, help="steps between progress lines")
    return parser.parse_args()


def main() -> None:
    """Train, save and score."""
    global GROUPED_KERNEL
    arguments = parse()
    arguments.out.mkdir(parents=True, exist_ok=True)
    recipe = Recipe(arguments.shape, arguments.batch, arguments.length, arguments.rate, seed=arguments.seed)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(CHECKPOINT)
    # The workers are forked before CUDA starts.
    feeder = Feeder(recipe, read_problems(arguments.text), arguments.workers)
    stopped: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: stopped.append(number))
    signal.signal(signal.SIGINT, lambda number, _: stopped.append(number))

    device = torch.device(arguments.device)
    torch.set_float32_matmul_precision("high")
    config = model_config(recipe, tokenizer)
    GROUPED_KERNEL = device.type != "cuda" or has_grouped_kernel(config)
    trainer = Trainer(recipe, config, device, arguments.compile)
    parameters = sum(p.numel() for p in trainer.model.parameters())
    train_begin = time.perf_counter()
    train_seconds = 60.0 * arguments.minutes - arguments.reserve - (train_begin - BEGIN)
    if arguments.steps is None and train_seconds <= 0:
        raise ValueError(f"minutes={arguments.minutes} leaves no time to train; give more or a smaller --reserve")
    print(f"{parameters:,} parameters, start-up {train_begin - BEGIN:.0f} s, {environment(device)}", flush=True)

    result: dict[str, Any] = {
        "recipe": asdict(recipe) | {"shares": SHARES, "long_from": LONG_FROM},
        "parameters": parameters,
        "compiled": trainer.compiled,
        "environment": environment(device),
        "scores": {},
        "curve": [],
    }
    step, tokens, progress, saved = 0, 0, 0.0, 0.0
    mean_loss, since = torch.zeros((), device=device), 0
    log_time, log_tokens = train_begin, 0

    def record() -> dict[str, Any]:
        seconds = round(time.perf_counter() - train_begin, 1)
        state = {"steps": step, "tokens": tokens, "progress": round(progress, 4), "train_seconds": seconds}
        return result | state | {"reused_batches": feeder.reused}

    try:
        for ids_array, marks_array in feeder:
            seconds = time.perf_counter() - train_begin
            progress = step / arguments.steps if arguments.steps is not None else seconds / train_seconds
            if progress >= 1.0 or stopped:
                break
            feeder.progress.value = progress
            ids, marks = torch.from_numpy(ids_array), torch.from_numpy(marks_array)
            if device.type == "cuda":
                ids, marks = (
                    ids.pin_memory().to(device, non_blocking=True),
                    marks.pin_memory().to(device, non_blocking=True),
                )
            rate = recipe.rate(step, progress)
            loss, nll, correct = trainer.step(ids.long(), marks.long(), rate)
            mean_loss += loss
            since += 1
            step += 1
            tokens += ids_array.shape[0] * (ids_array.shape[1] - 1)
            if step % arguments.log_every == 0 or step in (1, 50, 100):
                report = answer_report(nll, correct, marks_array)
                mean = float(mean_loss) / since
                if not math.isfinite(mean):
                    raise FloatingPointError(f"the loss is {mean} at step {step}")
                now = time.perf_counter()
                speed = (tokens - log_tokens) / (now - log_time)
                line = {
                    "step": step,
                    "progress": round(progress, 4),
                    "tokens": tokens,
                    "rate": rate,
                    "loss": round(mean, 4),
                }
                result["curve"].append(line | {"answers": report})
                shown = "  ".join(f"{name} {v['loss']:.3f}/{100 * v['exact']:.0f}%" for name, v in report.items())
                print(
                    f"step {step:5d}  {100 * progress:3.0f} %  {now - BEGIN:4.0f} s  {speed / 1e6:.2f} Mtok/s  "
                    f"reused {feeder.reused}  rate {rate:.1e}  loss {mean:.4f}  {shown}",
                    flush=True,
                )
                mean_loss.zero_()
                since, log_time, log_tokens = 0, now, tokens
            for mark in (0.6, 0.8, 0.92):
                if saved < mark <= progress:
                    saved = mark
                    save(trainer.rounded(), record(), arguments.out)
                    print(f"saved at {100 * progress:.0f} %", flush=True)
    finally:
        # Errors come here, too; the checkpoint is then the last saved one.
        feeder.close()

    final = trainer.rounded()
    save(final, record(), arguments.out)
    print(f"saved at {100 * progress:.0f} %: {step} steps, {tokens / 1e6:.0f} M tokens", flush=True)
    if stopped:
        print("stopped by a signal; not scored", flush=True)
        return
    done = record() | {"weight_bytes": (arguments.out / "model.safetensors").stat().st_size}
    scored = ("recall-80", "arithmetic-12", "tools", "recall-24", "arithmetic-4", "recall-160")
    for task in scored if arguments.evaluate else ():
        result["scores"][task] = evaluate(final, tokenizer, task, arguments.evaluate)
        write_result(done | {"wall_seconds": round(time.perf_counter() - BEGIN, 1)}, arguments.out)
        print(f"{time.perf_counter() - BEGIN:4.0f} s  {task}: {result['scores'][task]}", flush=True)


if __name__ == "__main__":
    main()
