"""The steps of this room, as pipelines.yaml names them: what each takes, its settings, and what it makes.

A step imports its implementation when it runs, so that `check` and `plan` read its settings in no time, and hands it
all arguments; tests/components/test_steps.py compares the two signatures.
"""

from __future__ import annotations

import platform
from typing import Annotated, Final, Literal

from pydantic import Field

from components.contract import Chats, Context, Conversations, Corpus, Features, Prompts, Target
from components.data.settings import (
    Amount,
    ChatSource,
    Cleaning,
    CorpusSource,
    Count,
    Name,
    Order,
    Positive,
    Share,
    Strata,
    Taps,
    Thinking,
    TooSmall,
    Turns,
    Unit,
    Weight,
    WorkloadSource,
)
from components.data.settings import collect_chats_settings as collect_chats_settings
from components.data.settings import mix_chats_settings as mix_chats_settings
from components.engines.server_address import BaseUrl, MooncakeAddress, ServerEngine
from components.outside_json import JsonObject

_DEFAULT: Final = Cleaning()


def collect_chats(
    *,
    sources: Annotated[list[ChatSource], Field(min_length=1)],
    clean: Cleaning = _DEFAULT,
    redact: bool = False,
    ctx: Context,
) -> Chats:
    """Collect conversations and documents from any sources, in one format and cleaned.

    Writes `part-*.parquet` with every row worth training on, and `dropped.parquet` with every other row and its reason.

    Args:
        sources: presets by name (eaglechat, sharegpt, ultrachat, smoltalk-chinese, perfectblend, magpie), paths, or
            sources with preset, path, name, revision, format, documents, fields, language, domain, domain_field,
            max_rows and follow_links. Files may be JSONL, JSON, CSV and text (also as .gz, .bz2, .xz, .zst), Parquet
            and Arrow. A path may be a folder with all below it, a pattern, an s3:// or other URL of fsspec, or
            hf:OWNER/NAME:SPLIT (on a hub: `draftsmith run --online`).
        clean: which rows are dropped; see components/data/cleaning/rules.py.
        redact: whether to replace personal data by [EMAIL], [KEY], [CARD], [IP] and [PHONE] (needs
            `draftsmith[redaction]`).
    """
    from components.data.collect.chats import collect_chats as run

    return run(sources=sources, clean=clean, redact=redact, ctx=ctx)


def collect_corpus(
    *, source: CorpusSource = "python-stdlib", with_tests: bool = True, min_characters: Count = 64, ctx: Context
) -> Corpus:
    """Collect text documents to pre-train a target on, and hold some of them out.

    Writes `train.jsonl` and `held_out.jsonl`, one {"id", "source", "text"} a line. A stable hash of a file's path
    decides in which of the two it is; of identical texts one is kept, the held-out one first. The part of "source"
    before the first slash is the document's group.

    Args:
        source: where the documents come from: the standard library of the interpreter that runs this.
        with_tests: whether to take the library's own test suites too (two thirds of all text).
        min_characters: documents with fewer characters are left out.
    """
    from components.data.collect.corpus import collect_corpus as run

    return run(source=source, with_tests=with_tests, min_characters=min_characters, ctx=ctx)


def corpus_from_chats(
    chats: Chats, *, held_out_percent: Annotated[int, Field(ge=1, le=50)] = 5, min_characters: Count = 16, ctx: Context
) -> Corpus:
    """Make a corpus to pre-train a target on from chats, each written as one document in chat markup.

    Writes `train.jsonl` and `held_out.jsonl`, one {"id", "source", "text"} a line. A hash of its first question alone
    decides whether a chat is held out: the same question is never on both sides, whatever the answer. Plain documents
    stay plain text. Chats without an answer, chats with tool calls (which are not text), equal documents and short ones
    are left out and counted. Rows are read one by one; only their ids stay in memory.

    Args:
        held_out_percent: of a hundred questions, how many are never trained on (in expectation).
        min_characters: documents with fewer characters are left out.
    """
    from components.data.collect.corpus import corpus_from_chats as run

    return run(chats, held_out_percent=held_out_percent, min_characters=min_characters, ctx=ctx)


