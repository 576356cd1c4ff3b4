"""Types of the settings of this room's steps; light, because `check` and `plan` read them."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from components.engines.server_address import ServerAddress

Dtype = Literal["float32", "bfloat16"]
SpeculationType = Literal["draft-simple", "draft-eagle3", "draft-mtp"]
"""llama.cpp's --spec-type."""

DraftDepths = list[Annotated[int, Field(ge=1, le=64)]]
LookupDepths = list[Annotated[int, Field(ge=1, le=16)]]
BatchSizes = list[Annotated[int, Field(ge=1, le=1024)]]
KvLengths = list[Annotated[int, Field(ge=16)]]
TreeBudgets = list[Annotated[int, Field(ge=1, le=256)]]
"""Draft tokens that a tree verifies in one pass."""

DepthsToRun = Literal["around", "all"] | list[Annotated[int, Field(ge=1)]]


class EngineServer(ServerAddress):
    """One server to be measured.

    base_url: its address with or without /v1, such as http://127.0.0.1:8000; no credentials, query or fragment.
    engine: which it is; auto asks it. openai is any other with /v1/completions.
    model: the name it serves; empty takes the first of /v1/models.
    method: how it speculates (eagle3, mtp, ngram ...); empty is external where it drafts, none where it does not.
    depth_k: draft tokens a round it was started with; 0 takes what it reports itself.
    draft_key: the artifact key of the drafter it serves, where it is one of ours.
    api_key_variable: the environment variable that holds its key; the key is written nowhere.
    """

    setting: ClassVar[str] = "servers"

    method: str = ""
    depth_k: int = Field(default=0, ge=0)
    draft_key: str = ""
