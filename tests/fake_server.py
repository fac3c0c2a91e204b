"""A server that speaks OpenAI's chat protocol, in a thread of the test, with faults planted by request number.

with FakeServer(faults={0: 503, 1: "drop"}) as server:
    Server(server.url)...
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class FakeServer(ThreadingHTTPServer):
    """Answers the last turn in capitals. `faults`: number of a request -> what goes wrong with it: a status, or
    `drop` (the connection ends), `torn` (half of the JSON), `hang` (no answer), or a dict of the response's choice."""

    daemon_threads = True

    def __init__(self, faults: dict[int, Any] | None = None, *, models: tuple[str, ...] = ("tiny",), key: str = ""):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.faults, self.models, self.key = faults or {}, models, key
        self.poison: dict[str, int] = {}
        """Last turn -> the status that its question always gets."""
        self.together: threading.Barrier | None = None
        """The first requests are answered once so many of them are here."""
        self.extra_tokens = 0
        """What the server's template has more than the recipe's."""
        self.retry_after: str | None = None
        self.bodies: list[dict[str, Any]] = []
        self.asked: Counter[str] = Counter()
        self.under_way = self.most_under_way = 0
        self.count_tokens = lambda messages: 0
        self.lock = threading.Lock()
        self.over = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def __enter__(self) -> FakeServer:
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self.over.set()
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: FakeServer

    def log_message(self, format: str, *args: Any) -> None: ...

    def do_GET(self) -> None:
        if self.server.key and self.headers.get("Authorization") != f"Bearer {self.server.key}":
            self.reply(401, {"error": {"message": "no such key"}})
        elif self.path == "/v1/models":
            self.reply(200, {"data": [{"id": name, "max_model_len": 100} for name in self.server.models]})
        else:
            self.reply(404, {"detail": "Not Found"})

    def do_POST(self) -> None:
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = body["messages"][-1]["content"]
        with server.lock:
            number = len(server.bodies)
            fault = server.faults.get(number)
            server.bodies.append(body)
            server.asked[text] += 1
            server.under_way += 1
            server.most_under_way = max(server.most_under_way, server.under_way)
        try:
            if server.together is not None and number < server.together.parties:
                server.together.wait(20)
            self.answer(body, text, server.poison.get(text, fault))
        finally:
            with server.lock:
                server.under_way -= 1

    def answer(self, body: dict[str, Any], text: str, fault: Any) -> None:
        server = self.server
        if body["model"] not in server.models:
            return self.reply(404, {"error": {"message": f"The model `{body['model']}` does not exist."}})
        if isinstance(fault, int):
            return self.reply(fault, {"error": {"message": f"planted {fault}"}})
        if fault == "hang":
            server.over.wait(20)
        if fault in ("drop", "hang"):
            return self.connection.close()
        choice = {
            "message": {"content": text.upper()},
            "finish_reason": "stop",
            **(fault if isinstance(fault, dict) else {}),
        }
        tokens = server.count_tokens(body["messages"]) + server.extra_tokens
        usage = {"prompt_tokens": tokens, "completion_tokens": 3}
        self.reply(200, {"choices": [choice], "usage": usage}, half=fault == "torn")

    def reply(self, status: int, content: dict[str, Any], half: bool = False) -> None:
        data = json.dumps(content).encode()
        data = data[: len(data) // 2] if half else data
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        if status != 200 and self.server.retry_after is not None:
            self.send_header("Retry-After", self.server.retry_after)
        self.end_headers()
        self.wfile.write(data)