def collect_prompts(
    *,
    source: Name = "python-stdlib",
    num_train: Count = 640,
    num_validation: Count = 48,
    num_test: Count = 24,
    num_warm_up: Count = 4,
    evaluation_percent: Annotated[int, Field(ge=0, le=100)] = 20,
    keep_out: str = "",
    workload: str = "",
    workload_field: str = "",
    min_prompt_characters: Annotated[int | None, Field(ge=1)] = None,
    max_prompt_characters: Annotated[int | None, Field(ge=1)] = None,
    max_rows: Amount = 200_000,
    ctx: Context,
) -> Prompts:
    """Collect prompts from one source and split them, so that no evaluation prompt is ever trained on.

    Writes `prompts.jsonl` with the splits train, validation, test and warm_up.

    Args:
        source: "python-stdlib" (signature and docstring in, body out); a path, folder or pattern of JSONL, JSON or
            Parquet files with chats or texts; or a data set in Hugging Face format, hf:OWNER/NAME[/CONFIG]:SPLIT on the
            hub (pin it as NAME@REVISION: it counts by this name alone) or hf:FOLDER:SPLIT. Malformed rows are set aside
            and counted.
        num_train: The most training prompts; the target answers them.
        num_validation: The most prompts that choose a drafter's checkpoint; the target answers them too.
        num_test: The most prompts for the benchmarks.
        num_warm_up: The most prompts that warm a benchmark up and are never counted.
        evaluation_percent: Of a hundred questions in rows, how many are for test, warm-up and validation; 100 with
            num_train 0 and num_validation 0 makes a benchmark of all of them.
        keep_out: Another source of rows, such as a benchmark; its questions are left out of every split, and counted.
        workload: The label by which results are grouped; empty is the file's name without its suffix.
        workload_field: A field of the rows that holds the label instead (for Spec-Bench: category).
        min_prompt_characters: Shorter prompts are left out, characters; null is 40 for python-stdlib, 1 for rows.
        max_prompt_characters: Longer prompts are left out, characters; null is 400 for python-stdlib, 4000 for rows.
        max_rows: The most rows to read, in the order of the files; a hub data set may hold billions.
    """
    arguments = locals().copy()
    from components.data.collect.prompts import collect_prompts as run

    return run(**arguments)


def collect_traffic(
    seen: Prompts | None = None,
    *,
    source: Name,
    num_train: Amount = 640,
    num_validation: Count = 24,
    num_test: Amount = 32,
    num_warm_up: Count = 2,
    min_new: Amount = 32,
    evaluation_percent: Annotated[int, Field(ge=1, le=90)] = 20,
    keep_out: str = "",
    workload: Name = "traffic",
    workload_field: str = "",
    min_prompt_characters: Amount = 1,
    max_prompt_characters: Amount = 4000,
    max_new: Amount = 200_000,
    ctx: Context,
) -> Prompts:
    """Collect the new conversations in files of served traffic, for nightly retraining.

    Writes `prompts.jsonl` with the new conversations, and `seen.txt` with all that have been used so far. What is
    beyond the limits waits for the next night.

    Args:
        seen: the prompts of the champion's line; conversations that they hold or have used are not new.
        source: a folder, file or pattern of JSONL, JSON or Parquet files with chats or texts, or with logged requests
            that hold them in "body" or "request". Malformed rows are set aside and counted, empty files passed over.
        num_train: new conversations at most that the target answers for training.
        num_validation: new conversations at most that choose a checkpoint.
        num_test: new conversations at most for drift and benchmarks.
        num_warm_up: new conversations at most that warm a benchmark up.
        min_new: fewer new conversations than this are left for another night.
        evaluation_percent: of a hundred questions, how many are for test, warm-up and validation; keep it from night to
            night, since it decides what may be trained on.
        keep_out: a source of rows, such as a benchmark, whose questions are left out and counted.
        workload: the label that results are grouped by.
        workload_field: a field of the rows that holds the label instead.
        min_prompt_characters: shorter questions are left out, characters.
        max_prompt_characters: longer questions are left out, characters.
        max_new: new conversations looked at, at most, in the order of the files; the rest waits for another night.
    """
    arguments = locals().copy()
    from components.data.collect.traffic import collect_traffic as run

    return run(**arguments)


