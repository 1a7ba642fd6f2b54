"""Answer requests for text by OpenAI's API: completions and chats, whole or streamed.

`app` calls `decode` and `answer` for ``/v1/completions`` and ``/v1/chat/completions``, `listed` and `described` for ``/v1/models``; `scheduler`
generates. `embeddings` reads its requests by `read_json`. Fields and the form of errors are OpenAI's and stay; other fields are refused.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import PydanticCustomError
from starlette.types import Receive, Scope, Send

from arclight.fabric.extras import require
from arclight.serve.admission import Refusal, Turn, failure, one_sentence, size_text
from arclight.serve.settings import Limits
from arclight.serve.tasks.scheduler import Generation, Piece, Scheduler
from arclight.text.data.tokenizer import Tokenizer, TokenizerError
from arclight.text.generation import GenerationSettings, encode_prompt

MAX_ERRORS = 100
"""Most errors of a request of which the first is named; of more only their number is."""


def whole(value: Any) -> Any:
    """Return 3 for 3.0, which JSON Schema counts among the integers."""
    return int(value) if type(value) is float and value.is_integer() else value


def boolean(value: Any) -> Any:
    """Refuse 0 and 0.0, which equal False and would pass for it."""
    if value == 0 and value is not False:
        raise PydanticCustomError("bool_type", "Input should be a valid boolean")
    return value


Off = Annotated[Literal[False], BeforeValidator(boolean)]
AtLeastOne = Annotated[int, Field(ge=1), BeforeValidator(whole)]
One = Annotated[int, Field(ge=1, le=1), BeforeValidator(whole)]
Seed = Annotated[int, Field(ge=-(2**63), le=2**63 - 1), BeforeValidator(whole)]
StopText = Annotated[str, Field(min_length=1, max_length=256)]
# the first wrong element ends a list: a million of them, each with an error of its own, would take gigabytes
Texts = Annotated[list[str], Field(fail_fast=True)]
Tokens = Annotated[list[int], Field(fail_fast=True)]
_FORM = re.compile(r"str|constrained-str|(list|function-\w+)\[.*\]")
"""Pydantic's names of the forms of a field, which stand among the names of fields in an error's place; no field is called so."""
RequestKind = TypeVar("RequestKind", bound=BaseModel)


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    include_usage: bool = False


class TextRequest(BaseModel):
    """Fields of completion and chat requests.

    A field that is not supported and would change an answer takes its neutral value only.
    """

    model_config = ConfigDict(extra="forbid", strict=True)
    model: str
    max_tokens: AtLeastOne | None = None
    temperature: float | None = Field(1.0, ge=0, le=2)
    top_p: float | None = Field(1.0, gt=0, le=1)
    stop: StopText | Annotated[list[StopText], Field(max_length=16, fail_fast=True)] | None = None
    seed: Seed | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    user: str | None = None
    n: One | None = None
    presence_penalty: Annotated[float, Field(ge=0, le=0)] | None = None
    frequency_penalty: Annotated[float, Field(ge=0, le=0)] | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = None

    @property
    def length_field(self) -> str:
        """The field that bounds an answer's tokens."""
        return "max_tokens"

    def settings(self) -> GenerationSettings:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        temperature = 1.0 if self.temperature is None else self.temperature
        top_p = None if self.top_p in (None, 1.0) else self.top_p
        return GenerationSettings(temperature=temperature, top_p=top_p, stop=stop, seed=self.seed)


class CompletionRequest(TextRequest):
    prompt: str | Texts | Tokens | Annotated[list[Tokens], Field(fail_fast=True)]
    logprobs: None = None
    echo: Off | None = None
    best_of: One | None = None
    suffix: None = None

    def prompts(self, tokenizer: Tokenizer) -> list[list[int]]:
        several = isinstance(self.prompt, list) and not (self.prompt and isinstance(self.prompt[0], int))
        prompts: Any = self.prompt if several else [self.prompt]
        if not prompts:
            raise ValueError("the list of prompts is empty: send a text or a list of them")
        return [encode_prompt(prompt, tokenizer, False) for prompt in prompts]

    def new_tokens(self, longest: int, positions: int) -> int:
        """Return the most tokens of an answer, by default 16, as OpenAI's API has it."""
        return self.max_tokens or min(16, max(1, positions - longest))


