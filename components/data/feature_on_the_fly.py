"""Step `data.features_on_the_fly`: replaces `record_features` where features do not fit on disk, or are used once.

Its artifact holds tokens, masks and the manifest; `train_draft` computes the hidden states batch by batch
(feature_live.py). The step logs an estimate of the cost, one pass of the target over every token in each epoch.
"""

from __future__ import annotations

import shutil
from typing import Annotated

from pydantic import Field

from components.contract import Context, Conversations, Features, Target
from components.data.feature_estimate import Probe, check_space, estimated_seconds, format_duration
from components.data.recording import write_features_manifest
from components.shards import sweep, written_whole


def features_on_the_fly(
    target: Target,
    answers: Conversations,
    *,
    tokens_per_pass: Annotated[int, Field(ge=64)] = 2048,
    ctx: Context,
) -> Features:
    """Features that are computed while training instead of being stored, for `train_draft` with the same target.

    Args:
        tokens_per_pass: The most tokens of one forward pass, padding included (a longer conversation is a pass of its
            own); bounds memory.
    """
    from components.data.answers import open_answers
    from components.targets.load import target_facts
    from components.targets.threads import threads_for

    facts = target_facts(target)
    names = open_answers(answers).shards
    check_space(ctx, int(answers.info["num_tokens"]), int(facts["shape"]["hidden_size"]), "none", share_left=1.0)
    if names:
        shards = [answers.path / name for name in names]
        num_threads = threads_for(facts["num_params"], ctx.num_threads)
        probe = Probe(shards[0], target.path, tokens_per_pass, ctx.device, num_threads)
        seconds = estimated_seconds(ctx, probe, shards)
        if seconds is not None:
            duration = format_duration(seconds)
            ctx.note(f"features: nothing stored; computing them takes about {duration} of every epoch of training")
    for name in names:
        with written_whole(ctx.out / name) as beside:
            shutil.copyfile(answers.path / name, beside)
    sweep(ctx.out)
    return write_features_manifest(ctx, target, answers, names, {"storage": "none", "tokens_per_pass": tokens_per_pass})
