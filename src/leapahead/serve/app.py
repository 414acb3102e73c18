"""The application: paths, and errors of every kind as OpenAI's error object."""

from __future__ import annotations

import asyncio
import codecs
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from json import detect_encoding
from threading import Lock
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic_core import from_json
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp

from leapahead import __version__
from leapahead.api import LLM
from leapahead.asynchronous import AsyncLLM
from leapahead.core.errors import LeapaheadError
from leapahead.engine.preemption import reopens
from leapahead.serve import anthropic, bounds, chat, completions, errors, logs, page, responses
from leapahead.serve.anthropic_replies import MessageReply, TokenCount
from leapahead.serve.anthropic_schema import CountTokensRequest, MessagesRequest
from leapahead.serve.errors import ApiError, ErrorReply
from leapahead.serve.gate import Gate
from leapahead.serve.keys import Keys
from leapahead.serve.prompts import Texts
from leapahead.serve.replies import (
    ChatReply,
    CompletionReply,
    DetokenizeReply,
    Health,
    Load,
    Model,
    Models,
    TokenizeReply,
    Version,
)
from leapahead.serve.responses_replies import ResponseReply
from leapahead.serve.responses_schema import ResponsesRequest
from leapahead.serve.schema import ChatRequest, CompletionRequest
from leapahead.serve.service import Service
from leapahead.serve.settings import Limits, Settings
from leapahead.serve.streaming import GONE, ClientGone, log_fault
from leapahead.serve.tokenization import DetokenizeRequest, TokenizeMessages, TokenizeRequest
from leapahead.serve.worker import NO_KEY, Worker

EVENT = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}  # of a stream
EVENTS = {"text/event-stream": {"schema": EVENT}}


class Application(FastAPI):
    """FastAPI without its own kind of errors, which are answered as all others.

    Attributes:
        service: whose limits its schema tells.
    """

    service: Service
    _making = Lock()  # of the schema: several threads may ask for it

    def openapi(self) -> dict[str, Any]:
        with self._making:
            if not self.openapi_schema:
                schema = super().openapi()
                for path in schema["paths"].values():
                    for operation in path.values():
                        operation["responses"].pop("422", None)
                formats, limits = self.service.formats, self.service.settings.limits
                has_tools = formats.tools is not None and formats.has_grammars
                bounds.apply(schema, limits, self.service.texts.info, formats.has_grammars, has_tools)
            return super().openapi()


class JsonRequest(Request):
    """A request whose body is strict JSON: UTF-8, no NaN, no lone surrogates, at most some 200 levels deep.

    A byte order mark before it is left out: editors and shells of Windows write one into files.
    """

    async def body(self) -> bytes:
        try:
            return await super().body()
        except ClientDisconnect:  # nobody reads this; it is for the log
            raise ApiError(GONE, "the client has closed the connection") from None

    async def json(self) -> Any:
        body = await self.body()
        try:
            return from_json(body.removeprefix(codecs.BOM_UTF8), allow_inf_nan=False)
        except ValueError as error:
            encoding = detect_encoding(body)
            message = f"the body of the request is not valid JSON: {error}"
            if not encoding.startswith("utf-8"):
                message = f"the body of the request is encoded in {encoding.upper()}; send it in UTF-8"
            raise ApiError(400, message, code="invalid_json") from None


class JsonRoute(APIRoute):
    """A route that reads bodies as `JsonRequest` does."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def read(request: Request) -> Response:
            kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
            if request.method == "POST" and kind != "application/json":
                raise ApiError(
                    415,
                    f"the content type {kind[:60]!r} is not possible; send JSON with 'Content-Type: application/json'",
                    code="unsupported_media_type",
                )
            coding = request.headers.get("content-encoding", "").strip().lower()
            if coding not in ("", "identity"):
                raise ApiError(
                    415,
                    f"the content encoding {coding[:60]!r} is not possible; send the body uncompressed, without "
                    "'Content-Encoding'",
                    code="unsupported_media_type",
                )
            return await handle(JsonRequest(request.scope, request.receive))

        return read


def failures(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The errors of a path, for the OpenAPI schema."""
    return {status: {"model": ErrorReply} for status in statuses}