def collect_workloads(
    target: Target | None = None,
    *,
    sources: Annotated[list[str | WorkloadSource], Field(min_length=1)],
    num_prompts: Amount = 40,
    num_warm_up: Count = 1,
    max_prompt_characters: Amount = 8000,
    max_answer_tokens: Amount = 256,
    max_rows: Amount = 200_000,
    ctx: Context,
) -> Prompts:
    """Collect benchmark prompts of named workloads and languages; none of them is for training.

    Writes `prompts.jsonl` with the splits test and warm_up, each prompt with its workload, language and source.

    Args:
        target: answers the earlier turns of sources with several; without it only first turns become prompts.
        sources: presets by name (mt-bench, spec-bench, speed-bench and speed-bench-1k to -32k, gsm8k, math-500,
            aime-2025, humaneval, mbpp, livecodebench, alpaca, arena-hard, bfcl, longbench-v2, ceval, cmmlu), or sources
            with preset, path, revision, workload, workload_field, language, template, reference and num_prompts. A
            preset without a path is read from the hub, which needs `draftsmith run --online`.
        num_prompts: test prompts of each workload of each source, at most; second turns come on top.
        num_warm_up: warm-up prompts of each workload of each source, at most.
        max_prompt_characters: longer prompts are left out and counted, characters.
        max_answer_tokens: tokens of the target's answer that a second turn may follow on, at most.
        max_rows: rows looked at in each source, at most.
    """
    arguments = locals().copy()
    from components.data.collect.workloads import collect_workloads as run

    return run(**arguments)


def deduplicate(
    chats: list[Chats],
    keep_out: list[Prompts] | None = None,
    *,
    similarity: Annotated[float, Field(gt=0.0, le=1.0)] = 0.8,
    ngram: Annotated[int, Field(ge=1, le=32)] = 5,
    num_permutations: Annotated[int, Field(ge=16, le=1024)] = 128,
    prefer: list[str] | None = None,
    benchmark_ngram: Annotated[int, Field(ge=4, le=64)] = 13,
    benchmark_overlap: Annotated[float, Field(gt=0.0, le=1.0)] = 0.3,
    ctx: Context,
) -> Chats:
    """Remove exact duplicates, near duplicates and benchmark texts from chats.

    Writes the other rows in their order, and `dropped.parquet` with the removed ones. Words are compared, or characters
    where a script writes no spaces; case, width, punctuation and white space do not count. Of duplicates the row of the
    preferred source stays, then the longer, then the one with the smaller row_id.

    Args:
        chats: rows of any sources; duplicates are found across all of them.
        keep_out: prompts of benchmarks: rows that contain a prompt or a reference answer of their splits test and
            warm_up, in any turn, are removed.
        similarity: rows whose sets of n-grams have at least this Jaccard index are near duplicates; above 0.99 only
            rearranged repetition is. Rows of fewer than `ngram` units are compared as a whole.
        ngram: units (words; Chinese characters) of an n-gram in near duplicates. A changed word changes this many
            n-grams, so a smaller number forgives more.
        num_permutations: length of a MinHash signature. Longer ones miss fewer pairs near the threshold and take time;
            the bands they are cut into follow from similarity (sketches.py shows the S-curve).
        prefer: names of sources, the best first; sources that are not named come last, all alike; null: all are alike.
        benchmark_ngram: units of an n-gram in the search for benchmark texts. Shorter prompts are searched as a whole.
        benchmark_overlap: share of a prompt's n-grams that a row must contain to be removed; 0.01: one is enough.
    """
    arguments = locals().copy()
    from components.data.dedup.deduplicate import deduplicate as run

    return run(**arguments)


def features_on_the_fly(
    target: Target,
    answers: Conversations,
    *,
    tap_layers: Taps | None = None,
    tokens_per_pass: Annotated[int, Field(ge=64)] = 2048,
    ctx: Context,
) -> Features:
    """Prepare features that `train_draft` computes while training, with the same target, instead of storing them.

    Args:
        tap_layers: As of record_features.
        tokens_per_pass: The most tokens of one forward pass, padding included (a longer conversation is a pass of its
            own); bounds memory.
    """
    from components.data.features.record import features_on_the_fly as run

    return run(target, answers, tap_layers=tap_layers, tokens_per_pass=tokens_per_pass, ctx=ctx)


