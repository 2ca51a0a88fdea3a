"""Transformers' own server, OpenAI-compatible, over compressed pages."""

from __future__ import annotations

import time
from typing import Any

import torch

from hfkvq.caches import Scheme
from hfkvq.measure.models import Source, load_model, load_tokenizer, read_config

from .engine import Serving, check, enable


class Server:
    """A server of one model, in a thread of its own.

    Attributes:
        serving: the model, enabled.
        url: where it answers.
    """

    def __init__(
        self,
        source: Source,
        name: str,
        scheme: Scheme,
        device: torch.device,
        dtype: torch.dtype | None = None,
        *,
        host: str = "localhost",
        port: int = 8000,
        requests: int | None = None,
        request_tokens: int | None = None,
        **options: Any,
    ) -> None:
        """Loads the model and starts the server.

        Args:
            source: of the model.
            name: by which requests name it.
            scheme: whose pages.
            device: of the model.
            dtype: None takes what `load_model` takes.
            host: to listen at.
            port: likewise.
            requests: see `enable`.
            request_tokens: likewise.
            options: of Transformers' ``Serve``: cb_num_blocks, cb_max_batch_tokens, cb_max_memory_percent.

        Raises:
            ImportError: packages are missing.
            OSError: nothing can listen at this host and port.
            ValueError: a scheme or a model that does not go; see `enable`.
        """
        from transformers.cli.serve import Serve

        check(read_config(source), scheme)
        model, tokenizer = load_model(source, device, dtype), load_tokenizer(source)
        self.serving: Serving = enable(model, scheme, requests=requests, request_tokens=request_tokens)
        self.url = f"http://{host}:{port}/v1"
        # It starts when all is in place: what is added to a server that runs may come too late.
        held = type("HeldServe", (Serve,), {"start_server": lambda _: None})
        self._serve = held(continuous_batching=True, non_blocking=True, host=host, port=port, **options)
        # One model, under the name that the user knows, for as long as the server runs.
        models: Any = self._serve._model_manager
        models.force_model, models.load_model_and_processor = name, lambda *_, **__: (model, tokenizer)
        routes: Any = self._serve.server.config.app
        routes.add_api_route("/metrics", self._metrics, methods=["GET"])
        routes.add_exception_handler(ValueError, _refused)
        Serve.start_server(self._serve)
        while not self._serve.server.started:
            if not self._serve._thread.is_alive():
                raise OSError(f"port: got {host}:{port}, where no server can listen; choose another --port or --host.")
            time.sleep(0.05)

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


async def _refused(_: Any, error: Exception) -> Any:
    from fastapi.responses import JSONResponse

    return JSONResponse({"error": {"message": str(error), "type": "invalid_request_error"}}, status_code=400)