WITH_BODY = failures(400, 401, 404, 408, 413, 415, 500, 503)
DECODING = failures(400, 401, 404, 408, 413, 415, 429, 500, 503, 504)


def make(llm: LLM, settings: Settings) -> tuple[ASGIApp, Worker]:
    """The application of a loaded model, and its worker.

    When the application ends, the drafter caches are saved and the model is closed.
    """
    keys, worker = Keys(settings.keys), Worker(AsyncLLM(llm), settings)
    worker.open_caches([NO_KEY, *keys.ids])
    service = Service(worker, Texts(llm, settings.limits.prompt_tokens), settings)
    tell_of_waiting(llm, settings.limits)

    @asynccontextmanager
    async def life(_: FastAPI) -> AsyncIterator[None]:
        yield
        await worker.close()

    app = Application(
        title="leapahead",
        version=__version__,
        description="An OpenAI-compatible API: the text of plain decoding, with several tokens per forward pass.",
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        lifespan=life,
        strict_content_type=False,
        redirect_slashes=False,
    )
    app.service = service
    app.include_router(generating(service))
    app.include_router(tokenizing(service))
    app.include_router(describing(service))
    app.include_router(page.showing())

    @app.get("/openapi.json", include_in_schema=False)
    async def schema() -> Response:
        return await asyncio.to_thread(lambda: JSONResponse(app.openapi()))  # compiles the vocabulary, the first time

    _handle_errors(app)
    gate: ASGIApp = Gate(app, keys, settings.limits)
    if settings.cors:
        gate = CORSMiddleware(
            gate,
            allow_origins=settings.cors,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id"],
        )
    return gate, worker


def tell_of_waiting(llm: LLM, limits: Limits) -> None:
    """Logs that chats may wait for others, where the KV cache has no room for as many as are decoded together."""
    info, most = llm.target.info, llm.engine.max_batch
    room = info.cache_tokens // info.context_length
    if reopens(llm.target):  # they reserve little, and are preempted
        return
    if info.cache_tokens and room < most and limits.max_tokens is None and limits.default_max_tokens is None:
        logs.event(
            "kv_cache_reserved",
            message=f"a chat that names no max_tokens reserves {info.context_length} tokens of the KV cache, which has "
            f"{info.cache_tokens}, so fewer than --max-batch {most} such chats are decoded together and further "
            "requests wait; --default-max-tokens bounds them",
        )


def generating(service: Service) -> APIRouter:
    """The paths that decode."""
    router = APIRouter(route_class=JsonRoute)

    @router.post("/completions", include_in_schema=False)
    @router.post("/v1/completions", responses={200: {"model": CompletionReply, "content": EVENTS}, **DECODING})
    async def complete(request: Request, body: CompletionRequest) -> Response:
        """Completes prompts."""
        return await completions.complete(service, request, body)

    @router.post("/chat/completions", include_in_schema=False)
    @router.post("/v1/chat/completions", responses={200: {"model": ChatReply, "content": EVENTS}, **DECODING})
    async def answer(request: Request, body: ChatRequest) -> Response:
        """Answers a chat."""
        return await chat.complete(service, request, body)

    @router.post("/responses", include_in_schema=False)
    @router.post("/v1/responses", responses={200: {"model": ResponseReply, "content": EVENTS}, **DECODING})
    async def respond(request: Request, body: ResponsesRequest) -> Response:
        """Answers a chat, in the form of OpenAI's Responses API. Nothing is kept."""
        return await responses.respond(service, request, body)

    @router.post("/v1/messages", responses={200: {"model": MessageReply, "content": EVENTS}, **DECODING})
    async def message(request: Request, body: MessagesRequest) -> Response:
        """Answers a chat, in the form of Anthropic's Messages API."""
        return await anthropic.respond(service, request, body)

    return router


