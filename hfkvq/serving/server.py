"""Transformers' own server, OpenAI-compatible, over compressed pages."""

from __future__ import annotations

import asyncio
import copy
import json
import socket
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import ContinuousBatchingConfig
from transformers.cli.serving.utils import CBGenerateManager, _StreamError, response_events_to_chunks
from transformers.generation.continuous_batching.cb_logits_processors import (
    ContinuousBatchingLogitsProcessor,
    ContinuousBatchingTopPLogitsWarper,
)

from hfkvq.caches import Scheme
from hfkvq.measure.models import Source, load_model, load_tokenizer, read_config
from hfkvq.measure.models.outline import positions_of

from .engine import Serving, checked, enable
from .fields import ENDPOINTS, PROMPTS, TEXT_PARTS, RefusedRequest, got
from .fields import check as check_fields

ROUTES = {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/health"}
"""Routes of Transformers' server that are kept: others load and unload models, or need models of another kind."""

LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "generation_config")
"""Fields for the length of an answer."""

USUAL_ANSWER = 1024
"""Most tokens of an answer where a request says nothing."""

GREEDY = 1e-4
"""Temperatures below it are 0; logits that are divided by less are no finite numbers."""


class BadPrompt(ValueError):
    """Raised for a prompt that no field's rule rules out: too long, or refused by the chat template."""


class LongAnswer(ValueError):
    """Raised where a prompt has room, and the answer asked for has not."""


class GreedyRows(ContinuousBatchingLogitsProcessor):
    """Logits of requests with temperature 0: only the largest is left, so that sampling takes it."""

    supported_kwargs = {"greedy": bool}  # noqa: RUF012
    ignored_kwargs = ()

    def fill_defaults(self, int32_tensor: Tensor) -> None:
        """Rows without a request sample."""
        int32_tensor.zero_()

    def prepare_tensor_args(self, requests_with_new_token: list[Any]) -> Tensor:
        """A flag for each request: i32 (N,)."""
        flags = [request.state.logit_processor_kwargs.get("greedy", False) for request in requests_with_new_token]
        return torch.tensor(flags, dtype=torch.int32, device="cpu")

    def __call__(self, scores: Tensor, tensor_arg: Tensor) -> Tensor:
        """Scores f32 (N, V), with minus infinity for all tokens of a greedy row but one."""
        best = scores.argmax(-1, keepdim=True)
        only = torch.full_like(scores, -torch.inf).scatter_(-1, best, 0.0)
        return torch.where(tensor_arg[: len(scores), None] != 0, only, scores)


class SharedTopP(ContinuousBatchingTopPLogitsWarper):
    """top_p of each request, left out of steps in which no request has one below 1: it sorts the whole vocabulary.

    Attributes:
        needed: True if a request of the batch that was prepared last has top_p below 1.
    """

    needed = True

    def prepare_tensor_args(self, requests_with_new_token: list[Any]) -> Tensor:
        """top_p of each request, f32 viewed as i32 (N,); notes on the host whether the step needs them."""
        given = [request.state.logit_processor_kwargs.get("top_p", self.top_p) for request in requests_with_new_token]
        self.needed = any(top_p < 1 for top_p in given)
        return super().prepare_tensor_args(requests_with_new_token)

    def __call__(self, scores: Tensor, tensor_arg: Tensor) -> Tensor:
        """Scores f32 (N, V), with minus infinity for tokens outside of top_p."""
        return super().__call__(scores, tensor_arg) if self.needed else scores


