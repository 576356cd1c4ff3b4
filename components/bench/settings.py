"""Types of the settings of this room's steps; light, because `check` and `plan` read them."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from components.engines.server_address import ServerAddress

Dtype = Literal["float32", "bfloat16"]
SpeculationType = Literal["draft-simple", "draft-eagle3", "draft-mtp", "draft-dflash", "draft-dspark"]
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
    imposed: share of rounds in which it was told to accept draft 1, 2, ..., whatever the target says (vLLM's
        synthetic_acceptance_rates); such a server says what rounds cost, and nothing of a drafter. Empty: nothing.
    api_key_variable: the environment variable that holds its key; the key is written nowhere.
    """

    setting: ClassVar[str] = "servers"

    method: str = ""
    depth_k: int = Field(default=0, ge=0)
    draft_key: str = ""
    imposed: tuple[Annotated[float, Field(ge=0.0, le=1.0)], ...] = ()

    @model_validator(mode="after")
    def _imposed_alone(self) -> Self:
        """Imposed acceptance is no drafter's: its rows carry a method of their own and no draft_key."""
        if any(later > earlier for earlier, later in pairwise(self.imposed)):
            raise ValueError("imposed: a draft is accepted after those before it, so no rate exceeds the one before")
        if self.imposed and (self.method or self.draft_key or self.depth_k not in (0, len(self.imposed))):
            raise ValueError("imposed: goes without method and draft_key, and holds a rate for each of depth_k drafts")
        return self

    @property
    def arm_method(self) -> str:
        """The method of its rows, as far as the settings tell: imposed acceptance is named by its mean length."""
        return f"imposed {1.0 + sum(self.imposed):.2f}" if self.imposed else self.method

    @property
    def arm_depth(self) -> int:
        """Draft tokens a round, as far as the settings tell; 0 where they do not."""
        return len(self.imposed) or self.depth_k