def describing(service: Service) -> APIRouter:
    """The names of the model, and the state of the server."""
    router, texts, settings = APIRouter(route_class=JsonRoute), service.texts, service.settings

    def model(name: str) -> Model:
        return Model(id=name, created=service.created, root=texts.info.name, max_model_len=texts.info.context_length)

    @router.get("/models", include_in_schema=False)
    @router.get("/v1/models", responses=failures(401))
    async def models() -> Models:
        """The names of the model."""
        return Models(data=[model(name) for name in settings.names])

    @router.get("/models/{name:path}", include_in_schema=False)
    @router.get("/v1/models/{name:path}", responses=failures(401, 404))
    async def one_model(name: str) -> Model:
        """One name of the model."""
        return model(service.name(name))

    @router.get("/ping", include_in_schema=False)
    @router.get("/health", responses=failures(503))
    async def health() -> Health:
        """Whether requests are taken."""
        if service.worker.draining:
            raise ApiError(503, "the server is about to stop", code="shutting_down")
        return Health()

    @router.get("/version")
    async def version() -> Version:
        """The version of leapahead."""
        return Version()

    @router.get("/load")
    async def load() -> Load:
        """How many texts are waiting or decoded."""
        return Load(server_load=service.worker.pending)

    @router.get("/metrics", responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}})
    async def metrics() -> Response:
        """Metrics in the format of Prometheus."""
        return Response(service.worker.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    return router


def tokenizing(service: Service) -> APIRouter:
    """The paths that turn text into token ids and back."""
    router, texts = APIRouter(route_class=JsonRoute), service.texts

    @router.post("/tokenize", responses=WITH_BODY)
    async def tokenize(body: TokenizeRequest) -> TokenizeReply:
        """The token ids of a prompt or a chat."""
        service.name(body.model)

        def ids() -> list[int]:
            if isinstance(body, TokenizeMessages):
                service.formats.check(body.tools)
                return texts.chat_of_any_length(body)
            return texts.ids(body.prompt, body.add_special_tokens)

        found = await asyncio.to_thread(ids)
        strings = texts.strings(found) if body.return_token_strs else None
        return TokenizeReply(
            count=len(found), max_model_len=texts.info.context_length, tokens=found, token_strs=strings
        )

    @router.post("/v1/messages/count_tokens", responses=WITH_BODY)
    async def count_tokens(body: CountTokensRequest) -> TokenCount:
        """The number of tokens of a chat, in the form of Anthropic's Messages API."""
        return await anthropic.count(service, body)

    @router.post("/detokenize", responses=WITH_BODY)
    async def detokenize(body: DetokenizeRequest) -> DetokenizeReply:
        """The text of token ids."""
        service.name(body.model)
        return DetokenizeReply(prompt=await asyncio.to_thread(texts.checked_text, body.tokens))

    if service.settings.tokenizer_info:

        @router.get("/tokenizer_info", responses=failures(401))
        async def tokenizer_info() -> dict[str, Any]:
            """What the tokenizer was made with."""
            return await asyncio.to_thread(texts.tokenizer_info)

    return router


def _handle_errors(app: FastAPI) -> None:
    async def validation(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return errors.of_validation(error.errors()).response()

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if isinstance(error, ApiError):
            return error.response()
        if error.status_code == 404:
            message = f"there is nothing at {request.method} {request.url.path[:200]}"
            return ApiError(404, message, code="not_found").response()
        if error.status_code == 405:
            message = f"{request.url.path[:200]} does not take the method {request.method}"
            return ApiError(405, message, code="method_not_allowed", headers=error.headers).response()
        return ApiError(error.status_code, error.detail, headers=error.headers).response()

    async def failed(request: Request, error: Exception) -> Response:
        known = errors.of(error)
        log_fault(known, error, request.state.request_id)
        return known.response()

    async def unknown(_: Request, error: Exception) -> Response:
        return errors.of(error).response()  # raised once more, to the gate, which logs it

    async def gone(_: Request, error: Exception) -> Response:
        return Response(status_code=GONE)

    app.add_exception_handler(LeapaheadError, failed)
    app.add_exception_handler(Exception, unknown)
    app.add_exception_handler(ClientGone, gone)
    app.add_exception_handler(RequestValidationError, validation)
    app.add_exception_handler(HTTPException, http)