def features_from_server(
    target: Target,
    answers: Conversations,
    *,
    base_url: BaseUrl,
    folder: Name,
    engine: Literal["auto", "vllm"] = "auto",
    model: str = "",
    api_key_variable: str = "",
    mooncake: MooncakeAddress | None = None,
    tap_layers: Taps | None = None,
    storage: Literal["bf16", "fp8", "none"] = "bf16",
    buffer_gb: Positive = 8.0,
    concurrency: Annotated[int, Field(ge=1, le=1024)] = 16,
    retries: Annotated[int, Field(ge=0, le=20)] = 5,
    backoff_s: Positive = 0.5,
    timeout_s: Positive = 600.0,
    wait_s: Positive = 30.0,
    num_checked: Count = 4,
    ctx: Context,
) -> Features:
    """Let vLLM run a target that does not fit here, and keep the hidden states that it hands out.

    Writes what data.record_features writes. The server needs `extract_hidden_states` and a connector that writes files
    or puts states into a Mooncake store (docs/my-data.md, Hidden states from a server).

    Args:
        target: The model that the server serves; of its weights only the final norm and the head are read.
        answers: Its answers; every one is asked for, and a fault stops the step, which goes on where it was.
        base_url: The server's address with or without /v1; no credentials, query or fragment.
        folder: The folder that the server writes to (its shared_storage_path), as this machine sees it; with mooncake,
            one of this machine's own. Files are deleted once they are stored.
        engine: The engine behind it, which must be vLLM; auto asks the server.
        model: The name of the served model; empty takes the first of /v1/models.
        api_key_variable: The environment variable that holds its key; the key is written nowhere.
        mooncake: The Mooncake store that the server puts states into, where no folder is shared: master (such as
            10.0.0.7:50051), metadata_server, protocol (tcp or rdma), device, local_hostname; null takes files.
        tap_layers: As of record_features; the server must hand out these layers, and then the number of all layers.
        storage: As of record_features, whatever the server writes; none stores nothing: train_draft asks for its
            batches while it trains.
        buffer_gb: With storage none, what the server's folder may hold for training, GB, of all its processes.
        concurrency: Requests in flight.
        retries: Further attempts for a conversation, after failures that may pass.
        backoff_s: The first wait between attempts, seconds; it doubles, with jitter, and Retry-After is respected.
        timeout_s: The longest that one conversation's states may take, seconds.
        wait_s: How long the server may take to answer for the first time, seconds.
        num_checked: Conversations of a run whose next token must follow from the last state by the target's own head.
    """
    arguments = locals().copy()
    from components.data.features.from_server import features_from_server as run

    return run(**arguments)


def record_features(
    target: Target,
    answers: Conversations,
    *,
    tap_layers: Taps | None = None,
    tokens_per_pass: Annotated[int, Field(ge=64)] = 2048,
    storage: Literal["bf16", "fp8"] = "bf16",
    ctx: Context,
) -> Features:
    """Record the target's hidden states at its conversations, from which drafters learn.

    Writes for every token the taps (auxiliary hidden states) and the last layer's output before the final norm.

    Args:
        tap_layers: The layers whose states eagle3 and p-eagle read, as Hugging Face hidden_states indices: different
            ones, ascending, from 1 (the first layer's output) to n - 1 of the target's n layers. null is 2, n//2 and
            n-3, which every engine reads; a drafter that an engine should serve with others needs one that can.
        tokens_per_pass: Tokens of one forward pass at most, padding included; bounds memory. A longer conversation has
            a pass of its own.
        storage: bf16, or fp8 (e4m3 with one exponent per token and state) for half the disk; the cost of fp8 in
            acceptance is measured by benchmarks/feature_precision.py.
    """
    from components.data.features.record import record_features as run

    return run(target, answers, tap_layers=tap_layers, tokens_per_pass=tokens_per_pass, storage=storage, ctx=ctx)


