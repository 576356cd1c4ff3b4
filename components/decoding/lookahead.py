"""The loop of lookahead decoding: one pass a round makes guesses and verifies others (drafts/lookahead.py says which).

Greedy only: the window's outputs are argmaxes, and what is verified is compared with argmaxes. The output is what plain
greedy decoding says, whatever the window holds: a guess is kept only where it equals the target's own pick after rows
that hold accepted tokens alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from components.contract import UserError
from components.decoding.chain import Clock, Decoded, RoundFacts, Rounds, keep_until_end
from components.decoding.sampling import is_greedy
from components.decoding.session import Session
from components.drafts.draft import Columns, Proposer, Sampling
from components.drafts.lookahead import LookaheadState
from components.targets.model import AbstractTarget


def lookahead_rounds(
    target: AbstractTarget,
    proposer: Proposer,
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int,
    depth: int,
    sampling: Sampling,
    ends: frozenset[int],
    session: Session | None,
    clock: Clock,
) -> Rounds[Decoded]:
    """Continue `prompt_ids`; arguments as those of chain.decode_rounds, checked there.

    depth: guesses of an n-gram verified.

    A round's `drafted` counts the guesses of all n-grams it verified.

    Raises UserError when tokens are to be sampled.
    """
    if not is_greedy(sampling):
        raise UserError("decoding: lookahead is greedy only: set temperature 0, or take another method")
    n = len(prompt_ids)
    state = proposer.new_state(n + max_new_tokens)
    assert isinstance(state, LookaheadState)
    needed, ahead = n + max_new_tokens, state.settings.positions_ahead(depth)
    scratch = ahead + state.max_rows
    cache = (session or Session(target, needed + scratch)).empty_cache(needed, scratch)
    rng, nothing = torch.Generator(), torch.empty(0)
    start = clock()
    ids = torch.tensor(prompt_ids, dtype=torch.int64, device=target.device)
    out = target.forward(ids.unsqueeze(0), cache, logits="last")
    assert out.logits is not None
    raw = out.logits[0].argmax(-1).tolist()
    first = clock()
    new = [*prompt_ids[1:], *raw]
    rounds: list[RoundFacts] = []
    kept, ended = 1, raw[0] in ends
    while not ended and kept < max_new_tokens:
        yield kept
        if n + kept + 1 + ahead > target.shape.max_position_embeddings:  # no positions for the window: a plain step
            out = target.forward(torch.tensor([new[-1:]], device=target.device), cache, logits="last")
            assert out.logits is not None
            new = out.logits[0].argmax(-1).tolist()
            rounds.append(RoundFacts(kept - 1, 0, 0, 1, n + kept - 1))
            kept, ended = kept + 1, new[0] in ends
            raw += new
            continue
        columns = Columns(torch.tensor(new), nothing, nothing)
        rows = proposer.propose(state, columns, depth, sampling, rng).tokens
        plan = state.plan
        assert plan is not None
        pass_ids = torch.cat((torch.tensor(new[-1:]), rows)).to(target.device)
        out = target.forward(pass_ids.unsqueeze(0), cache, tree=plan.tree)
        assert out.logits is not None
        picks = out.logits[0].argmax(-1).tolist()
        found = state.judge(picks)
        cache.keep(torch.tensor([n + kept - 1]), [found.rows])
        new, accepted = found.token_ids, len(found.rows) - 1
        state.advance(picks, accepted)
        emitted, ended = keep_until_end(new, max_new_tokens - kept, ends)
        drafted = sum(map(len, plan.guesses))
        rounds.append(RoundFacts(kept - 1, drafted, accepted, emitted, n + kept - 1))
        kept += emitted
        raw += new
    stop = clock()
    return Decoded(raw[:kept], raw, rounds, "eos" if ended else "ok", n, first - start, stop - first)
