"""Fields of ``/v1/conversations``. Pure."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from router.api.http.fields import Fields, List, Object
from router.api.openai.responses.fields import Metadata

#: Maximum number of items that one call adds, as in OpenAI's API.
MAX_NEW_ITEMS = 20
Items = Annotated[List[Object], Field(max_length=MAX_NEW_ITEMS)]


class ConversationFields(Fields):
    items: Items | None = None
    metadata: Metadata | None = None


class ConversationUpdateFields(Fields):
    metadata: Metadata


class ConversationItemsFields(Fields):
    items: Annotated[Items, Field(min_length=1)]