def mix_chats(
    chats: list[Chats],
    target: Target | None = None,
    *,
    strata: Strata = "source",
    weights: dict[str, Weight] = {},  # noqa: B006 - settings, never written to
    by: Unit = "tokens",
    temperature: Annotated[float, Field(ge=0.1, le=100.0)] = 1.0,
    caps: dict[str, Amount] = {},  # noqa: B006
    limit_tokens: Amount | None = None,
    limit_rows: Amount | None = None,
    too_small: TooSmall = "shrink",
    max_turns: Annotated[int, Field(ge=1, le=100)] = 4,
    order: Order = "random",
    ask_once: bool = True,
    num_validation: Count = 48,
    num_test: Count = 24,
    num_warm_up: Count = 4,
    evaluation_percent: Annotated[int, Field(ge=0, le=90)] = 5,
    evaluation_weights: dict[str, Weight] = {},  # noqa: B006
    workload: Strata = "source",
    chars_per_token: dict[str, Positive] = {},  # noqa: B006
    ctx: Context,
) -> Prompts:
    """Mix chats of several sources in declared shares, and split them so that no question is on both sides.

    Writes `prompts.jsonl` (train, validation, test, warm_up), `mix.json` (requested and actual shares) and
    `dropped.parquet`.

    Args:
        chats: what to mix; each may hold several sources.
        target: whose tokenizer counts the tokens; without one they are estimated from the characters.
        strata: the groups that weights, caps and temperature apply to: the rows' sources, languages or domains.
        weights: the share of each stratum in training, in any scale; all must be named, 0 leaves one out. Without
            weights the shares are sizes**(1/temperature).
        by: whether shares and caps count tokens or rows.
        temperature: without weights: 1 keeps the sizes' proportions, 2 favours small strata, 100 makes all alike.
        caps: the most to take of a stratum; the others make up for the rest of its share.
        limit_tokens: the most tokens to train on in all, with by: tokens; null is all there is. A larger limit contains
            all of a smaller one. One that leaves fewer than 8 conversations is an error.
        limit_rows: the same in rows, that is conversations, with by: rows.
        too_small: what happens when a stratum has too few rows for its share. shrink: the mix ends there, the shares
            hold. fill: the others go on, the shares do not hold. repeat: its rows are repeated. refuse: an error.
        max_turns: with too_small: repeat, the most passes over a stratum; more are an error.
        order: the order in which a drafter is trained on the rows. random: shuffled anew every epoch. Any other is a
            curriculum that each epoch follows, unless drafts.train_draft has `order: shuffled`: short_first;
            easy_first, the short rows of every source first; by_source; by_domain.
        ask_once: keep one of the conversations that begin with the same prompt, since a target answers them alike;
            false for data.write_given_answers.
        num_validation: the most prompts that choose a drafter's checkpoint.
        num_test: the most prompts for the benchmarks.
        num_warm_up: the most prompts that warm a benchmark up.
        evaluation_percent: of a hundred questions, how many are for test, warm-up and validation and never trained on.
        evaluation_weights: shares of the strata in test, warm-up and validation, by rows; empty: those of training.
        workload: the column by which results are grouped.
        chars_per_token: characters of a token by language, for estimates; "" is every language not named (4.0; Chinese
            and Japanese 1.6, Korean 1.8).
    """
    arguments = locals().copy()
    from components.data.mixing.mix_chats import mix_chats as run

    return run(**arguments)


def mix_prompts(
    new: Prompts,
    old: Prompts | None = None,
    *,
    old_share: Annotated[float, Field(ge=0.0, le=0.95)] = 0.5,
    num_validation: Amount = 48,
    num_test: Amount = 24,
    num_warm_up: Amount = 4,
    ctx: Context,
) -> Prompts:
    """Mix new conversations with prompts that the champion was trained on, so that a drafter does not forget.

    Writes `prompts.jsonl` with all new training prompts and old ones beside them, and `seen.txt` of both.

    Args:
        new: the newly collected conversations.
        old: the prompts that the champion was trained and evaluated on.
        old_share: share of old prompts in every split, as far as there are enough of them; 0 takes old ones only where
            the new ones do not suffice for validation, test and warm-up.
        num_validation: prompts for the selection of a checkpoint, at most.
        num_test: prompts for benchmarks, at most.
        num_warm_up: prompts that warm a benchmark up, at most.
    """
    arguments = locals().copy()
    from components.data.mixing.mix_prompts import mix_prompts as run

    return run(**arguments)


def write_answers_by_server(
    target: Target,
    prompts: Prompts,
    *,
    base_url: BaseUrl,
    engine: ServerEngine = "auto",
    model: str = "",
    api_key_variable: str = "",
    label: str = "",
    concurrency: Annotated[int, Field(ge=1, le=1024)] = 16,
    retries: Annotated[int, Field(ge=0, le=20)] = 5,
    backoff_s: Positive = 0.5,
    timeout_s: Positive = 600.0,
    wait_s: Positive = 30.0,
    temperature: Annotated[float, Field(gt=0.0, le=2.0)] = 0.8,
    greedy_share: Share = 0.75,
    max_new_tokens: Annotated[int, Field(ge=8)] = 96,
    max_prompt_tokens: Amount = 512,
    shard_size: Amount = 256,
    max_failed: Share = 0.01,
    ctx: Context,
) -> Conversations:
    """Let a server answer the train and validation prompts.

    Args:
        target: The model that the server serves; its tokenizer encodes the prompts.
        base_url: The server's address with or without /v1; no credentials, query or fragment.
        engine: The engine behind it; auto asks the server. openai is any other with /v1/completions.
        model: The name of the served model; empty takes the first of /v1/models.
        api_key_variable: The environment variable that holds its key; the key is written nowhere.
        label: A description of the server; it is part of the step's key, and the server itself is not.
        concurrency: Requests in flight.
        retries: Further attempts for a prompt, after failures that may pass.
        backoff_s: The first wait between attempts, seconds; it doubles, with jitter, and Retry-After is respected.
        timeout_s: The longest that one answer may take, seconds.
        wait_s: How long the server may take to answer for the first time, seconds.
        temperature: Sampling temperature of the sampled answers.
        greedy_share: The share of train prompts answered greedily; validation always is.
        max_new_tokens: The longest answer, tokens.
        max_prompt_tokens: Prompts of more tokens are skipped and counted.
        shard_size: Rows of a shard.
        max_failed: Share of the prompts that may fail; above it the step stops and keeps its answers for the next
            attempt.
    """
    arguments = locals().copy()
    from components.data.responses.from_server import write_answers_by_server as run

    return run(**arguments)


