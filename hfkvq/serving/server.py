"""Transformers' own server, OpenAI-compatible, over compressed pages."""

from __future__ import annotations

from typing import Any

from hfkvq.caches import Scheme
from hfkvq.measure.models import Source, read_config

from .engine import Serving, check, enable


class Server:
    """A server in a thread of its own, of one model.

    Attributes:
        serving: the model, enabled.
        url: where it answers.
    """

    def __init__(
        self, source: Source, name: str, scheme: Scheme, *, host: str = "localhost", port: int = 8000, **options: Any
    ) -> None:
        """Starts the server, and loads the model.

        Args:
            source: of the model.
            name: by which requests name it.
            scheme: whose pages.
            host: to listen at.
            port: likewise.
            options: of Transformers' ``Serve``: device, dtype, cb_num_blocks...

        Raises:
            ImportError: packages are missing.
            ValueError: a scheme or a model that does not go; see `enable`.
        """
        from transformers.cli.serve import Serve

        check(read_config(source), scheme)
        self._serve = Serve(continuous_batching=True, non_blocking=True, host=host, port=port, **options)
        manager = self._serve._model_manager
        try:
            loaded = manager.load_model_and_processor(manager.process_model_name(source.path))
            self.serving: Serving = enable(loaded[0], scheme)
        except BaseException:
            self.close()
            raise
        self.url = f"http://{host}:{port}/v1"
        # One model, under the name that the user knows, for as long as the server runs.
        manager.model_timeout, manager.force_model = -1, name
        manager.load_model_and_processor = lambda *_, **__: loaded
        routes: Any = self._serve.server.config.app
        routes.add_api_route("/metrics", self._metrics, methods=["GET"])

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
