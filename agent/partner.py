"""What tools may ask of the conversation that they serve: a look at a picture, calls of its other tools, children."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from agent.conversation import Conversation
from agent.errors import ModelError, RunStopped
from agent.models.base import Model
from agent.types import Message, Reply
from tools.base import Delivery, Errand, Picture, ToolSpec
from tools.errors import ToolError
from tools.pictures.pictures import data_url, fitted

OF_THE_RUN = ("budget", "interrupt")
"""Why a gate lets no request go any more, where that is nothing about its endpoint."""


Delegate = Callable[[Sequence[Errand]], Awaitable[Sequence[Delivery]]]


class ConversationPartner:
    """Fulfils `tools.base.Partner`. `eye` is the model that answers questions about pictures; `delegate` does errands,
    None: this conversation is a child itself."""

    def __init__(self, conversation: Conversation, eye: Model | None, delegate: Delegate | None = None) -> None:
        self._conversation = conversation
        self._eye = eye
        self._delegate = delegate

    async def look(self, question: str, picture: Picture) -> str:
        """See `Partner`. What it costs is the conversation's. An eye that cannot be had is the tool's problem, unless
        it is the conversation's own model, or the run ends."""
        if self._eye is None:
            raise ToolError("there is no model here that sees pictures")
        shown = data_url(await fitted(picture))
        reply = await self._asked(self._eye, Message(role="user", content=question, pictures=(shown,)))
        if not reply.content.strip():
            raise ToolError("the vision model gave an empty answer")
        return str(self._conversation.purged(reply.content))

    async def _asked(self, eye: Model, message: Message) -> Reply:
        conversation = self._conversation
        request = conversation.side_request([message])
        try:
            reply = await eye.reply(request)
        except asyncio.CancelledError:
            conversation.spend += request.tally.spend
            raise
        except ModelError as error:
            conversation.spend += error.spend
            raise ToolError(f"the vision model gave no answer: {error}") from error
        except RunStopped as stop:
            conversation.spend += stop.spend
            if eye is conversation.model or stop.reason in OF_THE_RUN:
                raise
            raise ToolError(f"the vision model cannot be had: {stop}") from stop
        conversation.spend += reply.spend
        return reply

    async def call(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """See `Partner`."""
        return await self._conversation.call_inside(name, arguments)

    def inner_tools(self) -> Sequence[ToolSpec]:
        """See `Partner`."""
        return self._conversation.offered

    async def delegate(self, errands: Sequence[Errand]) -> Sequence[Delivery]:
        """See `Partner`."""
        if self._delegate is None:
            raise ToolError("A child cannot delegate")
        return await self._delegate(errands)