class StopStream:
    """A stream that decodes tokens to text and ends before the first stop text.

    Text that may be the beginning of a stop text is held back until more of it is known.

    Attributes:
        stopped: True after a stop text.
    """

    def __init__(self, stream: Any, tokenizer: Any, stops: list[str], end: Callable[[], None]) -> None:
        self.text, self.stopped = "", False
        self._stream, self._tokenizer, self._stops, self._end = stream, tokenizer, stops, end
        self._held = ""
        # Each token with the length of the text before it and after it.
        self._tokens: list[tuple[int, int, int]] = []

    def step(self, tokenizer: Any, token: int) -> str | None:
        """Text after one more token, or None if there is none to give out."""
        if self.stopped:
            return None
        start = len(self.text) + len(self._held)
        self._held += self._stream.step(tokenizer, token) or ""
        self._tokens.append((token, start, len(self.text) + len(self._held)))
        if found := [at for stop in self._stops if (at := self._held.find(stop)) >= 0]:
            self.stopped = True
            self._end()
            return self._give(min(found))
        begun = (n for stop in self._stops for n in range(1, len(stop)) if self._held.endswith(stop[:n]))
        return self._give(len(self._held) - max(begun, default=0))

    def rest(self) -> str | None:
        """Text that was held back, when no token comes any more."""
        return None if self.stopped else self._give(len(self._held))

    def _give(self, length: int) -> str | None:
        text, self._held = self._held[:length], self._held[length:]
        self.text += text
        return text or None

    def tokens(self) -> list[int]:
        """Tokens of the text; where a stop text cuts one, what is left of it is encoded anew."""
        size = len(self.text)
        if not self.stopped:
            return [token for token, _, _ in self._tokens]
        whole = [(token, end) for token, start, end in self._tokens if start < size and end <= size]
        left = self.text[whole[-1][1] if whole else 0 :]
        return [token for token, _ in whole] + (self._tokenizer.encode(left, add_special_tokens=False) if left else [])