def write_answers(
    target: Target,
    prompts: Prompts,
    *,
    max_new_tokens: Annotated[int, Field(ge=8)] = 96,
    sampled_share: Share = 0.25,
    temperature: Annotated[float, Field(gt=0.0, le=2.0)] = 0.8,
    batch_size: Amount = 64,
    shard_size: Amount = 256,
    max_prompt_tokens: Amount = 512,
    ctx: Context,
) -> Conversations:
    """Let the target answer the train and validation prompts, in batches over its KV cache.

    Args:
        max_new_tokens: The longest answer, tokens; an end-of-text token ends it sooner.
        sampled_share: The share of prompts whose answer is sampled; the others are greedy. Validation is always greedy.
        temperature: Sampling temperature of the sampled answers.
        batch_size: The most prompts answered together; bounds memory. On a CPU they are fewer where keys and values of
            so many would take more than 512 MiB.
        shard_size: Prompts of a shard, the unit of work of a worker, and the most that a kill loses.
        max_prompt_tokens: Prompts of more tokens are left out and counted.
    """
    arguments = locals().copy()
    from components.data.responses.generate import write_answers as run

    return run(**arguments)


def write_given_answers(
    target: Target,
    prompts: Prompts,
    *,
    thinking: Thinking = "drop",
    turns: Turns = "all",
    max_tokens: Annotated[int, Field(ge=16)] = 2048,
    shard_size: Amount = 256,
    max_set_aside: Share = 0.2,
    ctx: Context,
) -> Conversations:
    """Train on the answers that the sources came with: convert chats to token ids and answer masks.

    Args:
        target: Its tokenizer and chat template are used; its weights are not.
        prompts: Those with a `conversation`, or with a chat and a `reference`; others have no answer and are counted.
        thinking: What happens to the thinking in answers: keep all of it, drop it, or keep that of a row's last answer
            only. Where a template writes earlier answers without thinking, each answer becomes a row of its own.
        turns: Learn from all answers of a chat, or from the last one only.
        max_tokens: The most tokens of a row; a longer chat loses its last turns, and is left out if no answer remains.
        shard_size: Rows of a shard.
        max_set_aside: Share of the chats with answers that may be set aside; above it the step stops and says why.
    """
    arguments = locals().copy()
    from components.data.responses.given import write_given_answers as run

    return run(**arguments)


def collect_chats_fingerprint(settings: JsonObject) -> dict[str, str]:
    """File -> sha256 of every local source, or the reason why it is not read."""
    from components.data.sources.listing import collect_chats_fingerprint as fingerprint

    return fingerprint(settings)


def collect_corpus_fingerprint(settings: JsonObject) -> dict[str, str]:
    """The interpreter's version, which determines the library."""
    return {"python-stdlib": platform.python_version()}


def collect_prompts_fingerprint(settings: JsonObject) -> dict[str, str]:
    """File -> sha256 of `source` and `keep_out`; data on a hub count by their name alone: pin it as NAME@REVISION."""
    from components.data.sources.listing import collect_prompts_fingerprint as fingerprint

    return fingerprint(settings)


def collect_traffic_fingerprint(settings: JsonObject) -> dict[str, str]:
    """File -> sha256 of `source` and `keep_out`."""
    from components.data.sources.listing import collect_traffic_fingerprint as fingerprint

    return fingerprint(settings)


def collect_workloads_fingerprint(settings: JsonObject) -> dict[str, str]:
    """File -> sha256 of every local source; a preset on the hub counts by its name and revision alone."""
    from components.data.sources.listing import collect_workloads_fingerprint as fingerprint

    return fingerprint(settings)