class TextPart(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    type: Literal["text"]
    text: str


class Message(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    role: str = Field(max_length=64)
    content: str | Annotated[list[TextPart], Field(fail_fast=True)]
    name: str | None = None


class ChatRequest(TextRequest):
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: AtLeastOne | None = None
    logprobs: Off | None = None

    @property
    def length_field(self) -> str:
        return "max_tokens" if self.max_completion_tokens is None and self.max_tokens else "max_completion_tokens"

    def prompts(self, tokenizer: Tokenizer) -> list[list[int]]:
        text = rendered(tokenizer, self.messages)
        return [encode_prompt(tokenizer.encode(text, specials=True), tokenizer, False)]

    def new_tokens(self, longest: int, positions: int) -> int:
        """Return the most tokens of an answer, by default all that the model has positions for."""
        return self.max_completion_tokens or self.max_tokens or max(1, positions - longest)


def rendered(tokenizer: Tokenizer, messages: list[Message]) -> str:
    """Render a chat by the tokenizer's template, up to where the answer begins.

    Raises Refusal 400 without a template, or if it fails on the messages.
    """
    template = tokenizer.chat_templates.get("default")
    if template is None:
        raise Refusal(400, "The model has no chat template; send the text to POST /v1/completions.")
    jinja2 = require("jinja2", extra="serve")
    sandbox = require("jinja2.sandbox", extra="serve")

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = raise_exception
    names = {
        f"{role}_token": "" if token is None else tokenizer.names[token]
        for role, token in (("bos", tokenizer.bos), ("eos", tokenizer.eos), ("pad", tokenizer.pad))
    }
    spoken = [
        {
            "role": message.role,
            "content": message.content
            if isinstance(message.content, str)
            else "".join(part.text for part in message.content),
        }
        for message in messages
    ]
    try:
        text: str = environment.from_string(template).render(messages=spoken, add_generation_prompt=True, **names)
    except (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError) as error:
        # such as of roles that do not alternate, or of a text that the template takes for something else
        raise Refusal(400, f"The model's chat template refuses these messages: {error}.") from None
    return text


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """A request for text that its model can answer."""

    body: CompletionRequest | ChatRequest
    scheduler: Scheduler
    prompts: list[list[int]]
    new: int


def decode(
    body: bytes, kind: type[CompletionRequest | ChatRequest], model: Callable[[str], Scheduler], limits: Limits
) -> GenerationRequest:
    """Decode a request.

    Raises Refusal 400 for what the model cannot answer, 404 for another model, 413 for long JSON.
    """
    parsed = read_json(body, kind, limits)
    scheduler = model(parsed.model)
    try:
        prompts = parsed.prompts(scheduler.tokenizer)
        new = parsed.new_tokens(max(map(len, prompts)), scheduler.run.max_positions)
        scheduler.check(prompts, new, parsed.length_field)
    except (ValueError, TokenizerError) as error:
        raise Refusal(400, one_sentence(error)) from None
    return GenerationRequest(body=parsed, scheduler=scheduler, prompts=prompts, new=new)


def read_json(
    body: bytes, kind: type[RequestKind], limits: Limits, sentence: Callable[[ValidationError], str] | None = None
) -> RequestKind:
    """Parse the request in a JSON body.

    Raises Refusal 413 for long JSON, and 400 with the ``sentence`` on wrong fields.
    """
    if len(body) > limits.json_bytes:
        raise Refusal(413, f"The request is larger than {size_text(limits.json_bytes)}; send less.")
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise Refusal(400, (sentence or wrong_field)(error)) from None


def wrong_field(error: ValidationError) -> str:
    """Return a sentence on the first wrong field, or on the number of very many."""
    if (count := error.error_count()) > MAX_ERRORS:
        return f"{count} fields of the request are wrong; GET /openapi.json describes it."
    errors = error.errors(include_url=False, include_context=False, include_input=False)
    first = errors[0]
    parts = [str(part) for part in first["loc"]]
    if (fork := next((at for at, part in enumerate(parts) if _FORM.fullmatch(part)), 0)) > 0:
        # pydantic has an error for each of the forms that a field may have
        place, forms = ".".join(parts[:fork])[:80], []
        for one in errors:
            inner = [str(part) for part in one["loc"]]
            if inner[:fork] == parts[:fork]:
                forms.append(" ".join([*inner[fork + 1 :], one["msg"].lower()[:200]]))
        return one_sentence(f"The field {place!r} has none of its forms: {', or '.join(dict.fromkeys(forms))}")
    place = ".".join(parts)[:80]
    if first["type"] == "extra_forbidden":
        return f"The field {place!r} is not supported; leave it out."
    return one_sentence(f"The field {place!r}: {first['msg'][:200]}" if place else first["msg"][:200])


class GenerationReply:
    """Collect the pieces of a request's texts, and write them in the form of the API.

    Pieces come from the scheduler's thread.
    """

    def __init__(self, request: GenerationRequest) -> None:
        self.request = request
        self.is_chat = isinstance(request.body, ChatRequest)
        self.id = f"{'chatcmpl' if self.is_chat else 'cmpl'}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self._pieces: asyncio.Queue[tuple[int, Piece]] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def collect(index: int) -> Callable[[Piece], None]:
            def on_piece(piece: Piece) -> None:
                loop.call_soon_threadsafe(self._pieces.put_nowait, (index, piece))

            return on_piece

        settings = request.body.settings()
        self.generations = [
            Generation(prompt, request.new, settings, collect(index)) for index, prompt in enumerate(request.prompts)
        ]
        self._tokens = [0] * len(self.generations)

    def cancel(self) -> None:
        """Generate no more."""
        for generation in self.generations:
            generation.cancel()

    async def pieces(self, turn: Turn) -> AsyncIterator[tuple[int, Piece]]:
        """Yield the pieces of all texts.

        Raises Refusal 503 if the first does not come before the deadline, 500 if the model fails.
        """
        left = len(self.generations)
        waiting: float | None = turn.left_s()
        while left:
            try:
                async with asyncio.timeout(waiting):
                    index, piece = await self._pieces.get()
            except TimeoutError:
                wait = self.request.scheduler.retry_after_s()
                raise Refusal(
                    503, f"No text was begun before the deadline; send the request again in {wait} s.",
                    headers={"Retry-After": str(wait)},
                ) from None  # fmt: skip
            waiting = None
            if piece.finish == "error":
                raise Refusal(500, "The model failed on this text; the server's log has the details.")
            left -= piece.finish is not None
            self._tokens[index] = piece.tokens
            yield index, piece

    def usage(self) -> dict[str, int]:
        prompt, written = sum(map(len, self.request.prompts)), sum(self._tokens)
        return {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written}

    async def whole(self, turn: Turn) -> JSONResponse:
        """Return the response once all texts have ended."""
        texts = [""] * len(self.generations)
        finish: list[str | None] = [None] * len(texts)
        async for index, piece in self.pieces(turn):
            texts[index] += piece.text
            finish[index] = piece.finish
        choices = [
            {"index": index, **self._text(text), "logprobs": None, "finish_reason": reason}
            for index, (text, reason) in enumerate(zip(texts, finish, strict=True))
        ]
        return JSONResponse(self._object("chat.completion", choices) | {"usage": self.usage()})

    async def events(self, first: tuple[int, Piece], rest: AsyncIterator[tuple[int, Piece]]) -> AsyncIterator[str]:
        """Write server-sent events, one for each piece that has text or is the last."""
        options = self.request.body.stream_options
        if self.is_chat:
            yield self._event([{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}])
        try:
            index, piece = first
            while True:
                if piece.text or piece.finish:
                    choice = {"index": index, **self._text(piece.text, "delta"), "finish_reason": piece.finish}
                    yield self._event([choice])
                try:
                    index, piece = await anext(rest)
                except StopAsyncIteration:
                    break
        except Refusal as refusal:
            yield f"data: {json.dumps(failure(refusal))}\n\n"
            return
        if options is not None and options.include_usage:
            yield self._event([], usage=self.usage())
        yield "data: [DONE]\n\n"

    def _text(self, text: str, key: str = "message") -> dict[str, Any]:
        if not self.is_chat:
            return {"text": text}
        return {key: {"content": text} if key == "delta" else {"role": "assistant", "content": text}}

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> str:
        return f"data: {json.dumps(self._object('chat.completion.chunk', choices) | more)}\n\n"

    def _object(self, chat: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        kind = chat if self.is_chat else "text_completion"
        model = self.request.body.model
        return {"id": self.id, "object": kind, "created": self.created, "model": model, "choices": choices}


class EventStream(StreamingResponse):
    """Server-sent events of a reply; ends the generation of its texts once the client has left."""

    def __init__(self, reply: GenerationReply, events: AsyncIterator[str]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-store"})
        self._reply = reply

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._reply.cancel()


async def answer(request: GenerationRequest, turn: Turn, left: Callable[[], Awaitable[None]]) -> Response:
    """Generate the texts of a request; ``left()`` ends when its client does.

    Raises Refusal 429, 500 or 503.
    """
    reply = GenerationReply(request)
    request.scheduler.submit(reply.generations)
    begun: asyncio.Future[Response] = asyncio.ensure_future(_begun(reply, turn))
    watch: asyncio.Future[None] = asyncio.ensure_future(left())
    response: Response | None = None
    try:
        waited: set[asyncio.Future[Any]] = {begun, watch}
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        if not begun.done():
            raise Refusal(400, "The connection closed before the text had been generated.")
        response = begun.result()
        return response
    finally:
        begun.cancel()
        watch.cancel()
        if not isinstance(response, EventStream):
            reply.cancel()


async def _begun(reply: GenerationReply, turn: Turn) -> Response:
    """Return the answer, or its stream once the first piece has come.

    Until then a failure can still be answered by its status.
    """
    if not reply.request.body.stream:
        return await reply.whole(turn)
    pieces = reply.pieces(turn)
    return EventStream(reply, reply.events(await anext(pieces), pieces))


def listed(names: Mapping[str, int]) -> dict[str, Any]:
    """Return the list of models; ``names`` maps each to when it was loaded, seconds since 1970."""
    return {"object": "list", "data": [described(name, created) for name, created in names.items()]}


def described(name: str, created: int) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": created, "owned_by": "arclight"}