class Answers(CBGenerateManager):
    """Transformers' link to the engine, whose requests have their own temperature, top_p, length and stop texts.

    Transformers takes the first request's temperature and top_p for all of them, and no stop texts.

    Attributes:
        temperature: of requests that name none: the model's; 0 if it does not sample by itself.
    """

    _cb: Any

    def __init__(self, model: Any, config: ContinuousBatchingConfig | None) -> None:
        super().__init__(config or ContinuousBatchingConfig())
        self._cb_config.per_request_processors = True  # type: ignore[union-attr]
        self._positions, usual = positions_of(model.config), model.generation_config
        self._longest: int | None = None
        self.temperature: float = (1.0 if usual.temperature is None else usual.temperature) if usual.do_sample else 0.0
        self.top_p: float = usual.top_p if usual.do_sample and usual.top_p is not None else 1.0

    def check_length(self, characters: int, tokenizer: Any) -> None:
        """Refuses a text that cannot fit into the model's positions: to cut megabytes into tokens takes seconds."""
        if self._longest is None:
            self._longest = max(map(len, tokenizer.get_vocab()), default=1)
        most = None if self._positions is None else self._positions * self._longest
        if most is not None and characters > most:
            raise BadPrompt(f"got {characters} characters, allowed {most}, since the model has no more positions.")

    def init_cb(self, model: Any, gen_config: Any) -> None:
        """Starts the engine at the first request. It samples for all; `GreedyRows` takes the best token where asked."""
        if self._cb is not None:
            return
        shared = copy.deepcopy(model.generation_config)
        # The engine leaves out processors whose value would change nothing; each request gives its own.
        shared.update(do_sample=True, temperature=0.5, top_p=0.5, use_cache=False)
        self._cb = model.init_continuous_batching(shared, self._cb_config)
        processors = self._cb.logit_processor
        at, plain = next(
            (at, each)
            for at, each in enumerate(processors.logits_processor)
            if isinstance(each, ContinuousBatchingTopPLogitsWarper)
        )
        shared_top_p = processors.logits_processor[at] = SharedTopP(plain)  # type: ignore[arg-type]
        # Steps with and without top_p are two captured graphs.
        self._cb.graph_variant = lambda: shared_top_p.needed
        processors.logits_processor.append(GreedyRows())
        processors.tensors_required += 1
        processors._retrieve_processors_kwargs()
        # Outputs of cancelled requests, which have no reader.
        self._cb.output_router.output_queue.put = lambda *_, **__: None
        self._cb.start()

    def _admit(self, input_ids: list[int], config: Any, request_id: str) -> None:
        """Refuses a request for which there is no room, and tells the engine how to sample for it."""
        if request_id in self._cb.output_router.result_handlers:
            raise RefusedRequest("x-request-id", got(request_id, "a name that no request has that waits for an answer"))
        limit, tokens, new = self._cb.room(), len(input_ids), config.max_new_tokens
        reason = "all blocks hold no more; give the server more --num-blocks, or --memory"
        if self._positions is not None and self._positions <= limit:
            limit, reason = self._positions, "the model has no more positions"
        if not 0 < tokens < limit:
            raise BadPrompt(f"got {tokens} tokens, allowed 1 to {limit - 1}, since {reason}.")
        if new is not None and tokens + new > limit:
            raise LongAnswer(f"got {new}, allowed up to {limit - tokens} after {tokens} of the prompt, since {reason}.")
        config.max_new_tokens = min(USUAL_ANSWER, limit - tokens) if new is None else new
        temperature = self.temperature if config.temperature is None else config.temperature
        greedy = temperature < GREEDY
        self._cb.sampling[request_id] = {
            "greedy": greedy,
            "temperature": 1.0 if greedy else float(temperature),
            "top_p": 1.0 if greedy else float(self.top_p if config.top_p is None else config.top_p),
        }

    def _cancel(self, request_id: str) -> None:
        self._cb.cancel_request(request_id)
        router = self._cb.output_router
        with router._lock:
            router.result_handlers.pop(request_id, None)

    def generate_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str, response_parser: Any = None
    ) -> tuple[Any, Any]:
        """Streams an answer, up to the first stop text."""
        self._check_alive(request_id)
        self._admit(inputs["input_ids"], gen_config, request_id)
        queue, streamer = super().generate_streaming(model, processor, inputs, gen_config, request_id, response_parser)
        made: Any = streamer
        made.cancel = lambda: self._cancel(request_id)
        if stops := gen_config.stop_strings:
            self._stop(made, processor, [stops] if isinstance(stops, str) else stops, gen_config)
        return queue, made

    def _stop(self, streamer: Any, tokenizer: Any, stops: list[str], config: Any) -> None:
        """Ends a stream before the first stop text."""
        loop, ended, end = asyncio.get_running_loop(), False, streamer.end

        def finish() -> None:
            nonlocal ended
            if ended:
                return
            ended, rest = True, stream.rest()
            if rest is not None:
                parser = streamer._parser
                for item in [rest] if parser is None else response_events_to_chunks(parser.feed(rest)):
                    streamer._queue.put_nowait(item)
            end()

        def stop() -> None:
            streamer.cancel()
            # Otherwise an answer of exactly so many tokens would be told as ended by its length.
            config.max_new_tokens = None
            # The text before the stop text is put into the queue first.
            loop.call_soon(finish)

        stream = StopStream(streamer._decode_stream, tokenizer, stops, stop)
        streamer._decode_stream, streamer.end = stream, finish

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str
    ) -> tuple[str, int, list[int]]:
        """Generates an answer, up to the first stop text; it is cancelled when its client goes away."""
        try:
            if not gen_config.stop_strings:
                self._check_alive(request_id)
                self._admit(inputs["input_ids"], gen_config, request_id)
                return await super().generate_non_streaming(model, processor, inputs, gen_config, request_id)
            queue, streamer = self.generate_streaming(model, processor, inputs, gen_config, request_id)
            while (item := await queue.get()) is not None:
                if isinstance(item, _StreamError):
                    raise RuntimeError(f"generation failed for {request_id}: {item.msg}")
            stream = streamer._decode_stream
            return stream.text, len(inputs["input_ids"]), stream.tokens()
        except asyncio.CancelledError:
            self._cancel(request_id)
            raise


