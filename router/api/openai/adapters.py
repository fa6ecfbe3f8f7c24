"""Handlers of ``/v1/load_lora_adapter`` and ``/v1/unload_lora_adapter``, compatible with vLLM."""

from __future__ import annotations

from starlette.responses import PlainTextResponse, Response

from router.api.adapters import Adapters
from router.api.http.endpoint import Call
from router.api.openai.fields import LoadAdapterFields, UnloadAdapterFields


class AdapterPaths:
    def __init__(self, adapters: Adapters) -> None:
        self._adapters = adapters

    async def load(self, call: Call) -> Response:
        fields = await call.fields(LoadAdapterFields)
        await self._adapters.load(fields.lora_name, fields.lora_path, fields.model or "")
        return PlainTextResponse(f"Success: LoRA adapter '{fields.lora_name}' added successfully.")

    async def unload(self, call: Call) -> Response:
        fields = await call.fields(UnloadAdapterFields)
        await self._adapters.unload(fields.lora_name)
        return PlainTextResponse(
            f"Success: LoRA adapter '{fields.lora_name}' removed successfully."
        )
