"""The decoding loop of lookahead: one pass a round drafts tokens and verifies others (see drafts/methods/lookahead.py).

Greedy only: the window's outputs are argmaxes, and draft tokens are compared with argmaxes. The output is that of plain
greedy decoding, whatever the window holds: a draft token is accepted only where it equals the target's argmax after
accepted tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from components.contract import UserError
from components.decoding.chain import Clock, Decoded, RoundFacts, Rounds, count_until_end
from components.decoding.session import Session, is_greedy
from components.drafts.interface import CommittedPositions, Proposer, Sampling
from components.drafts.methods.lookahead import LookaheadState
from components.targets.interface import AbstractTarget, check_verifies_trees


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

    depth: draft tokens verified per n-gram. A round's `drafted` counts those of all its n-grams.

    Raises UserError when tokens are to be sampled.
    """
    if not is_greedy(sampling):
        raise UserError("decoding: lookahead is greedy only: set temperature 0, or take another method")
    check_verifies_trees(target)
    n = len(prompt_ids)
    state = proposer.new_state(n + max_new_tokens)
    assert isinstance(state, LookaheadState)
    needed, ahead = n + max_new_tokens, state.settings.positions_ahead(depth)
    scratch = ahead + state.max_rows
    cache = (session or Session(target, needed + scratch)).empty_cache(needed, scratch)
    rng, empty = torch.Generator(), torch.empty(0)
    start = clock()
    ids = torch.tensor(prompt_ids, dtype=torch.int64, device=target.device)
    out = target.forward(ids.unsqueeze(0), cache, logits="last")
    assert out.logits is not None
    tokens = out.logits[0].argmax(-1).tolist()
    first = clock()
    new = [*prompt_ids[1:], *tokens]
    rounds: list[RoundFacts] = []
    num_tokens, at_eos = 1, tokens[0] in ends
    while not at_eos and num_tokens < max_new_tokens:
        yield num_tokens
        if (
            n + num_tokens + 1 + ahead > target.shape.max_position_embeddings
        ):  # no positions left for the window: a plain step
            out = target.forward(torch.tensor([new[-1:]], device=target.device), cache, logits="last")
            assert out.logits is not None
            new = out.logits[0].argmax(-1).tolist()
            rounds.append(RoundFacts(num_tokens - 1, 0, 0, 1, n + num_tokens - 1))
            num_tokens, at_eos = num_tokens + 1, new[0] in ends
            tokens += new
            continue
        columns = CommittedPositions(torch.tensor(new), empty, empty)
        rows = proposer.propose(state, columns, depth, sampling, rng).tokens
        plan = state.plan
        assert plan is not None
        pass_ids = torch.cat((torch.tensor(new[-1:]), rows)).to(target.device)
        out = target.forward(pass_ids.unsqueeze(0), cache, tree=plan.tree)
        assert out.logits is not None
        picks = out.logits[0].argmax(-1).tolist()
        result = state.verify(picks)
        cache.keep(torch.tensor([n + num_tokens - 1]), [result.rows])
        new, accepted = result.token_ids, len(result.rows) - 1
        state.advance(picks, accepted)
        emitted, at_eos = count_until_end(new, max_new_tokens - num_tokens, ends)
        drafted = sum(map(len, plan.draft_rows))
        rounds.append(RoundFacts(num_tokens - 1, drafted, accepted, emitted, n + num_tokens - 1))
        num_tokens += emitted
        tokens += new
    stop = clock()
    return Decoded(tokens[:num_tokens], tokens, rounds, "eos" if at_eos else "ok", n, first - start, stop - first)
