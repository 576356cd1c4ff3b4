"""The address of a model server: its URL, its engine, the name of its model and where its API key is.

The steps that let a server answer prompts and those that measure servers take these settings; states may come by a
Mooncake store, which has an address of its own. The module is light, because `check` and `plan` read it with the steps.
"""

from __future__ import annotations

import json
import os
from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from components.contract import UserError

ServerEngine = Literal["auto", "vllm", "sglang", "llama.cpp", "transformers", "openai"]
BaseUrl = Annotated[str, Field(pattern=r"^https?://[^/?#@\s]+(/[^?#@\s]*)?$")]


class ServerAddress(BaseModel):
    """The settings that describe one server.

    base_url: the address with or without /v1, such as http://127.0.0.1:8000; no credentials, query or fragment.
    engine: the engine behind it; auto asks the server. openai is any other engine with /v1/completions.
    model: the name of the served model; empty takes the first of /v1/models.
    api_key_variable: the environment variable that holds the key; the key is written nowhere.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    setting: ClassVar[str] = "base_url"  # name of the step's setting; errors begin with it

    base_url: BaseUrl
    engine: ServerEngine = "auto"
    model: str = ""
    api_key_variable: str = ""

    @property
    def root(self) -> str:
        """The address without /v1."""
        return self.base_url.rstrip("/").removesuffix("/v1")

    @property
    def location(self) -> str:
        """The beginning of every error about this server."""
        return f"{self.setting}: {self.base_url}"

    def headers(self) -> dict[str, str]:
        """HTTP headers with the key, empty without one; raises UserError when the variable holds no usable key."""
        key = self._key()
        return {"Authorization": f"Bearer {key}"} if key else {}

    def without_key(self, message: str) -> str:
        """A message of the server or a library, as one line of at most 300 characters, without the key."""
        key = self._key()
        for form in (key, json.dumps(key)[1:-1]) if key else ():  # as it is, and as a JSON text holds it
            message = message.replace(form, "***")
        return " ".join(message.split())[:300]

    def _key(self) -> str:
        """The key, stripped, checked here because HTTP libraries quote a bad header in their errors; "" without one."""
        if not self.api_key_variable:
            return ""
        location = f"{self.location}: ${self.api_key_variable}"
        key = os.environ.get(self.api_key_variable, "").strip()
        if not key:
            raise UserError(f"{location} is not set; put the server's key there")
        if not (key.isascii() and key.isprintable()):
            raise UserError(f"{location} is no key: only printable ASCII characters can be sent; set it again")
        return key


class MooncakeAddress(BaseModel):
    """The settings of a Mooncake store.

    master: the address of its master, such as 10.0.0.7:50051. metadata_server: P2PHANDSHAKE, or the address of the
    store's metadata server. protocol: tcp or rdma. device: with rdma, the devices, such as mlx5_0; empty lets Mooncake
    choose. local_hostname: the name by which the other machines reach this one; empty asks the system.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    master: Annotated[str, Field(pattern=r"^[^\s:/@]+:\d{1,5}$")]
    metadata_server: str = "P2PHANDSHAKE"
    protocol: Literal["tcp", "rdma"] = "tcp"
    device: str = ""
    local_hostname: str = ""

    def for_connector(self) -> dict[str, object]:
        """The same settings as vLLM's connector wants them (kv_connector_extra_config)."""
        names = {"master_server_address": self.master, "metadata_server": self.metadata_server}
        return {"mooncake": {**names, "protocol": self.protocol, "device_name": self.device}}
