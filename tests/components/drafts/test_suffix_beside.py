"""A drafter with suffix decoding beside it opens as it was made, takes turns with it, and is measured as it decodes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from saved_drafts import saved_draft
from tiny_drafts import new_context, new_draft, write_features

from components.bench.acceptance import acceptance_map
from components.contract import Draft, Features, Target, UserError
from components.decoding.batch import decode_batch
from components.decoding.chain import decode
from components.drafts import add_suffix, quantise_draft
from components.drafts.interface import CommittedPositions, Sampling, TreeProposer
from components.drafts.methods.with_suffix import WithSuffix
from components.drafts.storage.files import open_draft, read_record
from components.publish.release.export import promised_formats
from components.speedup.prediction.replay import replay
from components.targets.interface import AbstractTarget

MakeTarget = Callable[[str], AbstractTarget]
PROMPT = [5, 9, 11, 7, 8, 5, 9, 11, 7, 8, 5, 9]
DEEPEST, LENGTH = 6, 40


def made(target: AbstractTarget, folder: Path, features: Features | None = None, **settings: Any) -> Draft:
    plain = saved_draft(folder / "plain", new_draft(target, "eagle3"), {}, target, target_key="", held_out_al=1.5)
    return add_suffix(plain, features, ctx=new_context(folder / "both"), **settings)


def test_each_drafts_where_it_should_and_the_map_is_what_decoding_does(tiny_target: MakeTarget, tmp_path: Path) -> None:
    target = tiny_target("llama")
    both = made(target, tmp_path, depth=2, max_draft_tokens=DEEPEST)
    drafter: Any = open_draft(both, target)
    assert isinstance(drafter, WithSuffix) and not isinstance(drafter, TreeProposer)
    assert drafter.suffix.settings.min_score == 0.5, "the held-out acceptance length, less the target's own token"
    answer = decode(target, None, PROMPT, max_new_tokens=LENGTH + DEEPEST, ignore_eos=True).tokens
    found = acceptance_map(target, drafter, PROMPT, answer, LENGTH, DEEPEST)
    for depth in (1, 3, DEEPEST):
        run = decode(target, drafter, PROMPT, max_new_tokens=LENGTH, depth=depth, ignore_eos=True)
        assert run.tokens == answer[:LENGTH]
        mapped = replay(found.accepted, depth)
        assert [(r.out_pos, r.accepted) for r in run.rounds] == [(r.out_pos, r.accepted) for r in mapped]
    drafted = {r.drafted for r in run.rounds}
    assert 2 in drafted and max(drafted) > 2, "the trained drafter's chains and longer copies"
    together = decode_batch(target, drafter, [PROMPT, [3, 4]], max_new_tokens=LENGTH, depth=DEEPEST, ignore_eos=True)
    assert [(r.drafted, r.accepted) for r in together[0].rounds] == [(r.drafted, r.accepted) for r in run.rounds]


def test_positions_wait_while_copies_draft_and_reach_the_trained_drafter_together(
    tiny_target: MakeTarget, tmp_path: Path
) -> None:
    target = tiny_target("llama")
    drafter: Any = open_draft(made(target, tmp_path, depth=2), target)
    text = torch.tensor([*PROMPT, 11, 7, 8, 40])
    out = target.forward(text[None], target.new_cache(1, 32), logits="none", features=True)
    assert out.taps is not None and out.last is not None
    columns = CommittedPositions(text[1:], out.taps[0, :-1], out.last[0, :-1])
    state, rng = drafter.new_state(32), torch.Generator()
    for start, stop in ((0, 11), (11, 14)):
        found = drafter.propose(state, CommittedPositions(*(part[start:stop] for part in columns)), 4, Sampling(), rng)
        assert found.probs is None and found.tokens[0] == PROMPT[(stop + 1) % 5], "the prompt repeats five tokens"
        assert state.drafter.num_columns == 0
    found = drafter.propose(state, CommittedPositions(*(part[14:] for part in columns)), 4, Sampling(), rng)
    alone = drafter.drafter.propose(drafter.drafter.new_state(32), columns, 2, Sampling(), rng)
    assert found.tokens.tolist() == alone.tokens.tolist() and state.drafter.num_columns == len(text) - 1


def test_earlier_answers_are_stored_and_a_quantised_drafter_keeps_its_copies(
    tiny_target: MakeTarget, tmp_path: Path
) -> None:
    target = tiny_target("llama")
    features = write_features(target, tmp_path / "features")
    both = made(target, tmp_path, features, cached_tokens=40)
    drafter: Any = open_draft(both, target)
    assert len(drafter.suffix.cache.answers) == both.info["with_suffix"]["settings"]["cached_tokens"] // 18
    record = read_record(both.path)
    assert record["max_depth"] == 16 and "held_out_al" not in record
    with pytest.raises(UserError, match="cached_tokens needs answers"):
        made(target, tmp_path, cached_tokens=40)
    rounded = quantise_draft(made(target, tmp_path, depth=1), ctx=new_context(tmp_path / "int8"))
    assert isinstance(open_draft(rounded, target), WithSuffix)


def test_what_cannot_be_is_said_in_one_line(tiny_target: MakeTarget, tmp_path: Path) -> None:
    target = tiny_target("llama")
    both = made(target, tmp_path)
    with pytest.raises(UserError, match="has suffix decoding beside it already"):
        add_suffix(both, ctx=new_context(tmp_path / "twice"))
    with pytest.raises(UserError, match="depth 16 is deeper than it drafts"):
        made(target, tmp_path / "deep", depth=16)
    source: Any = Target(key="", path=tmp_path)
    with pytest.raises(UserError, match=r"no format holds: release the drafter that drafts\.add_suffix was given"):
        promised_formats(both, source, [])
    file = both.path / "draft.json"
    file.write_text(file.read_text().replace('"min_score"', '"least"'))
    with pytest.raises(UserError, match="with_suffix cannot be read"):
        open_draft(both, target)
