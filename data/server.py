"""Questions answered by a server that speaks OpenAI's chat protocol: vLLM, SGLang, `transformers serve`.

    server = Server("http://localhost:8000", concurrency=16, max_new_tokens=512, temperature=0.0)
    server.connect()                                    # the model that it serves, or one sentence
    distill(prompts, server.answer, renderer, "answers.jsonl", settings=...)

Every wait has an end. What may pass (no connection, a broken answer, 408, 429, 5xx) is tried again, later and later, as
long as `Retry-After` says or twice the wait before; a question that still fails is counted and left for the next run,
and three of them in a row end this one. $OPENAI_API_KEY is sent where it is set.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import Any

import httpx2 as httpx

from headstart.data.distill import Answer, Question
from headstart.data.messages import SkipRow
from headstart.errors import DataError, warn

CONNECT_SECONDS = 10.0
TRIES = 7
LONGEST_WAIT = 300.0
"""Seconds; also where a server asks for more."""
FAILURES_IN_A_ROW = 3
MAY_PASS = {408, 425, 429}


class _TryAgain(Exception):
    """The answer may come if the question is asked again. seconds: how long the server wants to be left alone."""

    def __init__(self, reason: str, seconds: int | float | None = None):
        super().__init__(reason)
        self.seconds = seconds


@dataclass
class Server:
    """One server and what it is asked for; see the top of the file."""

    url: str
    """With or without the `/v1` at its end."""
    model: str | None = None
    """As the server calls it; None until `connect`: the one that it serves."""
    concurrency: int = 16
    """Questions that are with the server at once."""
    max_new_tokens: int = 512
    temperature: int | float = 0.0
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the chat template, as the recipe has them."""
    timeout: int | float = 600.0
    """Seconds that one answer may take, waiting for its turn on the server included."""
    first_wait: int | float = 1.0
    """Seconds before the second try."""
    models: list[str] = field(default_factory=list)
    """What the server says that it serves; `transformers serve` names what was downloaded, and serves more."""
    compared: int = 0
    """Answers that came with the number of tokens of their prompt."""
    differing: int = 0
    """Those of them where the recipe's template makes another number of it."""
    _answered: int = 0
    _failures: int = 0
    _refusals: int = 0

    def __post_init__(self) -> None:
        base = self.url.rstrip("/")
        self.url = base if base.endswith("/v1") else f"{base}/v1"

    def connect(self) -> int | None:
        """Asks for the models, once and with a time limit, and settles which to use.

        Returns how many tokens prompt and answer together may have, where the server says so. Raises DataError where
        there is no such server, it wants a key, or the model isn't clear.
        """
        try:
            response = httpx.get(f"{self.url}/models", headers=_headers(), timeout=CONNECT_SECONDS)
            served = {str(entry["id"]): entry for entry in response.json()["data"]} if response.is_success else {}
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise DataError(
                f"No server answers at {self.url} ({_named(error)}); start it, or give its address with --server."
            ) from None
        except (ValueError, KeyError, TypeError):
            raise self._no_such_api("its list of models is none") from None
        self._refuse_stranger(response)
        if not response.is_success:
            raise self._no_such_api(f"GET /models gives {response.status_code}")
        self.models = sorted(served)
        if self.model is None:
            if len(served) != 1:
                raise DataError(f"Which model is to answer? {self._listed()}; say which with --model.")
            self.model = self.models[0]
        most = served.get(self.model, {}).get("max_model_len")
        return most if isinstance(most, int) else None

    def answer(self, questions: Iterator[Question]) -> Iterator[Answer]:
        """What `data/distill.py` calls: answers as they come, while at most `concurrency` questions are under way."""
        with asyncio.Runner() as runner:
            client = httpx.AsyncClient(
                base_url=self.url,
                headers=_headers(),
                timeout=httpx.Timeout(None, connect=CONNECT_SECONDS),  # `timeout` is on the whole, in _ask
                limits=httpx.Limits(max_connections=self.concurrency),
            )
            pending: set[asyncio.Task[Answer]] = set()
            try:
                while True:
                    while len(pending) < self.concurrency and (question := next(questions, None)) is not None:
                        pending.add(runner.get_loop().create_task(self._ask(client, question)))
                    if not pending:
                        return
                    done, pending = runner.run(_first_of(pending))
                    failed = [error for task in done if (error := task.exception())]
                    yield from (task.result() for task in done if not task.exception())
                    if failed:
                        raise failed[0]
            finally:  # also where the caller has had enough: nothing is waited for
                runner.run(_drop(pending))
                runner.run(client.aclose())

    def summary(self) -> str | None:
        """A sentence where prompts were read otherwise than the recipe renders them; None where nothing was found."""
        if not self.differing:
            return None
        return (
            f"warning: {self.differing} of {self.compared} prompts have another number of tokens on the server than in "
            "the recipe's template; heads would learn from other contexts than they meet. Check the model, its chat "
            "template, data.chat.arguments and data.chat.system"
        )

    async def _ask(self, client: httpx.AsyncClient, question: Question) -> Answer:
        fault, wait = "", self.first_wait
        for tried in range(TRIES):
            try:
                async with asyncio.timeout(self.timeout):
                    response = await client.post("chat/completions", json=self._body(question))
                answer = self._read(question, response)
            except _TryAgain as again:
                fault, seconds = str(again), again.seconds
            except TimeoutError:
                fault, seconds = f"no answer within {self.timeout:g} s", None
            except httpx.HTTPError as error:
                fault, seconds = _named(error), None
            else:
                self._answered += answer.refused is None
                self._failures = 0
                return answer
            if tried < TRIES - 1:
                await asyncio.sleep(min(LONGEST_WAIT, wait if seconds is None else seconds))
                wait *= 2 + question.seed / 2**32  # not all of them at the same moment
        self._failures += 1
        if self._failures >= FAILURES_IN_A_ROW or not self._answered:
            raise DataError(
                f"The server at {self.url} doesn't answer ({fault}), after {TRIES} tries{self._unlisted()}; what was "
                "answered is kept: once it is well, the same command goes on."
            )
        return _without(question, SkipRow("the server failed", f"{fault}; run the same command again"))

    def _body(self, question: Question) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.model,
            "messages": list(question.messages),
            "max_tokens": self.max_new_tokens,
            "temperature": self.temperature,
            "top_p": 1.0,  # some servers take another from the model's generation_config.json
            "seed": question.seed,
        }
        if self.template_arguments:
            body["chat_template_kwargs"] = dict(self.template_arguments)
        return body

    def _read(self, question: Question, response: httpx.Response) -> Answer:
        """The answer in a response; raises _TryAgain, or DataError where no question would be answered."""
        status = response.status_code
        if status in MAY_PASS or status >= 500:
            raise _TryAgain(f"{status}: {_message(response)}", retry_after(response))
        self._refuse_stranger(response)
        if status == 404:
            raise DataError(
                f"The server at {self.url} has no model {self.model} ({_message(response)}). {self._listed()}."
            )
        if status != 200:
            self._refusals += 1
            if not self._answered and self._refusals >= FAILURES_IN_A_ROW:
                raise DataError(
                    f"The server at {self.url} refuses what it is asked ({status}: {_message(response)})"
                    f"{self._unlisted()}."
                )
            return _without(question, SkipRow("the server refuses it", f"{status}: {_message(response)}"))
        try:
            content = response.json()
            choice = content["choices"][0]
            message, reason, usage = choice["message"], choice["finish_reason"], content.get("usage") or {}
            text, thought = (
                str(message.get(key) or "").encode(errors="replace").decode()
                for key in ("content", "reasoning_content")
            )
        except (ValueError, LookupError, TypeError, AttributeError):
            raise _TryAgain(f"the answer is no chat completion: {response.text[:80]!r}") from None
        if reason not in ("stop", "length"):
            return _without(question, SkipRow(f"the server ended the answer with {reason!r}, not stop or length"))
        self._compare(question, usage.get("prompt_tokens"))
        cut = reason == "length"
        return Answer(
            question.request_id,
            text.rstrip("\ufffd") if cut else text,  # a cut can fall inside a character
            cut,
            num_tokens=usage.get("completion_tokens") or 0,
            reasoning=thought,
        )

    def _compare(self, question: Question, num_tokens: int | None) -> None:
        """Whether the server reads the prompt that the recipe's template makes, as far as their lengths tell."""
        if not num_tokens:
            return
        self.compared += 1
        if num_tokens != len(question.prompt_ids):
            self.differing += 1
            if self.differing == 1:
                warn(
                    f"the server reads {num_tokens} tokens for the prompt {question.request_id}, the recipe's template "
                    f"makes {len(question.prompt_ids)} of it; its model or chat template is another"
                )

    def _refuse_stranger(self, response: httpx.Response) -> None:
        if response.status_code in (401, 403):
            raise DataError(
                f"The server at {self.url} wants another key ({response.status_code}: {_message(response)}); put it in "
                "the environment variable OPENAI_API_KEY."
            )

    def _no_such_api(self, found: str) -> DataError:
        return DataError(
            f"{self.url} doesn't speak the OpenAI protocol ({found}); give the address of a server that does, such as "
            "http://localhost:8000/v1."
        )

    def _listed(self) -> str:
        return f"It lists {', '.join(self.models)}" if self.models else "It lists no models"

    def _unlisted(self) -> str:
        return "" if self.model in self.models else f", and doesn't list {self.model} ({self._listed()})"


def _headers() -> dict[str, str]:
    key = os.environ.get("OPENAI_API_KEY")
    return {"Authorization": f"Bearer {key}"} if key else {}


async def _first_of(pending: set[asyncio.Task[Answer]]) -> tuple[set[asyncio.Task[Answer]], set[asyncio.Task[Answer]]]:
    return await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)


async def _drop(tasks: set[asyncio.Task[Answer]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _without(question: Question, why: SkipRow) -> Answer:
    return Answer(question.request_id, "", cut=False, refused=why)


def _message(response: httpx.Response) -> str:
    """What the server says about an error, on one line."""
    try:
        content = response.json()
        error = content.get("error", content)
        text = error.get("message") or error.get("detail") if isinstance(error, Mapping) else error
    except (ValueError, AttributeError):
        text = None
    return " ".join(str(text or response.text or response.reason_phrase).split())[:200]


def retry_after(response: httpx.Response) -> float | None:
    """Seconds, from either form of the header: a number or a date."""
    value = response.headers.get("Retry-After", "")
    try:
        return max(
            0.0, float(value) if value.strip().isdecimal() else parsedate_to_datetime(value).timestamp() - time.time()
        )
    except ValueError:
        return None


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
