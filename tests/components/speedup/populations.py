"""Populations of prompts and machines with a known truth, from which studies are drawn.

A prompt has an acceptance rate and a length of its own; a machine has a cost of a round at every depth. A study is a
number of prompts, decoded at every depth, and the costs that a few fresh processes measured: each process shifts its
plain steps (SHARED, which every arm of it is compared with) and each of its arms (OWN), and each block of an arm is
slowed by other work, never sped up (NOISE). The truth is what very many prompts in very many processes would give.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from components.speedup.bootstrap import Floats
from components.speedup.prediction.costs import CostTable, StepTimes, cost_curve, exact_table
from components.speedup.prediction.predict import Rule, Speeds, predict

DEPTHS = np.arange(1, 8)
SHARED, OWN, NOISE, NUM_BLOCKS = 0.015, 0.02, 0.04, 8
RULE = Rule(tolerance=0.01, confidence=0.95, num_draws=800, include_host=True)

Draw = Callable[[np.random.Generator, int], Floats]


class Population(NamedTuple):
    """rate, length: of each prompt, [n]. cost: of a round over a plain step at each of DEPTHS."""

    rate: Draw
    length: Draw
    cost: Floats

    def lengths_kept(self) -> Floats:
        """The true acceptance length at each depth: a ratio of expectations, over 300,000 prompts."""
        rng = np.random.default_rng(99)
        tokens = self.length(rng, 300_000)
        return np.asarray(tokens.sum() / (tokens[:, None] / _kept(self.rate(rng, 300_000))).sum(axis=0))

    def truth(self) -> Floats:
        """The true speedup at each depth."""
        return np.asarray(self.lengths_kept() / self.cost)

    def scaled_to(self, best: float) -> Population:
        """The same on a machine where the best depth is `best` times as fast as plain decoding."""
        return self._replace(cost=self.cost * self.truth().max() / best)


def study(population: Population, num_prompts: int, num_processes: int, rng: np.random.Generator) -> Speeds:
    """What choose_depth would work with: acceptance and speedup of every depth, 0 included, with draws."""
    tokens = np.round(population.length(rng, num_prompts))[:, None]
    rounds = tokens / _kept(population.rate(rng, num_prompts))
    # Rounds of one prompt vary as a sum of that many does, and mostly alike at all depths.
    noise = 0.8 * rng.standard_normal((num_prompts, 1)) + 0.6 * rng.standard_normal(rounds.shape)
    rounds = np.maximum(1.0, rounds * (1.0 + 0.5 * noise / np.sqrt(rounds)))
    columns = np.concatenate([tokens, rounds], axis=1)
    table = measured_costs(population.cost, num_processes, rng)
    return predict(np.repeat(tokens, len(DEPTHS) + 1, axis=1), columns, table, "all", RULE, int(rng.integers(2**31)))


def measured_costs(cost: Floats, num_processes: int, rng: np.random.Generator) -> CostTable:
    """The cost table that processes with blocks of noise measured."""
    spread = np.concatenate([[SHARED], np.full(len(cost), OWN)])[:, None]
    level = np.concatenate([[1.0], cost])[:, None] * np.exp(
        spread * rng.standard_normal((len(cost) + 1, num_processes))
    )
    blocks = np.sort(level[:, :, None] * (1.0 + NOISE * rng.gamma(1.0, 1.0, size=(*level.shape, NUM_BLOCKS))))
    times = blocks[:, :, : NUM_BLOCKS // 2].mean(axis=2)  # steady(), for all cells at once
    return table_of(np.log(times[1:] / times[0]))


def table_of(log_ratio: Floats) -> CostTable:
    """The cost table of log ratios of rounds over plain steps, [depths, processes]."""
    depths, curve = list(range(1, len(log_ratio) + 1)), cost_curve(list(range(1, len(log_ratio) + 1)), log_ratio)
    verify, nothing = np.concatenate([[1.0], np.exp(curve.log_ratio)]), np.zeros(len(depths) + 1)
    return exact_table([0, *depths], StepTimes(np.array(1.0), verify, nothing, nothing))._replace(
        process=np.concatenate([np.zeros((1, curve.process.shape[1])), curve.process]),
        process_dof=np.concatenate([[np.inf], curve.dof]),
        num_shared=log_ratio.shape[1],
        num_processes=log_ratio.shape[1],
    )


def _kept(rate: Floats) -> Floats:
    """[prompts, depths]: tokens a round at each depth, where every draft is kept with the prompt's own rate."""
    return 1.0 + np.cumsum(rate[:, None] ** DEPTHS, axis=1)


def _even(rng: np.random.Generator, n: int) -> Floats:
    return rng.integers(48, 257, size=n).astype(float)


def _heavy(rng: np.random.Generator, n: int) -> Floats:
    return np.maximum(32.0, np.exp(rng.normal(4.5, 1.2, size=n)))


def _dominant(rng: np.random.Generator, n: int) -> Floats:
    """One prompt in 24 is twenty times as long."""
    return _even(rng, n) * np.where(rng.random(n) < 1 / 24, 20.0, 1.0)


def _beta(mean: float, sureness: float) -> Draw:
    return lambda rng, n: rng.beta(mean * sureness, (1.0 - mean) * sureness, size=n)


def _easy_and_hard(rng: np.random.Generator, n: int) -> Floats:
    return np.where(rng.random(n) < 0.4, rng.beta(20.0, 10.0, size=n), rng.beta(24.0, 6.0, size=n))


def _line(intake: float, draft: float) -> Floats:
    return np.asarray(1.0 + intake + draft * DEPTHS)


def _populations() -> dict[str, Population]:
    equal = Population(_beta(0.75, 20.0), _even, np.ones(len(DEPTHS)))
    speeds = 1.4 * np.array([0.97, 0.998, 1.0, 1.0, 1.0, 0.999, 0.99])
    found = {
        "geometric": Population(_beta(0.75, 20.0), _even, _line(0.1, 0.18)),
        "mixture": Population(_easy_and_hard, _even, _line(0.1, 0.18)),
        "heavy tails": Population(_beta(0.72, 20.0), _heavy, _line(0.15, 0.17)),
        "near break-even": Population(_beta(0.6, 20.0), _even, _line(0.2, 0.17)).scaled_to(1.02),
        "many equal depths": equal._replace(cost=equal.lengths_kept() / speeds),
        # ... and a kernel that takes five rows or more costs a step of 6 % of a plain one.
        "one dominant prompt": Population(_beta(0.72, 20.0), _dominant, _line(0.1, 0.16) + 0.06 * (DEPTHS >= 5)),
    }
    return found


POPULATIONS = _populations()