class Obeying:
    """Handlers of Transformers' server that obey a request in all its fields, or refuse it."""

    endpoint: str
    tokenizer: Any
    answers: Answers

    async def handle_request(self, body: dict[str, Any], request_id: str) -> Any:
        """Checks a request's fields, and answers it.

        Raises:
            RefusedRequest: with the name of the field that cannot be obeyed.
        """
        own: Any = self
        try:
            check_fields(self.endpoint, body, own.model_manager.force_model)
            if "seed" in body and body.get("temperature", self.answers.temperature) >= GREEDY:
                raise RefusedRequest(
                    "seed", got(body["seed"], "none but with temperature 0: requests share a generator")
                )
            if body.get("tools") and "tools" not in str(self.tokenizer.chat_template):
                raise RefusedRequest("tools", got(body["tools"], "none, since the chat template takes no tools"))
            self.answers.check_length(len(json.dumps(body[PROMPTS[self.endpoint]], ensure_ascii=False)), self.tokenizer)
            # OpenAI's default; Transformers streams responses.
            body.setdefault("stream", False)
            parent: Any = super()
            return await parent.handle_request(body, request_id)
        except BadPrompt as error:
            raise RefusedRequest(PROMPTS[self.endpoint], str(error)) from error
        except LongAnswer as error:
            raise RefusedRequest(next(name for name in LENGTHS if name in body), str(error)) from error
        except RecursionError as error:
            raise RefusedRequest(PROMPTS[self.endpoint], "the request is nested too deeply.") from error

    def _build_generation_config(self, body: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        parent: Any = super()
        config = parent._build_generation_config(body, *args, **kwargs)
        # None stands for the model's, and for what there is room for.
        config.temperature, config.top_p = body.get("temperature"), body.get("top_p")
        if not any(name in body for name in LENGTHS):
            config.max_new_tokens = None
        return config

    def _normalize_input(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        """Messages of a response's input; Transformers takes a list whose first item has no role for texts alone."""
        parent: Any = super()
        items = body["input"]
        if isinstance(items, str) or "role" in items[0] or items[0].get("type") in TEXT_PARTS:
            return parent._normalize_input(body)
        messages = parent._normalize_input({**body, "input": [{"role": "user", "content": ""}, *items]})
        # It comes behind the instructions.
        del messages[1 if body.get("instructions") else 0]
        return messages

    def get_processor_inputs_from_messages(self, messages: list[dict[str, Any]], modality: Any) -> list[dict[str, Any]]:
        """Messages for the chat template, with fields that Transformers leaves out."""
        parent: Any = super()
        made = parent.get_processor_inputs_from_messages(messages, modality)
        for message, one in zip(messages, made, strict=True):
            one |= {name: message[name] for name in ("name", "reasoning_content") if message.get(name)}
        return made


def _check_address(host: str, port: int) -> None:
    """Raises OSError if no server can listen there; weights take minutes to load."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            tried.bind(address)
    except (OSError, UnicodeError) as error:
        raise OSError(
            f"port: got {host}:{port}, where no server can listen ({error}); choose another --port or --host."
        ) from None


class EndWithClient:
    """Middleware that cancels the work on a request whose client has gone."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Runs the app beside a task that listens to the client."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        heard: asyncio.Queue[Any] = asyncio.Queue()
        work = asyncio.ensure_future(self._app(scope, heard.get, send))

        async def listen() -> None:
            while True:
                message = await receive()
                heard.put_nowait(message)
                if message["type"] == "http.disconnect":
                    work.cancel()
                    return

        listener = asyncio.ensure_future(listen())
        try:
            await asyncio.wait([work])
        finally:
            listener.cancel()
            if not work.done():
                work.cancel()
        if not work.cancelled():
            work.result()


class Server:
    """A server of one model, in a thread of its own."""

    def __init__(
        self,
        source: Source,
        name: str,
        scheme: Scheme | None,
        device: torch.device,
        dtype: torch.dtype | None = None,
        *,
        host: str = "localhost",
        port: int = 8000,
        requests: int | None = None,
        request_tokens: int | None = None,
        memory: int | str | None = None,
        **options: Any,
    ) -> None:
        """Loads the model and starts the server.

        Args:
            name: by which requests name it.
            dtype: None takes what `load_model` takes.
            host: to listen at.
            memory: most bytes of the cache, in place of a scheme; see `enable`.
            options: of Transformers' ``Serve``: cb_num_blocks, cb_max_batch_tokens, cb_max_memory_percent.

        Raises:
            ImportError: packages are missing.
            OSError: nothing can listen at this host and port.
            ValueError: a scheme, a budget or a model that does not go; see `enable`.
        """
        from fastapi.exceptions import RequestValidationError
        from transformers.cli.serve import Serve

        _check_address(host, port)
        # Weights take minutes to load, and may then turn out to be of 32 bits.
        checked(read_config(source), scheme, memory, dtype or torch.bfloat16, requests, request_tokens)
        model, tokenizer = load_model(source, device, dtype), load_tokenizer(source)
        self.serving: Serving = enable(model, scheme, requests=requests, request_tokens=request_tokens, memory=memory)
        self.url = f"http://{host}:{port}/v1"
        # It starts when all is in place: what is added to a server that runs may come too late.
        held = type("HeldServe", (Serve,), {"start_server": lambda _: None})
        self._serve = held(continuous_batching=True, non_blocking=True, host=host, port=port, **options)
        # One model, under the name that the user knows, for as long as the server runs.
        models: Any = self._serve._model_manager
        models.force_model, models.load_model_and_processor = name, lambda *_, **__: (model, tokenizer)
        self._obey(models.process_model_name(name), model, tokenizer)
        routes: Any = self._serve.server.config.app
        routes.router.routes[:] = [route for route in routes.router.routes if route.path in ROUTES]
        self._card = {"id": name, "object": "model", "created": int(time.time()), "owned_by": "hfkvq"}
        routes.add_api_route("/v1/models", lambda: {"object": "list", "data": [self._card]}, methods=["GET"])
        routes.add_api_route("/v1/models/{asked:path}", self._model, methods=["GET"])
        routes.add_api_route("/metrics", self._metrics, methods=["GET"])
        for kind in (ValueError, RequestValidationError):
            routes.add_exception_handler(kind, _refused)
        routes.add_middleware(EndWithClient)
        Serve.start_server(self._serve)
        while not self._serve.server.started:
            if not self._serve._thread.is_alive():
                raise OSError(f"port: got {host}:{port}, where no server can listen; choose another --port or --host.")
            time.sleep(0.05)

    def _obey(self, model_id: str, model: Any, tokenizer: Any) -> None:
        """Puts our engine's link and our checks into Transformers' server."""
        state: Any = self._serve._generation_state
        state._cb_model_id, state._cb_manager = model_id, Answers(model, state._cb_config)
        own = {"tokenizer": tokenizer, "answers": state._cb_manager}
        for endpoint, part in zip(ENDPOINTS, ("chat", "completion", "response"), strict=True):
            handler = getattr(self._serve, f"_{part}_handler")
            handler.__class__ = type("Obeying", (Obeying, type(handler)), own | {"endpoint": endpoint})
        render = tokenizer.apply_chat_template

        def apply_chat_template(*args: Any, **kwargs: Any) -> Any:
            try:
                return render(*args, **kwargs)
            except Exception as error:
                # Templates raise errors of their own, and stumble over messages that they do not know.
                raise BadPrompt(f"the chat template refuses it: {error}") from error

        tokenizer.apply_chat_template = apply_chat_template

    def _model(self, asked: str) -> Any:
        """The served model, as OpenAI's API describes one."""
        if asked != self._card["id"]:
            return _error(404, f"model: {got(asked, repr(self._card['id']))}", "model")
        return self._card

    def _metrics(self) -> Any:
        """Users, tokens, bytes and bits, as Prometheus reads them."""
        from fastapi.responses import PlainTextResponse

        lines = [f"hfkvq_{name} {value}" for name, value in self.serving.usage()._asdict().items()]
        return PlainTextResponse("\n".join(lines) + "\n")

    def wait(self) -> None:
        """Until the server ends."""
        self._serve._thread.join()

    def close(self) -> None:
        """Ends it."""
        self._serve.kill_server()


def _error(status: int, message: str, field: str | None) -> Any:
    from fastapi.responses import JSONResponse

    # JSON cannot hold halves of surrogate pairs.
    said = (text and text.encode("utf-8", "backslashreplace").decode("utf-8") for text in (message, field))
    error = dict(zip(("message", "param"), said, strict=True)) | {"type": "invalid_request_error", "code": None}
    return JSONResponse({"error": error}, status_code=status)


async def _refused(_: Any, error: Exception) -> Any:
    return _error(400, str(error) if isinstance(error, ValueError) else f"body: {error}", getattr(error, "field", None))
